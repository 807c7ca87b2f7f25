"""Configuration, shape and rotary tables of Llama and of the targets that differ from it by flags, equal to those of
transformers, which takes seconds to import."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphs.dialects.quantization import EMBEDDING
from graphs.layer import LlamaShape
from runtime.errors import InputError

from ..weights.source import Source
from .architectures import ARCHITECTURES, SUPPORTED, Architecture
from .checkpoint import Checkpoint
from .json_config import llama_fields, shown


@dataclass(frozen=True)
class LlamaConfig:
    """The fields of a config.json that describe a Llama, with the names and defaults of transformers' class of this
    name.

    rope_parameters: ``rope_type`` ("default", "linear" or "llama3"), ``rope_theta``, and the numbers of that type.
    model_type: of ``ARCHITECTURES``. sliding_window: the positions before a row, itself included, that some layers
    attend to; None for all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope_parameters: Mapping[str, Any]
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    model_type: str = "llama"
    sliding_window: int | None = None

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.model_type]

    @property
    def positions(self) -> int:
        """The largest capacity with which a bundle, whose layers attend to all positions, computes the same."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)


def llama_config(checkpoint: Checkpoint) -> LlamaConfig:
    """The configuration of a checkpoint; a drafter's layers are those of Llama, whatever its ``model_type``.

    Raises InputError for another architecture, quantized weights, or invalid fields.
    """
    raw = checkpoint.config
    for key in ("model", "transformer_layer_config"):  # vLLM and speculators nest the decoder's configuration
        raw = raw[key] if isinstance(raw.get(key), dict) else raw
    where = f"{checkpoint.kind} '{checkpoint.source}'"
    kind = raw.get("model_type", "llama") if checkpoint.kind == "target" else "llama"
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise InputError(
            f"{where} has model_type {shown(kind)}, but Gumiho supports only {SUPPORTED}: name another target"
        )
    quantized = raw.get("quantization_config")
    if checkpoint.kind == "target" and quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        cause = method if isinstance(method, str) else "its config.json has a quantization_config"
        raise InputError(
            f"{where} is quantized already ({cause}), in a way that is not supported: "
            "give the checkpoint it was made from, and --weights int4 or int8"
        )
    return LlamaConfig(**llama_fields(raw, where, ARCHITECTURES[kind], checkpoint.called), model_type=kind)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers' warnings, for example of ids outside the vocabulary, which the exporter reports itself."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def transformers_config(config: LlamaConfig) -> Any:
    """The same configuration as transformers' own class, for its models and tokenizers, without a sliding window."""
    import transformers

    fields = asdict(config)
    del fields["model_type"]
    if config.architecture.window == "never":
        del fields["sliding_window"]
    else:
        fields["sliding_window"] = None  # Mistral's class has one by default
    with _quiet():
        return getattr(transformers, f"{config.architecture.name}Config")(**fields)


def transformers_class(config: LlamaConfig) -> Any:
    """transformers' class of the model."""
    import transformers

    return getattr(transformers, f"{config.architecture.name}ForCausalLM")


def transformers_model(
    config: LlamaConfig,
    names: Iterable[str],
    read: Callable[[str], Tensor],
    layer_made: Callable[[Any], object] = lambda _: None,
) -> Any:
    """transformers' own model, frozen. names: of a target's weights, all that the configuration asks for; without
    lm_head it is tied.

    layer_made: called with each layer when it has its weights, before those of the next one are read.
    """
    settings = transformers_config(config)
    with torch.device("meta"):
        model = transformers_class(config)(settings)
    # computed, not stored, so it must not stay on "meta"
    model.model.rotary_emb = type(model.model.rotary_emb)(settings)
    model.eval().requires_grad_(False)
    for number, layer in enumerate(model.model.layers):
        layer.load_state_dict({name: read(f"layers.{number}.{name}") for name in layer.state_dict()}, assign=True)
        layer_made(layer)
    model.model.norm.load_state_dict({"weight": read("norm.weight")}, assign=True)
    model.model.embed_tokens.load_state_dict({"weight": read(EMBEDDING)}, assign=True)
    if "lm_head.weight" in names:
        model.lm_head.load_state_dict({"weight": read("lm_head.weight")}, assign=True)
    else:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


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
        qkv_bias=config.attention_bias or config.architecture.qkv_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=config.architecture.qk_norm,
    )


def inverse_frequencies(config: LlamaConfig) -> Tensor:
    """Radians per position of each rotated pair, fp32 [head dim / 2].

    The operations and their order are those of transformers 5.23 (``LlamaRotaryEmbedding``,
    ``modeling_rope_utils.py``), so that every bit is the same.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return scaled(1.0 / (config.rope_parameters["rope_theta"] ** exponents), config.rope_parameters)


def scaled(inverse: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Radians per position after the scaling of ``rope_parameters``. inverse: before it, [head dim / 2]."""
    if rope["rope_type"] == "linear":
        return inverse / rope["factor"]
    if rope["rope_type"] == "llama3":
        factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
        trained = rope["original_max_position_embeddings"]
        wavelength = 2 * math.pi / inverse
        long, short = wavelength > trained / low, wavelength < trained / high
        smooth = (trained / wavelength - low) / (high - low)
        between = (1 - smooth) * inverse / factor + smooth * inverse
        return torch.where(long, inverse / factor, torch.where(short, inverse, between))
    return inverse


def rotary_tables(config: LlamaConfig, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [positions, head dim / 2]."""
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(config)[None, :]
    return angle.cos(), angle.sin()


def rotary_sources(config: LlamaConfig, positions: int) -> dict[str, Source]:
    """The tables as parameters of a graph. Computed when they are packed: a dry run needs only their shape."""

    def rows(table: int) -> Iterator[Tensor]:
        yield rotary_tables(config, positions)[table]

    shape = positions, config.head_dim // 2
    return {f"rotary.{name}": Source(shape, partial(rows, i), torch.float32) for i, name in enumerate(("cos", "sin"))}
