"""What ``runtime.device_check`` checks, a function for each piece; every one returns what it found."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from time import monotonic
from typing import Any

from . import doctor, golden, selftest
from .backends import Backend, backend
from .bundle import Bundle
from .decoder import Decoder
from .device_prompts import prompts
from .engines import compile_engines, find_engines
from .errors import GumihoError
from .lossless import NEAR, Difference, differences
from .measure import timed
from .model import Model, load
from .stats import Stats

try:
    import resource
except ImportError:  # no POSIX
    resource = None  # type: ignore[assignment]

GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 7}
_TOKENS, _CPU_TOKENS = 64, 32  # of each prompt
_SHOWN = 20  # differences that the report lists
_SELFTEST = 4, 48, 2000  # prompts, tokens and texts drawn, at most
_ROWS = 1, 2, 4, 8, 16, 32, 64, 128
_CONTEXTS = 128, 512, 2048, 8192, 32768
_SLOW = 0.8  # of plain decoding's speed: the planner rests long before drafting costs so much
_ODD = 1.25  # a pass over fewer rows should not take so many times as long
_GROWTH = 32 << 20, 0.05  # bytes, and share of the weights, that generating may add to the process once it has warmed up


class Skip(Exception):
    """A piece cannot be made here, and nothing is wrong with the device. Says why."""


@dataclass
class Found:
    """facts: numbers and texts as JSON has them. wrong: what does not hold, a line each. notes: what a reader should look at."""

    facts: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Check:
    """What the pieces share: the bundle, the backend, and one loaded model.

    deadline: of the running piece, in seconds of ``time.monotonic``. Opening raises GumihoError where the bundle is damaged or was
    not exported for the backend; a backend that cannot run here shows in ``backend``.
    """

    def __init__(self, path: str, name: str, device: str, threads: int, say: Callable[[str], object]) -> None:
        self.bundle = Bundle(path)
        self.name = name or self.bundle.manifest.default
        self.bundle.manifest.form(self.name)
        self.device, self.threads, self.say = device, threads, say
        self.deadline = 0.0
        self._backend: Backend | None = None
        self._model: Model | None = None

    @property
    def backend(self) -> Backend:
        """Raises GumihoError where it cannot run here."""
        if not self._backend:
            self._backend = backend(self.name, self.device, self.threads)
        return self._backend

    @property
    def model(self) -> Model:
        """Loaded when it is first asked for, and warm: what is bound or recorded in a first text has been."""
        if not self._model:
            self.say("loading")
            self._model = load(self.bundle.path, self.name, self.device, self.threads)
            for speculate in (True, False):
                selftest.generated(self._model, prompts(self._model)[0], 8, speculate, GREEDY)
        return self._model

    @property
    def runs(self) -> bool:
        """Whether the backend can run here."""
        try:
            return bool(self.backend)
        except GumihoError:
            return False

    @property
    def late(self) -> bool:
        return monotonic() > self.deadline

    def close(self) -> None:
        model, self._model = self._model, None
        if model:
            model.close()


# --- before anything is loaded ---------------------------------------------------------------------------------------------


def look(check: Check) -> Found:
    """The backend, its device and its libraries, and every byte of the bundle."""
    made, line = doctor.look(check.name, check.device)
    found = Found({"packages": doctor.installed(), "backend": line})
    if made is None:
        found.wrong.append(line)
        return found
    found.facts |= made.versions() | made.details()
    lines, ready = doctor.examine(
        check.bundle, {n: made if n == check.name else None for n in check.bundle.manifest.forms},
        dict.fromkeys(check.bundle.manifest.forms, check.device), quick=False,
    )  # fmt: skip
    found.facts |= {"bundle": lines, "engines": "current" if ready else "to be compiled"}
    return found


def compile(check: Check) -> Found:
    """Compiles, unless there are current engines. How long it took is in the piece's seconds."""
    try:
        return Found({"engines": find_engines(check.bundle, check.backend).name, "compiled": False})
    except GumihoError:
        pass
    started = monotonic()
    folder, errors = compile_engines(check.bundle, check.backend, progress=check.say)
    peak = memory(check.backend)["host_peak"]
    return Found(
        {"engines": folder.name, "compiled": True, "compile_seconds": monotonic() - started, "host_peak": peak, **errors}
    )


def replay(check: Check) -> Found:
    """The golden run through the engines on disk."""
    form, depth = check.bundle.manifest.form(check.name), check.bundle.manifest.depth
    tolerance = {name: golden.TOLERANCE[form.graphs[name].precision] for name in ("target", "draft")}
    tolerance["draft"] *= depth
    errors = golden.check(check.bundle, check.backend, find_engines(check.bundle, check.backend))
    return Found({name: {"error": error, "tolerance": tolerance[name]} for name, error in errors.items()})


# --- tokens ----------------------------------------------------------------------------------------------------------------


def tokens(check: Check, settings: Mapping[str, Any]) -> Found:
    """Speculative decoding against plain decoding on the device, and the speed of both."""
    model, given = check.model, prompts(check.model)
    tally, speculative, plain = _Tally(len(given)), Stats(texts=0), Stats(texts=0)
    for i, prompt in enumerate(given):
        if i and check.late:
            break
        made = selftest.compare(model, prompt, _TOKENS, settings)
        tally.add(i, len(made.speculative.ids), made.alike, made.differences, made.defects)
        speculative.add(made.speculative.stats)
        plain.add(made.plain.stats)
        if i % 8 == 7:
            check.say(f"{i + 1} of {len(given)} prompts")
    found = tally.found("plain decoding")
    speeds = {"speculative": _speed(speculative), "plain": _speed(plain)}
    found.facts |= speeds
    wrong, notes = slower(
        speeds["speculative"]["tokens_per_second"], speeds["plain"]["tokens_per_second"], model.decoder.planner is not None
    )
    found.wrong += wrong
    found.notes += notes
    return found


def greedy(check: Check) -> Found:
    return tokens(check, GREEDY)


def sampled(check: Check) -> Found:
    return tokens(check, SAMPLED)


def against_cpu(check: Check) -> Found:
    """The texts of the CPU's engines, replayed by plain decoding on the device. Forms of different precision differ at near-ties."""
    if check.name == "cpu":
        raise Skip("the backend is the CPU")
    try:
        cpu = backend("cpu", "", check.threads)
        check.bundle.manifest.form("cpu")
        try:
            find_engines(check.bundle, cpu)
        except GumihoError:
            compile_engines(check.bundle, cpu, progress=check.say)
        reference = load(check.bundle.path, "cpu", "", check.threads)
    except GumihoError as error:
        raise Skip(f"the CPU cannot run this bundle: {error}") from None
    model, given = check.model, prompts(check.model)
    tally, near = _Tally(len(given)), _near_of(model, reference)
    with reference:
        for i, prompt in enumerate(given):
            if i and check.late:
                break
            for settings in (GREEDY, SAMPLED):
                text = selftest.generated(reference, prompt, _CPU_TOKENS, False, settings)
                places = [_judged(place, near) for place in differences(model, text)]
                tally.add(i, len(text.ids), not places, places, sum(not place.near for place in places))
            if i % 8 == 7:
                check.say(f"{i + 1} of {len(given)} prompts")
    return tally.found("the CPU")


def _near_of(*models: Model) -> float:
    """The margin within which rounding may decide between two forms: that of the coarser one."""
    precisions = [model.decoder.graphs["target"].precision for model in models]
    return max(NEAR[precision] or golden.TOLERANCE[precision] for precision in precisions)


def _judged(place: Difference, near: float) -> Difference:
    return Difference(place.index, place.position, place.token, place.choice, place.margin, place.margin <= near)


class _Tally:
    """Differences of tokens, prompt by prompt."""

    def __init__(self, planned: int) -> None:
        self.facts: dict[str, Any] = {"prompts": 0, "planned": planned, "texts": 0, "alike": 0, "tokens": 0, "near_ties": 0,
                                      "widest_near_tie": 0.0, "defects": 0, "places": []}  # fmt: skip

    def add(self, prompt: int, count: int, alike: bool, places: list[Difference], defects: int) -> None:
        """One text of so many tokens. defects: differences that rounding does not explain."""
        facts, near = self.facts, [place.margin for place in places if place.near]
        facts["prompts"] = prompt + 1
        for name, more in (("texts", 1), ("alike", alike), ("tokens", count), ("near_ties", len(near)), ("defects", defects)):
            facts[name] += int(more)
        facts["widest_near_tie"] = max(facts["widest_near_tie"], *near, 0.0)
        facts["places"] += [
            {"prompt": prompt, "index": place.index, "token": place.token, "choice": place.choice,
             "margin": place.margin if isfinite(place.margin) else "infinite", "near": place.near}
            for place in places
        ]  # fmt: skip

    def found(self, reference: str) -> Found:
        """reference: whose tokens they were compared with, for messages."""
        facts, found = self.facts, Found(self.facts)
        facts["places"] = sorted(facts["places"], key=lambda place: place["near"])[:_SHOWN]  # defects first
        if not facts["tokens"]:
            found.wrong.append("no token was compared: every text ended at once")
        if facts["defects"]:
            first = next((place for place in facts["places"] if not place["near"]), None)
            where = (
                f"the first in prompt {first['prompt']}, token {first['index']}: {first['token']} instead of {first['choice']}, margin "
                f"{first['margin']}"
                if first
                else "and the replay does not show where"
            )
            found.wrong.append(
                f"{facts['defects']} of {facts['tokens']} tokens differ from {reference} by more than rounding does; {where}"
            )
        if facts["prompts"] < facts["planned"]:
            found.notes.append(f"time allowed {facts['prompts']} of {facts['planned']} prompts")
        return found


def _speed(stats: Stats) -> dict[str, Any]:
    names = ("tokens_per_second", "tau", "time_to_first_token_ms", "cycles_by_rows", "acceptance_by_depth", "lookups")
    return {name: stats.summary()[name] for name in names}


def slower(speculative: float, plain: float, planned: bool) -> tuple[list[str], list[str]]:
    """Failures and notes about tokens per second. planned: whether passes were measured, so that drafting is to rest where it does
    not pay."""
    if speculative >= plain:
        return [], []
    line = f"speculative decoding makes {speculative} tokens/s and plain decoding {plain}"
    if planned and speculative < _SLOW * plain:
        return [f"{line}: drafting should rest where it does not pay"], []
    return [], [line]


def prove(check: Check) -> Found:
    """The properties that ``runtime.selftest`` confirms."""
    found, (count, length, draws) = Found({"results": []}), _SELFTEST
    for result in selftest.results(check.model, count, length, draws, check.say, check.deadline):
        found.facts["results"].append({"name": result.name, "holds": result.holds, "found": result.found})
        if not result.holds:
            found.wrong.append(f"{result.name}: {result.found}")
    return found


# --- time and memory -------------------------------------------------------------------------------------------------------


def times(check: Check) -> Found:
    """Milliseconds of passes, fastest and median, by rows and by context; where shapes are static every pass has one size."""
    found = Found({"static": check.model.decoder.form.static, "contexts": []})
    with check.model.idle() as decoder:
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
    most = decoder.manifest.capacity - max(decoder.manifest.rows, decoder.form.chunk)
    between = [context for context in _CONTEXTS if context < most]
    yield from dict.fromkeys([*between[:1], max(1, most), *between[1:]])


def _at(decoder: Decoder, context: int) -> dict[str, Any]:
    """Times at a context, whatever the caches hold: dense passes do not depend on it."""
    rows, chunk = decoder.manifest.rows, decoder.form.chunk
    draft, verify = decoder.passes[0]

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
    decoder.target.length[0] = decoder.drafter.length[0] = context
    decoder.count[0] = 1
    at: dict[str, Any] = {"context": context, "cycle": measured(cycle), "plain": measured(decoder.causal(1))}
    if verify is decoder.verification(rows):  # else both are one launch
        at["draft"] = measured(draft)
    sizes = [rows] if decoder.form.static else sorted({n for n in _ROWS if n < rows} | {rows})
    at["target"] = {str(n): measured(decoder.verification(n)) for n in sizes}
    at["prefill"] = {"rows": chunk, "times": measured(decoder.causal(chunk))}
    return at


def memory(made: Backend) -> dict[str, Any]:
    """host: bytes that the process holds now; host_peak: at most so far, children included; device: as the driver tells it.

    None where the system does not tell.
    """
    return {"host": _resident(), "host_peak": _peak(), "device": made.details().get("memory")}


def _resident() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, AttributeError):
        return None


def _peak() -> int | None:
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def footprint(check: Check) -> Found:
    """Memory before loading, after it, and after some texts."""
    check.close()
    taken = {"before": memory(check.backend)}
    model = check.model
    taken["loaded"] = memory(check.backend)
    for prompt in prompts(model)[:8]:
        for speculate in (True, False):
            selftest.generated(model, prompt, 16, speculate, GREEDY)
    taken["used"] = memory(check.backend)
    found = Found({"weights": check.bundle.weights(), "caches": check.bundle.caches(check.name), **taken})
    loaded, used = taken["loaded"]["host"], taken["used"]["host"]
    least, share = _GROWTH
    if loaded and used and used - loaded > least + share * check.bundle.weights():
        found.notes.append(f"eight texts added {(used - loaded) / 1e6:.0f} MB to the process after loading")
    return found
