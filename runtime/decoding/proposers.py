"""Where the rows of a pass come from: a drafted tree, the text itself (prompt lookup), or the pending token only.

A proposer gives a ``Proposal``, and is told which of its rows were accepted once the target's cache holds them. What it has to keep
or read for that is its own business, so adding one touches no other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .cycle import Tree
from .draft_history import DraftHistory
from .engine_passes import EnginePasses
from .planner import Planner


@dataclass(frozen=True)
class Proposal:
    """Rows to verify in one pass, the pending token first.

    count: of the rows. verify: runs the target over them. tree: tokens and parents by row, valid after ``verify``. trace: the rows
    as a trace shows them; None for the pending token only. lookup: whether rows were found in the text. committed: is told the
    accepted rows, once the target's cache holds them and the text the tokens after them.
    """

    count: int
    verify: Callable[[], None]
    tree: Callable[[], tuple[Sequence[int], Sequence[int]]]
    trace: Callable[[], Tree | None]
    committed: Callable[[Sequence[int]], None] = field(repr=False)
    lookup: bool = False


class Proposer(Protocol):
    """Proposes rows for the next pass."""

    def propose(self, most: int) -> Proposal:
        """most: rows that the pass may verify."""


class DraftTree:
    """The drafter's tree (``graphs.tree``), of which the planner verifies as many rows as pay."""

    def __init__(
        self, passes: EnginePasses, history: DraftHistory, text: Callable[[], Sequence[int]], planner: Planner | None, rows: int
    ) -> None:
        """text: gives all token ids so far. rows: to verify of every tree where no planner decides."""
        self._passes, self._history, self._text, self._planner, self._rows = passes, history, text, planner, rows
        self.host_ns = 0  # of the last cycle, outside the engines; 0 if unknown

    def propose(self, most: int) -> Proposal:
        passes = self._passes
        self._history.catch_up(self._text)
        caught_up, accepted = passes.engine_ns[0], int(passes.accepted_count[0])
        draft, verify_all = passes.draft_and_verify(accepted)
        passes.run_draft(draft)
        static, rows = passes.form.static, self._rows
        if self._planner and not static:
            rows = self._planner.rows(*passes.scored())
        rows = min(rows, most)
        verify = verify_all if static or rows == passes.manifest.rows else passes.verification(rows)

        def committed(path: Sequence[int]) -> None:
            passes.draft_cache.commit(passes.graphs["draft"], range(accepted))
            self._learn(rows, path, caught_up)

        return Proposal(
            rows,
            lambda: passes.run_target(verify),
            lambda: passes.drafted(rows),
            lambda: passes.drafted_tree(rows),
            committed,
        )

    def _learn(self, rows: int, path: Sequence[int], caught_up: int) -> None:
        """Tells the planner what came of a tree. caught_up: nanoseconds that the drafter took to read what it had missed."""
        if self._planner:
            scores, depths = self._passes.scored()
            if self._passes.form.static:
                self._planner.rows(scores, depths)  # all rows are verified; the planner learns what they promised
            draft_ns, target_ns = self._passes.engine_ns
            times = draft_ns - caught_up, target_ns, self.host_ns
            self._planner.drafted(scores[:rows], depths[:rows], len(path) - 1, times, caught_up)


class Continuation:
    """The pending token, and tokens found in the text if there are any, each the child of the one before: a causal pass. Without any
    this is plain decoding."""

    def __init__(self, passes: EnginePasses, history: DraftHistory, planner: Planner | None) -> None:
        """planner: that may want to draft later; without one nobody will."""
        self._passes, self._history, self._planner = passes, history, planner
        self.found: Sequence[int] = ()

    def propose(self, most: int) -> Proposal:
        passes, found = self._passes, tuple(self.found[: most - 1])
        tokens = [int(passes.accepted_tokens[int(passes.accepted_count[0]) - 1]), *found]
        if self._planner:
            self._history.defer()

        def committed(path: Sequence[int]) -> None:
            if self._planner:
                if len(path) > passes.manifest.depth + 1:  # more than a draft reads
                    self._history.defer(kept=1)
                self._planner.decoded(passes.engine_ns[1], len(tokens))

        return Proposal(
            len(tokens),
            lambda: passes.read(tokens),
            lambda: (tokens, range(-1, len(found))),
            lambda: Tree.chain(tokens) if found else None,
            committed,
            bool(found),
        )
