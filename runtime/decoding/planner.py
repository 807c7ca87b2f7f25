"""Decides in every cycle whether to draft, to verify looked-up tokens or to decode plainly, and how many rows to
verify.

The measure is expected tokens per nanosecond. The prices of passes are measured (``prices``). Expected tokens follow
from counts of what the target has accepted, in which older cycles weigh less.

Rows of a draft tree. They come best first, each with a score: the drafter's log-probability that the target accepts the
path to it. For every depth the planner counts how many rows were accepted and how many the scores predicted. The ratio
turns scores into probabilities (``_Calibration``). Of the sizes that can be verified, the one with the most expected
tokens per time is taken.

Drafting on and off. A balance tracks the time that drafting saves, in plain passes (``_DraftBalance``). If it falls too
low, drafting pauses. Then a few trees decide whether it goes on. Pauses get longer until drafting pays again.

Prompt lookup. If the last tokens occurred earlier in the text, the tokens that followed them there can be verified
without a draft. Every cycle updates the hit rate per match length, even if the lookup was not verified
(``_LookupForecast``). A lookup is verified if it promises more tokens per time than drafting and plain decoding.

Plain passes. Prices measured at compile time are a first guess, which the first pass of its kind replaces: the machine
may have been busy. A draft does not show what a plain pass costs, so now and then a plain pass is due.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import exp, inf

from .prices import Costs, Price, Prices, TextLength
from .prompt_lookup import LONGEST_MATCH, Lookup

_DECAY = 0.97  # weight of a cycle in every count, relative to the cycle after it
# Before anything is counted, rows of depth d are accepted _PRIOR_GAIN**d times as often as their scores say: a target
# that takes its likeliest token accepts likely drafts more often than the drafter predicts. Where the target samples, 1
# would be right and is soon learned. A pessimistic prior verifies too few rows to correct itself.
_PRIOR_GAIN = 1.5
_PRIOR_WEIGHT = 1.0  # cycles that the prior counts for
_RESUMED_WEIGHT = 2.0  # cycles that the counts before a pause count for after it
_MAX_LOSS, _MAX_SAVING = 1.5, 3.0  # plain passes: drafting pauses below a balance of -1.5; the balance is capped at 3
_RESUMED_BALANCE = -0.5  # plain passes: the balance after a pause
_SHORTEST_PAUSE, _LONGEST_PAUSE = 32, 512  # passes without a draft
_PAUSE_GROWTH = 4  # factor by which the next pause is longer if drafting does not pay after this one
# A pause takes at least so many times the price of trying, so that it costs 2 % of the time: of a draft, and of reading
# the prompt before it. For prompts it is no longer than _PROMPT_PAUSE: drafting may pay in the next text.
_PROBE_SPACING, _PROMPT_PAUSE = 50, 128
_EMA_RATE = 0.2  # weight of the latest value in moving averages
_LOOKUP_PRIOR = 1.0, 2.0  # hits and trials of every match length before anything is counted
_LEAST_CHANCE = 0.02  # that a looked-up token is accepted; less likely ones are not verified
_OUTLIER = 16.0  # a pass that took so many times its price was delayed by something else
# The first drafts of a process and after a pause verify few rows: they show at little cost what drafting and
# verification take.
_FIRST_PROBES, _RESUMED_PROBES, _PROBE_ROWS = 2, 1, 4
_FIRST_INTERVAL, _INTERVAL = 8, 96  # drafts and lookups between two plain passes: after the first one, and later


class Planner:
    """Plans the cycles of one decoder. What it has learned stays from text to text, and fades.

    In plain Python: right after a pass, which empties the processor's caches, numpy took three times as long.
    """

    def __init__(self, costs: Costs, depth: int, padded: int = 0, drafts: bool = True, fixed: bool = False) -> None:
        """depth: of the deepest row. padded: rows of every pass if there is one size of passes, otherwise 0. drafts:
        whether there is a drafter. fixed: whether passes have the sizes of ``costs`` only, so that other numbers of
        rows are padded."""
        self._target, self._draft, self._host = Prices(costs.target), Price(costs.draft), Price(costs.host)
        self._text_length = TextLength(costs, self._target, self._draft)
        self._padded, self._drafts, self._fixed = padded, drafts, fixed
        self._calibration = _Calibration(depth)
        self._balance = _DraftBalance()
        self._lookups = _LookupForecast()
        # tokens per nanosecond that the last trees promised, a moving average; 0 before the first tree
        self._draft_rate = 0.0
        self._probes = _FIRST_PROBES  # drafts to come that verify few rows
        # Drafts and lookups before the next plain pass, and from that one to the one after it.
        self._until_plain_pass, self._interval = 0, _FIRST_INTERVAL
        # nanoseconds that the drafter takes to read tokens of cycles without a draft, a moving average
        self._catch_up_ns = 0.0
        self._caught_up = True  # whether the last cycle drafted, so that there is nothing to read
        self._prompt_ns = 0.0  # nanoseconds that the drafter takes to read a prompt, a moving average

    def behind(self, positions: int, drafter: int) -> None:
        """Sets how many positions are in the caches. positions: in the target's; drafter: in the drafter's."""
        before = self.plain_pass_ns
        if self._text_length.now(positions, drafter):
            self._draft_rate *= before / self.plain_pass_ns

    def begin(self, prompt: Sequence[int] = ()) -> None:
        """Another text begins, which shortens a pause: drafting may pay now. prompt: for lookups, empty if there are
        none."""
        self._balance.begin(self._shortest_pause)
        self._lookups.begin(prompt)
        self._caught_up = True

    @property
    def plain_pass_due(self) -> bool:
        """Whether the next cycle must be a plain pass, to measure its price."""
        return self._until_plain_pass <= 0

    @property
    def drafting(self) -> bool:
        """Whether drafting is on: the next cycle is to draft, unless a plain pass is due or a lookup is verified."""
        return self._drafts and self._balance.pause_left <= 0

    def lookup(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """The looked-up tokens to verify in the next cycle instead of a draft, at most ``most``; none if something else
        promises more. To be called in every cycle of a text with lookups.

        tokens: emitted since the last call.
        """
        continuation, gains = self._lookups.extend(tokens, most)
        plain_rate, drafting = self._plain_rate, self.drafting
        best_count, best_rate = 0, max(self._draft_rate or inf, plain_rate) if drafting else plain_rate
        # After a lookup the drafter must catch up, which it need not if it drafts now.
        besides = self._host.value + (self._catch_up_ns if drafting and self._caught_up else 0)
        for rows, price in ({self._padded: self._target.now[1]} if self._padded else self._target.now).items():
            count = min(rows, len(gains)) - 1
            if count and gains[count] > best_rate * (price + besides):
                best_count, best_rate = count, gains[count] / (price + besides)
        return continuation[:best_count]

    def choose_rows(self, scores: Sequence[float], depths: Sequence[int]) -> int:
        """How many rows of a drafted tree to verify. scores, depths: of all its rows."""
        gains = list(accumulate(self._calibration.expected(scores, depths)))
        prices = {rows: target + self._host.value for rows, target in self._target.now.items()}
        if self._probes and self._target.plain_measured:
            size = min((rows for rows in prices if rows >= _PROBE_ROWS), default=max(prices))
            prices = {size: prices[size]}
        promised = max(gains[rows - 1] / (price + self._draft.value) for rows, price in prices.items())
        self._draft_rate = _averaged(self._draft_rate, promised)
        # The draft's price is spent by now: more rows pay if they bring more tokens than the same time would elsewhere.
        rate = max(self._draft_rate, self._plain_rate)
        return max(prices, key=lambda rows: gains[rows - 1] - rate * prices[rows])

    def drafted(
        self,
        scores: Sequence[float],
        depths: Sequence[int],
        accepted: int,
        times: tuple[int, int, int],
        catch_up_ns: int = 0,
    ) -> None:
        """Takes in a cycle that drafted. scores, depths: of the verified rows. accepted: drafted tokens that were
        accepted. times: nanoseconds of draft, target and host, 0 where unknown. catch_up_ns: of reading the tokens of
        cycles without a draft."""
        if not self._caught_up:
            self._catch_up_ns = _averaged(self._catch_up_ns, catch_up_ns)
            self._caught_up = True
        self._until_plain_pass -= 1
        self._probes = max(0, self._probes - 1)
        draft, target, host = times
        held_up = target > _OUTLIER * self._target.now.get(len(scores), target)
        self._draft.measured(draft)
        if host:
            self._host.measured(host)
        spent = self._measured(len(scores), target) + self._draft.value + self._host.value
        # The balance counts tokens that came, not expected ones: those vary less, but a confident drafter that is never
        # right would seem to pay for long.
        self._balance.credit(accepted + 1)
        # The first draft of a process may wait for the disk, any pass for other programs: the next cycle's time stands
        # in.
        if self._draft.count > 1 and not held_up:
            self._balance.charge(spent, self._plain_rate)
        self._calibration.count(scores, depths, accepted)
        if self._balance.must_pause():
            self._balance.pause(self._shortest_pause)

    def decoded(self, target: int, rows: int = 1) -> None:
        """Takes in a cycle without a draft. target: nanoseconds of its pass; rows: that it verified, 1 for a plain
        pass."""
        rows = 1 if self._padded else rows
        self._measured(rows, target)
        if rows == 1:
            self._until_plain_pass, self._interval = self._interval, _INTERVAL
        else:
            self._until_plain_pass -= 1
        self._caught_up = False
        if self._balance.pass_ends_pause():
            self._calibration.restart()
            self._draft_rate, self._probes = 0.0, _RESUMED_PROBES

    def prompt_read(self, elapsed: int) -> None:
        """Takes in the nanoseconds in which the drafter read a prompt, before the first draft behind it."""
        self._prompt_ns = _averaged(self._prompt_ns, elapsed)

    @property
    def plain_pass_ns(self) -> float:
        """The price of the target's pass in a plain cycle."""
        return self._target.now[1]

    @property
    def _shortest_pause(self) -> float:
        spacing = _PROBE_SPACING * self._plain_rate
        with_prompt = min(spacing * (self._draft.value + self._prompt_ns), _PROMPT_PAUSE)
        return max(_SHORTEST_PAUSE, spacing * self._draft.value, with_prompt)

    @property
    def _plain_rate(self) -> float:
        """Tokens per nanosecond of plain decoding."""
        return 1 / (self._target.now[1] + self._host.value)

    def _measured(self, rows: int, elapsed: int) -> float:
        """Takes in the nanoseconds of a target pass. Returns the price of such passes."""
        rows = min((size for size in self._target.now if size >= rows), default=rows) if self._fixed else rows
        if rows not in self._target.now:
            return float(elapsed)
        if self._target.measured(rows, elapsed):
            self._draft_rate = 0.0  # it was computed with a guessed price
        return self._target.now[rows]


def _averaged(average: float, latest: float) -> float:
    """A moving average with its latest value. average: 0 before the first one."""
    return average + (latest - average) * (_EMA_RATE if average else 1.0)


class _Calibration:
    """What rows of each depth bring, from how many were accepted and how many their scores predicted."""

    def __init__(self, deepest: int) -> None:
        self._accepted = [_PRIOR_WEIGHT * _PRIOR_GAIN**depth for depth in range(deepest + 1)]
        self._predicted = [_PRIOR_WEIGHT] * (deepest + 1)

    def expected(self, scores: Sequence[float], depths: Sequence[int]) -> list[float]:
        """Expected tokens by row; the root brings the target's own. A depth brings no more in all than the depth above
        it."""
        gain = [accepted / predicted for accepted, predicted in zip(self._accepted, self._predicted, strict=True)]
        by_depth, by_row = [1.0] + [0.0] * (len(gain) - 1), [1.0]
        for score, depth in zip(scores[1:], depths[1:], strict=True):
            by_row.append(min(exp(score) * gain[depth], by_depth[depth - 1] - by_depth[depth]))
            by_depth[depth] += by_row[-1]
        return by_row

    def count(self, scores: Sequence[float], depths: Sequence[int], accepted: int) -> None:
        """scores, depths: of the verified rows. accepted: drafted tokens that were accepted."""
        self._accepted = [_DECAY * count + (0 < depth <= accepted) for depth, count in enumerate(self._accepted)]
        self._predicted = [_DECAY * count for count in self._predicted]
        for score, depth in zip(scores[1:], depths[1:], strict=True):
            self._predicted[depth] += exp(score)

    def restart(self) -> None:
        """Drafting resumes after a pause. The counts are cut to a low weight, so that few trees decide. Where little
        was accepted, scores are half believed again: otherwise nothing would be verified and nothing learned."""
        for depth, (accepted, predicted) in enumerate(zip(self._accepted, self._predicted, strict=True)):
            weight = min(1.0, _RESUMED_WEIGHT / predicted)
            self._accepted[depth] = max(accepted, (accepted + predicted) / 2) * weight
            self._predicted[depth] = predicted * weight


class _DraftBalance:
    """The time that drafting saved, in plain passes, and the pauses that follow when it has lost too much.

    pause_left: passes without a draft before drafting resumes; 0 or less while drafting is on.
    """

    def __init__(self) -> None:
        self.pause_left = 0.0
        self._next_pause = 0.0  # passes; the next pause is the shortest one if that is longer
        self._balance = 0.0  # the tokens that drafting brought, less the plain passes that its time was worth
        self._uncharged = 0  # cycles whose tokens are in the balance and whose time is not

    def begin(self, shortest_pause: float) -> None:
        """Another text begins, which shortens a pause."""
        self.pause_left = min(self.pause_left, max(shortest_pause, self._next_pause / 8))

    def credit(self, tokens: int) -> None:
        """A cycle that drafted emitted so many tokens."""
        self._balance += tokens
        self._uncharged += 1

    def charge(self, spent: float, plain_rate: float) -> None:
        """Charges all uncharged cycles. spent: nanoseconds of one; plain_rate: tokens per nanosecond of plain
        decoding."""
        self._balance = min(self._balance - self._uncharged * spent * plain_rate, _MAX_SAVING)
        self._uncharged = 0

    def must_pause(self) -> bool:
        """Judges the balance after a cycle. Returns whether drafting has lost too much."""
        if self._balance >= _MAX_SAVING:
            self._next_pause = 0.0  # drafting has paid for a while: the next pause is a short one
        return self._balance < -_MAX_LOSS

    def pause(self, shortest: float) -> None:
        """Drafting pauses. shortest: passes that the pause takes at least."""
        self.pause_left = max(self._next_pause, shortest)
        self._next_pause = min(_PAUSE_GROWTH * self.pause_left, max(shortest, _LONGEST_PAUSE))
        self._balance = _RESUMED_BALANCE

    def pass_ends_pause(self) -> bool:
        """Counts a pass without a draft. Returns whether a pause ended with it."""
        paused = self.pause_left > 0
        self.pause_left -= 1
        return paused and self.pause_left <= 0


class _LookupForecast:
    """Looks up what followed the text's last tokens earlier, and how many of those tokens to expect.

    hits, trials: by match length, how often the next token was the looked-up one, and how often there was one.
    """

    def __init__(self) -> None:
        self._lookup = Lookup()
        self._new_prompt = list[int]()  # tokens of the prompt that the lookup has not read
        self._match_length = 0  # of the last lookup
        self._continuation: Sequence[int] = ()  # its tokens
        self.hits, self.trials = ([weight] * (LONGEST_MATCH + 1) for weight in _LOOKUP_PRIOR)

    def begin(self, prompt: Sequence[int]) -> None:
        """Another text begins; it may continue the last one."""
        if list(prompt[: len(self._lookup.text)]) != self._lookup.text:
            self._lookup = Lookup()
        self._new_prompt = list(prompt[len(self._lookup.text) :])
        self._match_length, self._continuation = 0, ()

    def extend(self, tokens: Sequence[int], most: int) -> tuple[Sequence[int], list[float]]:
        """Takes in emitted tokens and looks up the next ones. Returns at most ``most`` looked-up tokens, and the
        expected number of tokens of a pass that verifies the first 0, 1, 2, … of them, the target's own token
        included."""
        hits, trials = self.hits, self.trials
        for length, (looked_up, token) in enumerate(zip(self._continuation, tokens, strict=False), self._match_length):
            hit, length = looked_up == token, min(length, LONGEST_MATCH)
            hits[length], trials[length] = _DECAY * hits[length] + hit, _DECAY * trials[length] + 1
            if not hit:
                break
        self._lookup.extend((*self._new_prompt, *tokens))
        self._new_prompt = []
        length, continuation = self._match_length, self._continuation = self._lookup.find(most)
        gains, chance = [1.0], 1.0
        while len(gains) <= len(continuation) and chance > _LEAST_CHANCE:
            matched = min(length + len(gains) - 1, LONGEST_MATCH)
            chance *= hits[matched] / trials[matched]
            gains.append(gains[-1] + chance)
        return continuation, gains
