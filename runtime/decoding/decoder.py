"""The decode loop: propose, verify, accept, commit."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from time import perf_counter_ns

import numpy as np

from ..backends import Engine
from ..bundle.graphs import Form, of_drafter
from ..bundle.manifest import Manifest
from ..bundle.reader import Bundle
from ..engines.devices import Device
from ..errors import DamageError, MisuseError
from .acceptance import accept
from .checks import check
from .cycle import Cycle
from .draft_history import DraftHistory
from .draft_noise import DraftNoise
from .engine_passes import EnginePasses
from .planner import Planner
from .prices import Costs
from .proposers import Continuation, DraftTree, Proposal, Proposer
from .stats import Stats
from .token_selector import TokenSelector

# While other streams decode, a prompt's passes take so many nanoseconds at most, since two of them may come one after the other.
_PATIENCE_NS = 0.125e9
_FEWEST_READ = 8  # rows of such a pass in any case: fewer hardly take less time


class Decoder:
    """Drives the engines of one bundle, one generation at a time.

    shares: whether other streams want passes now; set by whoever drives the decoder.
    planners: of likeliest and of drawn texts, which accept differently; None without costs. text: the token ids whose rows the caches hold: a prompt, and what was emitted after it, which still grows. valid_target_length:
    rows of the target's cache, from the first, that are as in plain decoding.
    """

    def __init__(
        self, manifest: Manifest, form: Form, engines: Mapping[str, Engine], device: Device, costs: Costs | None = None,
        beside: "Decoder | None" = None, draft_tokens: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """costs: measured on this device, for the planner; without them every tree is verified whole. beside: a decoder of the same target with
        another drafter, whose caches of the target this one shares: one of them decodes at a time, see ``take``. draft_tokens: see ``Bundle.draft_tokens``; None
        for trees without noise."""
        self.manifest, self.form, self.device = manifest, form, device
        self.passes: EnginePasses = EnginePasses(manifest, form, engines, device, beside.passes if beside else None)
        self.history = DraftHistory(self.passes)
        self._noise = DraftNoise(self.passes.noise, device, draft_tokens) if draft_tokens is not None else None
        padded = 0 if self.passes.splits else form.chunk
        shape = manifest.depth, padded, manifest.has_drafter, form.static
        self.planners = [Planner(costs, *shape) if costs else None for _ in range(2)]
        self.shares = False
        self._draws = False  # whether the running text is drawn
        self._rows_in_time = 0  # of a pass over a prompt that takes _PATIENCE_NS, as far as the last one shows
        self.selector: TokenSelector | None = None
        self.text: tuple[Sequence[int], Sequence[int]] = (), ()
        self.valid_target_length = manifest.capacity

    @classmethod
    def with_drafter(
        cls, drafter: str, bundle: Bundle, form: Form, engines: Mapping[str, Engine], device: Device, costs: Costs | None = None,
        beside: "Decoder | None" = None,
    ) -> "Decoder":  # fmt: skip
        """A decoder with one of a bundle's drafters; "" for the first. bundle, form, engines: with all of them. Raises DamageError."""
        own, suffix = bundle.of(drafter), bundle.manifest.suffix(drafter)
        own_engines = of_drafter(engines, suffix)
        tokens = own.draft_tokens() if own.manifest.noisy else None
        return cls(own.manifest, form.of(suffix), own_engines, device, costs, beside, tokens)

    @property
    def planner(self) -> Planner | None:
        """The running text's."""
        return self.planners[self._draws]

    # --- the loop --------------------------------------------------------------------------------------------------------

    def generate(self, selector: TokenSelector, stats: Stats, resume: bool = False) -> Iterator[Cycle | None]:
        """Continues a selector's text, one cycle at a time, the prefill first; None between two passes over a prompt, where other streams
        can have the engines. resume: reuse the cached rows of the common prefix.

        Raises InputError for a prompt that is empty or does not fit.
        """
        check(self.manifest, selector.prompt)
        stats.prompt_tokens, stats.seed, stats.finish_reason = len(selector.prompt), selector.seed, selector.finish_reason
        if selector.finish_reason:
            return
        yield from self._read_prompt(selector, stats, resume)
        rows, path, times, tree, lookup = 0, list[int](), (0, stats.prefill_ns, 0), None, False  # of the prefill
        planner = self.planner if selector.settings.speculate and selector.settings.rows is None else None
        draft_tree = DraftTree(self.passes, self.history, self._ids, planner, selector, self._noise)
        continuation = Continuation(self.passes, self.history, planner)
        while True:
            selector.interrupted()
            emitted, logprobs = tuple(selector.ids[stats.tokens :]), tuple(selector.logprobs[stats.tokens :])
            stats.tokens, stats.finish_reason = len(selector.ids), selector.finish_reason
            yield Cycle(emitted, rows, tuple(path), selector.finish_reason, times, tree, lookup, logprobs)
            started, self.passes.engine_ns, self.passes.waited_ns = perf_counter_ns(), [0, 0], 0
            if not rows and self.selector is selector and selector.settings.speculate and not selector.ended():
                yield from self._catch_up_with_prompt(selector)  # after the first token, so that it does not delay it
            if selector.ended():
                stats.finish_reason = selector.finish_reason
                return
            if self.selector is not selector:
                raise MisuseError("the caches of this generation were used for something else: start it again")
            self.device.enter()
            if planner:
                planner.behind(int(self.passes.target_cache.length[0]), int(self.passes.draft_cache.length[0]))
            proposer = self._choose(draft_tree, continuation, planner, emitted)
            proposal = proposer.propose(self.room)
            proposal.verify()
            path = self._accept(proposal)
            self._commit(proposal, path)
            draft_ns, target_ns = self.passes.engine_ns
            tree = proposal.trace() if selector.settings.trace else None
            times = draft_ns, target_ns, perf_counter_ns() - started - draft_ns - target_ns - self.passes.waited_ns
            draft_tree.host_ns = times[2] if stats.cycles else 0  # the first cycle's includes reading the prompt
            rows, lookup = proposal.count, proposal.lookup
            stats.count(len(path), times, rows, lookup)

    def _choose(
        self, draft_tree: DraftTree, continuation: Continuation, planner: Planner | None, emitted: Sequence[int]
    ) -> Proposer:
        """The proposer with the highest expected speed. emitted: tokens of the last cycle."""
        assert self.selector
        settings, continuation.looked_up = self.selector.settings, ()
        if planner is None:
            return draft_tree if settings.speculate and self.manifest.has_drafter else continuation
        if settings.looks_up:
            continuation.looked_up = planner.lookup(emitted, 0 if planner.plain_pass_due else self.room - 1)
        return continuation if continuation.looked_up or planner.plain_pass_due or not planner.drafting else draft_tree

    def _accept(self, proposal: Proposal) -> list[int]:
        """The accepted rows of a verified proposal; the tokens after them join the text."""
        assert self.selector
        tokens, parents = proposal.tree()
        path = accept(tokens, parents, self.next_token, self.selector, self.passes)
        borrowed = (i for i in range(1, len(path)) if parents[path[i]] != path[i - 1])
        if (first := next(borrowed, None)) is not None:  # accepted under other ancestors than its own (lossy)
            self.valid_target_length = min(self.valid_target_length, int(self.passes.target_cache.length[0]) + first)
        return path

    def _commit(self, proposal: Proposal, path: Sequence[int]) -> None:
        """Keeps the accepted rows in the caches and passes them to the next draft."""
        assert self.selector
        cache = self.passes.target_cache
        self.passes.commit(proposal.count, path)
        if self.passes.choice[: proposal.count].min() < 0:  # NaN in a row that was not accepted
            cache.wipe(int(cache.length[0]))
        self.history.accept(path, self.selector.ids[-len(path) :])
        proposal.committed(path)

    def next_token(self, row: int) -> int | None:
        """The target's token after a row joins the text. Returns it, or None if the text ends with it.

        Raises DamageError if the row's logits hold NaN or infinity.
        """
        assert self.selector
        choice = int(self.passes.choice[row])
        if choice < 0:
            read = len(self._ids())
            self.clear()
            self.passes.target_cache.wipe(0)
            raise DamageError(
                f"the target's logits hold NaN or infinity after {read} tokens: the weights or engines are damaged, or values overflow; "
                "run `gumiho doctor` on the bundle"
            )
        return self.selector.add(self.selector.choose(choice, lambda: self.passes.row(row)))

    @property
    def room(self) -> int:
        """Rows that a pass may verify."""
        return min(self.manifest.rows, self.manifest.capacity - int(self.passes.target_cache.length[0]))

    # --- the prompt ------------------------------------------------------------------------------------------------------

    def _read_prompt(self, selector: TokenSelector, stats: Stats, resume: bool) -> Iterator[None]:
        """Reads the part of the prompt and of what was emitted that is not cached, and emits the next token. Pauses between passes."""
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
            self.history.accept([last], selector.ids[-1:])
        stats.prefill_ns += perf_counter_ns() - started

    def _catch_up_with_prompt(self, selector: TokenSelector) -> Iterator[None]:
        """The drafter reads what it is to read of the prompt. Pauses between passes."""
        self.device.enter()
        while self.history.pending:
            self.history.catch_up(self._ids, once=True)
            if not self.history.pending or selector.interrupted():
                return
            yield
            self.device.enter()

    def prefill(self, prompt: Sequence[int], speculate: bool) -> int:
        """Reads the rest of a prompt into the target's cache, in chunks; the drafter reads it later.

        Returns which row of the last pass's outputs is the prompt's last.
        """
        row, left = -1, int(self.passes.target_cache.length[0]) < len(prompt)
        while left:
            row, left = self._read_chunk(prompt, speculate)
        return row

    def _read_chunk(self, prompt: Sequence[int], speculate: bool) -> tuple[int, bool]:
        """One pass over a prompt. Returns which row of its outputs is the last, and whether more of the prompt is left."""
        start = int(self.passes.target_cache.length[0])
        part, started = prompt[start : start + self._chunk()], perf_counter_ns() - self.passes.waited_ns
        n = len(part)
        first = self.feed(part, last=True)
        # The last row is the first draft's. Without drafts only the first rows are kept, for turns that draft.
        end = min(start + n, len(prompt) - 1, self.history.FIRST if not speculate else len(prompt))
        if self.passes.extends and start < end:
            self.history.record(start, end - start, range(start, end), first)
        took = perf_counter_ns() - self.passes.waited_ns - started
        self._rows_in_time = int(n * _PATIENCE_NS / took)
        return first + n - 1, start + n < len(prompt)

    def _chunk(self) -> int:
        """How many tokens of a prompt the next pass reads: fewer if other streams would wait for it too long."""
        return min(self.form.chunk, max(_FEWEST_READ, self._rows_in_time)) if self.shares else self.form.chunk

    def feed(self, tokens: Sequence[int], last: bool = False) -> int:
        """One causal pass of the target over at most a chunk of tokens; commits all of them. See ``EnginePasses.read``."""
        first = self.passes.read(tokens, last)
        self.passes.commit(len(tokens), range(len(tokens)))
        return first

    def catch_up(self) -> None:
        """The drafter reads what it has missed; see ``DraftHistory.catch_up``."""
        self.history.catch_up(self._ids)

    # --- what the caches hold --------------------------------------------------------------------------------------------

    def _ids(self) -> list[int]:
        return [*self.text[0], *self.text[1]]

    @property
    def cached(self) -> list[int]:
        """The tokens whose rows in the target's cache are those of plain decoding."""
        return self._ids()[: min(self.valid_target_length, int(self.passes.target_cache.length[0]))]

    def shared(self, text: Sequence[int]) -> int:
        """Leading tokens of a text whose rows the target's cache holds."""
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.cached, text, strict=False)))

    def resume(self, prompt: Sequence[int], speculate: bool) -> int:
        """Truncates the caches to the prefix they share with a prompt. Returns how many of its tokens need not be read again.

        The target reads tokens again that the drafter lacks, but no more than that reads of a prompt.
        """
        shared, history = self.shared(prompt), self.history
        history.keep(shared - 1)  # the drafter's row of a token depends on the next token
        start = min(shared, len(prompt) - 1)
        if speculate and self.passes.extends:
            known = [-1, *history.positions[-1:].tolist(), *history.pending[-1:]]
            start = min(start, max(known[-1] + 1, len(prompt) - 1 - history.LAST))
        self.valid_target_length = self.manifest.capacity
        self.passes.target_cache.length[0] = start
        history.keep(start)
        return start

    def saved(self, text: Sequence[int]) -> tuple[Sequence[int], np.ndarray, np.ndarray, np.ndarray]:
        """The rows of a text's beginning that the caches hold, for ``restore``, which takes them in this order."""
        shared, positions = self.shared(text), self.history.positions
        positions = positions[: positions.searchsorted(shared - 1)]  # the drafter's row of a token depends on the next token
        rows = self.passes.target_cache.rows(shared), self.passes.draft_cache.rows(len(positions))
        return text[:shared], *rows, positions.copy()

    def restore(self, text: Sequence[int], target: np.ndarray, drafter: np.ndarray, positions: np.ndarray) -> None:
        """Fills the caches with rows of a text, as ``KVCache.rows`` returned them: the target's leading ones, and the drafter's of the
        tokens at so many positions. Raises GumihoError if they do not fit."""
        self.clear()
        self.passes.target_cache.fill(target)
        self.history.restore(drafter, positions)
        self.text = text, ()

    def take(self, other: "Decoder") -> None:
        """Goes on with the target's cache that another decoder shares; its drafter has read nothing of the text."""
        self.text, self.valid_target_length = other.text, other.valid_target_length
        self.selector = other.selector = None
        self.history.keep(0)

    def clear(self) -> None:
        """Empties the caches; a running generation cannot continue."""
        self.selector, self.text = None, ((), ())
        self.passes.target_cache.length[0] = 0
        self.valid_target_length = self.manifest.capacity
        self.history.keep(0)

    def close(self, engines: bool = True) -> None:
        """Frees buffers, and the engines unless other decoders use them."""
        passes = self.passes
        self.__dict__.clear()
        passes.close(engines)
