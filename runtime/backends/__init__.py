"""One module per backend: ``key`` and ``compile`` for its engines, and an ``Engine`` to run them."""
