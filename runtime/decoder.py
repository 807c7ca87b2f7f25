"""The cycle: draft -> verify -> commit, over buffers that are allocated and bound once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from time import perf_counter_ns

import numpy as np

from . import lossy
from .backends import Engine
from .bundle import Form, Manifest
from .cache import Slab
from .devices import Array, Device
from .errors import GumihoError
from .lossy import Take
from .stats import Stats
from .writer import Writer


@dataclass(frozen=True)
class Tree:
    """The verified rows of a draft tree, the pending token first. scores: cumulative log-probabilities under the drafter."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Cycle:
    """What one step emitted. The prefill counts as the first step, with no rows drafted.

    tokens: emitted ids; rows: verified, root included; path: accepted rows, the root first, so that ``tokens[i]`` is what row
    ``path[i + 1]`` drafted and the last token is the target's own; finish_reason: see ``Generation``, None while more follows.
    times: nanoseconds of draft, target and host (of the prefill: 0, all, 0). tree: where a trace was asked for.
    """

    tokens: tuple[int, ...]
    rows: int
    path: tuple[int, ...]
    finish_reason: str | None
    times: tuple[int, int, int] = (0, 0, 0)
    tree: Tree | None = None


def walk(tokens: Sequence[int], parents: Sequence[int], take: Take) -> list[int]:
    """The path of the target's own choices down the tree. Parents come before children, so one pass finds it.

    take: the target's token behind a row, None where the text ends with it; it is asked for the rows of the path alone.
    """
    path, token = [0], take(0)
    for row in range(1, len(tokens)):
        if parents[row] == path[-1] and tokens[row] == token:
            path.append(row)
            token = take(row)
    return path


class Decoder:
    """Drives the engines of one bundle, one generation at a time.

    Where the form is static, every pass is padded to its size: rows behind those that count are computed and ignored.
    """

    def __init__(self, manifest: Manifest, form: Form, engines: Mapping[str, Engine], device: Device) -> None:
        self.manifest, self.form, self.graphs = manifest, form, form.graphs
        self.engines, self.device = engines, device
        device.enter()
        self.target = Slab(device, self.graphs["target"])
        self.drafter = Slab(device, self.graphs["draft"], self.graphs["extend"])
        rows, most = manifest.rows, manifest.depth + 1
        widest = max(rows, form.chunk)
        self.choice = np.zeros(widest, np.int64)
        self.logits = device.zeros((widest, manifest.vocabulary), manifest.dtype)
        self.hidden = device.zeros((widest, manifest.hidden), manifest.dtype)
        self.tokens, self.depth = np.zeros(widest, np.int64), np.arange(widest)
        self.tree = self.graphs["draft"].tree_buffers(device)
        # Accepted but not yet read by the drafter: rows of ``hidden``, the token after each, and how many there are.
        self.path, self.after = np.zeros(widest, np.int64), np.zeros(widest, np.int64)
        self.count = np.zeros(1, np.int64)
        self.writer: Writer | None = None
        # What the caches hold begins with a prompt and goes on with what was emitted behind it, which still grows.
        self.text: tuple[Sequence[int], Sequence[int]] = (), ()
        self.chunk, self.plain = self._causal(form.chunk), self._causal(1)
        self.extend = self._draft("extend", form.chunk, {})
        verify = self._verification(rows)
        accepted = [most] if form.static else range(1, most + 1)
        self.passes = [device.fuse(self._draft("draft", n, self.tree), verify) for n in accepted]

    def _target(self, tokens: Array, depth: Array, mask: Array) -> Callable[[], None]:
        n = len(tokens)
        out = {"choice": self.choice[:n], "logits": self.logits[:n], "hidden": self.hidden[:n]}
        inputs = {"tokens": tokens, "depth": depth, "mask": mask}
        return self.engines["target"].bind({**inputs, **out, **self.target.ports(self.graphs["target"])})

    def _causal(self, rows: int) -> Callable[[], None]:
        rows = self.form.chunk if self.form.static else rows
        return self._target(self.tokens[:rows], self.depth[:rows], np.tri(rows, dtype=np.bool_))

    def _verification(self, rows: int) -> Callable[[], None]:
        """The pass over the tree's first rows, which are the best tree of that size."""
        if self.form.static:
            return self._target(*(self.tree[f"tree_{part}"] for part in ("tokens", "depth", "mask")))
        mask = np.ascontiguousarray(self.tree["tree_mask"][:rows, :rows])
        return self._target(self.tree["tree_tokens"][:rows], self.tree["tree_depth"][:rows], mask)

    def _draft(self, graph: str, accepted: int, tree: Mapping[str, Array]) -> Callable[[], None]:
        inputs = {"tokens": self.after[:accepted], "path": self.path[:accepted], "count": self.count, "hidden": self.hidden}
        return self.engines[graph].bind({**inputs, **tree, **self.drafter.ports(self.graphs[graph])})

    def clear(self) -> None:
        """Has the caches forget everything. A generation that runs over them cannot go on."""
        self.writer, self.text, self.target.length[0], self.drafter.length[0] = None, ((), ()), 0, 0

    def restore(self, text: Sequence[int], target: np.ndarray, drafter: np.ndarray) -> None:
        """Has the caches hold the first rows of a text, as ``Slab.rows`` gave them. Raises GumihoError where they do not fit."""
        self.clear()
        self.target.fill(target)
        self.drafter.fill(drafter)
        self.text = text, ()

    def resume(self, prompt: Sequence[int], speculate: bool) -> int:
        """Has the caches forget all but what they share with a prompt. Returns how many of its tokens need not be read again.

        The drafter's row of a token is made of the token behind it, so it shares one less; what it has not read yet, it reads
        with the target.
        """
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.cached, prompt, strict=False)))
        drafted = min(int(self.drafter.length[0]), max(0, shared - 1))
        start = min(drafted if speculate else shared, len(prompt) - 1)
        self.target.length[0], self.drafter.length[0] = start, min(drafted, start)
        return start

    @property
    def cached(self) -> list[int]:
        """The tokens whose rows are in the target's cache."""
        return [*self.text[0], *self.text[1]][: int(self.target.length[0])]

    def prefill(self, prompt: Sequence[int], speculate: bool, interrupted: Callable[[], bool] = lambda: False) -> int | None:
        """Fills the caches with what they lack of a prompt, in chunks, and readies its last row for the first draft.

        Returns which row of the last pass that is, or None where it was interrupted between two chunks.
        """
        chunk, n = self.form.chunk, 0
        for start in range(int(self.target.length[0]), len(prompt), chunk):
            if interrupted():
                return None
            part = prompt[start : start + chunk]
            n = len(part)
            self.feed(part)
            ahead = prompt[start + 1 : start + n + 1]
            if speculate and ahead:
                m = self.count[0] = len(ahead)
                self.path[:m], self.after[:m] = self.depth[:m], ahead
                (self.extend if self.form.static or m == chunk else self._draft("extend", m, {}))()
                self.drafter.keep(self.graphs["extend"], range(m))
        return n - 1

    def feed(self, tokens: Sequence[int]) -> None:
        """One causal pass of the target over at most a chunk of tokens, behind what its cache holds."""
        n = len(tokens)
        self.tokens[:n] = tokens
        (self.chunk if self.form.static or n == self.form.chunk else self._causal(n))()
        self.target.keep(self.graphs["target"], range(n))

    def read(self, token: int) -> None:
        """A pass of the target over one token, as in plain decoding; what follows it is row 0."""
        self.tokens[0] = token
        self.plain()
        self.target.keep(self.graphs["target"], [0])

    def row(self, row: int) -> np.ndarray:
        """The target's logits [V] behind a row of its last pass, which alone is fetched from the device."""
        return self.device.read(self.logits[row])

    def take(self, row: int) -> int | None:
        """The target's token behind a row joins the text. Returns it, or None where the text ends with it."""
        assert self.writer
        return self.writer.add(int(self.choice[row]) if self.writer.idle else self.writer.choose(self.row(row)))

    def generate(self, writer: Writer, stats: Stats, resume: bool = False) -> Iterator[Cycle]:
        """Continues a writer's prompt, a step at a time. resume: from what the caches share with it.

        Raises GumihoError for a prompt that is empty or does not fit.
        """
        self.check(writer.prompt)
        prompt, speculate = writer.prompt, writer.settings.speculate
        stats.prompt_tokens, stats.seed, stats.finish_reason = len(prompt), writer.seed, writer.finish_reason
        if writer.finish_reason:
            return
        started = perf_counter_ns()
        self.device.enter()
        if not resume:
            self.clear()
        stats.cached_tokens = self.resume(prompt, speculate)
        self.writer, self.text = writer, (prompt, writer.ids)
        last = self.prefill(prompt, speculate, writer.interrupted)
        if last is not None:
            self.take(last)
            self._commit([last])
        stats.prefill_ns = perf_counter_ns() - started
        rows, path, times, tree = 0, list[int](), (0, stats.prefill_ns, 0), None
        while True:
            tokens = tuple(writer.ids[stats.tokens :])
            stats.tokens += len(tokens)
            stats.finish_reason = writer.finish_reason
            yield Cycle(tokens, rows, tuple(path), writer.finish_reason, times, tree)
            if writer.interrupted():
                stats.finish_reason = writer.finish_reason
                return
            if self.writer is not writer:
                raise GumihoError("something else was read into the caches of this generation: start it again")
            self.device.enter()
            rows = min(self.manifest.rows if speculate else 1, self.manifest.capacity - int(self.target.length[0]))
            path, times = self.cycle(rows) if speculate else self.step()
            stats.count(len(path), times)
            tree = self._tree(rows) if speculate and writer.settings.trace else None

    def cycle(self, rows: int) -> tuple[list[int], tuple[int, int, int]]:
        """Drafts a tree, verifies its first ``rows`` rows and commits the path the target takes. Returns path and times."""
        t0 = perf_counter_ns()
        accepted = int(self.count[0])
        draft, verify = self.passes[min(accepted, len(self.passes)) - 1]
        draft()
        t1 = perf_counter_ns()
        (verify if rows == self.manifest.rows or self.form.static else self._verification(rows))()
        t2 = perf_counter_ns()
        tokens, parents = (self.device.read(self.tree[name])[:rows].tolist() for name in ("tree_tokens", "tree_parent"))
        path = self._accept(tokens, parents)
        self.drafter.keep(self.graphs["draft"], range(accepted))
        self.target.keep(self.graphs["target"], path)
        self._commit(path)
        return path, (t1 - t0, t2 - t1, perf_counter_ns() - t2)

    def step(self) -> tuple[list[int], tuple[int, int, int]]:
        """Plain decoding: one row on the same engine."""
        t0 = perf_counter_ns()
        self.read(int(self.after[0]))
        t1 = perf_counter_ns()
        self.take(0)
        self._commit([0])
        return [0], (0, t1 - t0, perf_counter_ns() - t1)

    def _commit(self, path: Sequence[int]) -> None:
        """Leaves the path's rows, and the token behind each, for the next draft."""
        assert self.writer
        n = self.count[0] = len(path)
        self.path[:n], self.after[:n] = path, self.writer.ids[-n:]

    def _accept(self, tokens: list[int], parents: list[int]) -> list[int]:
        assert self.writer
        settings = self.writer.settings
        if settings.accept == "typical":
            return lossy.typical(tokens, parents, self.take, self.writer.add, self.row, settings.temperature)
        return (lossy.full_tree if settings.tree == "fta" else walk)(tokens, parents, self.take)

    def _tree(self, rows: int) -> Tree:
        names = ("tree_tokens", "tree_parent", "tree_depth", "tree_score")
        return Tree(*(tuple(self.device.read(self.tree[name])[:rows].tolist()) for name in names))

    def close(self) -> None:
        """Lets go of bindings, engines and buffers, in this order: bound calls hold the engine, and both use the device's stream."""
        engines, device = self.engines, self.device
        device.enter()
        try:
            device.synchronize()
        finally:
            self.__dict__.clear()
            for engine in engines.values():
                engine.close()
            device.close()

    def check(self, prompt: Sequence[int]) -> None:
        """Raises GumihoError for a prompt that is empty, too long or outside the vocabulary."""
        if not prompt:
            raise GumihoError("the prompt has no tokens: give at least one")
        if len(prompt) > self.manifest.capacity:
            raise GumihoError(
                f"the prompt has {len(prompt)} tokens and the bundle's capacity is {self.manifest.capacity}: "
                "shorten it, or export with a larger --capacity"
            )
        foreign = next((t for t in prompt if not 0 <= t < self.manifest.vocabulary), None)
        if foreign is not None:
            raise GumihoError(f"the prompt holds token id {foreign}, outside the vocabulary of {self.manifest.vocabulary}")
