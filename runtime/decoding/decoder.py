"""The cycle: draft -> verify -> commit, over buffers that are allocated and bound once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from time import perf_counter_ns
from typing import TypeAlias

import numpy as np

from ..backends import Engine, close
from ..bundle.manifest import Form, Manifest
from ..devices import Array, Call, Device
from ..errors import GumihoError
from . import lossy
from .kv_cache import Slab, runs
from .lossy import Take
from .planner import Planner
from .prices import Costs
from .stats import Stats
from .token_selector import Writer


@dataclass(frozen=True)
class Tree:
    """Verified rows, the pending token first. scores: cumulative log-probabilities under the drafter, -inf for rows that it did not
    draft."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float, ...]

    @staticmethod
    def chain(tokens: Sequence[int]) -> "Tree":
        """Rows each behind the one before, looked up."""
        n = len(tokens)
        return Tree(tuple(tokens), (0, *range(n - 1)), tuple(range(n)), (0.0, *[-inf] * (n - 1)))


@dataclass(frozen=True)
class Cycle:
    """What one step emitted. The prefill counts as the first step, with no rows drafted.

    tokens: emitted ids; rows: verified, root included; path: accepted rows, the root first, so that ``tokens[i]`` is what row
    ``path[i + 1]`` drafted and the last token is the target's own; finish_reason: see ``Generation``, None while more follows, or
    where it is cancelled behind this one. times: nanoseconds of draft, target and host (of the prefill: 0, all, 0). tree: where a trace was asked for.
    lookup: whether the rows behind the first were found in the text (``lookup``), each behind the one before, instead of drafted.
    """

    tokens: tuple[int, ...]
    rows: int
    path: tuple[int, ...]
    finish_reason: str | None
    times: tuple[int, int, int] = (0, 0, 0)
    tree: Tree | None = None
    lookup: bool = False


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


def check(manifest: Manifest, prompt: Sequence[int]) -> None:
    """Raises GumihoError for a prompt that is empty, too long or outside the vocabulary."""
    if not prompt:
        raise GumihoError("the prompt has no tokens: give at least one")
    if len(prompt) > manifest.capacity:
        raise GumihoError(
            f"the prompt has {len(prompt)} tokens and the bundle's capacity is {manifest.capacity}: "
            "shorten it, or export with a larger --capacity"
        )
    foreign = next((t for t in prompt if not 0 <= t < manifest.vocabulary), None)
    if foreign is not None:
        raise GumihoError(f"the prompt holds token id {foreign}, outside the vocabulary of {manifest.vocabulary}")


_LATER = 32  # tokens that the drafter reads when it is asked again
_DRAFT, _TARGET = 0, 1


_Bind: TypeAlias = Callable[["Decoder", int], Call]


class Decoder:
    """Drives the engines of one bundle, one generation at a time.

    Where the form is static, every pass is padded to its size: rows behind those that count are computed and ignored.
    """

    def __init__(
        self, manifest: Manifest, form: Form, engines: Mapping[str, Engine], device: Device, costs: Costs | None = None
    ) -> None:
        """costs: of the passes on this device, by which cycles are planned; without them every tree is verified whole."""
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
        # By kind and rows; what is not bound here is when it is first asked for.
        self._bound: dict[tuple[_Bind, int], Call] = {}
        for n in (form.chunk, 1):
            self.causal(n)
        verify = self.verification(rows)
        accepted = [most] if form.static else range(1, most + 1)
        self.planner = Planner(costs, manifest.depth, form.chunk if form.static else 0) if costs else None
        # What the drafter is to read later: the target's rows of these positions, and a chunk of them to read from, each as ``move``
        # wants them.
        self.unread = range(0)
        self.fresh = self.hidden.reshape(1, widest, manifest.hidden)
        self.store = device.zeros((1, manifest.capacity, manifest.hidden), manifest.dtype)
        self.later = device.zeros((1, form.chunk, manifest.hidden), manifest.dtype)
        self.spent = [0, 0]  # nanoseconds in the engines of drafter and target
        self.sound = manifest.capacity  # rows of the target's cache, from the first, that were read as in plain decoding
        self.aligned = manifest.capacity  # rows of the drafter's cache that are those of the text, none left out
        self._bind(Decoder._extend, form.chunk)
        self.passes = [device.fuse(self._draft("draft", n, self.tree, self.hidden), verify) for n in accepted]

    def _bind(self, bind: _Bind, rows: int) -> Call:
        """A call that is bound once. Not ``functools.cache``, which would keep the decoder alive until garbage is collected."""
        if (bind, rows) not in self._bound:
            self._bound[bind, rows] = bind(self, rows)
        return self._bound[bind, rows]

    def _target(self, tokens: Array, depth: Array, mask: Array) -> Callable[[], None]:
        n = len(tokens)
        out = {"choice": self.choice[:n], "logits": self.logits[:n], "hidden": self.hidden[:n]}
        inputs = {"tokens": tokens, "depth": depth, "mask": mask}
        return self.engines["target"].bind({**inputs, **out, **self.target.ports(self.graphs["target"])})

    def causal(self, rows: int) -> Callable[[], None]:
        """The pass over so many rows, at most a chunk, each of which sees those before it."""
        return self._bind(Decoder._causal, self.form.chunk if self.form.static else rows)

    def _causal(self, rows: int) -> Callable[[], None]:
        return self._target(self.tokens[:rows], self.depth[:rows], np.tri(rows, dtype=np.bool_))

    def verification(self, rows: int) -> Callable[[], None]:
        """The pass over the tree's first rows, which are the best tree of that size."""
        return self._bind(Decoder._verification, rows)

    def _verification(self, rows: int) -> Callable[[], None]:
        if self.form.static:
            return self._target(*(self.tree[f"tree_{part}"] for part in ("tokens", "depth", "mask")))
        whole = self.tree["tree_mask"]
        mask = whole if rows == self.manifest.rows else np.zeros((rows, rows), np.bool_)
        call = self._target(self.tree["tree_tokens"][:rows], self.tree["tree_depth"][:rows], mask)

        def cut() -> None:
            mask[...] = whole[:rows, :rows]
            call()

        return call if rows == self.manifest.rows else cut

    def _extend(self, rows: int) -> Callable[[], None]:
        return self._draft("extend", rows, {}, self.later.reshape(self.form.chunk, self.manifest.hidden))

    def _draft(self, graph: str, accepted: int, tree: Mapping[str, Array], hidden: Array) -> Callable[[], None]:
        inputs = {"tokens": self.after[:accepted], "path": self.path[:accepted], "count": self.count, "hidden": hidden}
        return self.engines[graph].bind({**inputs, **tree, **self.drafter.ports(self.graphs[graph])})

    def clear(self) -> None:
        """Has the caches forget everything. A generation that runs over them cannot go on."""
        self.writer, self.text, self.target.length[0], self.drafter.length[0] = None, ((), ()), 0, 0
        self.unread = range(0)
        self.aligned = self.sound = self.manifest.capacity

    def restore(self, text: Sequence[int], target: np.ndarray, drafter: np.ndarray) -> None:
        """Has the caches hold the first rows of a text, as ``Slab.rows`` gave them. Raises GumihoError where they do not fit."""
        self.clear()
        self.target.fill(target)
        self.drafter.fill(drafter)
        self.text = text, ()

    def resume(self, prompt: Sequence[int], speculate: bool) -> int:
        """Has the caches forget all but what they share with a prompt. Returns how many of its tokens need not be read again.

        What the drafter has not read yet, it reads now, where the target's rows of it are kept, or else with the target.
        """
        shared, drafted = self.shared(prompt)
        if speculate and self.unread.start == drafted < shared - 1:
            self.unread = range(drafted, min(self.unread.stop, shared - 1))
            self.catch_up()
            shared, drafted = self.shared(prompt)
        self.unread = range(0)
        self.aligned = self.sound = self.manifest.capacity
        start = min(drafted if speculate else shared, len(prompt) - 1)
        self.target.length[0], self.drafter.length[0] = start, min(drafted, start)
        return start

    def shared(self, text: Sequence[int]) -> tuple[int, int]:
        """Rows of the target's and of the drafter's cache that are those of a text, from its beginning.

        The drafter's row of a token is made of the token behind it, so it shares one less.
        """
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.cached, text, strict=False)))
        return shared, min(self.drafted, max(0, shared - 1))

    @property
    def cached(self) -> list[int]:
        """The tokens whose rows are in the target's cache, as they are in plain decoding."""
        return [*self.text[0], *self.text[1]][: min(self.sound, int(self.target.length[0]))]

    def prefill(self, prompt: Sequence[int], speculate: bool, interrupted: Callable[[], bool] = lambda: False) -> int | None:
        """Fills the target's cache with what it lacks of a prompt, in chunks; the drafter is to read it later.

        Returns which row of the last pass is the prompt's last, or None where it was interrupted between two chunks.
        """
        begun, n = int(self.target.length[0]), 0
        for start in range(begun, len(prompt), self.form.chunk):
            if interrupted():
                return None
            part = prompt[start : start + self.form.chunk]
            n = len(part)
            self.feed(part)
            if speculate:
                self.device.move(self.store, start, self.fresh, 0, n)
                self.unread = range(begun, min(start + n, len(prompt) - 1))  # the last row is the first draft's
        return n - 1

    def feed(self, tokens: Sequence[int]) -> None:
        """One causal pass of the target over at most a chunk of tokens, behind what its cache holds."""
        self._read(tokens)
        self.target.keep(self.graphs["target"], range(len(tokens)))

    def _read(self, tokens: Sequence[int]) -> None:
        """The same pass, of which nothing is kept yet."""
        self.tokens[: len(tokens)] = tokens
        self._run(_TARGET, self.causal(len(tokens)))

    def row(self, row: int) -> np.ndarray:
        """The target's logits [V] behind a row of its last pass, which alone is fetched from the device."""
        return self.device.read(self.logits[row])

    def take(self, row: int) -> int | None:
        """The target's token behind a row joins the text. Returns it, or None where the text ends with it.

        Raises GumihoError where the row's logits are no numbers.
        """
        assert self.writer
        if self.choice[row] < 0:
            raise GumihoError(
                f"the target's logits hold NaN or infinity after {len(self.text[0]) + len(self.text[1])} tokens: weights or engines are damaged, "
                "or numbers overflow; run `python -m runtime.doctor` on the bundle"
            )
        return self.writer.add(int(self.choice[row]) if self.writer.idle else self.writer.choose(self.row(row)))

    def generate(self, writer: Writer, stats: Stats, resume: bool = False) -> Iterator[Cycle]:
        """Continues a writer's prompt, a step at a time. resume: from what the caches share with it.

        Raises GumihoError for a prompt that is empty or does not fit.
        """
        check(self.manifest, writer.prompt)
        prompt, asked, speculate = writer.prompt, writer.settings, writer.settings.speculate
        stats.prompt_tokens, stats.seed, stats.finish_reason = len(prompt), writer.seed, writer.finish_reason
        if writer.finish_reason:
            return
        started = perf_counter_ns()
        writer.begin()
        self.device.enter()
        if not resume:
            self.clear()
        stats.cached_tokens = self.resume(prompt, speculate)
        self.writer, self.text = writer, (prompt, writer.ids)
        if self.planner:
            self.planner.begin(prompt if asked.looks_up else ())
        last = self.prefill(prompt, speculate, writer.interrupted)
        if last is not None:
            self.take(last)
            self._commit([last])
        stats.prefill_ns = perf_counter_ns() - started
        rows, path, times = 0, list[int](), (0, stats.prefill_ns, 0)
        tree: Tree | None = None
        found: Sequence[int] = ()
        while True:
            writer.interrupted()
            tokens = tuple(writer.ids[stats.tokens :])
            stats.tokens += len(tokens)
            stats.finish_reason = writer.finish_reason
            yield Cycle(tokens, rows, tuple(path), writer.finish_reason, times, tree, bool(found))
            started, self.spent = perf_counter_ns(), [0, 0]
            if self.writer is writer and not (rows or writer.ended()):
                self.device.enter()
                self.catch_up(writer.interrupted)  # on the prompt; whoever waits for the first token need not wait for this
            if writer.ended():
                stats.finish_reason = writer.finish_reason
                return
            if self.writer is not writer:
                raise GumihoError("something else was read into the caches of this generation: start it again")
            self.device.enter()
            planner = self.planner if speculate and asked.rows is None else None
            due = planner is not None and planner.due
            found = planner.lookup(tokens, 0 if due else self._room - 1) if planner and asked.looks_up else ()
            if drafting := speculate and not (found or due) and (planner is None or planner.drafts):
                rows, path = self.cycle(planner, times[2] if stats.cycles > 1 else 0)  # the first one's has what a prompt takes
            else:
                rows, path = 1 + len(found), self.step(planner, found)
            if asked.trace:
                tree = self._tree(rows) if drafting else Tree.chain((tokens[-1], *found)) if found else None
            draft, target = self.spent
            times = draft, target, perf_counter_ns() - started - draft - target
            stats.count(len(path), times, rows, bool(found))

    def _run(self, part: int, call: Callable[[], None]) -> None:
        """An engine's pass, by the clock."""
        started = perf_counter_ns()
        call()
        self.spent[part] += perf_counter_ns() - started

    def cycle(self, planner: Planner | None, host: int) -> tuple[int, list[int]]:
        """Drafts a tree, verifies its best rows and commits the path the target takes. Returns their number and the path.

        host: nanoseconds that the last cycle took outside the engines, for the planner; 0 where there was none.
        """
        self.catch_up()
        caught_up, accepted = self.spent[_DRAFT], int(self.count[0])
        draft, verify = self.passes[min(accepted, len(self.passes)) - 1]
        self._run(_DRAFT, draft)
        rows = self._rows(None if self.form.static else planner)
        self._run(_TARGET, verify if rows == self.manifest.rows or self.form.static else self.verification(rows))
        tokens, parents = (self.device.read(self.tree[name])[:rows].tolist() for name in ("tree_tokens", "tree_parent"))
        path = self._accept(tokens, parents)
        self.drafter.keep(self.graphs["draft"], range(accepted))
        self.target.keep(self.graphs["target"], path)
        self._commit(path)
        if planner:
            scores, depths = self._scored()
            if self.form.static:
                planner.rows(scores, depths)  # all are verified; it is told what they promised
            draft_ns, target_ns = self.spent
            planner.drafted(scores[:rows], depths[:rows], len(path) - 1, (draft_ns - caught_up, target_ns, host), caught_up)
        return rows, path

    def _scored(self) -> tuple[list[float], list[int]]:
        """Scores and depths of the tree's rows."""
        return self.device.read(self.tree["tree_score"]).tolist(), self.device.read(self.tree["tree_depth"]).tolist()

    def _rows(self, planner: Planner | None) -> int:
        """How many rows of the tree to verify: those that are asked for, or that pay; no more than the cache has room for."""
        assert self.writer
        asked = self.writer.settings.rows or self.manifest.rows
        if planner:
            asked = planner.rows(*self._scored())
        return min(asked, self._room)

    @property
    def _room(self) -> int:
        """Rows that a pass may verify."""
        return min(self.manifest.rows, self.manifest.capacity - int(self.target.length[0]))

    def _put_off(self, kept: int = 0) -> None:
        """The drafter reads what was accepted when it drafts again, and no more of it than a few tokens: to read all that plain
        decoding has added could take longer than drafting gains. Its text then lacks a piece, which costs acceptance alone.

        kept: tokens, the last, that stay pending.
        """
        end, count = int(self.target.length[0]) - kept, int(self.count[0]) - kept
        for at, row, n in runs(self.path[:count].tolist(), True):
            self.device.move(self.store, end - count + at, self.fresh, row, n)
        begun = self.unread.start if self.unread else end - count
        if end - begun > _LATER:
            self.aligned, begun = self.drafted, end - _LATER
        self.unread = range(begun, end)
        self.count[0] = kept
        self.path[:kept], self.after[:kept] = self.path[count : count + kept], self.after[count : count + kept]

    def catch_up(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """The drafter reads what was put off, until interrupted between two chunks. What was accepted last stays pending."""
        if not self.unread:
            return
        text, pending = [*self.text[0], *self.text[1]], (self.path.copy(), self.after.copy(), int(self.count[0]))
        while self.unread:
            at, n = self.unread.start, min(self.form.chunk, len(self.unread))
            self.count[0] = n
            self.device.move(self.later, 0, self.store, at, n)
            self.path[:n], self.after[:n] = self.depth[:n], text[at + 1 : at + 1 + n]
            self._run(_DRAFT, self._bind(Decoder._extend, self.form.chunk if self.form.static else n))
            # It returns nothing to the host, which is about to change what it reads.
            self._run(_DRAFT, self.device.synchronize)
            self.drafter.keep(self.graphs["extend"], range(n))
            self.unread = range(at + n, self.unread.stop)
            if self.unread and interrupted():
                break
        self.path[:], self.after[:], self.count[0] = pending

    @property
    def drafted(self) -> int:
        """Rows of the drafter's cache that belong to the text from its beginning."""
        return min(self.aligned, int(self.drafter.length[0]))

    def step(self, planner: Planner | None, found: Sequence[int] = ()) -> list[int]:
        """Verifies tokens that nobody drafted; without any, plain decoding. Returns the path. planner: that may want to draft later."""
        tokens = [int(self.after[int(self.count[0]) - 1]), *found]
        if planner:
            self._put_off()
        self._read(tokens)
        path = walk(tokens, range(-1, len(found)), self.take)
        self.target.keep(self.graphs["target"], path)
        self._commit(path)
        if planner:
            if len(path) > self.manifest.depth + 1:  # more than a draft reads
                self._put_off(kept=1)
            planner.decoded(self.spent[_TARGET], len(tokens))
        return path

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
        if settings.tree == "exact":
            return walk(tokens, parents, self.take)
        path = lossy.full_tree(tokens, parents, self.take)
        borrowed = (i for i in range(1, len(path)) if parents[path[i]] != path[i - 1])
        self.sound = min(self.sound, int(self.target.length[0]) + next(borrowed, len(path)))
        return path

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
            close(engines, device)
