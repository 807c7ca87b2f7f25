"""Measures the times of passes on this device, when engines are compiled."""

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter_ns

from ..decoding.cycle import Accepted
from ..decoding.decoder import Decoder
from ..decoding.prices import CONTEXT, Costs, Longer, rising, sizes

_LONGER = 512, 2048  # text lengths at which a few sizes are measured again; the longest with room for a tree is another
_FEW = 8  # rows: a size between 1 and those of a tree
_ONE = Accepted((0,), (0,))  # what a draft reads after a plain pass
_HOST = 60_000.0  # nanoseconds per cycle outside the engines: an estimate, since only real cycles show it
# Nanoseconds after which a pass is not timed again, and after which no further row count is measured.
_PASS_LIMIT, _TOTAL_LIMIT = 1_000_000_000, 60_000_000_000


def measure(decoder: Decoder) -> Costs:
    """Times the draft, and the target's passes of 1 row to the rows of a tree, in nanoseconds; the fastest of a few
    runs counts. Without a drafter the draft takes 0, and the passes are causal, as those over looked-up tokens.

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
    prices = {n: fastest(target.verification(n) if drafts and n > 1 else target.causal(n)) for n in few}
    return Longer(context, rising(prices), fastest(decoder.draft.drafting(_ONE)) if drafts else 0.0)


def _cycles(decoder: Decoder) -> Costs:
    """The costs of drafting and verifying."""
    rows, target = decoder.manifest.rows, decoder.target
    draft, verify = decoder.draft.drafting(_ONE), target.verification(rows)

    def cycle() -> None:
        draft()
        verify()
        decoder.device.synchronize()

    plain = fastest(target.causal(1))
    if not target.splits:
        return Costs(rising({1: plain, rows: fastest(cycle)}), 0.0, _HOST)
    cycle()  # makes a tree to verify

    def draft_alone() -> None:
        draft()
        decoder.device.synchronize()

    return Costs(rising(_by_rows(decoder, plain, target.verification)), fastest(draft_alone), _HOST)


def _causal_passes(decoder: Decoder) -> Costs:
    """The costs without a drafter."""
    rows, target = decoder.manifest.rows, decoder.target
    plain = fastest(target.causal(1))
    by_rows = _by_rows(decoder, plain, target.causal) if target.splits else {1: plain, rows: plain}
    return Costs(rising(by_rows), 0.0, _HOST)


def _by_rows(decoder: Decoder, plain: float, bind: Callable[[int], Callable[[], object]]) -> dict[int, float]:
    """Nanoseconds of passes by their number of rows, up to those of a tree. plain: of one row; bind: a pass over so
    many rows."""
    rows = decoder.manifest.rows
    by_rows = {1: plain, rows: fastest(bind(rows))}
    started = perf_counter_ns()
    for size in [n for n in decoder.form.targets if n < rows] or sizes(rows):
        if size not in by_rows and perf_counter_ns() - started < _TOTAL_LIMIT:  # the planner uses only measured sizes
            by_rows[size] = fastest(bind(size))
    return by_rows


def fastest(call: Callable[[], object]) -> float:
    """Nanoseconds of the fastest of a few runs."""
    return float(min(timed(call)))


def timed(call: Callable[[], object]) -> list[int]:
    """Nanoseconds of up to five runs of a call; fewer once their sum exceeds a second."""
    times: list[int] = []
    while len(times) < 5 and sum(times) < _PASS_LIMIT:
        started = perf_counter_ns()
        call()
        times.append(perf_counter_ns() - started)
    return times
