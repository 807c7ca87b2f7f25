"""The math that is traced: a Llama target, its Gumiho drafter and the draft tree, as torch modules of static shape."""
