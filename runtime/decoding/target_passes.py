"""The target's passes: its engines, bound once to preallocated buffers and its KV cache."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..backends import Engine
from ..bundle.graphs import PANEL, Form
from ..bundle.manifest import Manifest
from ..engines.devices import Array, Call, Device
from .kv_cache import KVCache
from .passes import Passes, bound_once


class TargetPasses(Passes):
    """The target's passes, by their number of rows. If shapes are static, passes have fixed sizes: padding rows are
    computed and ignored.

    rows: of a tree. splits: whether a part of a tree can be verified; otherwise all of it is. tokens, depth: int64
    [widest], inputs of causal passes. tree: the tree to verify, by the names of a draft graph's ``tree_*`` outputs;
    empty without a drafter. choice: int64 [widest]; logits: [widest, V]; hidden: [widest, H]: outputs of the last pass
    by row; while a prompt is read they may be the last ones, of which only the very last has choice and logits.
    """

    def __init__(self, manifest: Manifest, form: Form, engines: Mapping[str, Engine], device: Device) -> None:
        """form, engines: with those of one drafter at most, whose trees are verified. Other drafters' trees have the
        same rows."""
        device.enter()
        targets = [form.graphs[name] for name in form.targets.values() or ("target",)]
        super().__init__(KVCache(device, *targets, capacity=manifest.capacity + form.least - 1))
        self.form, self.graphs, self._engines, self._device = form, form.graphs, engines, device
        self.rows, self.splits = manifest.rows, not form.static or min(form.targets) < manifest.rows
        widest = max(manifest.rows, form.chunk)
        self.tokens, self.depth = np.zeros(widest, np.int64), np.arange(widest)
        self.choice = np.zeros(widest, np.int64)
        self.logits = device.zeros((widest, manifest.vocabulary), manifest.dtype)
        self.hidden = device.zeros((widest, manifest.hidden), manifest.dtype)
        self.tree = form.graphs["draft"].tree_buffers(device) if manifest.has_drafter else {}
        self._causal: dict[tuple[int, bool], Call] = {}
        self._verifications: dict[int, Call] = {}
        self.causal(form.chunk, last=True)
        for size in form.targets or (1,):
            self.causal(size)
        for size in sorted({*form.targets, manifest.rows}) if manifest.has_drafter else ():
            if size <= manifest.rows:
                self.verification(size)

    # --- calls --------------------------------------------------------------------------------------------------------

    def causal(self, rows: int, last: bool = False) -> Call:
        """The pass over ``tokens``. rows: at most a chunk; each attends to those before it. last: whether choice and
        logits of the last row will do."""
        _, size = self.form.target(rows)
        last = last and self.graphs["target"].selects
        first = size - self.form.least if last else 0

        def bind() -> Call:
            return self._bind(self.tokens, self.depth, np.tri(size, dtype=np.bool_), first, self._begin(size, last))

        return bound_once(self._causal, (size, last), bind)

    def verification(self, rows: int) -> Call:
        """The pass over the tree's first rows, which are the best tree of that size."""
        _, size = self.form.target(rows)
        return bound_once(self._verifications, size, lambda: self._bind_verification(size))

    def _begin(self, rows: int, last: bool) -> int:
        """Where the outputs of a causal pass over so many rows begin. The last row of a prompt is always the same one,
        since a row of logits takes memory from when it is first written."""
        return len(self.choice) - rows if last and self.graphs["target"].selects else 0

    def _bind(self, tokens: Array, depth: Array, mask: Array, first: int = 0, begin: int = 0) -> Call:
        """first: of the rows that have choice and logits. begin: see ``_begin``."""
        n, cache = len(mask), self.cache
        name, _ = self.form.target(n)
        graph = self.graphs[name]
        chosen, rows = slice(begin + first, begin + n), slice(begin, begin + n)
        outputs = {"choice": self.choice[chosen], "logits": self.logits[chosen], "hidden": self.hidden[rows]}
        buffers = {"tokens": tokens[:n], "depth": depth[:n], "mask": mask, **outputs}
        if graph.selects:
            buffers["wanted"] = np.arange(first, n)
        engine = self._engines[name]

        def bind() -> Call:
            return engine.bind({**buffers, **cache.bindings(graph)})

        return _growing(cache, n, bind) if graph.open_caches else bind()

    def _bind_verification(self, rows: int) -> Call:
        tree_mask, whole = self.tree["tree_mask"], self.rows
        if rows == whole:
            return self._bind(self.tree["tree_tokens"], self.tree["tree_depth"], tree_mask)
        mask = self._device.zeros((rows, rows), np.bool_)
        call = self._bind(self.tree["tree_tokens"], self.tree["tree_depth"], mask)
        corner, part = tree_mask[:rows].reshape(rows, whole, 1), mask.reshape(rows, rows, 1)
        move = self._device.move

        def verify() -> float | None:
            move(part, 0, corner, 0, rows)
            return call()

        return verify

    def warm_up(self) -> None:
        """Makes every bound call once, see ``Decoder.warm_up``."""
        for call in (*self._verifications.values(), *self._causal.values()):
            call()

    # --- passes -------------------------------------------------------------------------------------------------------

    def read(self, tokens: Sequence[int], last: bool = False) -> int:
        """One causal pass over the next tokens, at most a chunk. last: see ``causal``. The caller commits the rows to
        keep. Returns its nanoseconds."""
        self.tokens[: len(tokens)] = tokens
        return self.run(self.causal(len(tokens), last))

    def first(self, rows: int, last: bool = False) -> int:
        """Which row of the outputs is the first token's after ``read`` of so many."""
        return self._begin(self.form.target(rows)[1], last)

    def in_order(self, rows: int) -> int:
        """How many of the tree's first rows can be verified so that their sums over the cache are those of plain
        decoding, to the last bit. rows: at most.

        A row and its ancestors must be written in the panels of their positions. A tree's rows are written one after
        the other, in plain decoding each at its position.
        """
        begin = self.length
        if not self.graphs["target"].open_caches or begin // PANEL == (begin + rows - 1) // PANEL:
            return rows
        depths = self._device.read(self.tree["tree_depth"])[:rows]
        moved = (begin + np.arange(rows)) // PANEL != (begin + depths) // PANEL
        return int(moved.argmax()) if moved.any() else rows

    def verify(self, rows: int) -> int:
        """One pass over the tree's first rows. The caller commits the accepted ones. Returns its nanoseconds."""
        return self.run(self.verification(rows))

    def row(self, row: int) -> np.ndarray:
        """The logits [V] of one row of the last pass; no other row is fetched from the device."""
        return self._device.read(self.logits[row])

    # --- the cache ----------------------------------------------------------------------------------------------------

    def commit(self, rows: int, path: Sequence[int]) -> None:
        """Keeps some rows of the last pass in the cache. rows: of that pass; path: see ``KVCache.commit``."""
        name, _ = self.form.target(rows)
        self.cache.commit(self.graphs[name], path)

    def wipe(self) -> None:
        """Zeroes the positions that are not filled, see ``KVCache.wipe``."""
        self.cache.wipe(self.length)


def _growing(cache: KVCache, rows: int, bind: Callable[[], Call]) -> Call:
    """A call that makes room in the cache for its rows, and is bound anew when the cache has other buffers."""
    bound, moves = bind(), cache.moves

    def call() -> float | None:
        nonlocal bound, moves
        cache.fit(int(cache.length[0]) + rows)
        if moves != cache.moves:
            bound, moves = bind(), cache.moves
        return bound()

    return call
