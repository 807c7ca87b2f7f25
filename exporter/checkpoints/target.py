"""Opens a target, in whatever format it is stored."""

from .checkpoint import Checkpoint
from .gguf_file import GgufCheckpoint, gguf_file
from .json_config import document
from .quantized import QuantizedCheckpoint

_OLDER = "quantize_config.json"  # AutoGPTQ before 0.5 wrote it, and nothing into config.json


def target_checkpoint(source: str) -> Checkpoint:
    """The target in a folder, in a GGUF file or on the hub. Raises what the classes of checkpoints raise."""
    if file := gguf_file(source):
        return GgufCheckpoint(source, file)
    checkpoint = Checkpoint(source, "target")
    config = checkpoint.config.get("quantization_config")
    if config is None and (checkpoint.folder / _OLDER).is_file():
        config = {"quant_method": "gptq", **document(checkpoint.folder / _OLDER)}
    if isinstance(config, dict) and config.get("quant_method") in ("gptq", "awq", "compressed-tensors"):
        return QuantizedCheckpoint(source, config)
    return checkpoint
