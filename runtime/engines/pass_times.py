"""Measures the times of passes on this device, when engines are compiled."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from time import perf_counter_ns

from ..decoding.cycle import Accepted
from ..decoding.decoder import Decoder
from ..decoding.prices import CONTEXT, Costs, Longer, rising, sizes

_LONGER = 512, 2048  # text lengths at which a few sizes are measured again; the longest with room for a tree is another
_FEW = 8  # rows: a size between 1 and those of a tree
_ONE = Accepted((0,), (0,))  # what a draft reads after a plain pass
_HOST = 60_000.0  # nanoseconds per cycle outside the engines: an estimate, since only real cycles show it
_RUNS = 5  # of a pass
# Nanoseconds after which a pass is not timed again, and after which no further row count is measured.
_PASS_LIMIT, _TOTAL_LIMIT = 1_000_000_000, 60_000_000_000
_DRAFT = 0  # among passes by their rows


def measure(decoder: Decoder) -> Costs:
    """Times the draft, and the target's passes of 1 row to the rows of a tree, in nanoseconds; the fastest of a few
    runs counts. They take turns, so that other programs delay all of them alike. Without a drafter the draft takes 0,
    and the passes are causal, as those over looked-up tokens.

    If a pass over fewer rows took longer than one over more rows, it gets the lower time. Where every tree is verified
    whole (``TargetPasses.splits``), the time of both counts as the target's and the draft's is 0.
    """
    decoder.clear()
    most = decoder.manifest.capacity - decoder.manifest.rows
    _fill(decoder, min(CONTEXT, most))
    costs = _cycles(decoder) if decoder.manifest.has_drafter else _causal_passes(decoder)
    # Static passes read whole caches, however little of them is filled.
    contexts = [] if decoder.form.static else [n for n in (*_LONGER, most) if CONTEXT < n <= most]
    started, longer = perf_counter_ns(), list[Longer]()
    for context in sorted({*contexts}):
        if perf_counter_ns() - started < _TOTAL_LIMIT / 4:
            longer.append(_longer(decoder, context, costs))
    decoder.clear()
    return replace(costs, longer=tuple(longer))


def _fill(decoder: Decoder, context: int) -> None:
    """Whatever the caches hold, so many of their positions count as filled."""
    decoder.target.keep(context)
    decoder.draft.keep(context)


def _longer(decoder: Decoder, context: int, costs: Costs) -> Longer:
    """The prices of a few sizes at another length of the text."""
    _fill(decoder, context)
    target, rows = decoder.target, decoder.manifest.rows
    target.causal(1)()  # untimed: caches may be laid out anew for it
    drafts, few = decoder.manifest.has_drafter, sorted({1, min(_FEW, rows), rows} & costs.target.keys())
    calls = {n: target.verification(n) if drafts and n > 1 else target.causal(n) for n in few}
    if drafts:
        calls[_DRAFT] = decoder.draft.drafting(_ONE)
    prices = _in_turn(calls)
    draft = prices.pop(_DRAFT, 0.0)
    return Longer(context, rising(prices), draft)


def _cycles(decoder: Decoder) -> Costs:
    """The costs of drafting and verifying."""
    rows, target = decoder.manifest.rows, decoder.target
    draft, verify = decoder.draft.drafting(_ONE), target.verification(rows)

    def cycle() -> None:
        draft()
        verify()
        decoder.device.synchronize()

    if not target.splits:
        return Costs(rising(_in_turn({1: target.causal(1), rows: cycle})), 0.0, _HOST)
    cycle()  # makes a tree to verify

    def draft_alone() -> None:
        draft()
        decoder.device.synchronize()

    prices = _in_turn({_DRAFT: draft_alone, **_by_rows(decoder, target.verification)})
    draft_ns = prices.pop(_DRAFT)
    return Costs(rising(prices), draft_ns, _HOST)


def _causal_passes(decoder: Decoder) -> Costs:
    """The costs without a drafter."""
    rows, target = decoder.manifest.rows, decoder.target
    if not target.splits:
        plain = _in_turn({1: target.causal(1)})[1]
        return Costs({1: plain, rows: plain}, 0.0, _HOST)
    return Costs(rising(_in_turn(_by_rows(decoder, target.causal))), 0.0, _HOST)


def _by_rows(decoder: Decoder, bind: Callable[[int], Callable[[], object]]) -> dict[int, Callable[[], object]]:
    """Passes by their number of rows: a plain one, of all rows of a tree, of fewer. bind: a pass over so many rows."""
    rows = decoder.manifest.rows
    smaller = [n for n in decoder.form.targets if n < rows] or sizes(rows)
    return {1: decoder.target.causal(1), **{n: bind(n) for n in (rows, *smaller) if n > 1}}


def _in_turn(calls: Mapping[int, Callable[[], object]]) -> dict[int, float]:
    """Nanoseconds of the fastest of a few runs of each call, in turn. Without those, but for the first three, that time
    does not suffice for: the planner uses measured sizes only."""
    fastest, started = dict[int, float](), perf_counter_ns()
    for _ in range(_RUNS):
        for key, call in calls.items():
            if len(fastest) >= 3 and perf_counter_ns() - started > _TOTAL_LIMIT:
                return fastest
            fastest[key] = min(fastest.get(key, inf), once(call))
        if perf_counter_ns() - started > _PASS_LIMIT * len(calls):
            break
    return fastest


def timed(call: Callable[[], object]) -> list[int]:
    """Nanoseconds of up to five runs of a call; fewer once their sum exceeds a second."""
    times: list[int] = []
    while len(times) < _RUNS and sum(times) < _PASS_LIMIT:
        times.append(once(call))
    return times


def once(call: Callable[[], object]) -> int:
    """Nanoseconds of a run."""
    started = perf_counter_ns()
    call()
    return perf_counter_ns() - started
