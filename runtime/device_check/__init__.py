"""Runs all checks and measurements of a bundle on this device, in pieces that can be resumed."""
