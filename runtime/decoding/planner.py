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

from collections.abc import Sequence
from itertools import accumulate
from math import exp, inf

from .prices import Costs, Price, Prices
from .prompt_lookup import MOST, Lookup

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
_PAUSE = 16.0  # times the price of a pass: it was held up by something else
_TRY = 2, 1, 4  # drafts of a process, and after each rest, that verify so many rows to learn from little what drafting costs
_CHECK = 8, 96  # drafts and lookups after which a plain pass is measured: again for the first time, and from then on


class Planner:
    """Plans the cycles of one decoder; what it has learnt stays from text to text, and fades.

    In plain Python: behind a pass, which leaves nothing else in the processor's caches, numpy took three times as long.
    """

    def __init__(self, costs: Costs, depth: int, padded: int = 0) -> None:
        """depth: of the deepest row. padded: rows that every pass has, 0 where it has as many as it needs."""
        self._target, self._draft, self._host = Prices(costs.target), Price(costs.draft), Price(costs.host)
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
