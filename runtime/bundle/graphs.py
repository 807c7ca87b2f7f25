"""The graphs of a bundle, as its manifest describes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Annotated, TypeVar

import numpy as np

from ..engines.devices import Array, Device
from .hashes import Count
from .records import Bounds, OneOf, Pattern

SHARED = "shared"
# Caches of any length have a multiple of BLOCK positions. Sums over them add PANEL positions in order, and then the
# panels (graphs.dialects.exact).
BLOCK, PANEL = 128, 1024
NAME = "[A-Za-z0-9_][A-Za-z0-9_-]{0,63}"  # of a drafter
Size = Annotated[int, Bounds(1, 1 << 31)]
WeightOwner = Annotated[str, Pattern(rf"target|draft(\.{NAME})?", "target, draft or draft.NAME")]
WeightName = Annotated[str, Pattern(r"[A-Za-z0-9_.]{1,200}", "the name of a weight")]
GraphName = Annotated[
    str,
    Pattern(
        rf"(draft|extend)(\.{NAME})?|shared|target(-[1-9][0-9]{{0,4}})?",
        "one of target, shared, draft, extend, target-N, draft.NAME or extend.NAME",
    ),
]
T = TypeVar("T")
# Bits of an element of weights that graphs take as inputs; numpy knows not all of these types.
_BITS = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "int8": 8,
    "uint8": 8,
    "float8_e4m3fn": 8,
    "int4": 4,
}


def of_drafter(named: Mapping[str, T], suffix: str) -> dict[str, T]:
    """The entries of the target and of one drafter, the latter without their suffix. named: entries by the name of
    their graph or model; suffix: of the drafter's names, "" for the first drafter."""
    found = dict[str, T]()
    for name, value in named.items():
        kind, dot, owner = name.partition(".")
        if kind not in ("draft", "extend") or dot + owner == suffix:
            found[kind] = value
    return found


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a graph. shape: sizes, or the names of symbolic axes."""

    name: Annotated[str, Pattern(r"[a-z_]{1,20}(\.[0-9]{1,4}){0,2}", "the name of a tensor")]
    dtype: Annotated[str, OneOf(("int64", "bool", "float32", "float16"))]
    shape: tuple[
        Size | Annotated[str, Pattern(r"(rows|positions)(_[0-9])?|accepted|wanted", "the name of an axis")], ...
    ]


@dataclass(frozen=True)
class Graph:
    """A graph of the bundle.

    file: path relative to the bundle, as are the paths of its weights; graphs of several sizes may share one of
    symbolic rows. weights: bytes of its weights. reads: bytes of weights that a pass reads; a matrix that is multiplied
    twice counts twice, an embedding not at all. precision: of its matrix products, that of the weights, or int8 if a
    pass rounds its rows to int8 to multiply them with quantized weights.
    """

    file: str
    weights: Count
    reads: Count
    precision: Annotated[str, OneOf(("float32", "float16", "bfloat16", "int8"))]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def sized(self) -> tuple[str, int | str]:
        """Identifies the graph: its file, which graphs of several sizes may share, and the number of tokens it
        takes."""
        return self.file, self.inputs[0].shape[0]

    @property
    def caches(self) -> tuple[TensorSpec, ...]:
        """The cache inputs: key, then value of each layer in turn, each [1, kv heads, S, d]; values may also be [1, kv
        heads * parts, S, d / parts]."""
        return tuple(p for p in self.inputs if p.name.startswith(("past_key.", "past_value.")))

    @property
    def open_caches(self) -> bool:
        """Whether the caches may have any multiple of BLOCK positions; that axis is then symbolic, ``positions``."""
        return bool(self.caches) and self.caches[0].shape[2] == "positions"

    @property
    def splits_values(self) -> bool:
        """Whether the caches of values are split by columns into several parts."""
        return bool(self.caches) and self.caches[0].shape[1] != self.caches[1].shape[1]

    @property
    def selects(self) -> bool:
        """Whether a pass returns choices and logits only for the rows listed in the input ``wanted``."""
        return any(p.name == "wanted" for p in self.inputs)

    @property
    def noisy(self) -> bool:
        """Whether the graph takes noise, fp32 [levels, draft vocabulary]."""
        return any(p.name == "noise" for p in self.inputs)

    @property
    def lanes(self) -> int:
        """How many streams may have rows in a pass of the graph ``shared``; 0 for other graphs."""
        return sum(p.name.startswith("mask.") for p in self.inputs)

    def cache_positions(self, capacity: int) -> int:
        """The largest number of positions of the caches in a bundle of this capacity."""
        if not self.caches:
            return capacity
        return -(-capacity // BLOCK) * BLOCK if self.open_caches else int(self.caches[0].shape[2])

    def cache_bytes(self, capacity: int) -> int:
        """Bytes of the caches with ``cache_positions(capacity)`` positions."""
        if not self.caches:
            return 0
        _, kv_heads, _, head_dim = self.caches[0].shape
        positions, itemsize = self.cache_positions(capacity), np.dtype(self.caches[0].dtype).itemsize
        return len(self.caches) * int(kv_heads) * positions * int(head_dim) * itemsize

    @property
    def appends(self) -> bool:
        """Whether the graph returns only its rows' keys and values, instead of updated caches."""
        return bool(self.fresh)

    @property
    def fresh(self) -> tuple[TensorSpec, ...]:
        """The outputs with only the rows' keys and values, [1, kv heads, n, d], in the order of ``caches``; () unless
        ``appends``.
        """
        return tuple(p for p in self.outputs if p.name.startswith(("new_key.", "new_value.")))

    def tree_buffers(self, device: Device) -> dict[str, Array]:
        """A zeroed buffer for each of the draft graph's ``tree_*`` outputs, whose shapes are static."""
        shapes = {p.name: (tuple(int(n) for n in p.shape), p.dtype) for p in self.outputs if p.name.startswith("tree_")}
        return {name: device.zeros(*tensor, mirrored=True) for name, tensor in shapes.items()}


@dataclass(frozen=True)
class Weight:
    """A weight that graphs take as an input. file: path relative to the bundle; offset: of its bytes there."""

    dtype: Annotated[str, OneOf(tuple(_BITS))]
    shape: tuple[Size, ...]
    file: str
    offset: Count

    @property
    def nbytes(self) -> int:
        return -(-prod(self.shape) * _BITS[self.dtype] // 8)

    @property
    def itemsize(self) -> int:
        """Bytes of an element, of the smallest whole number of bytes."""
        return -(-_BITS[self.dtype] // 8)


@dataclass(frozen=True)
class Form:
    """The bundle's graphs for one backend.

    dialect: how their operators are spelled. chunk: rows of a prefill pass. static: whether all shapes are fixed. If
    they are, the graph ``target`` has ``chunk`` rows, and the draft graph reads the largest number of tokens that a
    cycle can accept; otherwise both take any number.

    graphs: ``target``, and with a drafter ``draft`` and, if it has caches, ``extend``. Static forms may also have
    ``target-N``, the target for passes of N rows, fewer than ``chunk``; the CPU's may have ``shared``, the target's
    pass over rows of several streams (``graphs.shared_target``). With several drafters, these names are the first
    one's; the others' end with ``.NAME``. spares: the same graphs in other dialects, by dialect, for devices and
    releases that cannot run the first one.

    weights: those that graphs take as inputs, so that all graphs share them, by model (``target``, or ``draft`` for
    both graphs of the drafter) and name; the other weights are part of the graphs. least: the minimum number of rows of
    a target pass on this machine; shorter passes are padded to it (see ``backends.processor.one_row_differs``).
    """

    dialect: Annotated[str, Pattern("[a-z]{1,20}", "the name of a dialect")]
    chunk: Annotated[int, Bounds(1, 1 << 16)]
    static: bool
    graphs: Mapping[GraphName, Graph]
    spares: Mapping[Annotated[str, Pattern("[a-z]{1,20}", "the name of a dialect")], Mapping[GraphName, Graph]]
    weights: Mapping[WeightOwner, Mapping[WeightName, Weight]] = field(default_factory=dict)
    least: Annotated[int, Bounds(1, 2)] = 1

    def of(self, suffix: str) -> "Form":
        """The form with only one of its drafters. suffix: of the drafter's names, "" for the first."""
        spares = {dialect: of_drafter(graphs, suffix) for dialect, graphs in self.spares.items()}
        return replace(
            self, graphs=of_drafter(self.graphs, suffix), spares=spares, weights=of_drafter(self.weights, suffix)
        )

    def variants(self) -> dict[str, Mapping[str, Graph]]:
        """All sets of graphs by dialect, in order of preference."""
        return {self.dialect: self.graphs, **self.spares}

    @cached_property
    def targets(self) -> dict[int, str]:
        """The names of the target's graphs by their number of rows, ascending; empty if they take any number."""
        if not self.static:
            return {}
        return dict(sorted((int(name[7:] or self.chunk), name) for name in self.graphs if name.startswith("target")))

    def target(self, rows: int) -> tuple[str, int]:
        """The name of the smallest target graph that takes this many rows, and the number of rows that it computes."""
        return next(
            ((name, size) for size, name in self.targets.items() if size >= rows), ("target", max(rows, self.least))
        )

    def inputs(self, graph: str) -> Mapping[str, Weight]:
        """The weights that a graph may take as inputs, by name."""
        if graph.startswith(("target", SHARED)):
            return self.weights.get("target", {})
        _, dot, owner = graph.partition(".")
        return self.weights.get(f"draft{dot}{owner}", {})
