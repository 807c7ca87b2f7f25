"""Pieces of ``runtime.device_check`` that measure the times of passes and the memory of a loaded bundle."""

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

from ..cli.checks import selftest
from ..decoding.decoder import Decoder
from ..engines.pass_times import timed
from .memory import memory_in_use
from .pieces import Check, Findings
from .prompts import prompts

_ROWS = 1, 2, 4, 8, 16, 32, 64, 128
_CONTEXTS = 128, 512, 2048, 8192, 32768
_ODD = 1.25  # a pass should not take so many times as long as one over more rows
_GROWTH = 32 << 20, 0.05  # bytes, and share of the weights, that generating may add to a process after it has warmed up


def times(check: Check) -> Findings:
    """Milliseconds of passes, fastest and median, by rows and context; with static shapes all passes have one size."""
    findings = Findings({"static": check.model.decoder.form.static, "contexts": []})
    with check.model.exclusive() as decoder:
        for i, context in enumerate(_contexts(decoder)):
            if i and check.late:
                findings.notes.append(f"measured only {i} contexts before the time limit")
                break
            findings.facts["contexts"].append(_measured_at(decoder, context))
        decoder.clear()
    findings.facts["contexts"].sort(key=lambda at: at["context"])
    for at in findings.facts["contexts"]:
        if odd := odd_times({int(rows): fastest for rows, (fastest, _) in at["target"].items()}):
            findings.notes.append(f"at context {at['context']} {odd}: was the machine busy?")
    return findings


def odd_times(target: Mapping[int, float]) -> str:
    """Describes a pass that takes clearly longer than one over more rows, "" if there is none. target: milliseconds by rows."""
    for rows, cost in target.items():
        faster = min((size for size in target if size > rows), key=lambda size: target[size], default=rows)
        if cost > _ODD * target[faster]:
            return f"a pass over {rows} rows takes {cost:.3g} ms and one over {faster} rows {target[faster]:.3g} ms"
    return ""


def _contexts(decoder: Decoder) -> Iterator[int]:
    """Context lengths to measure, in order: the shortest, the longest that leaves room for a pass, and those between."""
    most = max(0, decoder.manifest.capacity - max(decoder.manifest.rows, decoder.form.chunk))
    between = [context for context in _CONTEXTS if context < most]
    yield from dict.fromkeys([*between[:1], most, *between[1:]])


def _measured_at(decoder: Decoder, context: int) -> dict[str, Any]:
    """Times at a context length, with any content in the caches: the time of a dense pass does not depend on it."""
    rows, chunk, passes = decoder.manifest.rows, decoder.form.chunk, decoder.passes

    def measured(call: Callable[[], object]) -> tuple[float, float]:
        def complete() -> None:
            call()
            decoder.device.synchronize()

        complete()  # the first run also records or allocates
        nanoseconds = timed(complete)
        return min(nanoseconds) / 1e6, median(nanoseconds) / 1e6

    decoder.clear()
    passes.target_cache.length[0] = context
    at: dict[str, Any] = {"context": context}
    if decoder.manifest.has_drafter:
        passes.draft_cache.length[0], passes.accepted_count[0] = context, 1
        draft, verify = passes.draft(1), passes.verification(rows)

        def cycle() -> None:
            draft()
            verify()

        at["cycle"], at["draft"] = measured(cycle), measured(draft)
    at["plain"] = measured(passes.causal(1))
    verification = passes.verification if decoder.manifest.has_drafter else passes.causal
    sizes = [n for n in decoder.form.targets if n <= rows] or sorted({n for n in _ROWS if n < rows} | {rows})
    at["target"] = {str(n): measured(verification(n)) for n in sizes}
    at["prefill"] = {"rows": chunk, "times": measured(passes.causal(chunk, last=True))}
    return at


def footprint(check: Check) -> Findings:
    """Measures memory before loading, after it, and after some texts."""
    check.close()
    usage = {"before": memory_in_use(check.backend)}
    model = check.model
    usage["loaded"] = memory_in_use(check.backend)
    for prompt in prompts(model)[:8]:
        for speculate in (True, False):
            selftest.generated(model, prompt, 16, speculate, {})
    usage["used"] = memory_in_use(check.backend)
    findings = Findings({"weights": check.bundle.weights(), "caches": check.bundle.caches(check.name), **usage})
    loaded, used = usage["loaded"]["host"], usage["used"]["host"]
    nbytes, share = _GROWTH
    if loaded and used and used - loaded > nbytes + share * check.bundle.weights():
        findings.notes.append(f"eight texts added {(used - loaded) / 1e6:.0f} MB to the process after loading")
    return findings
