"""Where the rows of a pass come from: a draft tree, the text itself (prompt lookup), or the pending token only.

A proposer makes a proposal for one cycle. The proposal is told which of its rows were accepted, after the target's cache holds
them. A new proposer needs no change in the others.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from ..engines.devices import Call
from .cycle import Tree
from .draft_history import DraftHistory
from .draft_noise import DraftNoise
from .engine_passes import EnginePasses
from .planner import Planner
from .token_selector import TokenSelector


class Proposal(Protocol):
    """Rows to verify in one pass, the pending token first."""

    @property
    def count(self) -> int:
        """The number of rows."""

    @property
    def lookup(self) -> bool:
        """Whether the rows were found in the text."""

    def verify(self) -> None:
        """Runs the target over the rows."""

    def tree(self) -> tuple[Sequence[int], Sequence[int]]:
        """Tokens and parents by row; valid after ``verify``."""

    def trace(self) -> Tree | None:
        """The rows as a trace shows them; None if only the pending token was verified."""

    def committed(self, path: Sequence[int]) -> None:
        """To be called when the target's cache holds the accepted rows and the text their tokens. path: these rows."""


class Proposer(Protocol):
    """Proposes rows for the next pass."""

    def propose(self, most: int) -> Proposal:
        """most: rows that the pass may verify."""


class DraftTree:
    """Proposes the drafter's tree (``graphs.tree``): as many of its rows as the planner chooses."""

    def __init__(
        self, passes: EnginePasses, history: DraftHistory, text: Callable[[], Sequence[int]], planner: Planner | None,
        selector: TokenSelector, noise: DraftNoise | None,
    ) -> None:  # fmt: skip
        """text: gives all token ids so far. planner: None to verify as many rows of every tree as the settings say. noise: None if the
        drafter takes none."""
        self.passes, self.history, self._text, self._planner = passes, history, text, planner
        self._rows = selector.settings.rows or passes.manifest.rows
        self._noise, self._sampler = noise, selector.sampler
        self.host_ns = 0  # of the last cycle, outside the engines; 0 if unknown

    def propose(self, most: int) -> Proposal:
        passes = self.passes
        self.history.catch_up(self._text)
        catch_up_ns, accepted = passes.engine_ns[0], int(passes.accepted_count[0])
        if self._noise:
            self._noise.put(self._sampler, int(passes.target_cache.length[0]) + 1)
        passes.run_draft(passes.draft(accepted))
        rows = self._rows
        if self._planner and passes.splits:
            passes.run_draft(passes.device.synchronize)
            rows = self._planner.choose_rows(*passes.scored())
        rows = min(rows, most)
        return _DraftedRows(self, rows, passes.verification(rows), accepted, catch_up_ns)

    def learn(self, rows: int, accepted: int, catch_up_ns: int) -> None:
        """Tells the planner how a tree did. accepted: drafted tokens; catch_up_ns: time to read the tokens without a draft."""
        if self._planner:
            scores, depths = self.passes.scored()
            if not self.passes.splits:
                self._planner.choose_rows(scores, depths)  # all rows are verified; the planner learns what they promised
            draft_ns, target_ns = self.passes.engine_ns
            times = draft_ns - catch_up_ns, target_ns, self.host_ns
            self._planner.drafted(scores[:rows], depths[:rows], accepted, times, catch_up_ns)


class _DraftedRows:
    """The first rows of a draft tree."""

    __slots__ = "_accepted", "_catch_up_ns", "_proposer", "_verify", "count"
    lookup = False

    def __init__(self, proposer: DraftTree, count: int, verify: Call, accepted: int, catch_up_ns: int) -> None:
        """accepted: rows that the draft read; catch_up_ns: see ``DraftTree.learn``."""
        self._proposer, self.count, self._verify = proposer, count, verify
        self._accepted, self._catch_up_ns = accepted, catch_up_ns

    def verify(self) -> None:
        self._proposer.passes.run_target(self._verify)

    def tree(self) -> tuple[Sequence[int], Sequence[int]]:
        return self._proposer.passes.drafted(self.count)

    def trace(self) -> Tree:
        return self._proposer.passes.drafted_tree(self.count)

    def committed(self, path: Sequence[int]) -> None:
        read = int(self._proposer.passes.target_cache.length[0]) - len(
            path
        )  # tokens in the target's cache when the drafter read
        self._proposer.history.committed("draft", range(read - self._accepted, read))
        self._proposer.learn(self.count, len(path) - 1, self._catch_up_ns)


class Continuation:
    """Proposes the pending token and looked-up tokens, if there are any, each the child of the one before it: a causal pass.
    Without looked-up tokens this is plain decoding.

    looked_up: tokens for the next proposal.
    """

    def __init__(self, passes: EnginePasses, history: DraftHistory, planner: Planner | None) -> None:
        """planner: if it chooses how to decode; None for plain decoding of the whole text."""
        self.passes, self.history, self.planner = passes, history, planner
        self.defers = planner is not None and passes.manifest.has_drafter  # whether the drafter may read the tokens later
        self.looked_up: Sequence[int] = ()

    def propose(self, most: int) -> Proposal:
        passes = self.passes
        pending = int(passes.accepted_tokens[int(passes.accepted_count[0]) - 1])
        if self.defers:
            self.history.defer()
        return _Chain(self, [pending, *self.looked_up[: most - 1]])


class _Chain:
    """The pending token, and after it looked-up tokens."""

    __slots__ = "_proposer", "_tokens", "count", "lookup"

    def __init__(self, proposer: Continuation, tokens: list[int]) -> None:
        self._proposer, self._tokens, self.count, self.lookup = proposer, tokens, len(tokens), len(tokens) > 1

    def verify(self) -> None:
        self._proposer.passes.read(self._tokens)

    def tree(self) -> tuple[Sequence[int], Sequence[int]]:
        return self._tokens, range(-1, self.count - 1)

    def trace(self) -> Tree | None:
        return Tree.chain(self._tokens) if self.lookup else None

    def committed(self, path: Sequence[int]) -> None:
        passes, history, planner = self._proposer.passes, self._proposer.history, self._proposer.planner
        if self._proposer.defers and len(path) > passes.manifest.depth + 1:  # more than a draft reads
            history.defer(kept=1)
        if planner:
            planner.decoded(passes.engine_ns[1], self.count)
