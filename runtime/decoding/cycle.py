"""What one cycle of decoding verified and emitted."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from .logprobs import TokenLogprobs


@dataclass(frozen=True)
class Tree:
    """Verified rows, the pending token first.

    tokens, parents, depths: ids, parent rows and depths, parents before children. scores: cumulative log-probabilities
    under the drafter, -inf for rows that it did not draft.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float, ...]

    @staticmethod
    def chain(tokens: Sequence[int]) -> "Tree":
        """A path that nobody drafted: each row is the child of the row before it."""
        n = len(tokens)
        return Tree(tuple(tokens), (0, *range(n - 1)), tuple(range(n)), (0.0, *[-inf] * (n - 1)))


@dataclass(frozen=True, slots=True)
class Accepted:
    """Accepted rows of the target's last pass, for the drafter, which reads their hidden rows and the token after each.

    rows: of that pass, ascending. tokens: ids; the last one is the pending token.
    """

    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()

    def last(self, count: int) -> "Accepted":
        """The last ``count`` ones."""
        first = len(self.rows) - count
        return Accepted(self.rows[first:], self.tokens[first:])


@dataclass(frozen=True)
class Cycle:
    """What one step emitted. The prefill counts as the first step and verifies no rows.

    tokens: emitted ids. rows: verified rows, root included. path: accepted rows, the root first, so that ``tokens[i]``
    is what row ``path[i + 1]`` proposed and the last token is the target's own. finish_reason: see ``Generation``; None
    unless generation ended with this cycle. times: nanoseconds of draft, target and host (of the prefill: 0, all, 0).
    tree: set if the settings ask for a trace. lookup: whether the proposed rows were found in the text (prompt lookup)
    instead of drafted. logprobs: one for each token if the settings ask for them.
    """

    tokens: tuple[int, ...]
    rows: int
    path: tuple[int, ...]
    finish_reason: str | None
    times: tuple[int, int, int] = (0, 0, 0)
    tree: Tree | None = None
    lookup: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
