"""Llama's configuration, shape and rotary tables, as transformers reads them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import logging

from graphs.layer import LlamaShape
from runtime.errors import InputError

from .checkpoint import Checkpoint
from .json_config import llama_fields, reason, shown


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers' warnings, for example of ids outside the vocabulary, which the exporter reports itself."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def llama_config(checkpoint: Checkpoint) -> LlamaConfig:
    """The configuration of a checkpoint. Raises InputError for another architecture, quantized weights, or invalid fields."""
    raw = checkpoint.config
    raw = raw["model"] if isinstance(raw.get("model"), dict) else raw  # vLLM nests the decoder's configuration
    where = f"{checkpoint.kind} '{checkpoint.source}'"
    if checkpoint.kind == "target" and raw.get("model_type", "llama") != "llama":
        raise InputError(
            f"{where} has model_type {shown(raw['model_type'])}, but Gumiho supports only 'llama': name another target"
        )
    quantized = raw.get("quantization_config")
    if checkpoint.kind == "target" and quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        cause = method if isinstance(method, str) else "its config.json has a quantization_config"
        raise InputError(
            f"{where} is quantized already ({cause}), which is not supported: "
            "give the checkpoint it was made from, and --weights int4 or int8"
        )
    fields = llama_fields(raw, where)
    try:
        with _quiet():
            config = LlamaConfig(**fields)
            LlamaRotaryEmbedding(config)
    except Exception as error:  # transformers' validators raise exceptions of any type
        raise InputError(f"{where}: config.json is not a Llama configuration ({reason(error)}): download it again") from None
    return config


def llama_shape(config: LlamaConfig) -> LlamaShape:
    """The sizes that the graphs need."""
    return LlamaShape(
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        attention_bias=bool(config.attention_bias),
        mlp_bias=bool(config.mlp_bias),
    )


def rotary_tables(config: LlamaConfig, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [positions, head dim / 2], from transformers' inverse frequencies."""
    rotary = LlamaRotaryEmbedding(config)
    inverse: Tensor = rotary.inv_freq.float()
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * inverse[None, :]
    return angle.cos() * rotary.attention_scaling, angle.sin() * rotary.attention_scaling
