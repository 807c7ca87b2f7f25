"""Reading checkpoints: where they come from, their configuration, and which tensors make a pair."""
