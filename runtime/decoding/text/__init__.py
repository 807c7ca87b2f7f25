"""Turns token ids into text, and conversations into prompts."""
