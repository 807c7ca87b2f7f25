"""The decode loop: propose, verify, accept, commit."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from time import perf_counter_ns

import numpy as np

from ..backends import Engine, close
from ..bundle.graphs import Form, of_drafter
from ..bundle.manifest import Manifest
from ..bundle.reader import Bundle
from ..engines.devices import Device
from ..errors import DamageError, MisuseError
from .acceptance import accept
from .checks import check
from .cycle import Accepted, Cycle, Tree
from .draft_history import DraftHistory
from .draft_passes import DraftPasses
from .passes import CycleClock
from .planner import Planner
from .prices import Costs
from .proposals import Proposal, Proposer
from .stats import Stats
from .target_passes import TargetPasses
from .token_selector import TokenSelector

# While other streams decode, a prompt's passes take so many nanoseconds at most, since two of them may come one after
# the other.
_PATIENCE_NS = 0.125e9
_FEWEST_READ = 8  # rows of such a pass in any case: fewer hardly take less time


class Decoder:
    """Drives the engines of one bundle, one generation at a time.

    contended: whether other streams want passes now; set by whoever drives the decoder. planners: of likeliest and of
    drawn texts, which accept differently; None without costs. text: the token ids whose rows the caches hold: a prompt,
    and what was emitted after it, which still grows. valid_target_length: rows of the target's cache, from the first,
    that are as in plain decoding.
    """

    def __init__(
        self,
        manifest: Manifest,
        form: Form,
        engines: Mapping[str, Engine],
        device: Device,
        costs: Costs | None = None,
        sibling: "Decoder | None" = None,
        draft_tokens: np.ndarray | None = None,
    ) -> None:
        """costs: measured on this device, for the planner; without them every tree is verified whole. sibling: a
        decoder of the same target with another drafter, whose passes of the target this one uses: one of them decodes
        at a time, see ``take``. draft_tokens: see ``Bundle.draft_tokens``; None for trees without noise."""
        self.manifest, self.form, self.engines, self.device = manifest, form, engines, device
        self.target: TargetPasses = sibling.target if sibling else TargetPasses(manifest, form, engines, device)
        self.draft = DraftPasses(manifest, form, engines, device, self.target, draft_tokens)
        self.history = DraftHistory(manifest, device, self.target, self.draft)
        self._clock = CycleClock(self.draft, self.target)
        padded = 0 if self.target.splits else form.chunk
        shape = manifest.depth, padded, manifest.has_drafter, form.static
        self.planners = [Planner(costs, *shape) if costs else None for _ in range(2)]
        self.contended = False
        self._draws = False  # whether the running text is drawn
        self._rows_in_time = 0  # of a pass over a prompt that takes _PATIENCE_NS, as far as the last one shows
        self.selector: TokenSelector | None = None
        self.text: tuple[Sequence[int], Sequence[int]] = (), ()
        self.valid_target_length = manifest.capacity

    @classmethod
    def with_drafter(
        cls,
        drafter: str,
        bundle: Bundle,
        form: Form,
        engines: Mapping[str, Engine],
        device: Device,
        costs: Costs | None = None,
        sibling: "Decoder | None" = None,
    ) -> "Decoder":
        """A decoder with one of a bundle's drafters; "" for the first. bundle, form, engines: with all of them. Raises
        DamageError."""
        own, suffix = bundle.of(drafter), bundle.manifest.suffix(drafter)
        own_engines = of_drafter(engines, suffix)
        tokens = own.draft_tokens() if own.manifest.noisy else None
        return cls(own.manifest, form.of(suffix), own_engines, device, costs, sibling, tokens)

    @property
    def planner(self) -> Planner | None:
        """The running text's."""
        return self.planners[self._draws]

    # --- the loop -----------------------------------------------------------------------------------------------------

    def generate(self, selector: TokenSelector, stats: Stats, resume: bool = False) -> Iterator[Cycle | None]:
        """Continues a selector's text, one cycle at a time, the prefill first; None between two passes over a prompt,
        where other streams can have the engines. resume: reuse the cached rows of the common prefix.

        Raises InputError for a prompt that is empty or does not fit.
        """
        check(self.manifest, selector.prompt)
        stats.prompt_tokens = len(selector.prompt)
        stats.seed = selector.seed
        stats.finish_reason = selector.finish_reason
        if selector.finish_reason:
            return
        yield from self._read_prompt(selector, stats, resume)
        cycle, host_ns = _cycle(selector, len(selector.ids) - stats.tokens, (0, stats.prefill_ns, 0)), 0
        proposer = Proposer(self.target, self.draft, self.history, self._ids, self.planner, selector)
        while True:
            stats.tokens, stats.finish_reason = len(selector.ids), cycle.finish_reason
            yield cycle
            self._clock.start()
            # After the first token, so that it does not delay it.
            if self.selector is selector and not selector.ended() and proposer.drafting and self.history.behind:
                yield from self._catch_up_with_prompt(selector)
            if selector.ended():
                stats.finish_reason = selector.finish_reason
                return
            if self.selector is not selector:
                raise MisuseError("the caches of this generation were used for something else: start it again")
            self.device.enter()
            cycle = self.step(proposer.propose(cycle.tokens, self.room, host_ns))
            host_ns = cycle.times[2] if stats.cycles else 0  # the first cycle's includes reading the prompt
            stats.count(len(cycle.path), cycle.times, cycle.rows, cycle.lookup)

    def step(self, proposal: Proposal) -> Cycle:
        """Verifies a proposal, accepts a path of its rows, whose tokens join the text, and commits it to the caches."""
        selector = self.selector
        assert selector
        target_ns = proposal.verify()
        path = self._accept(proposal)
        self._commit(proposal, path, target_ns)
        tree = proposal.trace() if selector.settings.trace else None
        return _cycle(selector, len(path), self._clock.times(), proposal.count, path, tree, proposal.lookup)

    def _accept(self, proposal: Proposal) -> list[int]:
        """The accepted rows of a verified proposal; the tokens after them join the text."""
        assert self.selector
        tokens, parents = proposal.tree()
        path = accept(tokens, parents, self.next_token, self.selector, self.target.row)
        borrowed = (i for i in range(1, len(path)) if parents[path[i]] != path[i - 1])
        if (first := next(borrowed, None)) is not None:  # accepted under other ancestors than its own (lossy)
            self.valid_target_length = min(self.valid_target_length, self.target.length + first)
        return path

    def _commit(self, proposal: Proposal, path: Sequence[int], target_ns: int) -> None:
        """Keeps the accepted rows in the caches and passes them to the next draft."""
        assert self.selector
        self.target.commit(proposal.count, path)
        if self.target.choice[: proposal.count].min() < 0:  # NaN in a row that was not accepted
            self.target.wipe()
        self.history.accept(Accepted(tuple(path), tuple(self.selector.ids[-len(path) :])))
        proposal.committed(path, target_ns)

    def next_token(self, row: int) -> int | None:
        """The target's token after a row joins the text. Returns it, or None if the text ends with it.

        Raises DamageError if the row's logits hold NaN or infinity.
        """
        assert self.selector
        choice = int(self.target.choice[row])
        if choice < 0:
            read = len(self._ids())
            self.clear()
            self.target.wipe()
            raise DamageError(
                f"the target's logits hold NaN or infinity after {read} tokens: the weights or engines are damaged, or "
                "values overflow; run `gumiho doctor` on the bundle"
            )
        return self.selector.add(self.selector.choose(choice, lambda: self.target.row(row)))

    @property
    def room(self) -> int:
        """Rows that a pass may verify."""
        return min(self.manifest.rows, self.manifest.capacity - self.target.length)

    # --- the prompt ---------------------------------------------------------------------------------------------------

    def _read_prompt(self, selector: TokenSelector, stats: Stats, resume: bool) -> Iterator[None]:
        """Reads the part of the prompt and of what was emitted that is not cached, and emits the next token. Pauses
        between passes."""
        text, settings, started = [*selector.prompt, *selector.ids], selector.settings, perf_counter_ns()
        selector.begin()
        self.device.enter()
        if not resume:
            self.clear()
        cached = self.resume(text, settings.speculate)
        stats.cached_tokens = stats.cached_tokens if selector.ids else cached
        self.selector, self.text, self._draws = selector, (selector.prompt, selector.ids), settings.temperature > 0
        if self.planner:
            self.planner.begin(text if settings.looks_up else ())
        last, left = 0, True
        while left and not selector.interrupted():
            last, left = self._read_chunk(text, settings.speculate)
            if left:
                yield
                self.device.enter()
        if not left:
            self.next_token(last)
            self.history.accept(Accepted((last,), tuple(selector.ids[-1:])))
        stats.prefill_ns += perf_counter_ns() - started

    def _catch_up_with_prompt(self, selector: TokenSelector) -> Iterator[None]:
        """The drafter reads what it is to read of the prompt. Pauses between passes."""
        self.device.enter()
        took = 0
        while self.history.pending:
            took += self.history.catch_up(self._ids, once=True)
            if not self.history.pending or selector.interrupted():
                break
            yield
            self.device.enter()
        if self.planner and took:
            self.planner.prompt_read(took)

    def prefill(self, prompt: Sequence[int], speculate: bool) -> int:
        """Reads the rest of a prompt into the target's cache, in chunks; the drafter reads it later.

        Returns which row of the last pass's outputs is the prompt's last.
        """
        row, left = -1, self.target.length < len(prompt)
        while left:
            row, left = self._read_chunk(prompt, speculate)
        return row

    def _read_chunk(self, prompt: Sequence[int], speculate: bool) -> tuple[int, bool]:
        """One pass over a prompt. Returns which row of its outputs is the last, and whether more of the prompt is
        left."""
        start = self.target.length
        part, started = prompt[start : start + self._chunk()], perf_counter_ns() - self.target.waited_ns
        n = len(part)
        first = self.feed(part, last=True)
        # The first draft reads the last row itself. A text without drafts keeps only the first rows, for later texts
        # with drafts.
        end = min(start + n, len(prompt) - 1, self.history.FIRST if not speculate else len(prompt))
        if self.draft.extends and start < end:
            self.history.record(start, end - start, range(start, end), first)
        took = perf_counter_ns() - self.target.waited_ns - started
        self._rows_in_time = int(n * _PATIENCE_NS / took)
        return first + n - 1, start + n < len(prompt)

    def _chunk(self) -> int:
        """How many tokens of a prompt the next pass reads: fewer if other streams would wait for it too long."""
        return min(self.form.chunk, max(_FEWEST_READ, self._rows_in_time)) if self.contended else self.form.chunk

    def feed(self, tokens: Sequence[int], last: bool = False) -> int:
        """One causal pass of the target over at most a chunk of tokens; commits all of them. last: see
        ``TargetPasses.causal``. Returns which row of the outputs is the first token's."""
        self.target.read(tokens, last)
        self.target.commit(len(tokens), range(len(tokens)))
        return self.target.first(len(tokens), last)

    def catch_up(self) -> None:
        """The drafter reads what it has missed; see ``DraftHistory.catch_up``."""
        self.history.catch_up(self._ids)

    # --- what the caches hold -----------------------------------------------------------------------------------------

    def _ids(self) -> list[int]:
        return [*self.text[0], *self.text[1]]

    @property
    def cached(self) -> list[int]:
        """The tokens whose rows in the target's cache are those of plain decoding."""
        return self._ids()[: min(self.valid_target_length, self.target.length)]

    def cached_prefix(self, text: Sequence[int]) -> int:
        """Leading tokens of a text whose rows the target's cache holds."""
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.cached, text, strict=False)))

    def resume(self, prompt: Sequence[int], speculate: bool) -> int:
        """Truncates the caches to the prefix that they have in common with a prompt. Returns how many of its tokens
        need not be read again.

        The target reads tokens again that the drafter lacks, but no more than that reads of a prompt.
        """
        cached, history = self.cached_prefix(prompt), self.history
        history.keep(cached - 1)  # the drafter's row of a token depends on the next token
        start = min(cached, len(prompt) - 1)
        if speculate and self.draft.extends:
            known = [-1, *history.positions[-1:].tolist(), *history.pending[-1:]]
            start = min(start, max(known[-1] + 1, len(prompt) - 1 - history.LAST))
        self.valid_target_length = self.manifest.capacity
        self.target.keep(start)
        history.keep(start)
        return start

    def saved(self, text: Sequence[int]) -> tuple[Sequence[int], np.ndarray, np.ndarray, np.ndarray]:
        """The rows of a text's beginning that the caches hold, for ``restore``, which takes them in this order."""
        cached, positions = self.cached_prefix(text), self.history.positions
        # the drafter's row of a token depends on the next token
        positions = positions[: positions.searchsorted(cached - 1)]
        rows = self.target.cache.rows(cached), self.draft.cache.rows(len(positions))
        return text[:cached], *rows, positions.copy()

    def restore(self, text: Sequence[int], target: np.ndarray, drafter: np.ndarray, positions: np.ndarray) -> None:
        """Fills the caches with rows of a text, as ``KVCache.rows`` returned them: the target's leading ones, and the
        drafter's of the tokens at so many positions. Raises GumihoError if they do not fit."""
        self.clear()
        self.target.restore(target)
        self.history.restore(drafter, positions)
        self.text = text, ()

    def take(self, other: "Decoder") -> None:
        """Goes on with the text of a sibling, which the target has read and this one's drafter has not."""
        self.text, self.valid_target_length = other.text, other.valid_target_length
        self.selector = other.selector = None
        self.history.keep(0)

    def clear(self) -> None:
        """Empties the caches; a running generation cannot continue."""
        self.selector, self.text = None, ((), ())
        self.target.keep(0)
        self.valid_target_length = self.manifest.capacity
        self.history.keep(0)

    def warm_up(self) -> None:
        """Makes every bound call once: with the first call an accelerator sets an engine up and records its work, which
        takes much longer than the call. Nothing is committed, but rows behind the caches' length are written."""
        self.draft.warm_up()  # first, since verification reads a drafted tree
        self.target.warm_up()
        self.device.synchronize()

    def close(self, engines: bool = True) -> None:
        """Frees bindings and buffers, a sibling's of the target too, and then the engines, unless other decoders use
        them: bound calls hold the engines, and both use the device's stream."""
        target, draft, opened, device = self.target, self.draft, self.engines, self.device
        self.__dict__.clear()
        device.enter()
        try:
            device.synchronize()
        finally:
            draft.close()
            target.close()
            if engines:
                close(opened, device)


def _cycle(
    selector: TokenSelector,
    emitted: int,
    times: tuple[int, int, int],
    rows: int = 0,
    path: Sequence[int] = (),
    tree: Tree | None = None,
    lookup: bool = False,
) -> Cycle:
    """The cycle that emitted a text's last ``emitted`` tokens, see ``Cycle``; by default the prefill's. The text ends
    with it if it was interrupted meanwhile."""
    selector.interrupted()
    first = len(selector.ids) - emitted
    tokens, logprobs = tuple(selector.ids[first:]), tuple(selector.logprobs[first:])
    return Cycle(tokens, rows, tuple(path), selector.finish_reason, times, tree, lookup, logprobs)
