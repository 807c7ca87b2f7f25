"""What passes cost on this device, measured when engines are compiled."""

from collections.abc import Callable
from time import perf_counter_ns

from ..decoding.decoder import Decoder
from ..decoding.prices import Costs, rising, sizes

_CONTEXT = 128  # positions before a measured pass
_HOST = 60_000.0  # nanoseconds; told apart from the engines' only in a real cycle
_ENOUGH, _ALL = 1_000_000_000, 60_000_000_000  # nanoseconds after which a pass is not measured again, and no other one at all


def measure(decoder: Decoder) -> Costs:
    """Times the draft, and the target over as many rows as a tree may have, each a few times; the fastest counts. Costs
    that fall with rows are lowered to what more rows took.

    On devices where draft and verification are one launch, that is the target's time and the draft's is none.
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
        cycle()  # a tree to verify
        by_rows, started = (
            {1: _fastest(decoder.passes.causal(1)), rows: _fastest(decoder.passes.verification(rows))},
            perf_counter_ns(),
        )
        for size in sizes(rows):
            if size not in by_rows and perf_counter_ns() - started < _ALL:  # what is not measured is not chosen
                by_rows[size] = _fastest(decoder.passes.verification(size))
        costs = Costs(rising(by_rows), _fastest(draft), _HOST)
    decoder.clear()
    return costs


def _fastest(call: Callable[[], None]) -> float:
    return float(min(timed(call)))


def timed(call: Callable[[], None]) -> list[int]:
    """Nanoseconds of a call, made up to five times; fewer times where they add up to a second."""
    times: list[int] = []
    while len(times) < 5 and sum(times) < _ENOUGH:
        started = perf_counter_ns()
        call()
        times.append(perf_counter_ns() - started)
    return times
