"""The cycle: draft -> verify -> commit, over buffers that are allocated and bound once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

from .backends import Engine
from .bundle import Form, Manifest
from .cache import Slab
from .devices import Array, Device
from .errors import GumihoError
from .stats import Stats


@dataclass(frozen=True)
class Cycle:
    """What one step emitted. The prefill counts as the first step, with no rows drafted.

    tokens: emitted ids; rows: verified, root included; path: accepted rows; finish_reason: ``stop`` (end of text), ``length``
    (max_new_tokens), ``context`` (the cache is full), or None while more follows.
    """

    tokens: tuple[int, ...]
    rows: int
    path: tuple[int, ...]
    finish_reason: str | None


def walk(tokens: list[int], parents: list[int], choices: list[int]) -> list[int]:
    """The path of the target's own choices down the tree. Parents come before children, so one pass finds it."""
    path = [0]
    for row in range(1, len(tokens)):
        if parents[row] == path[-1] and tokens[row] == choices[path[-1]]:
            path.append(row)
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

    def prefill(self, prompt: Sequence[int], speculate: bool) -> int:
        """Fills the caches in chunks, leaves the last row for the first draft, and returns the target's first choice."""
        self.target.length[0] = self.drafter.length[0] = 0
        chunk = self.form.chunk
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            n = len(part)
            self.feed(part)
            ahead = prompt[start + 1 : start + n + 1]
            if speculate and ahead:
                m = self.count[0] = len(ahead)
                self.path[:m], self.after[:m] = self.depth[:m], ahead
                (self.extend if self.form.static or m == chunk else self._draft("extend", m, {}))()
                self.drafter.keep(self.graphs["extend"], range(m))
        self.path[0], self.after[0], self.count[0] = n - 1, self.choice[n - 1], 1
        return int(self.choice[n - 1])

    def feed(self, tokens: Sequence[int]) -> None:
        """One causal pass of the target over at most a chunk of tokens, behind what its cache holds."""
        n = len(tokens)
        self.tokens[:n] = tokens
        (self.chunk if self.form.static or n == self.form.chunk else self._causal(n))()
        self.target.keep(self.graphs["target"], range(n))

    def generate(self, prompt: Sequence[int], max_new_tokens: int, speculate: bool, stats: Stats) -> Iterator[Cycle]:
        """Greedy decoding, a step at a time. Raises GumihoError for a prompt that is empty or does not fit.

        The last cache position may be filled, so prompt and new tokens come to at most capacity + 1.
        """
        self.check(prompt)
        room = min(max_new_tokens, self.manifest.capacity + 1 - len(prompt))
        stats.prompt_tokens = len(prompt)
        if room < 1:
            stats.finish_reason = "length"
            return
        started = perf_counter_ns()
        self.device.enter()
        tokens, rows = [self.prefill(prompt, speculate)], 0
        path: list[int] = []
        stats.prefill_ns = perf_counter_ns() - started
        while True:
            end = next((i + 1 for i, token in enumerate(tokens) if token in self.manifest.eos_token_ids), None)
            tokens = tokens[: min(end or len(tokens), room - stats.tokens)]
            stats.tokens += len(tokens)
            if end == len(tokens):
                stats.finish_reason = "stop"
            elif stats.tokens == room:
                stats.finish_reason = "length" if room == max_new_tokens else "context"
            if rows:
                stats.count(len(tokens), min(len(path) - 1, len(tokens)))
            yield Cycle(tuple(tokens), rows, tuple(path), stats.finish_reason)
            if stats.finish_reason:
                return
            self.device.enter()
            rows = min(self.manifest.rows if speculate else 1, self.manifest.capacity - int(self.target.length[0]))
            path = self.cycle(rows, stats) if speculate else self.step(stats)
            tokens = self.after[: len(path)].tolist()

    def cycle(self, rows: int, stats: Stats) -> list[int]:
        """Drafts a tree, verifies its first ``rows`` rows and commits the path the target takes. Returns the path."""
        t0 = perf_counter_ns()
        accepted = int(self.count[0])
        draft, verify = self.passes[min(accepted, len(self.passes)) - 1]
        draft()
        t1 = perf_counter_ns()
        (verify if rows == self.manifest.rows or self.form.static else self._verification(rows))()
        t2 = perf_counter_ns()
        tokens, parents = (self.device.read(self.tree[name])[:rows].tolist() for name in ("tree_tokens", "tree_parent"))
        path = walk(tokens, parents, self.choice[:rows].tolist())
        n = len(path)
        self.drafter.keep(self.graphs["draft"], range(accepted))
        self.target.keep(self.graphs["target"], path)
        self.path[:n] = path
        self.after[:n] = self.choice[path]
        self.count[0] = n
        stats.spend(t1 - t0, t2 - t1, perf_counter_ns() - t2)
        return path

    def step(self, stats: Stats) -> list[int]:
        """Plain decoding: one row on the same engine."""
        t0 = perf_counter_ns()
        self.tokens[0] = self.after[0]
        self.plain()
        t1 = perf_counter_ns()
        self.after[0] = self.choice[0]
        self.target.keep(self.graphs["target"], [0])
        stats.spend(0, t1 - t0, perf_counter_ns() - t1)
        return [0]

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
