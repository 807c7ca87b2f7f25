"""``Check`` and ``Findings``, which all pieces of ``runtime.device_check`` use, and the pieces that run other commands'
functions.

A piece is a function that takes a ``Check`` and returns its ``Findings``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from ..api.loader import load
from ..api.model import Model
from ..backends import Backend, backend
from ..bundle.reader import Bundle
from ..cli.checks import doctor, selftest
from ..engines import golden_replay as golden
from ..engines.store import compile_engines, find_engines
from ..errors import GumihoError
from .memory import memory_in_use
from .prompts import prompts

_SELFTEST = 4, 48, 2000  # most prompts, tokens and sampled texts


class Skip(Exception):
    """A piece cannot run here although nothing is wrong with the device. The text is the reason."""


@dataclass
class Findings:
    """facts: results in JSON's types. wrong: the failures, one line each. notes: observations worth a look, one line
    each."""

    facts: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Check:
    """The bundle, the backend and one loaded model, which the pieces share.

    deadline: of the running piece, in seconds of ``time.monotonic``. Opening raises DamageError if the bundle is
    damaged, and InputError if it was not exported for the backend; if the backend cannot run here, using ``backend``
    raises.
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
        """The backend. Raises GumihoError if it cannot run here."""
        if not self._backend:
            self._backend = backend(self.name, self.device)
        return self._backend

    @property
    def model(self) -> Model:
        """The model, loaded on first use and warmed up by two short texts."""
        if not self._model:
            self.say("loading")
            self._model = load(self.bundle.path, self.name, self.device, self.threads if self.backend.THREADS else 0)
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


def look(check: Check) -> Findings:
    """Checks the backend, its device and libraries, and every byte of the bundle."""
    instance, line = doctor.look(check.name, check.device)
    findings = Findings({"packages": doctor.installed(), "backend": line})
    if instance is None:
        findings.wrong.append(line)
        return findings
    findings.facts |= instance.versions() | instance.details()
    forms = check.bundle.manifest.forms
    lines, ready = doctor.examine(
        check.bundle,
        {name: instance if name == check.name else None for name in forms},
        dict.fromkeys(forms, check.device),
        quick=False,
    )
    findings.facts |= {"bundle": lines, "engines": "current" if ready else "to be compiled"}
    return findings


def compile(check: Check) -> Findings:
    """Compiles the engines, unless there are current ones."""
    try:
        return Findings({"engines": find_engines(check.bundle, check.backend).name, "compiled": False})
    except GumihoError:
        pass
    started = monotonic()
    folder, errors = compile_engines(check.bundle, check.backend, progress=check.say)
    peak = memory_in_use(check.backend)["host_peak"]
    return Findings(
        {
            "engines": folder.name,
            "compiled": True,
            "compile_seconds": monotonic() - started,
            "host_peak": peak,
            **errors,
        }
    )


def replay_golden(check: Check) -> Findings:
    """Replays the golden run through the engines on disk."""
    tolerance = golden.limits(check.bundle.manifest.form(check.name), check.bundle.manifest.deepest)
    errors = golden.check(check.bundle, check.backend, find_engines(check.bundle, check.backend))
    return Findings({name: {"error": error, "tolerance": tolerance[name]} for name, error in errors.items()})


def prove(check: Check) -> Findings:
    """Checks the properties of ``runtime.selftest``."""
    findings, (count, length, draws) = Findings({"results": []}), _SELFTEST
    for result in selftest.results(check.model, count, length, draws, check.say, check.deadline):
        findings.facts["results"].append({"name": result.name, "holds": result.holds, "found": result.found})
        if not result.holds:
            findings.wrong.append(f"{result.name}: {result.found}")
    return findings
