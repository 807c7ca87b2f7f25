"""How the benchmark talks to a peer: a process of its own, a line of JSON for every request and for its answer.

A peer's module says what it needs (``REQUIREMENTS``) and can (``ways``), and imports its packages inside ``load`` and ``convert``:
the benchmark reads it without them. Only the standard library is used here, since every peer's environment runs this file.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Way:
    """A way to decode.

    name: unique in a run. weights: the format that they are kept in. plain: the way without speculation over the same weights, ""
    for such a way itself. model: a checkpoint or bundle, "" for the target. draft: whether it needs a draft model. options: for
    loading; ways of a peer that load alike share a process. settings: for generating, of which the fastest is taken.
    """

    name: str
    weights: str
    plain: str = ""
    model: str = ""
    draft: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Sequence[Mapping[str, Any]] = ({},)


@dataclass(frozen=True)
class Text:
    """A generated text.

    tokens: all new ids, with the one that ends the text. seconds: for all of it; first_seconds, first_tokens: until the first step,
    the prompt's included, and what that gave. passes: of the target behind the first step; None where the peer does not tell.
    """

    tokens: list[int]
    seconds: float
    first_seconds: float
    first_tokens: int
    passes: int | None


class Model(Protocol):
    versions: dict[str, str]

    def generate(self, ids: list[int], count: int, **setting: Any) -> Text:
        """At most ``count`` new tokens, greedily; fewer where the text ends."""


class PeerError(Exception):
    """A peer cannot do what was asked; the message is one line."""


def peak() -> float:
    """The most memory this process has held, MiB resident (VmHWM). Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024


def serve(load: Callable[..., Model], convert: Callable[[Path, Path, str], object] | None = None) -> None:
    """Answers requests until standard input ends. Whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model: Model | None = None
    for line in sys.stdin:
        request = json.loads(line)
        do, answer = request.pop("do"), dict[str, Any]()
        try:
            if do == "convert":
                assert convert
                convert(Path(request["checkpoint"]), Path(request["out"]), request["weights"])
            elif do == "load":
                model = load(**request)
                answer["versions"] = model.versions
            else:
                assert model
                answer = asdict(model.generate(**request))
        except Exception as error:
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print(json.dumps({**answer, "peak_mb": peak()}), file=answers, flush=True)


class Worker:
    """A peer's process, from the benchmark's side."""

    def __init__(self, command: Sequence[str | Path], log: Path, folder: Path, environment: Mapping[str, str]) -> None:
        """log: gets what the process writes to standard error. folder: to run in. environment: added to this process' own."""
        self.log, self.peak_mb = log, 0.0
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=folder,
                env={**os.environ, **environment},
            )

    def ask(self, do: str, limit: float = 900, **request: Any) -> dict[str, Any]:
        """Raises PeerError for an answer that is an error, for a process that ended, and for none within so many seconds."""
        assert self.process.stdin
        assert self.process.stdout
        timer = threading.Timer(limit, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            last = (self.log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            raise PeerError(f"its process ended with status {self.process.wait()}: {last[:200]}")
        answer: dict[str, Any] = json.loads(line)
        self.peak_mb = answer.pop("peak_mb")
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process; closing twice is fine."""
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
