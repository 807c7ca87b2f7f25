"""The benchmark's protocol with its peers: each runs in its own process, with a line of JSON per request and answer.

A peer's module declares the packages it needs (``REQUIREMENTS``) and its ways to decode (``ways``). It imports these
packages only in ``load`` and ``convert``, because the benchmark imports the module without them. This file uses only
the standard library, because it runs in every peer's environment.
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

    name: unique in a run. weights: their format. plain: name of the way without speculation over the same weights, ""
    if this is one. model: a checkpoint or bundle, "" for the target. draft: whether it needs a draft model. options:
    for loading; ways of a peer with equal options share a process. settings: candidates for generating, of which the
    fastest is used.
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

    tokens: all new ids, including an end-of-text id. seconds: total time; first_seconds: time of the prompt and the
    first step; first_tokens: tokens of the first step. passes: of the target after the first step, None if the peer
    does not report them.
    """

    tokens: list[int]
    seconds: float
    first_seconds: float
    first_tokens: int
    passes: int | None


class Model(Protocol):
    versions: dict[str, str]

    def generate(self, ids: list[int], count: int, **setting: Any) -> Text:
        """Generates at most ``count`` tokens greedily; fewer if the text ends."""


class PeerError(Exception):
    """A peer's request failed; the message is one line."""


def peak(process: str = "self") -> float:
    """Peak resident memory of a process in MiB (VmHWM), by its id. Linux only."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024


def beside(name: str) -> str:
    """The path of a program beside this Python."""
    return str(Path(sys.executable).with_name(name))


def convert_with(command: Sequence[str]) -> None:
    """Runs a peer's own converter. Raises RuntimeError with the last line of its errors if it fails."""
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(process.stderr.strip().splitlines()[-1])


def serve(load: Callable[..., Model], convert: Callable[[Path, Path, str], object] | None = None) -> None:
    """Answers requests until standard input ends. Output of libraries is redirected to standard error.

    A model whose memory is another process's has a method ``peak``.
    """
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
        print(json.dumps({**answer, "peak_mb": getattr(model, "peak", peak)()}), file=answers, flush=True)


class Worker:
    """The benchmark's handle to a peer's process."""

    def __init__(self, command: Sequence[str | Path], log: Path, folder: Path, environment: Mapping[str, str]) -> None:
        """log: file for its standard error. folder: working directory. environment: additional variables."""
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
        """Returns the answer to a request. Raises PeerError on errors, after ``limit`` seconds, and if the process
        ends."""
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
            last = (self.log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
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
