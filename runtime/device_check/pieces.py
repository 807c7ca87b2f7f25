"""What the pieces of ``runtime.device_check`` share, and those of them that ask other commands' functions.

A piece is a function of the ``Check`` that returns what it ``Found``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from .. import doctor, selftest
from ..backends import Backend, backend
from ..bundle.reader import Bundle
from ..engines import golden_replay as golden
from ..engines.store import compile_engines, find_engines
from ..errors import GumihoError
from ..model import Model, load
from .memory import taken
from .prompts import prompts

_SELFTEST = 4, 48, 2000  # prompts, tokens and texts drawn, at most


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
                selftest.generated(self._model, prompts(self._model)[0], 8, speculate, {})
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
    peak = taken(check.backend)["host_peak"]
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


def prove(check: Check) -> Found:
    """The properties that ``runtime.selftest`` confirms."""
    found, (count, length, draws) = Found({"results": []}), _SELFTEST
    for result in selftest.results(check.model, count, length, draws, check.say, check.deadline):
        found.facts["results"].append({"name": result.name, "holds": result.holds, "found": result.found})
        if not result.holds:
            found.wrong.append(f"{result.name}: {result.found}")
    return found
