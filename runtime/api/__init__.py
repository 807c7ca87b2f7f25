"""What programs import, by way of ``runtime``: a model, its generations and sessions."""
