"""The manifest ``gumiho.json``: its schema, and the rules that no field can state by itself."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated

from ..devices import Array, Device
from ..errors import GumihoError
from .hashes import Count, File
from .records import Bounds, OneOf, Pattern, sealed

FORMAT = 3
MANIFEST = "gumiho.json"
GRAPHS = ("target", "draft", "extend")
# What a later version may add that this one could not run: a manifest names it under ``requires``.
FEATURES: tuple[str, ...] = ()
Size = Annotated[int, Bounds(1, 1 << 31)]
Dtype = Annotated[str, OneOf(("float32", "float16"))]
Backend = Annotated[str, OneOf(("cpu", "cuda", "migraphx", "tensorrt"))]
GraphName = Annotated[str, OneOf(GRAPHS)]


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a graph. shape: sizes, or the names of symbolic axes."""

    name: Annotated[str, Pattern(r"[a-z_]{1,20}(\.[0-9]{1,4})?", "the name of a tensor")]
    dtype: Annotated[str, OneOf(("int64", "bool", "float32", "float16"))]
    shape: tuple[Size | Annotated[str, OneOf(("rows", "accepted"))], ...]


@dataclass(frozen=True)
class Graph:
    """A graph of the bundle.

    file: relative to the bundle, as are the weights it names. weights: bytes of those. reads: bytes of weights that a pass reads,
    a matrix that is multiplied twice counted twice and an embedding not at all. precision: of its products, that of its weights, or
    int8 where the rows of a pass are rounded to meet quantized weights.
    """

    file: str
    weights: Count
    reads: Count
    precision: Annotated[str, OneOf(("float32", "float16", "bfloat16", "int8"))]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def caches(self) -> tuple[TensorSpec, ...]:
        """The cache inputs: key and value of every layer in turn, each [1, kv heads, S, d]."""
        return tuple(p for p in self.inputs if p.name.startswith(("past_key.", "past_value.")))

    @property
    def appends(self) -> bool:
        """Whether the graph returns its rows' keys and values alone, instead of writing them into the caches."""
        return bool(self.fresh)

    @property
    def fresh(self) -> tuple[TensorSpec, ...]:
        """The rows' own keys and values, [1, kv heads, n, d], in the order of ``caches``, where the graph returns them alone."""
        return tuple(p for p in self.outputs if p.name.startswith(("new_key.", "new_value.")))

    def tree_buffers(self, device: Device) -> dict[str, Array]:
        """A zeroed buffer for each of the draft graph's ``tree_*`` outputs, whose shapes are static."""
        shapes = {p.name: (tuple(int(n) for n in p.shape), p.dtype) for p in self.outputs if p.name.startswith("tree_")}
        return {name: device.zeros(*tensor, mirrored=True) for name, tensor in shapes.items()}


@dataclass(frozen=True)
class Form:
    """The bundle's graphs as one backend wants them.

    dialect: how their operators are spelled. chunk: rows of a prefill pass. static: whether every pass of the target has that
    many rows, as of the draft graph all that can be accepted; else any number goes. graphs: ``target``, ``draft`` and
    ``extend``. spares: the same graphs in other dialects, by dialect, for devices and releases that cannot run the first.
    """

    dialect: Annotated[str, Pattern("[a-z]{1,20}", "the name of a dialect")]
    chunk: Annotated[int, Bounds(1, 1 << 16)]
    static: bool
    graphs: Mapping[GraphName, Graph]
    spares: Mapping[Annotated[str, Pattern("[a-z]{1,20}", "the name of a dialect")], Mapping[GraphName, Graph]]

    def variants(self) -> dict[str, Mapping[str, Graph]]:
        """Every set of graphs by its dialect, the first choice first."""
        return {self.dialect: self.graphs, **self.spares}


@dataclass(frozen=True)
class TreeShape:
    """How trees are grown (``graphs.tree.TreeConfig``), and of how many tokens: for the reader and the trace."""

    rows: Size
    serial_steps: Annotated[int, Bounds(1, 64)]
    heads: Annotated[int, Bounds(0, 64)]
    top_k: Size
    head_top_k: Size
    beam: Size
    reference: bool
    vocabulary: Size


@dataclass(frozen=True)
class Manifest:
    """What a bundle says of itself (``gumiho.json``).

    capacity: positions a text may take. rows: of the tree, root included. depth: drafted tokens on its longest path. tree: how
    it is grown. dtype: of caches, hidden rows and logits. weights: how those of ``target`` and ``draft`` are quantized, for the
    reader. eos_token_ids: all that end a text. forms: by backend. files: by path relative to the bundle. requires: what a
    reader must know to run the bundle (``FEATURES``).
    """

    capacity: Annotated[int, Bounds(1, 1 << 24)]
    rows: Annotated[int, Bounds(2, 4096)]
    depth: Annotated[int, Bounds(1, 64)]
    vocabulary: Annotated[int, Bounds(1, 1 << 24)]
    hidden: Annotated[int, Bounds(1, 1 << 20)]
    dtype: Dtype
    weights: Mapping[Annotated[str, OneOf(("target", "draft"))], str]
    eos_token_ids: tuple[Count, ...]
    forms: Mapping[Backend, Form]
    tree: TreeShape
    sources: Mapping[str, str]
    files: Mapping[str, File]
    requires: tuple[str, ...] = ()
    format: int = field(default=FORMAT)

    @property
    def default(self) -> str:
        """The backend that the bundle was exported for first."""
        return next(iter(self.forms))

    def form(self, backend: str) -> Form:
        """Raises GumihoError where the bundle was not exported for the backend."""
        if backend not in self.forms:
            raise GumihoError(
                f"the bundle has graphs for {', '.join(self.forms)} and none for {backend}: "
                f"export it again with `gumiho-export --backend {' '.join(self.forms)} {backend}`"
            )
        return self.forms[backend]

    def to_json(self) -> str:
        return sealed(asdict(self))
