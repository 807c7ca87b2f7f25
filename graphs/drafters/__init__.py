"""The families of drafters, one per file."""
