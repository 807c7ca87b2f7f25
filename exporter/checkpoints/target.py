"""Opens a target, in whatever format it is stored."""

from .checkpoint import Checkpoint
from .gguf_file import GgufCheckpoint, gguf_file
from .quantized import QuantizedCheckpoint


def target_checkpoint(source: str) -> Checkpoint:
    """The target in a folder, in a GGUF file or on the hub. Raises what the classes of checkpoints raise."""
    if file := gguf_file(source):
        return GgufCheckpoint(source, file)
    checkpoint = Checkpoint(source, "target")
    config = checkpoint.config.get("quantization_config")
    method = config.get("quant_method") if isinstance(config, dict) else None
    return QuantizedCheckpoint(source) if method in ("gptq", "awq", "compressed-tensors") else checkpoint
