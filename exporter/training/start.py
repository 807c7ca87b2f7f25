"""Where a drafter begins: the target's last layers, fitted to the features that the serial layers work on, or a drafter that exists."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlamaConfig

from runtime.errors import InputError

from ..checkpoints.checkpoint import Checkpoint, tensor_indices
from .batches import Features, usable
from .model import BLOCKS, Drafter
from .parallel import whole
from .store import TOKEN, Text


def config(target: Any, layers: int) -> LlamaConfig:
    """The serial layers' configuration: a Llama of the target's shapes, with fewer layers."""
    own, layer = target.config, target.model.layers[0]
    keep = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    )  # fmt: skip
    return LlamaConfig(
        **{name: getattr(own, name) for name in keep},
        head_dim=layer.self_attn.head_dim,
        attention_bias=layer.self_attn.q_proj.bias is not None,
        mlp_bias=layer.mlp.up_proj.bias is not None,
        num_hidden_layers=layers,
        tie_word_embeddings=False,
    )


_UNTRAINED = frozenset(
    ("embed_tokens.weight", "lm_head.weight", "token_map")
)  # what a drafter may hold besides, the target's own
_BESIDE = 0.1  # of the target's layers, beside the linear prediction
_RIDGE = 1e-3
_ROWS = 48  # positions to fit a matrix on, by its columns


@torch.no_grad()
def from_target(
    drafter: Drafter, target: Any, text: Text, features: Features, report: Callable[[str], None] = lambda _: None
) -> None:
    """Begins with the best linear prediction: ``fc`` and each head's first matrix by ridge regression, the serial layers small.

    The serial layers are the target's last ones. Those read a residual stream that its final norm has not scaled, and the drafter's
    features are scaled, so the rows and columns that meet the stream take over that scale; their outputs are then made small, so that
    they correct the linear prediction instead of burying it. Norms of queries and keys, which a Llama lacks, become the scale of each
    head that they have on a text. All processes call it if the target is split over them.
    """
    records = usable(text, drafter.depths, training=True)
    columns = 2 * drafter.config.hidden_size + 1
    records = records[: int(np.searchsorted(text.lengths[records].cumsum(), _ROWS * columns)) + 1]
    _layers(drafter, target, text.record(int(records[0])))
    report(f"fitting the first drafter on {len(records)} texts")
    embed = target.model.embed_tokens.weight

    def texts() -> Iterator[tuple[Tensor, Tensor]]:
        for begin in range(0, len(records), 8):
            part = [int(r) for r in records[begin : begin + 8]]
            for record, hidden in zip(part, features.of(part), strict=True):
                ids = torch.from_numpy((text.record(record) & TOKEN).astype(np.int64)).to(embed.device)
                yield embed[ids].float(), hidden.to(embed.device).float()

    weight, bias = _fit((torch.cat((x[1:], h[:-1]), -1), h[1:]) for x, h in texts())
    drafter.fc.weight.copy_(weight)
    drafter.fc.bias.copy_(bias)
    heads = drafter.heads
    if not heads:
        return

    def further() -> Iterator[tuple[Tensor, Tensor]]:
        for x, h in texts():
            y1 = drafter.fuse(x[1:-2], h[:-3])
            y2 = drafter.fuse(x[2:-1], y1)
            pairs, count = drafter.pairs(x[2:-1], y1, x[3:], y2), len(h) - 2 - heads
            yield pairs[:count], torch.cat([h[3 + i : 3 + i + count] for i in range(heads)], -1)

    weight, bias = _fit(further())
    modules: Any = drafter.mlp
    for i, blocks in enumerate(modules):
        own = slice(i * drafter.config.hidden_size, (i + 1) * drafter.config.hidden_size)
        first, *rest = [block.linear for block in blocks]
        first.weight.copy_(weight[own])
        first.bias.copy_(bias[own])
        for linear in rest:
            nn.init.normal_(linear.weight, std=0.3 / drafter.config.hidden_size**0.5)
            nn.init.zeros_(linear.bias)


def _fit(rows: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Ridge regression. rows: inputs [n, K] and outputs [n, M] -> weight [M, K] and bias [M]."""
    gram: Tensor | None = None
    for x, y in rows:
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


def _layers(drafter: Drafter, target: Any, record: NDArray[np.uint32]) -> None:
    ids = torch.from_numpy((record & TOKEN).astype(np.int64))[None]
    seen: list[Tensor] = []
    last = target.model.layers[-len(drafter.serial) :]
    heads: dict[nn.Module, Tensor] = {}  # by norm of queries or keys
    normed = [norm for own in last for name in ("q_norm", "k_norm") if (norm := getattr(own.self_attn, name, None)) is not None]
    hooks = [
        target.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].float())),
        *(norm.register_forward_pre_hook(lambda norm, inputs: heads.update({norm: inputs[0].float()})) for norm in normed),
    ]
    hidden = target.model(ids.to(target.lm_head.weight.device), use_cache=False).last_hidden_state.float()
    for hook in hooks:
        hook.remove()
    final = target.model.norm.weight.float()
    out = _BESIDE * final / seen[0].square().mean(-1).sqrt().median()  # residual stream -> features
    safe = torch.where(final.abs() < 1e-3 * final.abs().mean(), final.abs().mean(), final)
    size = hidden.square().mean(-1).sqrt().median()
    for layer, own in zip(drafter.serial, last, strict=False):
        wanted = layer.state_dict()
        state = {name: torch.zeros_like(t) for name, t in wanted.items() if name.endswith("bias")}  # Qwen2 has some of Llama's
        state |= {name: whole(t).float().clone() for name, t in own.state_dict().items()}
        _fold_norms(state, own.self_attn, heads)
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
        layer.load_state_dict(
            {name: t for name, t in state.items() if name in wanted and wanted[name].shape == t.shape}, strict=False
        )


def _fold_norms(state: dict[str, Tensor], attention: Any, heads: dict[nn.Module, Tensor]) -> None:
    """Scales the projections as the norms of their heads do on average. heads: what the norms read, [1, n, heads, d]."""
    for name in ("q", "k"):
        norm = getattr(attention, f"{name}_norm", None)
        if norm is None:
            continue
        size = heads[norm][0].square().mean(-1).sqrt().median(0).values
        scale = (whole(norm.weight).float() / size[:, None]).flatten()
        state[f"self_attn.{name}_proj.weight"] *= scale[:, None]
        if f"self_attn.{name}_proj.bias" in state:
            state[f"self_attn.{name}_proj.bias"] *= scale


def from_checkpoint(drafter: Drafter, source: str) -> None:
    """Gives the drafter the weights of one that exists. Raises GumihoError if their shapes differ."""
    checkpoint = Checkpoint(source, "drafter")
    wanted = drafter.state_dict()
    checkpoint.require(
        {name: tuple(t.shape) for name, t in wanted.items() if name in checkpoint or name != "fc.bias"}, _UNTRAINED
    )
    state = {name: checkpoint.read(name).float() for name in wanted if name in checkpoint}
    state.setdefault("fc.bias", torch.zeros_like(wanted["fc.bias"]))
    drafter.load_state_dict(state)


def shape_of(source: str) -> tuple[int, int]:
    """Serial layers and heads of a drafter that exists. Raises InputError if its heads are not of the released depth."""
    checkpoint = Checkpoint(source, "drafter")
    layers, blocks = tensor_indices(checkpoint, "layers.#."), tensor_indices(checkpoint, "mlp.#.#.")
    if not layers or {block for _, block in blocks} - set(range(BLOCKS + 1)):
        raise InputError(
            f"--init '{source}' has no serial layers, or heads of another depth than {BLOCKS + 1}: give another drafter"
        )
    return len(layers), len({head for head, _ in blocks})
