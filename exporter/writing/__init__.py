"""A recipe -> a bundle with its engines."""
