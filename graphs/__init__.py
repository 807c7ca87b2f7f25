"""The modules that are traced to ONNX: a target of Llama's kind, its drafter and the draft tree."""
