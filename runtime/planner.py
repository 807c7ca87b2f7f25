"""How many rows of a tree are worth verifying, and whether drafting pays at all: from what passes cost on this device and from
what the target accepts of this text.

A tree's rows come best first, each with a score: the drafter's log-probability that the target takes the path to it. How often it
does is counted by depth, so scores become probabilities. Of the sizes that can be verified the one with the most expected tokens
per time is taken, tree by tree. Where drafting loses more than it had gained before, it rests, and is tried again after a while.

Where the text repeats itself, what followed before is verified instead, if that promises more: it costs no draft. How often it is
right is counted by how many tokens are alike already, whether it was verified or not.

The prices measured at compile time are only a first guess: a busy machine may have falsified any of them. The first pass of each kind
in this process replaces its guess, and ``due`` asks for a plain pass often enough that the price of plain decoding stays current
while drafting.
"""

import json
from bisect import bisect
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import exp, inf
from pathlib import Path

from .errors import GumihoError
from .lookup import MOST, Lookup

FILE = "costs.json"
_SIZES = 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64
_MEMORY = 0.97  # of a cycle ago, in what is counted
# How much more often than its score says a row is accepted, for each step of its depth, before anything was counted: a target that
# takes its likeliest token takes what the drafter thinks likely more often than not. Where it draws, 1 would be right, and is soon
# found; to think too little of a drafter is worse, since rows that are not verified teach nothing.
_HOPE = 1.5
_DOUBT = 1.0  # cycles for which that is believed
_AGAIN = 2.0  # cycles that what was known weighs when drafting is tried again
_STAKE, _SAVED = 1.5, 3.0  # plain passes that drafting may lose before it rests, and that it can save up against it
_LESS = 0.5  # by which it may lose less when it is tried again
_TURN = 0.2  # of the pace, by which each tree changes it
_REST = 32, 512  # passes without a draft before drafting is tried again: at first, and at most
_LONGER = 4  # times as long is the next rest if drafting does not pay again
_DEAR = 50  # and at least so many for each plain pass that a draft takes, so that a try costs a fiftieth
_REPEATS = 1.0, 2.0  # repetitions that went on, of how many: before any was seen, one of two
_UNLIKELY = 0.02  # no tokens are looked up that are as unlikely as this
_LAST = 5  # measurements of a pass of which the shortest is its price
_PAUSE = 16.0  # times the price of a pass: it was held up by something else
_OLD = 4, 128  # passes after which prices that were measured once, or more often, are guesses again
_TRY = 2, 1, 4  # drafts of a process, and after each rest, that verify so many rows to learn from little what drafting costs
_CHECK = 8, 96  # drafts and lookups after which a plain pass is measured: again for the first time, and from then on
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


class _Price:
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


class _Prices:
    """Prices of passes by their rows, which never fall with rows.

    A measured pass bounds the price of fewer rows from above and of more rows from below. A size that was not measured lately costs
    what was known of it or what a line through measured sizes says, whichever is less: a price that is too low is soon corrected, since
    that size is then chosen and measured, and one that is too high never would be.
    """

    def __init__(self, guesses: Mapping[int, float]) -> None:
        self._passes = {rows: _Price(cost) for rows, cost in sorted(rising(guesses).items())}
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


class Planner:
    """Plans the cycles of one decoder; what it has learnt stays from text to text, and fades.

    In plain Python: behind a pass, which leaves nothing else in the processor's caches, numpy took three times as long.
    """

    def __init__(self, costs: Costs, depth: int, padded: int = 0) -> None:
        """depth: of the deepest row. padded: rows that every pass has, 0 where it has as many as it needs."""
        self._target, self._draft, self._host = _Prices(costs.target), _Price(costs.draft), _Price(costs.host)
        self._until, self._check = 0, _CHECK[0]  # drafts and lookups before a plain pass is due, and after it before the next
        # By depth: how often rows there were accepted, and how often their scores say they should have been.
        self._taken = [_DOUBT * _HOPE**at for at in range(depth + 1)]
        self._hoped = [_DOUBT] * (depth + 1)
        self._pace = 0.0  # of the last trees: tokens per nanosecond that they promised
        self._left, self._rest, self._saved = 0.0, 0.0, 0.0
        self._tries = _TRY[0]  # drafts to come that verify few rows
        self._owed = 0  # cycles whose time is not yet taken off what was saved
        self._lookup, self._prompt = Lookup(), list[int]()
        self._found: tuple[int, Sequence[int]] = 0, ()
        # By the length of a repetition: how often it went on, and how often that was looked at.
        self._right, self._seen = ([weight] * (MOST + 1) for weight in _REPEATS)
        self._late = 0.0  # nanoseconds that the drafter takes, before it drafts again, for what came without it
        self._caught_up = True  # whether nothing did since it drafted last
        self._padded = padded

    def begin(self, prompt: Sequence[int] = ()) -> None:
        """Another text: what did not pay before may pay now."""
        self._left = min(self._left, max(self._short, self._rest / 8))
        if list(prompt[: len(self._lookup.text)]) != self._lookup.text:
            self._lookup = Lookup()
        self._prompt, self._found, self._caught_up = list(prompt[len(self._lookup.text) :]), (0, ()), True

    def lookup(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Takes in what was emitted, in every cycle, and returns what to verify next instead of a draft: what followed the text's last
        tokens before, as far as that promises more than anything else. Nothing, where it does not.

        tokens: emitted since the last call; most: at most so many are returned.
        """
        length, found = self._found
        for at, (before, token) in enumerate(zip(found, tokens, strict=False), length):
            alike, at = before == token, min(at, MOST)
            self._right[at], self._seen[at] = _MEMORY * self._right[at] + alike, _MEMORY * self._seen[at] + 1
            if not alike:
                break
        self._lookup.extend((*self._prompt, *tokens))
        self._prompt = []
        length, found = self._found = self._lookup.find(most)
        gained, chance = [1.0], 1.0
        while len(gained) <= len(found) and chance > _UNLIKELY:
            at = min(length + len(gained) - 1, MOST)
            chance *= self._right[at] / self._seen[at]
            gained.append(gained[-1] + chance)
        best, pace = 0, max(self._pace or inf, self._plain) if self.drafts else self._plain
        besides = self._host.value + (self._late if self.drafts and self._caught_up else 0)
        for rows, cost in ({self._padded: self._target.now[1]} if self._padded else self._target.now).items():
            count = min(rows, len(gained)) - 1
            if count and gained[count] > pace * (cost + besides):
                best, pace = count, gained[count] / (cost + besides)
        return found[:best]

    @property
    def due(self) -> bool:
        """Whether the next cycle must be a plain pass, to measure what it costs."""
        return self._until <= 0

    @property
    def drafts(self) -> bool:
        """Whether the next cycle is to draft, if no plain pass is due."""
        return self._left <= 0

    def rows(self, scores: Sequence[float], depths: Sequence[int]) -> int:
        """How many of a tree's rows to verify, the tree having been drafted. scores, depths: of its R rows."""
        gained = list(accumulate(self._expected(scores, depths)))
        spent = {rows: target + self._host.value for rows, target in self._target.now.items()}
        if self._tries and self._target.tried:
            size = min((rows for rows in spent if rows >= _TRY[2]), default=max(spent))
            spent = {size: spent[size]}
        promised = max(gained[rows - 1] / (cost + self._draft.value) for rows, cost in spent.items())
        self._pace += (promised - self._pace) * (_TURN if self._pace else 1.0)
        # The draft is made: more rows pay as long as they bring more than the time would elsewhere.
        pace = max(self._pace, self._plain)
        return max(spent, key=lambda rows: gained[rows - 1] - pace * spent[rows])

    def _expected(self, scores: Sequence[float], depths: Sequence[int]) -> list[float]:
        """Tokens that each row brings, the root the target's own. Of a depth no more are accepted than of the one before."""
        scale = [taken / hoped for taken, hoped in zip(self._taken, self._hoped, strict=True)]
        brought, found = [1.0] + [0.0] * (len(scale) - 1), [1.0]
        for score, depth in zip(scores[1:], depths[1:], strict=True):
            found.append(min(exp(score) * scale[depth], brought[depth - 1] - brought[depth]))
            brought[depth] += found[-1]
        return found

    def drafted(
        self, scores: Sequence[float], depths: Sequence[int], accepted: int, times: tuple[int, int, int], late: int = 0
    ) -> None:
        """A cycle has drafted.

        scores, depths: of the rows that were verified; accepted: drafted tokens; times: nanoseconds of draft, target and host, 0 where it
        is not known; late: of what the drafter had to read first.
        """
        self._late += (late - self._late) * (0 if self._caught_up else _TURN if self._late else 1)
        self._caught_up = True
        draft, target, host = times
        self._until, self._tries = self._until - 1, max(self._tries - 1, 0)
        paused = target > _PAUSE * self._target.now.get(len(scores), target)
        self._draft.measured(draft)
        if host:
            self._host.measured(host)
        spent = self._took(len(scores), target) + self._draft.value + self._host.value
        # Of tokens that came: what is expected varies less, but long has a confident drafter pay that is never right.
        # The first draft of a process may wait for the disk, and any pass for other programs: such a cycle is charged what the next takes.
        self._saved, self._owed = self._saved + accepted + 1, self._owed + 1
        if self._draft.count > 1 and not paused:
            self._saved, self._owed = min(self._saved - self._owed * spent * self._plain, _SAVED), 0
        self._taken = [_MEMORY * taken + (0 < depth <= accepted) for depth, taken in enumerate(self._taken)]
        self._hoped = [_MEMORY * hoped for hoped in self._hoped]
        for score, depth in zip(scores[1:], depths[1:], strict=True):
            self._hoped[depth] += exp(score)
        if self._saved < -_STAKE:
            self._left = max(self._rest, self._short)
            self._rest, self._saved = min(_LONGER * self._left, max(self._short, _REST[1])), -_LESS
        elif self._saved >= _SAVED:
            self._rest = 0.0  # it has paid for a while

    def decoded(self, target: int, rows: int = 1) -> None:
        """A cycle did not draft: a pass of the target over so many rows took so many nanoseconds."""
        rows = 1 if self._padded else rows
        self._took(rows, target)
        if rows == 1:
            self._until, self._check = self._check, _CHECK[1]
        else:
            self._until -= 1
        resting = self._left > 0
        self._left, self._caught_up = self._left - 1, False
        if resting and self._left <= 0:
            # Where nothing was accepted scores are half believed again: nothing would be verified, and nothing learnt. What was
            # counted before the rest weighs little, so that few trees decide.
            for depth, (taken, hoped) in enumerate(zip(self._taken, self._hoped, strict=True)):
                weight = min(1.0, _AGAIN / hoped)
                self._taken[depth], self._hoped[depth] = max(taken, (taken + hoped) / 2) * weight, hoped * weight
            self._pace, self._tries = 0.0, _TRY[1]

    @property
    def _short(self) -> float:
        """Passes of the shortest rest."""
        return max(_REST[0], _DEAR * self._draft.value * self._plain)

    @property
    def _plain(self) -> float:
        return 1 / (self._target.now[1] + self._host.value)

    def _took(self, rows: int, elapsed: int) -> float:
        """What a pass over so many rows costs, one having taken so many nanoseconds."""
        if rows not in self._target.now:
            return float(elapsed)
        if self._target.measured(rows, elapsed):
            self._pace = 0.0  # what was promised rests on a guess
        return self._target.now[rows]
