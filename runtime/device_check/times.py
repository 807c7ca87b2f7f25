"""Pieces of ``runtime.device_check``: the time of passes and the memory of a loaded bundle."""

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

from .. import selftest
from ..decoding.decoder import Decoder
from ..engines.pass_times import timed
from .memory import taken
from .pieces import Check, Found
from .prompts import prompts

_ROWS = 1, 2, 4, 8, 16, 32, 64, 128
_CONTEXTS = 128, 512, 2048, 8192, 32768
_ODD = 1.25  # a pass over fewer rows should not take so many times as long
_GROWTH = 32 << 20, 0.05  # bytes, and share of the weights, that generating may add to the process once it has warmed up


def times(check: Check) -> Found:
    """Milliseconds of passes, fastest and median, by rows and by context; where shapes are static every pass has one size."""
    found = Found({"static": check.model.decoder.form.static, "contexts": []})
    with check.model.exclusive() as decoder:
        for i, context in enumerate(_contexts(decoder)):
            if i and check.late:
                found.notes.append(f"time allowed {i} contexts")
                break
            found.facts["contexts"].append(_at(decoder, context))
        decoder.clear()
    found.facts["contexts"].sort(key=lambda at: at["context"])
    for at in found.facts["contexts"]:
        if odd := odd_times({int(rows): fastest for rows, (fastest, _) in at["target"].items()}):
            found.notes.append(f"at context {at['context']} {odd}: was the machine busy?")
    return found


def odd_times(target: Mapping[int, float]) -> str:
    """Where a pass takes longer than one over more rows; "" where none does. target: milliseconds by rows."""
    for rows, cost in target.items():
        more = min((other for other in target if other > rows), key=lambda other: target[other], default=rows)
        if cost > _ODD * target[more]:
            return f"a pass over {rows} rows takes {cost:.3g} ms and one over {more} rows {target[more]:.3g} ms"
    return ""


def _contexts(decoder: Decoder) -> Iterator[int]:
    """Positions before the measured passes: the fewest, the most that leave room for one, and those between."""
    most = max(0, decoder.manifest.capacity - max(decoder.manifest.rows, decoder.form.chunk))
    between = [context for context in _CONTEXTS if context < most]
    yield from dict.fromkeys([*between[:1], most, *between[1:]])


def _at(decoder: Decoder, context: int) -> dict[str, Any]:
    """Times at a context, whatever the caches hold: dense passes do not depend on it."""
    rows, chunk = decoder.manifest.rows, decoder.form.chunk
    draft, verify = decoder.passes.draft_and_verify(1)

    def cycle() -> None:
        draft()
        verify()

    def measured(call: Callable[[], None]) -> tuple[float, float]:
        def whole() -> None:
            call()
            decoder.device.synchronize()

        whole()  # what is recorded or allocated the first time
        nanoseconds = timed(whole)
        return min(nanoseconds) / 1e6, median(nanoseconds) / 1e6

    decoder.clear()
    decoder.passes.target_cache.length[0] = decoder.passes.draft_cache.length[0] = context
    decoder.passes.accepted_count[0] = 1
    at: dict[str, Any] = {"context": context, "cycle": measured(cycle), "plain": measured(decoder.passes.causal(1))}
    if verify is decoder.passes.verification(rows):  # else both are one launch
        at["draft"] = measured(draft)
    sizes = [rows] if decoder.form.static else sorted({n for n in _ROWS if n < rows} | {rows})
    at["target"] = {str(n): measured(decoder.passes.verification(n)) for n in sizes}
    at["prefill"] = {"rows": chunk, "times": measured(decoder.passes.causal(chunk))}
    return at


def footprint(check: Check) -> Found:
    """Memory before loading, after it, and after some texts."""
    check.close()
    held = {"before": taken(check.backend)}
    model = check.model
    held["loaded"] = taken(check.backend)
    for prompt in prompts(model)[:8]:
        for speculate in (True, False):
            selftest.generated(model, prompt, 16, speculate, {})
    held["used"] = taken(check.backend)
    found = Found({"weights": check.bundle.weights(), "caches": check.bundle.caches(check.name), **held})
    loaded, used = held["loaded"]["host"], held["used"]["host"]
    least, share = _GROWTH
    if loaded and used and used - loaded > least + share * check.bundle.weights():
        found.notes.append(f"eight texts added {(used - loaded) / 1e6:.0f} MB to the process after loading")
    return found
