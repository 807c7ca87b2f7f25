"""The architectures of targets, by ``model_type``: how each differs from Llama."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """How an architecture differs from Llama, and what it reads of config.json.

    name: begins the names of transformers' classes. defaults: transformers' own for missing fields, where they are not
    Llama's. biases: the fields that give all layers biases. qkv_bias: queries, keys and values always have one.
    qk_norm: the heads of queries and keys are normed before they are rotated. window: whether ``sliding_window`` limits
    attention: "never", "always" (unless it is null), or "if used" (with ``use_sliding_window``, and then in some
    layers).
    """

    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    window: str = "never"


_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("Llama", biases=("attention_bias", "mlp_bias")),
    "mistral": Architecture("Mistral", _MISTRAL, window="always"),
    "qwen2": Architecture("Qwen2", _QWEN, qkv_bias=True, window="if used"),
    "qwen3": Architecture(
        "Qwen3", _QWEN | {"head_dim": 128}, biases=("attention_bias",), qk_norm=True, window="if used"
    ),
}
SUPPORTED = ", ".join(f"'{name}'" for name in ARCHITECTURES)
