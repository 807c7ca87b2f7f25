"""An OpenAI-compatible HTTP server over one set of weights."""
