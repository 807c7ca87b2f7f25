"""Traces the modules of ``graphs`` to ONNX."""
