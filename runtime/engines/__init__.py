"""Compiled engines: where they lie, the golden run that proves them, and what their passes cost."""
