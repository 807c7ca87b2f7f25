"""The families of drafters, a file each."""
