"""Measures the times of passes on this device, when engines are compiled."""

from collections.abc import Callable
from time import perf_counter_ns

from ..decoding.decoder import Decoder
from ..decoding.prices import Costs, rising, sizes

_CONTEXT = 128  # positions in the cache before a measured pass
_HOST = 60_000.0  # nanoseconds per cycle outside the engines: an estimate, since only real cycles show it
# Nanoseconds after which a pass is not timed again, and after which no further row count is measured.
_PASS_LIMIT, _TOTAL_LIMIT = 1_000_000_000, 60_000_000_000


def measure(decoder: Decoder) -> Costs:
    """Times the draft, and the target's passes of 1 row to the rows of a tree, in nanoseconds; the fastest of a few runs
    counts.

    If a pass over fewer rows took longer than one over more rows, it gets the lower time. On devices that launch draft and
    verification together, their time counts as the target's and the draft's is 0.
    """
    rows, static = decoder.manifest.rows, decoder.form.static
    decoder.clear()
    decoder.passes.target_cache.length[0] = decoder.passes.draft_cache.length[0] = min(
        _CONTEXT, decoder.manifest.capacity - rows
    )
    decoder.passes.accepted_count[0] = 1
    draft, verify = decoder.passes.draft_and_verify(1)

    def cycle() -> None:
        draft()
        verify()
        decoder.device.synchronize()

    if static:
        costs = Costs(rising({1: _fastest(decoder.passes.causal(1)), rows: _fastest(cycle)}), 0.0, _HOST)
    else:
        cycle()  # makes a tree to verify
        by_rows = {1: _fastest(decoder.passes.causal(1)), rows: _fastest(decoder.passes.verification(rows))}
        started = perf_counter_ns()
        for size in sizes(rows):
            if size not in by_rows and perf_counter_ns() - started < _TOTAL_LIMIT:  # the planner uses only measured sizes
                by_rows[size] = _fastest(decoder.passes.verification(size))
        costs = Costs(rising(by_rows), _fastest(draft), _HOST)
    decoder.clear()
    return costs


def _fastest(call: Callable[[], None]) -> float:
    return float(min(timed(call)))


def timed(call: Callable[[], None]) -> list[int]:
    """Nanoseconds of up to five runs of a call; fewer once their sum exceeds a second."""
    times: list[int] = []
    while len(times) < 5 and sum(times) < _PASS_LIMIT:
        started = perf_counter_ns()
        call()
        times.append(perf_counter_ns() - started)
    return times
