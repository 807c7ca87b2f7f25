"""Commands and functions that check a bundle on a machine."""
