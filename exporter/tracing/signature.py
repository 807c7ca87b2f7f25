"""The inputs and outputs of a graph: the contract that the runtime binds to."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from graphs.dialects.plain import Plain
from graphs.drafter import Drafter
from graphs.shared_target import LANES, SharedTarget
from graphs.target import Target

Input: TypeAlias = tuple[str, Tensor, dict[int, str]]  # name, example, symbolic axes
_LISTS = {"mask.": "masks", "past_length.": "past_lengths", "past_key.": "caches", "past_value.": "caches"}


def caches(
    layers: int, kv_heads: int, capacity: int, head_dim: int, dtype: torch.dtype, ops: type[Plain] = Plain
) -> list[Tensor]:
    """Key and value of every layer in turn, zeros [1, kv heads, S, d], values in the parts of a dialect."""
    widths = [head_dim, ops.value_part(head_dim)] * layers
    return [torch.zeros(1, kv_heads * head_dim // width, capacity, width, dtype=dtype) for width in widths]


def _names(prefix: str, layers: int, lanes: Sequence[str] = ("",)) -> list[str]:
    """The names of caches. lanes: those of a shared target's, as "0."."""
    return [f"{prefix}_{part}.{lane}{i}" for i in range(layers) for lane in lanes for part in ("key", "value")]


def signature(
    module: Target | Drafter, dtype: torch.dtype, sizes: Mapping[str, int] | None = None
) -> tuple[list[Input], list[str]]:
    """Inputs (name, example, symbolic axes) and output names of a graph: the contract that the runtime binds to.

    dtype: of caches and hidden rows. sizes: the static ones of the axes ``rows`` and ``accepted``; the others are
    symbolic. A target of symbolic rows has the input ``wanted``, unless ``sizes`` names that axis.
    """
    sizes = sizes or {}
    layers = len(module.layers)
    block = module.ops.block
    positions, symbolic = (3 * block, {2: "positions"}) if block else (module.capacity, {})
    past = list[Tensor]()
    if layers:
        attention = module.layers[0].self_attn
        past = caches(layers, attention.kv_heads, positions, attention.head_dim, dtype, module.ops)
    cached: list[Input] = [(n, t, symbolic) for n, t in zip(_names("past", layers), past, strict=True)]
    length: Input = ("past_length", torch.zeros(1, dtype=torch.int64), {})

    def axes(*names: str) -> tuple[list[int], dict[int, str]]:
        return [sizes.get(n, 5 if n == "rows" else 3) for n in names], {
            i: n for i, n in enumerate(names) if n not in sizes
        }

    def spec(name: str, dtype: torch.dtype, *names: str, width: int | None = None) -> Input:
        shape, symbolic = axes(*names)
        return name, torch.zeros(*shape, *([width] if width else []), dtype=dtype), symbolic

    written = _names("new" if module.ops.appends else "present", layers)
    if isinstance(module, SharedTarget):
        return _shared_signature(module, dtype)
    if isinstance(module, Target):
        ids = [spec(name, torch.int64, "rows") for name in ("tokens", "depth")]
        mask = spec("mask", torch.bool, "rows", "rows")
        wanted = [] if sizes.keys() & {"rows", "wanted"} else [spec("wanted", torch.int64, "wanted")]
        return [*ids, mask, *wanted, length, *cached], ["choice", "logits", "hidden", *written]
    tokens, path = (spec(name, torch.int64, "accepted") for name in ("tokens", "path"))
    rows = spec("hidden", dtype, "rows", width=module.width or module.features)
    count: Input = ("count", torch.ones(1, dtype=torch.int64), {})
    tree = ["tree_tokens", "tree_depth", "tree_parent", "tree_mask", "tree_score"] if module.tree else []
    noise: list[Input] = []
    if module.noisy and module.tree:
        noise = [("noise", torch.zeros(module.tree.depth, module.drafted), {})]
    return [tokens, rows, path, count, length, *cached, *noise], [*tree, *written]


def _shared_signature(module: SharedTarget, dtype: torch.dtype) -> tuple[list[Input], list[str]]:
    """``signature`` of a pass over rows of several streams."""
    attention, layers, block = module.layers[0].self_attn, len(module.layers), module.ops.block
    lanes, heads, width = range(LANES), attention.kv_heads, attention.head_dim
    rows = [3 + lane for lane in lanes]  # as in ``spec``, no two sizes are alike

    def ids(name: str, axis: str, size: int) -> Input:
        return name, torch.zeros(size, dtype=torch.int64), {0: axis} if axis else {}

    def pair(lane: int) -> list[tuple[Tensor, dict[int, str]]]:
        positions, symbolic = ((3 + lane) * block, {2: f"positions_{lane}"}) if block else (module.capacity, {})
        return [(cache, symbolic) for cache in caches(1, heads, positions, width, dtype, module.ops)]

    masks: list[Input] = [
        (f"mask.{lane}", torch.zeros(n, n, dtype=torch.bool), dict.fromkeys((0, 1), f"rows_{lane}"))
        for lane, n in zip(lanes, rows, strict=True)
    ]
    names = [f"{lane}." for lane in lanes]
    pasts = (cache for _ in range(layers) for lane in lanes for cache in pair(lane))
    past: list[Input] = [(name, *one) for name, one in zip(_names("past", layers, names), pasts, strict=True)]
    total = sum(rows)
    inputs = [
        ids("tokens", "rows", total),
        ids("depth", "rows", total),
        ids("counts", "", LANES),
        ids("wanted", "wanted", 2),
        *masks,
        *(ids(f"past_length.{lane}", "", 1) for lane in lanes),
        *past,
    ]
    return inputs, ["choice", "logits", "hidden", *_names("present", layers, names)]


def arguments(module: nn.Module, values: Mapping[str, Any]) -> list[Any]:
    """Values by the names of ``signature``, in its order, as the module takes them: those of several layers or lanes in
    lists."""
    taken: dict[str, Any] = {}
    for name, value in values.items():
        many = next((into for prefix, into in _LISTS.items() if name.startswith(prefix)), None)
        if many:
            taken.setdefault(many, []).append(value)
        else:
            taken[name] = value
    if isinstance(module, Target) and not isinstance(module, SharedTarget):
        taken = {"tokens": None, "depth": None, "mask": None, "wanted": None} | taken  # the module's order
    if isinstance(module, Drafter):
        taken = {"tokens": None, "hidden": None, "path": None, "count": None, "past_length": None, "caches": []} | taken
    return list(taken.values())
