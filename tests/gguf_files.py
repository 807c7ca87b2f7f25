"""GGUF files of transformers' models, as llama.cpp's converter lays them out."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import quantize
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

from tests.pairs import head_dim

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def name_of(parameter: str) -> str:
    stem, end = parameter.rsplit(".", 1)
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{end}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[inner]}.{end}"


def write(
    model: PreTrainedModel,
    path: Path,
    kind: str = "F32",
    fields: dict[str, Any] | None = None,
    architecture: str = "",
    raw: dict[str, tuple[np.ndarray, str]] | None = None,
) -> Path:
    """kind: of the matrices; vectors stay in F32, as the converter has them. fields: more metadata, or other. raw:
    tensors already quantized, as bytes [rows, bytes of a row] with their kind, by parameter name. architecture: the
    converter's by default."""
    config: PretrainedConfig = model.config
    qwen, size = config.model_type.startswith("qwen"), head_dim(config)
    architecture = architecture or (config.model_type if qwen else "llama")
    writer = GGUFWriter(path, architecture)
    metadata: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if not qwen:
        metadata |= {"vocab_size": config.vocab_size, "rope.dimension_count": size}
    if config.model_type != "qwen2":
        metadata |= {"attention.key_length": size, "attention.value_length": size}
    metadata = {name: value for name, value in metadata.items() if f"{architecture}.{name}" not in (fields or {})}
    for name, value in metadata.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{name}", value)
    scaling = config.rope_parameters
    if scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    elif scaling["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    for name, value in (fields or {}).items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if raw and name in raw:
            writer.add_tensor(name_of(name), raw[name][0], raw_dtype=GGMLQuantizationType[raw[name][1]])
            continue
        values = parameter.float().numpy()
        if not qwen and (projection := name.split(".")[-2]) in heads:
            values = permuted(values, heads[projection])
        own = GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        writer.add_tensor(name_of(name), quantize(np.ascontiguousarray(values), own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _llama3_factors(config: LlamaConfig) -> np.ndarray:
    """``LlamaModel.generate_extra_tensors`` of llama.cpp's converter."""
    scaling, size = config.rope_parameters, config.head_dim
    frequencies = 1.0 / scaling["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float64) / size)
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    old = scaling["original_max_position_embeddings"]
    factors = []
    for wavelength in 2 * np.pi / frequencies:
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(scaling["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)
