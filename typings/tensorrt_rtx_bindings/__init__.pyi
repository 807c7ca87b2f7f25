# The members that TensorRT for RTX 1.7.1.116 shares with TensorRT, and its own, which the stub of tensorrt marks.

from tensorrt import *  # noqa: F403

__version__: str
