"""Training a Gumiho drafter for a target that has none."""
