"""Where the rows of a pass come from: a draft tree, the text itself (prompt lookup), or the pending token only.

In every cycle the proposer makes a proposal. A proposal is told which of its rows were accepted, after the target's
cache holds them.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from .cycle import Tree
from .draft_history import DraftHistory
from .draft_passes import DraftPasses
from .planner import Planner
from .target_passes import TargetPasses
from .token_selector import TokenSelector


class Proposal(Protocol):
    """Rows to verify in one pass, the pending token first."""

    @property
    def count(self) -> int:
        """The number of rows."""

    @property
    def lookup(self) -> bool:
        """Whether the rows were found in the text."""

    def verify(self) -> int:
        """Runs the target over the rows. Returns the nanoseconds of the pass."""

    def tree(self) -> tuple[Sequence[int], Sequence[int]]:
        """Tokens and parents by row; valid after ``verify``."""

    def trace(self) -> Tree | None:
        """The rows as a trace shows them; None if only the pending token was verified."""

    def committed(self, path: Sequence[int], target_ns: int) -> None:
        """To be called when the target's cache holds the accepted rows and the text their tokens. path: these rows.
        target_ns: what ``verify`` returned."""


class Proposer:
    """Makes the proposals of one text, in each cycle the one with the highest expected speed.

    planner: None if it does not choose how to decode.
    """

    def __init__(
        self,
        target: TargetPasses,
        draft: DraftPasses,
        history: DraftHistory,
        text: Callable[[], Sequence[int]],
        planner: Planner | None,
        selector: TokenSelector,
    ) -> None:
        """text: gives all token ids so far. planner: None without measured costs."""
        settings = selector.settings
        self.target, self.draft, self.history, self._text = target, draft, history, text
        self.planner = planner if settings.speculate and settings.rows is None else None
        self._sampler, self._looks_up, self._speculates = selector.sampler, settings.looks_up, settings.speculate
        self._rows = settings.rows or target.rows  # to verify, unless the planner chooses

    @property
    def drafting(self) -> bool:
        """Whether the next cycle may draft."""
        return self._speculates and (self.planner is None or self.planner.drafting)

    def propose(self, emitted: Sequence[int], most: int, host_ns: int) -> Proposal:
        """emitted: tokens of the last cycle. most: rows that the pass may verify. host_ns: nanoseconds of the last
        cycle outside the engines, 0 if unknown."""
        planner = self.planner
        if planner is None:
            return self._draft(most, host_ns) if self._speculates and self.draft.reads else self._continue(())
        planner.behind(self.target.length, self.draft.length)
        at_most = 0 if planner.plain_pass_due else most - 1
        looked_up = planner.lookup(emitted, at_most) if self._looks_up else ()
        if looked_up or planner.plain_pass_due or not planner.drafting:
            return self._continue(looked_up[: most - 1])
        return self._draft(most, host_ns)

    def _draft(self, most: int, host_ns: int) -> "DraftTree":
        catch_up_ns, accepted, rows = self.history.catch_up(self._text), self.history.accepted, self._rows
        draft_ns = self.draft.draft(accepted, self._sampler, self.target.length + 1)
        if self.planner and self.target.splits:
            draft_ns += self.draft.finish()
            rows = self.planner.choose_rows(*self.draft.scored())
        rows = self.target.in_order(min(rows, most))
        return DraftTree(self, rows, len(accepted.rows), (draft_ns, host_ns, catch_up_ns))

    def _continue(self, looked_up: Sequence[int]) -> "Continuation":
        pending = self.history.accepted.tokens[-1]
        if self.planner and self.draft.reads:
            self.history.defer()
        return Continuation(self, [pending, *looked_up])


class DraftTree:
    """The first rows of the drafter's tree (``graphs.tree``)."""

    __slots__ = "_proposer", "_read", "_times", "count"
    lookup = False

    def __init__(self, proposer: Proposer, count: int, read: int, times: tuple[int, int, int]) -> None:
        """read: accepted rows that the draft read. times: nanoseconds of the draft, of the last cycle outside the
        engines, and of reading before the draft the tokens of cycles without one."""
        self._proposer, self.count, self._read, self._times = proposer, count, read, times

    def verify(self) -> int:
        return self._proposer.target.verify(self.count)

    def tree(self) -> tuple[Sequence[int], Sequence[int]]:
        return self._proposer.draft.drafted(self.count)

    def trace(self) -> Tree:
        return self._proposer.draft.drafted_tree(self.count)

    def committed(self, path: Sequence[int], target_ns: int) -> None:
        target, draft, planner = self._proposer.target, self._proposer.draft, self._proposer.planner
        before = target.length - len(path)  # tokens in the target's cache when the drafter read
        self._proposer.history.committed("draft", range(before - self._read, before))
        if planner:
            scores, depths = draft.scored()
            if not target.splits:
                planner.choose_rows(scores, depths)  # all rows are verified; the planner learns what they promised
            (draft_ns, host_ns, catch_up_ns), rows = self._times, self.count
            planner.drafted(scores[:rows], depths[:rows], len(path) - 1, (draft_ns, target_ns, host_ns), catch_up_ns)


class Continuation:
    """The pending token and looked-up tokens, if there are any, each the child of the one before it: a causal pass.
    Without looked-up tokens this is plain decoding."""

    __slots__ = "_proposer", "_tokens", "count", "lookup"

    def __init__(self, proposer: Proposer, tokens: list[int]) -> None:
        self._proposer, self._tokens, self.count, self.lookup = proposer, tokens, len(tokens), len(tokens) > 1

    def verify(self) -> int:
        return self._proposer.target.read(self._tokens)

    def tree(self) -> tuple[Sequence[int], Sequence[int]]:
        return self._tokens, range(-1, self.count - 1)

    def trace(self) -> Tree | None:
        return Tree.chain(self._tokens) if self.lookup else None

    def committed(self, path: Sequence[int], target_ns: int) -> None:
        draft, planner = self._proposer.draft, self._proposer.planner
        if planner:
            if 0 < draft.reads < len(path):
                self._proposer.history.defer(kept=1)
            planner.decoded(target_ns, self.count)
