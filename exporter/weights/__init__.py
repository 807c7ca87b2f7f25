"""Packing, quantizing and linking weights."""
