"""A GGUF file's metadata as the config.json of a Hugging Face folder."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from runtime.errors import InputError

from . import gguf_keys
from .json_config import is_whole, shown
from .llama import scaled

# Llama 3.1 and later divide rotary frequencies by factors, which GGUF stores instead of the numbers they were computed
# from.
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Where the fields of a config.json are, without the architecture's name.
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "factor": "rope.scaling.factor",
}


def config(
    architecture: str, fields: Mapping[str, Any], tensors: Collection[str], factors: np.ndarray | None, source: str
) -> dict[str, Any]:
    """config.json as transformers writes it, with llama.cpp's defaults (src/llama-model.cpp); ``json_config`` checks
    types and ranges.

    tensors: their names. factors: float32 [head dim / 2] that divide the rotary frequencies, if the file has any.
    Raises InputError for what is not supported.
    """
    gguf_keys.require_known(fields, architecture, source)

    def field(name: str, default: Any = None) -> Any:
        """The value of a key; if it is a list of one number for every layer, that number."""
        value = fields.get(f"{architecture}.{name}", default)
        if not isinstance(value, list):
            return value
        if not value or any(own != value[0] for own in value):
            raise InputError(
                f"'{source}' has {architecture}.{name} {shown(value)}, not the same for every layer, which is not "
                "supported: name another target"
            )
        return value[0]

    tokens = fields.get("tokenizer.ggml.tokens")
    heads, hidden, window = field("attention.head_count"), field("embedding_length"), field("attention.sliding_window")
    found: dict[str, Any] = {
        "model_type": "mistral" if architecture == "llama" and window else architecture,
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "vocab_size": field("vocab_size", len(tokens) if isinstance(tokens, list) else None),
        "max_position_embeddings": field("context_length", 1 << 30),
        "sliding_window": window,
        "use_sliding_window": bool(window),
        "max_window_layers": 0,
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    usual = hidden // heads if is_whole(heads, 1, 1 << 16) and is_whole(hidden, 1, 1 << 24) else None
    size = found["head_dim"] = field("attention.key_length", usual)
    for name, default in (("rope.dimension_count", size), ("attention.value_length", usual)):
        if (own := field(name, default)) != size:
            raise InputError(
                f"'{source}' has {architecture}.{name} {shown(own)}, not the size of a head, {shown(size)}, which is "
                "not supported: name another target"
            )
    if field("expert_count", 0) != 0:
        raise InputError(f"'{source}' is a mixture of experts, which is not supported: name another target")
    factor = field("rope.scaling.factor", field("rope.scale_linear", 0.0))
    if scaling := _rope_scaling(field("rope.scaling.type", "linear"), factor, factors, found["rope_theta"], source):
        found["rope_scaling"] = scaling
    return found


def _rope_scaling(
    scaling: Any, factor: Any, factors: np.ndarray | None, theta: Any, source: str
) -> dict[str, Any] | None:
    """``rope_scaling`` of config.json, None without one."""
    factor = 1.0 if factor == 0 else factor
    if scaling not in ("none", "linear"):
        raise InputError(
            f"'{source}' has rotary scaling {shown(scaling)}, expected none, linear or llama3: name another target"
        )
    linear = scaling == "linear" and factor != 1.0
    if factors is None:
        return {"rope_type": "linear", "factor": factor} if linear else None
    if linear:
        raise InputError(
            f"'{source}' has a factor of rotary scaling beside the factors of Llama 3, which is not supported: name "
            "another target"
        )
    return _llama3(factors, theta, source)


def _llama3(factors: np.ndarray, theta: Any, source: str) -> dict[str, Any]:
    """The parameters of Llama 3's rotary scaling whose factors are the given ones, float32 [head dim / 2]. theta:
    ``json_config`` refuses what is no positive number."""
    if not isinstance(theta, int | float) or theta <= 0:
        return _LLAMA3
    rope = {**_LLAMA3, "factor": float(factors[-1])}
    inverse = 1 / theta ** (torch.arange(len(factors), dtype=torch.float64) / len(factors))
    if not np.allclose(factors, (inverse / scaled(inverse, rope)).numpy(), rtol=1e-4):
        raise InputError(
            f"'{source}' has rotary factors that are not those of Llama 3, which is not supported: name another target"
        )
    return rope
