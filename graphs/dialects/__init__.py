"""Dialects, one per file: the operators that a family of backends accepts."""
