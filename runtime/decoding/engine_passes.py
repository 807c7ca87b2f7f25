"""The engines of one bundle, bound once to preallocated buffers and KV caches."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns

import numpy as np

from ..backends import Engine, close
from ..bundle.graphs import Form
from ..bundle.manifest import Manifest
from ..engines.devices import Array, Call, Device
from .cycle import Tree
from .kv_cache import KVCache

_DRAFT, _TARGET = 0, 1
_MOST_BOUND = 32  # more than cycles use; a prompt may end with any number of rows


class _Shared:
    """What passes with several drafters over one target share: its cache, the inputs and outputs of its passes, and its causal passes. See
    ``EnginePasses``."""

    def __init__(self, manifest: Manifest, form: Form, device: Device) -> None:
        targets = [form.graphs[name] for name in form.targets.values() or ("target",)]
        self.cache = KVCache(device, *targets, capacity=manifest.capacity + form.least - 1)
        widest = max(manifest.rows, form.chunk)
        self.choice = np.zeros(widest, np.int64)
        self.logits = device.zeros((widest, manifest.vocabulary), manifest.dtype)
        self.hidden = device.zeros((widest, manifest.hidden), manifest.dtype)
        self.tokens, self.depth = np.zeros(widest, np.int64), np.arange(widest)
        self.causal: dict[tuple[str, int], Call] = {}


class EnginePasses:
    """Passes of target and drafter, by their number of rows. Without a drafter only the target's causal passes are bound.

    If the form is static, passes have fixed sizes: padding rows are computed and ignored.

    extends: whether the drafter has caches to extend. splits: whether the target can verify a part of a tree; otherwise all of it is verified.
    tokens, depth: int64 [widest], inputs of the target's causal passes. choice: int64 [widest]; logits: [widest, V]; hidden:
    [widest, H]: outputs of the target's last pass by row; while a prompt is read they may be the last ones, of which only the very
    last has choice and logits. tree: the draft graph's ``tree_*`` outputs, if any. noise: its input of that
    name, fp32 [depth, draft vocabulary], None if it has none. accepted_rows, accepted_tokens: int64 [widest], rows of ``hidden``
    that the next draft reads, and the token after each; accepted_count: int64 [1], how many of them it reads. history_chunk:
    [1, chunk, H], earlier hidden rows for ``extend``. engine_ns: nanoseconds spent in the drafter's and the target's engines.
    waited_ns: nanoseconds in which engines worked for other streams.
    """

    def __init__(
        self,
        manifest: Manifest,
        form: Form,
        engines: Mapping[str, Engine],
        device: Device,
        beside: "EnginePasses | None" = None,
    ) -> None:
        """beside: passes with another drafter over the same target, whose cache and buffers these use too."""
        self.manifest, self.form, self.graphs = manifest, form, form.graphs
        self.engines, self.device = engines, device
        device.enter()
        self.splits = not form.static or min(form.targets) < manifest.rows
        drafting = [self.graphs[name] for name in ("draft", "extend") if name in self.graphs]
        self.draft_cache = KVCache(device, *drafting, capacity=manifest.capacity, dtype=manifest.dtype)
        self._shared: _Shared = beside._shared if beside else _Shared(manifest, form, device)
        shared = self._shared
        self.target_cache, self.choice, self.logits, self.hidden = shared.cache, shared.choice, shared.logits, shared.hidden
        self.tokens, self.depth = shared.tokens, shared.depth
        self.tree: dict[str, Array] = {}
        self.noise: Array | None = None
        widest = len(self.tokens)
        self.accepted_rows, self.accepted_tokens = np.zeros(widest, np.int64), np.zeros(widest, np.int64)
        self.accepted_count = np.zeros(1, np.int64)
        self.engine_ns, self.waited_ns = [0, 0], 0
        self._bound: dict[tuple[str, int], Call] = {}
        self._drafts: list[Call] = []
        self.extends = "extend" in self.graphs
        self.causal(form.chunk, last=True)
        for size in form.targets or (1,):
            self.causal(size)
        if manifest.has_drafter:
            self._bind_drafter()

    def _bind_drafter(self) -> None:
        manifest, form, device = self.manifest, self.form, self.device
        self.tree = self.graphs["draft"].tree_buffers(device)
        if self.graphs["draft"].noisy and manifest.tree:
            self.noise = device.zeros((manifest.depth, manifest.tree.vocabulary), np.float32)
        for size in form.targets:
            if size < manifest.rows:
                self.verification(size)
        self.verification(manifest.rows)
        if self.extends:
            self.history_chunk = device.zeros((1, form.chunk, manifest.hidden), manifest.dtype)
            self.extend(form.chunk)
        most = manifest.depth + 1
        accepted = [most] if form.static else range(1, most + 1)
        self._drafts = [self._bind_draft("draft", n, self.tree, self.hidden) for n in accepted]

    def causal(self, rows: int, last: bool = False) -> Call:
        """The target's causal pass over ``tokens``. rows: at most a chunk; each attends to those before it. last: whether choice and
        logits of the last row will do."""
        _, size = self.form.target(rows)
        last = last and self.graphs["target"].selects
        first = size - self.form.least if last else 0

        def bind() -> Call:
            return self._bind_target(self.tokens, self.depth, np.tri(size, dtype=np.bool_), first, self._begin(size, last))

        return _once(self._shared.causal, "last of causal" if last else "causal", size, bind)

    def verification(self, rows: int) -> Call:
        """The target's pass over the draft tree's first rows, which are the best tree of that size."""
        _, size = self.form.target(rows)
        return _once(self._bound, "verify", size, lambda: self._bind_verification(size))

    def extend(self, rows: int) -> Call:
        """The drafter's pass over the first rows of ``history_chunk``; it fills the cache and drafts nothing."""
        size = self.form.chunk if self.form.static else rows
        hidden = self.history_chunk.reshape(self.form.chunk, self.manifest.hidden)
        return _once(self._bound, "extend", size, lambda: self._bind_draft("extend", size, {}, hidden))

    def draft(self, accepted: int) -> Call:
        """The drafter's pass that reads so many accepted rows and drafts a tree."""
        return self._drafts[min(accepted, len(self._drafts)) - 1]

    def _begin(self, rows: int, last: bool) -> int:
        """Where the outputs of a causal pass over so many rows begin. The last row of a prompt is always the same one, since a row of
        logits takes memory from when it is first written."""
        return len(self.choice) - rows if last and self.graphs["target"].selects else 0

    def _bind_target(self, tokens: Array, depth: Array, mask: Array, first: int = 0, begin: int = 0) -> Call:
        """first: of the rows that have choice and logits. begin: see ``_begin``."""
        n, cache = len(mask), self.target_cache
        name, _ = self.form.target(n)
        graph = self.graphs[name]
        chosen, rows = slice(begin + first, begin + n), slice(begin, begin + n)
        outputs = {"choice": self.choice[chosen], "logits": self.logits[chosen], "hidden": self.hidden[rows]}
        buffers = {"tokens": tokens[:n], "depth": depth[:n], "mask": mask, **outputs}
        if graph.selects:
            buffers["wanted"] = np.arange(first, n)

        def bind() -> Call:
            return self.engines[name].bind({**buffers, **cache.bindings(graph)})

        return _growing(cache, n, bind) if graph.open_caches else bind()

    def _bind_verification(self, rows: int) -> Call:
        tree_mask, whole = self.tree["tree_mask"], self.manifest.rows
        if rows == whole:
            return self._bind_target(self.tree["tree_tokens"], self.tree["tree_depth"], tree_mask)
        mask = self.device.zeros((rows, rows), np.bool_)
        call = self._bind_target(self.tree["tree_tokens"], self.tree["tree_depth"], mask)
        corner, part = tree_mask[:rows].reshape(rows, whole, 1), mask.reshape(rows, rows, 1)
        move = self.device.move

        def verify() -> float | None:
            move(part, 0, corner, 0, rows)
            return call()

        return verify

    def _bind_draft(self, graph: str, accepted: int, tree: Mapping[str, Array], hidden: Array) -> Call:
        tokens, rows = self.accepted_tokens[:accepted], self.accepted_rows[:accepted]
        inputs = {"tokens": tokens, "path": rows, "count": self.accepted_count, "hidden": hidden}
        if self.noise is not None:
            inputs["noise"] = self.noise
        return self.engines[graph].bind({**inputs, **tree, **self.draft_cache.bindings(self.graphs[graph])})

    def warm_up(self) -> None:
        """Makes every bound call once: with the first call an accelerator sets an engine up and records its work, which takes much longer
        than the call. Nothing is committed, but rows behind the caches' length are written."""
        self.accepted_count[0] = 1
        for call in (*self._drafts, *self._bound.values(), *self._shared.causal.values()):  # verification reads a drafted tree
            call()
        self.accepted_count[0] = 0
        self.device.synchronize()

    def run_target(self, call: Call) -> None:
        self._run(_TARGET, call)

    def run_draft(self, call: Call) -> None:
        self._run(_DRAFT, call)

    def _run(self, engine: int, call: Call) -> None:
        started = perf_counter_ns()
        own, passed = call(), perf_counter_ns() - started
        self.engine_ns[engine] += passed if own is None else int(own)
        self.waited_ns += 0 if own is None else passed - int(own)

    def read(self, tokens: Sequence[int], last: bool = False) -> int:
        """One causal pass of the target over the next tokens, at most a chunk. The caller commits the rows to keep. last: see
        ``causal``. Returns which row of the outputs is the first token's."""
        self.tokens[: len(tokens)] = tokens
        self.run_target(self.causal(len(tokens), last))
        return self._begin(self.form.target(len(tokens))[1], last)

    def commit(self, rows: int, path: Sequence[int]) -> None:
        """Keeps some rows of the target's last pass in its cache. rows: of that pass; path: see ``KVCache.commit``."""
        name, _ = self.form.target(rows)
        self.target_cache.commit(self.graphs[name], path)

    def row(self, row: int) -> np.ndarray:
        """The target's logits [V] of one row of its last pass; no other row is fetched from the device."""
        return self.device.read(self.logits[row])

    def scored(self) -> tuple[list[float], list[int]]:
        """Scores and depths of the drafted tree's rows."""
        return self.device.read(self.tree["tree_score"]).tolist(), self.device.read(self.tree["tree_depth"]).tolist()

    def drafted(self, rows: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the drafted tree's first rows."""
        tokens, parents = (self.device.read(self.tree[name])[:rows].tolist() for name in ("tree_tokens", "tree_parent"))
        return tokens, parents

    def drafted_tree(self, rows: int) -> Tree:
        """The drafted tree's first rows, for a trace."""
        names = ("tree_tokens", "tree_parent", "tree_depth", "tree_score")
        return Tree(*(tuple(self.device.read(self.tree[name])[:rows].tolist()) for name in names))

    def close(self, engines: bool = True) -> None:
        """Frees bindings, engines and buffers, in this order: bound calls hold the engines, and both use the device's
        stream. engines: False if others use them, and the device."""
        opened, device = self.engines, self.device
        device.enter()
        try:
            device.synchronize()
        finally:
            self.__dict__.clear()
            if engines:
                close(opened, device)


def _once(bound: dict[tuple[str, int], Call], kind: str, rows: int, bind: Callable[[], Call]) -> Call:
    """Binds at the first use, and again if many others were used since. Not ``functools.lru_cache``, which would keep the engines alive
    until garbage is collected."""
    call = bound.pop((kind, rows), None) or bind()
    bound[kind, rows] = call
    if len(bound) > _MOST_BOUND:
        del bound[next(iter(bound))]
    return call


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
