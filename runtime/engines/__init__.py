"""Compiled engines: the store in a bundle, the golden run that checks them, and the times of their passes."""
