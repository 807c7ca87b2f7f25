"""Where drafters begin: the target's layers, and linear predictions fitted to its hidden states."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlamaConfig

from .batches import Features, usable
from .model import SerialLayer
from .parallel import whole
from .store import TOKEN, Text

_BESIDE = 0.1  # of the target's layers, beside the linear prediction
_RIDGE = 1e-3
_ROWS = 48  # positions to fit a matrix on, by its columns


def config(target: Any, layers: int) -> LlamaConfig:
    """The serial layers' configuration: a Llama of the target's shapes, with fewer layers."""
    own, layer = target.config, target.model.layers[0]
    keep = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
    )
    return LlamaConfig(
        **{name: getattr(own, name) for name in keep},
        head_dim=layer.self_attn.head_dim,
        attention_bias=layer.self_attn.q_proj.bias is not None,
        mlp_bias=layer.mlp.up_proj.bias is not None,
        num_hidden_layers=layers,
        tie_word_embeddings=False,
    )


def to_fit(text: Text, depths: int, columns: int) -> list[int]:
    """Records with enough positions to fit matrices of so many columns on."""
    records = usable(text, depths, training=True)
    return records[: int(np.searchsorted(text.lengths[records].cumsum(), _ROWS * (columns + 1))) + 1].tolist()


def rows(target: Any, features: Features, records: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Embedded tokens and hidden states of each record, fp32 [n, H] each. target: transformers' model."""
    embed = target.model.embed_tokens.weight
    for begin in range(0, len(records), 8):
        part = records[begin : begin + 8]
        for record, hidden in zip(part, features.of(part), strict=True):
            ids = torch.from_numpy((features.text.record(record) & TOKEN).astype(np.int64)).to(embed.device)
            yield embed[ids].float(), hidden[:, : features.hidden].to(embed.device).float()


def fit(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Ridge regression. pairs: inputs [n, K] and outputs [n, M] -> weight [M, K] and bias [M]."""
    gram: Tensor | None = None
    for x, y in pairs:
        x = torch.cat((x, torch.ones_like(x[:, :1])), -1)
        if gram is None:
            gram, product = x.T @ x, x.T @ y
        else:
            gram.addmm_(x.T, x)
            product.addmm_(x.T, y)
    assert gram is not None
    gram.diagonal().mul_(1 + _RIDGE)
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    solved = torch.linalg.solve(gram, product)
    return solved[:-1].T, solved[-1]


@dataclass(frozen=True)
class _Seen:
    """states: of some of the target's layers, in the names and fp32 numbers of a Llama's. residual, hidden: before and
    after its final norm."""

    states: list[dict[str, Tensor]]
    residual: Tensor
    hidden: Tensor


def _observed(target: Any, which: slice, record: NDArray[np.uint32]) -> _Seen:
    """Norms of queries and keys, which a Llama lacks, become the scale of each head that they have on a text."""
    ids = torch.from_numpy((record & TOKEN).astype(np.int64))[None]
    seen: list[Tensor] = []
    heads: dict[nn.Module, Tensor] = {}  # by norm of queries or keys
    layers = target.model.layers[which]
    normed = [
        norm
        for own in layers
        for name in ("q_norm", "k_norm")
        if (norm := getattr(own.self_attn, name, None)) is not None
    ]
    hooks = [
        target.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].float())),
        *(
            norm.register_forward_pre_hook(lambda norm, inputs: heads.update({norm: inputs[0].float()}))
            for norm in normed
        ),
    ]
    hidden = target.model(ids.to(target.lm_head.weight.device), use_cache=False).last_hidden_state.float()
    for hook in hooks:
        hook.remove()
    states = []
    for own in layers:
        state = {name: whole(t).float().clone() for name, t in own.state_dict().items()}
        _fold_norms(state, own.self_attn, heads)
        states.append(state)
    return _Seen(states, seen[0], hidden)


def _give(layer: SerialLayer, state: dict[str, Tensor]) -> None:
    """Loads what a layer has too. Biases that only it has are zero, as Qwen2 has some of Llama's."""
    wanted = layer.state_dict()
    biases = {name: torch.zeros_like(t) for name, t in wanted.items() if name.endswith("bias")}
    fitting = {name: t for name, t in state.items() if name in wanted and wanted[name].shape == t.shape}
    layer.load_state_dict(biases | fitting, strict=False)


def first_layers(layers: Sequence[SerialLayer], target: Any, record: NDArray[np.uint32]) -> None:
    """Gives layers the weights of the target's first ones. For the parameters see ``last_layers``."""
    for layer, state in zip(layers, _observed(target, slice(len(layers)), record).states, strict=True):
        _give(layer, state)


def last_layers(layers: Sequence[SerialLayer], target: Any, record: NDArray[np.uint32]) -> None:
    """Gives layers that read features the weights of the target's last ones. record: a text to measure scales on.

    Those read a residual stream that its final norm has not scaled, and the drafter's features are scaled, so the rows
    and columns that meet the stream take over that scale; their outputs are then made small. All processes call it if
    the target is split over them.
    """
    seen, final = _observed(target, slice(-len(layers), None), record), target.model.norm.weight.float()
    out = _BESIDE * final / seen.residual.square().mean(-1).sqrt().median()  # residual stream -> features
    safe = torch.where(final.abs() < 1e-3 * final.abs().mean(), final.abs().mean(), final)
    size = seen.hidden.square().mean(-1).sqrt().median()
    for layer, state in zip(layers, seen.states, strict=False):
        into = state.pop("input_layernorm.weight") / safe
        if layer.input_layernorm is None:
            for name in ("q_proj", "k_proj", "v_proj"):
                state[f"self_attn.{name}.weight"] *= into
        else:
            state["input_layernorm.weight"] = into * size
        state["post_attention_layernorm.weight"] *= size / safe
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            for kind, factor in (("weight", out[:, None]), ("bias", out)):
                if f"{name}.{kind}" in state:
                    state[f"{name}.{kind}"] *= factor
        _give(layer, state)


def _fold_norms(state: dict[str, Tensor], attention: Any, heads: dict[nn.Module, Tensor]) -> None:
    """Scales the projections as the norms of their heads do on average. heads: what the norms read, [1, n, heads,
    d]."""
    for name in ("q", "k"):
        norm = getattr(attention, f"{name}_norm", None)
        if norm is None:
            continue
        size = heads[norm][0].square().mean(-1).sqrt().median(0).values
        scale = (whole(norm.weight).float() / size[:, None]).flatten()
        state[f"self_attn.{name}_proj.weight"] *= scale[:, None]
        if f"self_attn.{name}_proj.bias" in state:
            state[f"self_attn.{name}_proj.bias"] *= scale
