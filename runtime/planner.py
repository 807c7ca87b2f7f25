"""How many rows of a tree are worth verifying, and whether drafting pays at all: from what passes cost on this device and from
what the target accepts of this text.

A tree's rows come best first, each with a score: the drafter's log-probability that the target takes the path to it. How often it
does is counted by depth, so scores become probabilities. Of the sizes that can be verified the one with the most expected tokens
per time is taken, tree by tree. Where drafting loses more than it had gained before, it rests, and is tried again after a while.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import GumihoError

FILE = "costs.json"
_SIZES = 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64
_MEMORY = 0.97  # of a cycle ago, in what is counted
# How much more often than its score says a row is accepted, for each step of its depth, before anything was counted: a target that
# takes its likeliest token takes what the drafter thinks likely more often than not. Where it draws, 1 would be right, and is soon
# found; to think too little of a drafter is worse, since rows that are not verified teach nothing.
_HOPE = 1.5
_DOUBT = 1.0  # cycles for which that is believed
_AGAIN = 2.0  # cycles that what was known weighs when drafting is tried again
_STAKE, _SAVED = 2.0, 3.0  # plain passes that drafting may lose before it rests, and that it can save up against it
_TURN = 0.2  # of the pace, by which each tree changes it
_REST = 48, 512  # tokens decoded plainly before drafting is tried again: at first, and at most


def sizes(rows: int) -> tuple[int, ...]:
    """Numbers of rows to choose from, for trees of so many."""
    return tuple(sorted({size for size in _SIZES if size < rows} | {rows}))


@dataclass(frozen=True)
class Costs:
    """Nanoseconds. target: of a pass, by its rows; draft: of drafting a tree; host: of a cycle, outside the engines."""

    target: Mapping[int, float]
    draft: float
    host: float

    def save(self, folder: Path) -> None:
        content = {"target": list(self.target.items()), "draft": self.draft, "host": self.host}
        (folder / FILE).write_text(json.dumps(content), "utf-8")

    @staticmethod
    def load(folder: Path) -> "Costs | None":
        """What was measured when the engines in a folder were compiled, None where nothing was."""
        file = folder / FILE
        if not file.is_file():
            return None
        try:
            raw = json.loads(file.read_text("utf-8"))
            return Costs({int(rows): float(cost) for rows, cost in raw["target"]}, float(raw["draft"]), float(raw["host"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GumihoError(f"{file} is damaged ({error}): compile the engines again") from None


class Planner:
    """Plans the cycles of one decoder; what it has learnt stays from text to text, and fades."""

    def __init__(self, costs: Costs, depth: int) -> None:
        """depth: of the deepest row."""
        self._sizes = np.array(sorted(costs.target), np.int64)
        self._target = np.array([costs.target[int(size)] for size in self._sizes])
        self._draft, self._host = costs.draft, costs.host
        # By depth: how often rows there were accepted, and how often their scores say they should have been.
        self._taken, self._hoped = _DOUBT * _HOPE ** np.arange(depth + 1), np.full(depth + 1, _DOUBT)
        self._pace = 0.0  # of the last trees: tokens per nanosecond that they promised
        self._left, self._rest, self._saved = 0, _REST[0], 0.0

    def begin(self) -> None:
        """Another text: what did not pay before may pay now."""
        self._left = min(self._left, max(_REST[0], self._rest // 8))

    @property
    def drafts(self) -> bool:
        """Whether the next cycle is to draft."""
        return self._left <= 0

    def rows(self, scores: np.ndarray, depths: np.ndarray) -> int:
        """How many of a tree's rows to verify, the tree having been drafted. scores: float [R]; depths: int [R]."""
        gained = np.cumsum(self._expected(scores, depths))[self._sizes - 1]
        spent = self._target + self._host
        promised = float(np.max(gained / (spent + self._draft)))
        self._pace += (promised - self._pace) * (_TURN if self._pace else 1.0)
        # The draft is made: more rows pay as long as they bring more than the time would elsewhere.
        return int(self._sizes[np.argmax(gained - max(self._pace, self._plain) * spent)])

    def _expected(self, scores: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """Tokens that each row brings, the root the target's own."""
        return np.minimum(np.exp(scores) * (self._taken / self._hoped)[depths], 1.0)

    def drafted(self, scores: np.ndarray, depths: np.ndarray, accepted: int, times: tuple[int, int, int]) -> None:
        """A cycle has drafted.

        scores, depths: of the rows that were verified; accepted: drafted tokens; times: nanoseconds of draft, target and host.
        """
        draft, target, host = times
        self._draft, self._host = _tracked(self._draft, draft), _tracked(self._host, host)
        spent = self._draft + self._took(len(scores), target) + self._host
        saved = float(self._expected(scores, depths).sum()) - spent * self._plain
        self._saved = min(self._saved + saved, _SAVED)
        self._taken *= _MEMORY
        self._hoped *= _MEMORY
        self._taken[1 : accepted + 1] += 1
        np.add.at(self._hoped, depths[1:], np.exp(scores[1:]))
        if self._saved < -_STAKE:
            self._left, self._rest, self._saved = self._rest, min(2 * self._rest, _REST[1]), 0.0
        elif self._saved == _SAVED:
            self._rest = _REST[0]  # it has paid for a while

    def decoded(self, times: tuple[int, int, int]) -> None:
        """A token was decoded plainly, in so many nanoseconds of draft, target and host."""
        self._took(1, times[1])
        self._left -= 1
        if self._left == 0:
            # Where nothing was accepted scores are half believed again: nothing would be verified, and nothing learnt. What was
            # counted before the rest weighs little, so that few trees decide.
            taken = np.maximum(self._taken, (self._taken + self._hoped) / 2)
            weight = np.minimum(1.0, _AGAIN / self._hoped)
            self._taken, self._hoped = taken * weight, self._hoped * weight
            self._pace = 0.0

    @property
    def _plain(self) -> float:
        return 1 / float(self._target[0] + self._host)

    def _took(self, rows: int, elapsed: int) -> float:
        """What a pass over so many rows takes."""
        at = int(np.searchsorted(self._sizes, rows))
        if at < len(self._sizes) and self._sizes[at] == rows:
            self._target[at] = _tracked(float(self._target[at]), elapsed)
            return float(self._target[at])
        return float(elapsed)


def _tracked(known: float, measured: float) -> float:
    """A low quantile of what is measured: what else the machine does lengthens some passes, and says nothing about the others."""
    return known + (measured - known) * (0.1 if measured < known else 0.02)
