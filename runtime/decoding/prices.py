"""What passes cost: the table measured at compile time (``costs.json``), and prices that are measured in this
process."""

import json
from bisect import bisect
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path

import numpy as np

from ..errors import DamageError, reason

FILE = "costs.json"
_SIZES = 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64
_WINDOW = 5  # measurements of a pass, the shortest of which is its price
_EXPIRE_ONCE, _EXPIRE = 4, 128  # passes after which a price that was measured once, or more often, is a guess again
_LONGEST = 1e15  # nanoseconds that a stored price may be, eleven days
_LARGEST = 1 << 20  # bytes of a costs.json
_MOST_ROWS = 1 << 16  # of a tree if its size is unknown
_MOST_POSITIONS = 1 << 24
_MOST_THREADS = 1 << 16
_STRIDE = 64  # positions by which a text must grow before prices are scaled again
CONTEXT = 128  # positions in the caches before the passes of ``Costs.target``


def sizes(rows: int) -> tuple[int, ...]:
    """The numbers of rows to choose from, ascending. rows: of the trees."""
    return tuple(sorted({size for size in _SIZES if size < rows} | {rows}))


@dataclass(frozen=True)
class Longer:
    """What passes cost behind ``context`` positions. Nanoseconds; target: by rows, some of those of ``Costs``."""

    context: int
    target: Mapping[int, float]
    draft: float


@dataclass(frozen=True)
class Costs:
    """Nanoseconds. target: of a pass behind CONTEXT positions, by its number of rows; draft: of drafting a tree; host:
    of a cycle, outside the engines. longer: the same behind more positions, ascending. threads: CPU threads they were
    measured with, which the engines then use where there are as many ``cores``; 0 for one per physical core."""

    target: Mapping[int, float]
    draft: float
    host: float
    longer: tuple[Longer, ...] = ()
    threads: int = 0
    cores: int = 0

    def threads_on(self, cores: int) -> int:
        """The CPU threads to use on so many cores; 0 for one on each."""
        return self.threads if cores == self.cores else 0

    def at(self, context: int) -> "Costs":
        """What passes cost behind so many positions: between the measured ones on a line, and never less than behind
        CONTEXT."""
        if not self.longer or context <= CONTEXT:
            return self
        contexts, rows = [CONTEXT, *(longer.context for longer in self.longer)], list(self.target)
        more = [np.zeros(len(rows) + 1)]
        for longer in self.longer:
            known = sorted(longer.target)
            by_rows = np.interp(rows, known, [longer.target[n] - self.target[n] for n in known])
            more.append(np.array([*by_rows, longer.draft - self.draft]).clip(0))
        # Prices never fall as the text grows: the lower of two measurements holds, as in ``rising``.
        lowest = np.minimum.accumulate(more[::-1])[::-1].T
        *target, draft = (float(np.interp(context, contexts, column)) for column in lowest)
        return Costs(
            {n: self.target[n] + added for n, added in zip(rows, target, strict=True)}, self.draft + draft, self.host
        )

    def save(self, folder: Path, suffix: str = "") -> None:
        """suffix: of the names of the drafter's graphs."""
        content = {
            "target": list(self.target.items()),
            "draft": self.draft,
            "host": self.host,
            "longer": [[longer.context, list(longer.target.items()), longer.draft] for longer in self.longer],
            "threads": self.threads,
            "cores": self.cores,
        }
        (folder / FILE.replace(".", f"{suffix}.")).write_text(json.dumps(content), "utf-8")

    @staticmethod
    def read(folder: Path, rows: int = 0, suffix: str = "") -> "Costs | None":
        """The costs stored in a folder of engines, None if there are none.

        rows: of the bundle's trees, 0 if unknown. suffix: see ``save``. Raises DamageError if the file is damaged.
        """
        file = folder / FILE.replace(".", f"{suffix}.")
        if not file.is_file():
            return None
        try:
            if file.stat().st_size > _LARGEST:
                raise ValueError("too large")
            raw = json.loads(file.read_text("utf-8"))
            if not isinstance(raw, dict) or not {"target", "draft", "host"} <= raw.keys():
                raise ValueError("target, draft or host is missing")
            target = _table(raw["target"], rows)
            longer = _longer(raw.get("longer", []), target, rows)
            threads, cores = (raw.get(name, 0) for name in ("threads", "cores"))
            if not all(type(count) is int and 0 <= count <= _MOST_THREADS for count in (threads, cores)):
                raise ValueError("threads or cores is not a number of them")
            return Costs(
                target, _price("draft", raw["draft"], 0), _price("host", raw["host"], 0), longer, threads, cores
            )
        except (OSError, ValueError, RecursionError) as error:
            raise DamageError(f"{file} is damaged ({reason(error)}): compile the engines again") from None

    @staticmethod
    def load(folder: Path, rows: int = 0, suffix: str = "") -> "Costs | None":
        """``read``, with prices that never fall with rows (``rising``)."""
        costs = Costs.read(folder, rows, suffix)
        return costs and replace(costs, target=rising(costs.target))

    def lines(self, drafts: bool = True) -> list[str]:
        """The table and warnings about odd entries, for people. drafts: whether there is a drafter."""
        target = sorted(self.target.items())
        lines = [
            f"milliseconds of a pass by rows: {', '.join(f'{n}: {ns / 1e6:.3g}' for n, ns in target)}",
            f"draft {self.draft / 1e6:.3g}, host {self.host / 1e6:.3g}" if drafts else f"host {self.host / 1e6:.3g}",
        ]
        if self.threads:
            lines.append(
                f"{self.threads} CPU thread{'s were' if self.threads > 1 else ' was'} clearly faster than one for each "
                f"of {self.cores} cores"
            )
        for longer in self.longer:
            prices = ", ".join(f"{n}: {ns / 1e6:.3g}" for n, ns in sorted(longer.target.items()))
            lines.append(
                f"behind {longer.context} positions {prices}" + (f", draft {longer.draft / 1e6:.3g}" if drafts else "")
            )
        for (fewer, price), (more, lower) in pairwise(target):
            if lower < price:
                lines.append(
                    f"warning: {fewer} {'row was' if fewer == 1 else 'rows were'} measured at {price / 1e6:.3g} ms and "
                    f"{more} rows at {lower / 1e6:.3g} ms, so the machine was busy: compile the engines again while it "
                    "is idle"
                )
        if self.draft > self.target[1]:
            lines.append("warning: a draft takes longer than a plain pass, so drafting will hardly pay")
        return lines


def rising(target: Mapping[int, float]) -> dict[int, float]:
    """Prices by rows that never fall with rows. Of two that contradict each other the lower one holds: other load only
    lengthens a pass."""
    descending = sorted(target, reverse=True)
    lowest = dict(zip(descending, accumulate((target[rows] for rows in descending), min), strict=True))
    return {rows: lowest[rows] for rows in target}


def _price(name: str, value: object, least: float) -> float:
    """A stored price in nanoseconds. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= _LONGEST:
        raise ValueError(f"{name} is not a time in nanoseconds")
    return float(value)


def _table(raw: object, rows: int) -> dict[int, float]:
    """Stored prices by rows. rows: of the trees, 0 if unknown. Raises ValueError."""
    if not isinstance(raw, list):
        raise ValueError("target is not a list")
    prices = dict[int, float]()
    for entry in raw:
        if not isinstance(entry, list) or len(entry) != 2:
            raise ValueError("target is not a list of pairs")
        size, cost = entry
        if (
            isinstance(size, bool)
            or not isinstance(size, int)
            or not 1 <= size <= (rows or _MOST_ROWS)
            or size in prices
        ):
            raise ValueError("target has an impossible number of rows")
        prices[size] = _price("an entry of target", cost, 1)
    for size in (1, rows or 1):
        if size not in prices:
            raise ValueError(f"target has no entry for {size} {'row' if size == 1 else 'rows'}")
    return prices


def _longer(raw: object, target: Mapping[int, float], rows: int) -> tuple[Longer, ...]:
    """Stored prices behind more positions. Raises ValueError."""
    if not isinstance(raw, list):
        raise ValueError("longer is not a list")
    found, last = list[Longer](), CONTEXT
    for entry in raw:
        if not isinstance(entry, list) or len(entry) != 3:
            raise ValueError("longer is not a list of contexts")
        context, table, draft = entry
        if isinstance(context, bool) or not isinstance(context, int) or not last < context <= _MOST_POSITIONS:
            raise ValueError("longer has an impossible context")
        prices, last = _table(table, rows), context
        if not prices.keys() <= target.keys():
            raise ValueError("longer has a number of rows that target lacks")
        found.append(Longer(context, prices, _price("draft", draft, 0)))
    return tuple(found)


class Price:
    """The price of one kind of pass: the shortest of the last few measurements, since other load only lengthens a pass.

    value: nanoseconds; a guess before the first measurement. count: measurements so far.
    """

    def __init__(self, guess: float) -> None:
        self.value, self.count, self._last = guess, 0, deque[tuple[int, float]](maxlen=_WINDOW)

    def measured(self, elapsed: float, clock: int = 0) -> None:
        """Takes in a measurement in nanoseconds. clock: passes so far; measurements made long ago no longer count."""
        self._last.append((clock, elapsed))
        while clock - self._last[0][0] > _EXPIRE:
            self._last.popleft()
        self.value, self.count = min(elapsed for _, elapsed in self._last), self.count + 1

    def scale(self, factor: float) -> None:
        """What was measured takes so many times as long now."""
        self.value *= factor
        self._last = deque(((clock, elapsed * factor) for clock, elapsed in self._last), maxlen=_WINDOW)

    @property
    def valid_until(self) -> int:
        """The clock up to which the price is no guess; -1 before the first measurement."""
        return self._last[-1][0] + (_EXPIRE if len(self._last) > 1 else _EXPIRE_ONCE) if self._last else -1


class Prices:
    """Prices of passes by their rows, which never fall with rows.

    A measured pass bounds the price of fewer rows from above and of more rows from below. A size that was not measured
    lately costs its last known price or the value of a line through measured sizes, whichever is less. A price that is
    too low is soon corrected, because that size is then chosen and measured; one that is too high never would be.

    now: nanoseconds by rows.
    """

    def __init__(self, guesses: Mapping[int, float]) -> None:
        self._passes = {rows: Price(price) for rows, price in sorted(rising(guesses).items())}
        self._clock, self._valid_until = 0, 0  # passes so far, and the clock up to which every measured price is valid
        self.now = {rows: price.value for rows, price in self._passes.items()}

    def scale(self, factors: Mapping[int, float]) -> None:
        """Passes take so many times as long now, by rows."""
        for rows, price in self._passes.items():
            price.scale(factors[rows])
        if self._clock:
            self._update()
        else:
            self.now = rising({rows: price.value for rows, price in self._passes.items()})

    def measured(self, rows: int, elapsed: float) -> bool:
        """Takes in the nanoseconds of a pass. Returns whether its price was a guess before."""
        self._clock += 1
        price = self._passes[rows]
        was_guess, before = self._clock > price.valid_until, price.value
        price.measured(elapsed, self._clock)
        if was_guess or price.value != before or self._clock > self._valid_until:
            self._update()
        return was_guess

    def _update(self) -> None:
        valid = {n: price for n, price in self._passes.items() if self._clock <= price.valid_until}
        self._valid_until = min(price.valid_until for price in valid.values())
        measured = rising({n: price.value for n, price in valid.items()})
        measured = {1: min(self._passes[1].value, *measured.values()), **measured}
        sizes = list(measured)
        self.now = {
            n: measured[n] if n in measured else _between(n, price.value, measured, sizes)
            for n, price in self._passes.items()
        }

    @property
    def plain_measured(self) -> bool:
        """Whether a plain pass was measured."""
        return self._passes[1].count > 0


class TextLength:
    """Scales prices as the text grows, or another one begins, in the ratio of the stored prices at these lengths."""

    def __init__(self, costs: Costs, target: Prices, draft: Price) -> None:
        """costs: from which the prices come."""
        self._costs, self._target, self._draft = costs, target, draft
        self._here, self._positions = costs, (CONTEXT, CONTEXT)

    def now(self, positions: int, drafter: int) -> bool:
        """Sets how many positions are in the caches. positions: in the target's; drafter: in the drafter's. Returns
        whether prices have changed."""
        last = self._positions
        if not self._costs.longer or max(abs(positions - last[0]), abs(drafter - last[1])) < _STRIDE:
            return False
        before, self._positions = self._here, (positions, drafter)
        self._here = replace(self._costs.at(positions), draft=self._costs.at(drafter).draft)
        self._target.scale({rows: price / before.target[rows] for rows, price in self._here.target.items()})
        if before.draft and self._here.draft:
            self._draft.scale(self._here.draft / before.draft)
        return True


def _between(rows: int, guess: float, measured: Mapping[int, float], sizes: Sequence[int]) -> float:
    """A price that is not measured. measured: prices of ``sizes``, ascending from 1."""
    at = bisect(sizes, rows)
    below, other = sizes[at - 1], sizes[at] if at < len(sizes) else 1
    slope = (measured[other] - measured[below]) / (other - below) if other != below else inf
    return max(measured[below], min(guess, measured[below] + (rows - below) * slope))
