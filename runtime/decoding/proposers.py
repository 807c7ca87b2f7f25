"""Where the rows of a pass come from: a draft tree, the text itself (prompt lookup), or the pending token only.

A proposer makes a proposal for one cycle. The proposal is told which of its rows were accepted, after the target's cache holds
them. A new proposer needs no change in the others.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from ..bundle.manifest import Manifest
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
        """To be called when the target's cache holds the accepted rows and the text their tokens. path: these rows; target_ns: as
        ``verify`` returned."""


class Proposers:
    """The proposers of one text. For each cycle the one with the highest expected speed makes the proposal."""

    def __init__(
        self,
        manifest: Manifest,
        target: TargetPasses,
        draft: DraftPasses,
        history: DraftHistory,
        text: Callable[[], Sequence[int]],
        planner: Planner | None,
        selector: TokenSelector,
    ) -> None:
        """text: gives all token ids so far. planner: None without measured costs."""
        settings = selector.settings
        self._planner = planner if settings.speculate and settings.rows is None else None
        self._looks_up, self._target, self._draft = settings.looks_up, target, draft
        self._drafts = settings.speculate and manifest.has_drafter
        self._draft_tree = DraftTree(target, draft, history, text, self._planner, selector, settings.rows or manifest.rows)
        most = manifest.depth + 1 if self._planner and manifest.has_drafter else 0
        self._continuation = Continuation(target, history, self._planner, most)

    def propose(self, emitted: Sequence[int], most: int, host_ns: int) -> Proposal:
        """emitted: tokens of the last cycle. most: rows that the pass may verify. host_ns: of the last cycle, outside the engines; 0 if
        unknown."""
        planner = self._planner
        if planner is None:
            return self._draft_tree.propose(most, host_ns) if self._drafts else self._continuation.propose(())
        planner.behind(self._target.length, self._draft.length)
        at_most = 0 if planner.plain_pass_due else most - 1
        looked_up = planner.lookup(emitted, at_most) if self._looks_up else ()
        if looked_up or planner.plain_pass_due or not planner.drafting:
            return self._continuation.propose(looked_up[: most - 1])
        return self._draft_tree.propose(most, host_ns)


class DraftTree:
    """Proposes the drafter's tree (``graphs.tree``): as many of its rows as the planner chooses."""

    def __init__(
        self,
        target: TargetPasses,
        draft: DraftPasses,
        history: DraftHistory,
        text: Callable[[], Sequence[int]],
        planner: Planner | None,
        selector: TokenSelector,
        rows: int,
    ) -> None:
        """text: gives all token ids so far. planner: None to verify so many rows of every tree."""
        self.target, self.draft, self.history, self.planner = target, draft, history, planner
        self._text, self._sampler, self._rows = text, selector.sampler, rows

    def propose(self, most: int, host_ns: int) -> Proposal:
        """See ``Proposers.propose``."""
        catch_up_ns, accepted, rows = self.history.catch_up(self._text), self.history.accepted, self._rows
        draft_ns = self.draft.draft(accepted, self._sampler, self.target.length + 1)
        if self.planner and self.target.splits:
            draft_ns += self.draft.finish()
            rows = self.planner.choose_rows(*self.draft.scored())
        return _DraftedRows(self, min(rows, most), len(accepted.rows), draft_ns, host_ns, catch_up_ns)


class _DraftedRows:
    """The first rows of a draft tree."""

    __slots__ = "_catch_up_ns", "_draft_ns", "_host_ns", "_proposer", "_read", "count"
    lookup = False

    def __init__(self, proposer: DraftTree, count: int, read: int, draft_ns: int, host_ns: int, catch_up_ns: int) -> None:
        """read: accepted rows that the draft read. draft_ns, catch_up_ns: of the draft, and of reading before it what came without a
        draft; host_ns: see ``Proposers.propose``."""
        self._proposer, self.count, self._read = proposer, count, read
        self._draft_ns, self._host_ns, self._catch_up_ns = draft_ns, host_ns, catch_up_ns

    def verify(self) -> int:
        return self._proposer.target.verify(self.count)

    def tree(self) -> tuple[Sequence[int], Sequence[int]]:
        return self._proposer.draft.drafted(self.count)

    def trace(self) -> Tree:
        return self._proposer.draft.drafted_tree(self.count)

    def committed(self, path: Sequence[int], target_ns: int) -> None:
        proposer, rows = self._proposer, self.count
        before = proposer.target.length - len(path)  # tokens in the target's cache when the drafter read
        proposer.history.committed("draft", range(before - self._read, before))
        if planner := proposer.planner:
            scores, depths = proposer.draft.scored()
            if not proposer.target.splits:
                planner.choose_rows(scores, depths)  # all rows are verified; the planner learns what they promised
            times = self._draft_ns, target_ns, self._host_ns
            planner.drafted(scores[:rows], depths[:rows], len(path) - 1, times, self._catch_up_ns)


class Continuation:
    """Proposes the pending token and looked-up tokens, if there are any, each the child of the one before it: a causal pass.
    Without looked-up tokens this is plain decoding."""

    def __init__(self, target: TargetPasses, history: DraftHistory, planner: Planner | None, read: int) -> None:
        """planner: if it chooses how to decode; None for plain decoding of the whole text. read: accepted rows that a draft reads at most;
        the drafter reads others later. 0 if there are no drafts in this text."""
        self.target, self.history, self.planner, self.read = target, history, planner, read

    def propose(self, looked_up: Sequence[int]) -> Proposal:
        pending = self.history.accepted.tokens[-1]
        if self.read:
            self.history.defer()
        return _Chain(self, [pending, *looked_up])


class _Chain:
    """The pending token, and after it looked-up tokens."""

    __slots__ = "_proposer", "_tokens", "count", "lookup"

    def __init__(self, proposer: Continuation, tokens: list[int]) -> None:
        self._proposer, self._tokens, self.count, self.lookup = proposer, tokens, len(tokens), len(tokens) > 1

    def verify(self) -> int:
        return self._proposer.target.read(self._tokens)

    def tree(self) -> tuple[Sequence[int], Sequence[int]]:
        return self._tokens, range(-1, self.count - 1)

    def trace(self) -> Tree | None:
        return Tree.chain(self._tokens) if self.lookup else None

    def committed(self, path: Sequence[int], target_ns: int) -> None:
        proposer = self._proposer
        if 0 < proposer.read < len(path):
            proposer.history.defer(kept=1)
        if proposer.planner:
            proposer.planner.decoded(target_ns, self.count)
