"""The drafter's passes: its engines, bound once to preallocated buffers and its KV cache."""

from collections.abc import Mapping, Sequence

import numpy as np

from ..backends import Engine
from ..bundle.graphs import Form
from ..bundle.manifest import Manifest
from ..engines.devices import Array, Call, Device
from .cycle import Accepted, Tree
from .draft_noise import DraftNoise
from .kv_cache import KVCache, runs
from .passes import Passes, bound_once
from .sampling import Sampler
from .target_passes import TargetPasses


class DraftPasses(Passes):
    """One drafter's passes, if there is a drafter. They read the target's hidden rows where its last pass left them,
    and write the tree that it verifies.

    reads: accepted rows that a draft reads at most; 0 without a drafter. extends: whether there is a cache to extend.
    chunk: tokens that an extension reads at most.
    """

    def __init__(
        self,
        manifest: Manifest,
        form: Form,
        engines: Mapping[str, Engine],
        device: Device,
        target: TargetPasses,
        draft_tokens: np.ndarray | None = None,
    ) -> None:
        """draft_tokens: see ``Bundle.draft_tokens``; None for trees without noise."""
        device.enter()
        drafting = [form.graphs[name] for name in ("draft", "extend") if name in form.graphs]
        super().__init__(KVCache(device, *drafting, capacity=manifest.capacity, dtype=manifest.dtype))
        self.graphs, self._engines, self._device = form.graphs, engines, device
        self._tree, self._last_hidden = target.tree, target.hidden
        self.reads = manifest.depth + 1 if manifest.has_drafter else 0
        self.extends, self.chunk, self._static = "extend" in self.graphs, form.chunk, form.static
        widest = len(target.tokens)
        self._tokens = np.zeros(widest, np.int64)
        self._path = np.zeros(widest, np.int64)
        self._count = np.zeros(1, np.int64)
        self._extensions: dict[int, Call] = {}
        self._inputs: dict[str, Array] = {}
        self._noise: DraftNoise | None = None
        if manifest.tree and self.graphs["draft"].noisy:
            self._inputs["noise"] = device.zeros((manifest.depth, manifest.tree.vocabulary), np.float32)
            if draft_tokens is not None:
                self._noise = DraftNoise(self._inputs["noise"], device, draft_tokens)
        if self.extends:
            self._earlier_hidden = device.zeros((1, form.chunk, manifest.hidden), manifest.dtype)
            self._extension(form.chunk)
        sizes = ([self.reads] if form.static else range(1, self.reads + 1)) if self.reads else ()
        self._drafts = [self._bind("draft", n, self._last_hidden) for n in sizes]

    # --- calls --------------------------------------------------------------------------------------------------------

    def drafting(self, accepted: Accepted) -> Call:
        """The pass that reads accepted rows and drafts a tree, with its inputs in place until another pass is
        prepared."""
        self._put(accepted.rows, accepted.tokens)
        return self._drafts[min(len(accepted.rows), len(self._drafts)) - 1]

    def _extension(self, rows: int) -> Call:
        """The pass that reads so many rows of ``_earlier_hidden`` and drafts nothing."""
        size = self.chunk if self._static else rows
        hidden = self._earlier_hidden.reshape(self.chunk, self._last_hidden.shape[1])
        return bound_once(self._extensions, size, lambda: self._bind("extend", size, hidden))

    def _bind(self, graph: str, rows: int, hidden: Array) -> Call:
        inputs = {"tokens": self._tokens[:rows], "path": self._path[:rows], "count": self._count, "hidden": hidden}
        tree = self._tree if graph == "draft" else {}
        return self._engines[graph].bind({**inputs, **self._inputs, **tree, **self.cache.bindings(self.graphs[graph])})

    def _put(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        n = len(rows)
        self._count[0] = n
        self._path[:n], self._tokens[:n] = rows, tokens

    def warm_up(self) -> None:
        """Makes every bound call once, see ``Decoder.warm_up``."""
        self._count[0] = 1
        for call in (*self._drafts, *self._extensions.values()):
            call()

    # --- passes -------------------------------------------------------------------------------------------------------

    def draft(self, accepted: Accepted, sampler: Sampler, position: int) -> int:
        """Drafts a tree. sampler: of the text; position: of the tokens of level 1 in it. The caller commits the
        accepted rows. Returns the nanoseconds of the pass."""
        if self._noise:
            self._noise.put(sampler, position)
        return self.run(self.drafting(accepted))

    def extend(self, hidden: Array, rows: Sequence[int], tokens: Sequence[int]) -> int:
        """Reads tokens, at most a chunk, and drafts nothing. hidden: [1, n, H], hidden rows of the target; rows: the
        one before each token. The caller commits them. Returns the nanoseconds of the pass."""
        for at, row, count in runs(rows, True):
            self._device.move(self._earlier_hidden, at, hidden, row, count)
        self._put(range(len(rows)), tokens)
        took = self.run(self._extension(len(rows)))
        # Nobody waits for its outputs, since it has none, but the next pass changes its inputs.
        return took + self.finish()

    def finish(self) -> int:
        """Waits for the last pass. Returns the nanoseconds that it still took."""
        return self.run(self._device.synchronize)

    # --- the tree -----------------------------------------------------------------------------------------------------

    def scored(self) -> tuple[list[float], list[int]]:
        """Scores and depths of the drafted tree's rows."""
        scores, depths = (self._device.read(self._tree[name]).tolist() for name in ("tree_score", "tree_depth"))
        return scores, depths

    def drafted(self, rows: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the drafted tree's first rows."""
        tokens, parents = (
            self._device.read(self._tree[name])[:rows].tolist() for name in ("tree_tokens", "tree_parent")
        )
        return tokens, parents

    def drafted_tree(self, rows: int) -> Tree:
        """The drafted tree's first rows, for a trace."""
        names = ("tree_tokens", "tree_parent", "tree_depth", "tree_score")
        return Tree(*(tuple(self._device.read(self._tree[name])[:rows].tolist()) for name in names))

    # --- the cache ----------------------------------------------------------------------------------------------------

    def commit(self, graph: str, rows: int) -> None:
        """Keeps the first rows of the last pass in the cache. graph: of that pass."""
        self.cache.commit(self.graphs[graph], range(rows))
