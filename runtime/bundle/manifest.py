"""The schema of the manifest, ``gumiho.json``."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

from ..errors import InputError
from .graphs import NAME, SHARED, Form, Graph, Size
from .hashes import Count, File
from .records import Bounds, OneOf, Pattern, sealed

FORMAT = 3
MANIFEST = "gumiho.json"
GRAPHS = ("target", "draft", "extend")
TARGET_ONLY, OPEN_CACHES, WANTED_ROWS = "target-only", "open-caches", "wanted-rows"
PASS_SIZES, BOUND_WEIGHTS, SHARED_PASSES = "pass-sizes", "bound-weights", "shared-passes"
STATELESS, SEVERAL, NOISE = "stateless-drafter", "several-drafters", "draft-noise"
SPLIT_VALUES = "split-values"
RTX = "tensorrt-rtx"
Dtype = Annotated[str, OneOf(("float32", "float16"))]
Backend = Annotated[str, OneOf(("cpu", "cuda", "migraphx", "tensorrt", "tensorrt-rtx"))]
ModelName = Annotated[str, OneOf(("target", "draft"))]
DrafterName = Annotated[str, Pattern(NAME, "the name of a drafter")]


@dataclass(frozen=True)
class TreeShape:
    """How trees are grown (``graphs.tree.TreeConfig``), and the size of the draft vocabulary; only for display and
    traces."""

    rows: Size
    serial_steps: Annotated[int, Bounds(0, 64)]
    heads: Annotated[int, Bounds(0, 64)]
    top_k: Size
    head_top_k: Size
    beam: Size
    reference: bool
    vocabulary: Size


@dataclass(frozen=True)
class Drafter:
    """One of several drafters. The fields are those that ``Manifest`` has for the first one. source: where it came
    from."""

    depth: Annotated[int, Bounds(1, 64)]
    tree: TreeShape
    source: str


@dataclass(frozen=True)
class Manifest:
    """A bundle's description (``gumiho.json``).

    capacity: the most positions of a text, prompt included. rows: of the tree, root included; without a drafter, the
    most rows that a pass verifies. depth: drafted tokens on its longest path. tree: how it is grown; None without a
    drafter. dtype: of caches, hidden rows and logits. weights: how the weights of ``target`` and ``draft`` are
    quantized, in words. eos_token_ids: all tokens that end a text. forms: by backend. files: by path relative to the
    bundle. requires: features that a reader must know to run the bundle (``FEATURES``). drafters: by name if there are
    several; depth and tree are the first one's.
    """

    capacity: Annotated[int, Bounds(1, 1 << 24)]
    rows: Annotated[int, Bounds(2, 4096)]
    depth: Annotated[int, Bounds(1, 64)]
    vocabulary: Annotated[int, Bounds(1, 1 << 24)]
    hidden: Annotated[int, Bounds(1, 1 << 20)]
    dtype: Dtype
    weights: Mapping[ModelName, str]
    eos_token_ids: tuple[Count, ...]
    forms: Mapping[Backend, Form]
    tree: TreeShape | None
    sources: Mapping[str, str]
    files: Mapping[str, File]
    requires: tuple[str, ...] = ()
    drafters: Mapping[DrafterName, Drafter] = field(default_factory=dict)
    format: int = field(default=FORMAT)

    @property
    def default(self) -> str:
        """The backend that the bundle was exported for first."""
        return next(iter(self.forms))

    @property
    def has_drafter(self) -> bool:
        """Whether the bundle drafts. Without a drafter it decodes plainly and by prompt lookup."""
        return self.tree is not None

    def suffix(self, drafter: str) -> str:
        """The suffix of the names of a drafter's graphs. drafter: "" for the first."""
        return "" if drafter in ("", next(iter(self.drafters), "")) else f".{drafter}"

    def of(self, drafter: str) -> "Manifest":
        """The manifest with only this drafter of ``drafters``; "" for the first."""
        if not self.drafters:
            return self
        suffix, own = self.suffix(drafter), self.drafters[drafter or next(iter(self.drafters))]
        forms = {backend: form.of(suffix) for backend, form in self.forms.items()}
        return replace(self, depth=own.depth, tree=own.tree, drafters={}, forms=forms)

    def serial_steps(self, drafter: str) -> int:
        """The number of levels that a drafter's serial layers draft, 0 without a drafter. drafter: "" for the first."""
        tree = self.drafters[drafter].tree if drafter in self.drafters else self.tree
        return tree.serial_steps if tree else 0

    @property
    def deepest(self) -> int:
        """The largest depth of all drafters' trees, in drafted tokens."""
        return max((own.depth for own in self.drafters.values()), default=self.depth)

    @property
    def each(self) -> tuple[str, ...]:
        """The arguments with which ``of`` returns a manifest for each drafter; only "" if the bundle has at most
        one."""
        return tuple(self.drafters) or ("",)

    @property
    def stateless(self) -> bool:
        """Whether some drafter has no caches, and therefore no graph ``extend``."""
        views = (self.of(drafter) for drafter in self.each)
        variants = (graphs for view in views for form in view.forms.values() for graphs in form.variants().values())
        return self.has_drafter and any("extend" not in graphs for graphs in variants)

    def form(self, backend: str) -> Form:
        """The graphs for a backend. Raises InputError if the bundle was not exported for it."""
        if backend not in self.forms:
            raise InputError(
                f"the bundle has graphs for {', '.join(self.forms)} and none for {backend}: "
                f"export it again with `gumiho-export --backend {' '.join(self.forms)} {backend}`"
            )
        return self.forms[backend]

    @property
    def noisy(self) -> bool:
        """Whether some drafter takes noise."""
        variants = (graphs for form in self.forms.values() for graphs in form.variants().values())
        return any(graph.noisy for graphs in variants for graph in graphs.values())

    @property
    def targets(self) -> list[Graph]:
        """The target's graphs, of all backends and dialects."""
        return [graphs["target"] for form in self.forms.values() for graphs in form.variants().values()]

    def to_json(self) -> str:
        return sealed(asdict(self))


# The features that ``Manifest.requires`` may name: for each, a description of the bundles that have it, and a test.
FEATURES: Mapping[str, tuple[str, Callable[[Manifest], bool]]] = {
    TARGET_ONLY: ("tree is null", lambda manifest: not manifest.has_drafter),
    OPEN_CACHES: (
        "a target's caches are open",
        lambda manifest: any(target.open_caches for target in manifest.targets),
    ),
    SPLIT_VALUES: (
        "a target's caches of values are split by columns",
        lambda manifest: any(target.splits_values for target in manifest.targets),
    ),
    WANTED_ROWS: (
        "a target has the input 'wanted'",
        lambda manifest: any(target.selects for target in manifest.targets),
    ),
    SHARED_PASSES: (
        "a form has the graph 'shared'",
        lambda manifest: any(
            SHARED in graphs for form in manifest.forms.values() for graphs in form.variants().values()
        ),
    ),
    PASS_SIZES: (
        "a target has several graphs of fixed sizes",
        lambda manifest: any(len(form.targets) > 1 for form in manifest.forms.values()),
    ),
    SEVERAL: ("there are several drafters", lambda manifest: bool(manifest.drafters)),
    STATELESS: ("a form has the graph 'draft' and not 'extend'", lambda manifest: manifest.stateless),
    NOISE: ("a drafter has the input 'noise'", lambda manifest: manifest.noisy),
    BOUND_WEIGHTS: ("a form has weights", lambda manifest: any(form.weights for form in manifest.forms.values())),
    RTX: ("a form is for tensorrt-rtx", lambda manifest: RTX in manifest.forms),
}
