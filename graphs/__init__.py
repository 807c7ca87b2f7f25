"""The modules that are traced to ONNX: a Llama target, its Gumiho drafter and the draft tree, all of static shape."""
