# NVIDIA/cuda-python, cuda-bindings 13.5.0.

__version__: str
