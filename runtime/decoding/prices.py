"""What passes cost: the table measured at compile time (``costs.json``), and the prices that follow this process."""

import json
from bisect import bisect
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path

from ..errors import GumihoError

FILE = "costs.json"
_SIZES = 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64
_LAST = 5  # measurements of a pass of which the shortest is its price
_OLD = 4, 128  # passes after which prices that were measured once, or more often, are guesses again
_LONGEST = 1e15  # nanoseconds that a pass may take, eleven days
_LARGEST = 1 << 20  # bytes of a costs.json
_MOST_ROWS = 1 << 16  # of a tree, if its size is not known


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
    def read(folder: Path, rows: int = 0) -> "Costs | None":
        """What is stored beside the engines in a folder, None if nothing is.

        rows: of the bundle's trees, 0 if unknown. Raises GumihoError if the file is damaged.
        """
        file = folder / FILE
        if not file.is_file():
            return None
        try:
            if file.stat().st_size > _LARGEST:
                raise ValueError("too large")
            raw = json.loads(file.read_text("utf-8"))
            if not isinstance(raw, dict) or not {"target", "draft", "host"} <= raw.keys():
                raise ValueError("target, draft and host are not all there")
            target = _table(raw["target"], rows)
            return Costs(target, _price("draft", raw["draft"], 0), _price("host", raw["host"], 0))
        except (OSError, ValueError, RecursionError) as error:
            raise GumihoError(f"{file} is damaged ({error}): compile the engines again") from None

    @staticmethod
    def load(folder: Path, rows: int = 0) -> "Costs | None":
        """The same, made to never fall with rows."""
        costs = Costs.read(folder, rows)
        return costs and Costs(rising(costs.target), costs.draft, costs.host)

    def lines(self) -> list[str]:
        """The table and warnings about odd entries, for people."""
        target = sorted(self.target.items())
        plain, found = (
            self.target[1] / 1e6,
            [f"milliseconds of a pass by rows: {', '.join(f'{n}: {ns / 1e6:.3g}' for n, ns in target)}"],
        )
        found.append(f"draft {self.draft / 1e6:.3g}, host {self.host / 1e6:.3g}")
        for (few, dear), (more, cheap) in pairwise(target):
            if cheap < dear:
                found.append(
                    f"warning: {few} {'row was' if few == 1 else 'rows were'} measured at {dear / 1e6:.3g} ms and {more} rows at "
                    f"{cheap / 1e6:.3g} ms, so the machine was busy: compile the engines again while it is idle"
                )
        if self.draft / 1e6 > plain:
            found.append("warning: a draft takes longer than a plain pass, so drafting will hardly pay")
        return found


def rising(target: Mapping[int, float]) -> dict[int, float]:
    """Costs that never fall with rows. Of two that contradict each other the lower one holds: other load only lengthens a pass."""
    more = sorted(target, reverse=True)
    least = dict(zip(more, accumulate((target[rows] for rows in more), min), strict=True))
    return {rows: least[rows] for rows in target}


def _price(name: str, value: object, least: float) -> float:
    """A stored price in nanoseconds. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= _LONGEST:
        raise ValueError(f"{name} is no time in nanoseconds")
    return float(value)


def _table(raw: object, rows: int) -> dict[int, float]:
    """Stored prices by rows, of trees of so many rows if that is known. Raises ValueError."""
    if not isinstance(raw, list):
        raise ValueError("target is no list")
    found = dict[int, float]()
    for entry in raw:
        if not isinstance(entry, list) or len(entry) != 2:
            raise ValueError("target is no list of pairs")
        size, cost = entry
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= (rows or _MOST_ROWS) or size in found:
            raise ValueError("target has an impossible number of rows")
        found[size] = _price("an entry of target", cost, 1)
    for size in (1, rows or 1):
        if size not in found:
            raise ValueError(f"target has no entry for {size} {'row' if size == 1 else 'rows'}")
    return found


class Price:
    """What one kind of pass takes: the shortest of the last few measurements, since other load only lengthens a pass. Before the
    first, a guess."""

    def __init__(self, guess: float) -> None:
        self.value, self.count, self._last = guess, 0, deque[tuple[int, float]](maxlen=_LAST)

    def measured(self, elapsed: float, at: int = 0) -> None:
        """at: passes so far. Measurements long ago no longer count."""
        self._last.append((at, elapsed))
        while at - self._last[0][0] > _OLD[1]:
            self._last.popleft()
        self.value, self.count = min(elapsed for _, elapsed in self._last), self.count + 1

    @property
    def until(self) -> int:
        """At how many passes the last measurement is forgotten, -1 if there is none."""
        return self._last[-1][0] + _OLD[len(self._last) > 1] if self._last else -1


class Prices:
    """Prices of passes by their rows, which never fall with rows.

    A measured pass bounds the price of fewer rows from above and of more rows from below. A size that was not measured lately costs
    what was known of it or what a line through measured sizes says, whichever is less: a price that is too low is soon corrected, since
    that size is then chosen and measured, and one that is too high never would be.
    """

    def __init__(self, guesses: Mapping[int, float]) -> None:
        self._passes = {rows: Price(cost) for rows, cost in sorted(rising(guesses).items())}
        self._clock, self._until = 0, 0  # passes; and at how many what is known now will be partly forgotten
        self.now = {rows: price.value for rows, price in self._passes.items()}

    def measured(self, rows: int, elapsed: float) -> bool:
        """A pass took so many nanoseconds. Returns whether the price was a guess before."""
        self._clock += 1
        price = self._passes[rows]
        guessed, before = self._clock > price.until, price.value
        price.measured(elapsed, self._clock)
        if guessed or price.value != before or self._clock > self._until:
            self._reckon()
        return guessed

    def _reckon(self) -> None:
        fresh = {n: price for n, price in self._passes.items() if self._clock <= price.until}
        self._until = min(price.until for price in fresh.values())
        known = rising({n: price.value for n, price in fresh.items()})
        known = {1: min(self._passes[1].value, *known.values()), **known}
        sizes = list(known)
        self.now = {n: known[n] if n in known else _between(n, price.value, known, sizes) for n, price in self._passes.items()}

    @property
    def tried(self) -> bool:
        """Whether a plain pass was measured."""
        return self._passes[1].count > 0


def _between(rows: int, guess: float, known: Mapping[int, float], sizes: Sequence[int]) -> float:
    """A price that is not measured. known: those of ``sizes``, ascending from 1."""
    at = bisect(sizes, rows)
    below, other = sizes[at - 1], sizes[at] if at < len(sizes) else 1
    slope = (known[other] - known[below]) / (other - below) if other != below else inf
    return max(known[below], min(guess, known[below] + (rows - below) * slope))
