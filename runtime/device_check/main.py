"""Checks and measures everything about a bundle on this device, and writes device_check.json and device_check.md after
every step.

Run the same command again to continue after an interruption; it repeats steps that failed and steps whose inputs have
changed.
"""

import argparse
import hashlib
import json
import platform
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from ..bundle.files import read_regular, replaced
from ..bundle.locks import locked
from ..bundle.records import Damage, parse, sealed, unsealed
from ..cli.checks import doctor
from ..cli.command import argument_parser
from ..cli.command import run as run_command
from ..cli.engine_options import add_engine_options
from ..engines.store import RECORD, find_engines
from ..errors import DamageError, GumihoError, InputError, reason
from . import pieces as device_pieces
from . import report as device_report
from . import times as device_times
from . import tokens as device_tokens
from .pieces import Check, Findings, Skip

JSON, MARKDOWN = "device_check.json", "device_check.md"
FORMAT = 1
_MOST = 16 << 20  # bytes of a report
_CRASHES = 2  # a piece in which the process has crashed this often is not run again


@dataclass(frozen=True)
class Piece:
    """A step of the check.

    share: its share of the time budget, 0 for a piece without a time limit. needs: "", "backend" or "engines". again:
    the command that reproduces its failure.
    """

    name: str
    run: Callable[[Check], Findings]
    share: float
    needs: str
    again: str = "device_check"


PIECES = (
    Piece("doctor", device_pieces.look, 1, "", "doctor"),
    Piece("compile", device_pieces.compile, 0, "backend", "compile"),
    Piece("golden", device_pieces.replay_golden, 1, "engines"),
    Piece("memory", device_times.footprint, 2, "engines"),
    Piece("greedy", device_tokens.greedy, 5, "engines"),
    Piece("sampled", device_tokens.sampled, 5, "engines"),
    Piece("times", device_times.times, 2, "engines"),
    Piece("selftest", device_pieces.prove, 4, "engines", "selftest"),
    Piece("cpu", device_tokens.against_cpu, 5, "engines"),
)


@dataclass
class Outcome:
    """The outcome of a piece.

    state: ok, failed, skipped, or running if the process ended during the piece. key: a digest of everything it depends
    on. crashes: how often the process ended during the piece. trace: the traceback of an unexpected exception. again:
    see ``Piece``.
    """

    state: str
    key: str
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    crashes: int = 0
    trace: str = ""
    again: str = ""


class Report:
    """The outcomes so far, on disk."""

    def __init__(self, folder: Path, about: Mapping[str, Any], fresh: bool) -> None:
        """about: see the function ``about``. fresh: ignore an earlier report. Raises DamageError if that is damaged."""
        self.folder, self.about = folder, about
        self.pieces: dict[str, Outcome] = {} if fresh else self._read()

    def _read(self) -> dict[str, Outcome]:
        file = self.folder / JSON
        try:
            raw = parse(read_regular(file, _MOST))
            if not isinstance(raw, dict):
                raise Damage("it is not a JSON object")
            content = unsealed(raw)
            if content.get("format") != FORMAT:
                return {}
            return {name: Outcome(**outcome) for name, outcome in content["pieces"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, Damage, KeyError, TypeError, AttributeError) as error:
            raise DamageError(f"{file} is damaged ({reason(error)}): start over with --again") from None

    def save(self) -> None:
        # In the order of PIECES, wherever an earlier run stopped.
        pieces = {piece.name: asdict(self.pieces[piece.name]) for piece in PIECES if piece.name in self.pieces}
        text = sealed({"format": FORMAT, "about": self.about, "pieces": pieces})
        with replaced(self.folder / JSON) as file:
            file.write(text.encode())
        with replaced(self.folder / MARKDOWN) as file:
            file.write(device_report.markdown(json.loads(text)).encode())

    @property
    def passed(self) -> bool:
        return all(outcome.state in ("ok", "skipped") for outcome in self.pieces.values())


def check_all(check: Check, report: Report, minutes: float) -> None:
    """Runs the pieces that are not done yet, and saves the report after each."""
    total = sum(piece.share for piece in PIECES)
    for i, piece in enumerate(PIECES):
        before = report.pieces.get(piece.name)
        current, missing = _key(check, piece, minutes)
        if before and before.key == current and _done(before):
            print(device_report.line(piece.name, asdict(before)) + " (checked before)")
            continue
        minutes_left = minutes / total * sum(later.share for later in PIECES[i:])
        check.say(f"[{i + 1}/{len(PIECES)}] {piece.name}, at most {minutes_left:.0f} minutes left")
        crashes = before.crashes + 1 if before and before.state == "running" and before.key == current else 0
        if missing:
            outcome = Outcome("skipped", current, notes=[f"not run: {missing}"])
        elif crashes >= _CRASHES:
            cause = f"the process ended {crashes} times during this piece, since the backend crashed or memory ran out"
            outcome = Outcome("failed", current, wrong=[f"{cause}: use --again to retry"], crashes=crashes)
        else:
            report.pieces[piece.name] = Outcome("running", current, crashes=crashes)
            report.save()
            check.deadline = monotonic() + 60 * minutes * piece.share / total
            try:
                outcome = _run_piece(check, piece)
            except BaseException:  # an interruption, which does not count as a crash
                del report.pieces[piece.name]
                report.save()
                raise
            outcome.key = _key(check, piece, minutes)[0]  # compiling has changed the engines' key
        outcome.again = check_command(piece.again, check)
        report.pieces[piece.name] = outcome
        report.save()
        print(device_report.line(piece.name, asdict(outcome)))
        if outcome.state == "failed":
            print(device_report.failure(piece.name, asdict(outcome), report.about), file=sys.stderr)


def _done(outcome: Outcome) -> bool:
    return outcome.state == "ok" or (outcome.state == "failed" and outcome.crashes >= _CRASHES)


def _run_piece(check: Check, piece: Piece) -> Outcome:
    """Runs a piece; an exception becomes a failed outcome, and the next piece then loads the model again."""
    started, trace = monotonic(), ""
    try:
        findings = piece.run(check)
        state = "failed" if findings.wrong else "ok"
    except Skip as reason:
        findings, state = Findings(notes=[str(reason)]), "skipped"
    except Exception as error:  # device libraries raise many kinds of exceptions, and the other pieces should still run
        text = " ".join(str(error).split())[:500]
        message = text if isinstance(error, GumihoError) else f"{type(error).__name__}: {text}"
        findings, state = Findings(wrong=[message]), "failed"
        trace = "" if isinstance(error, GumihoError) else traceback.format_exc()[-4000:]
        with suppress(Exception):
            check.close()
    seconds = round(monotonic() - started, 3)
    return Outcome(state, "", seconds, findings.facts, findings.wrong, findings.notes, trace=trace)


def _key(check: Check, piece: Piece, minutes: float) -> tuple[str, str]:
    """A digest of everything that a piece depends on, and why the piece cannot run, "" if it can."""
    parts: dict[str, Any] = {
        "bundle": check.bundle.hash,
        "runtime": _source_digest(),
        "device": check.device,
        "threads": check.threads,
    }
    parts |= {"minutes": minutes} if piece.share else {}
    missing = ""
    try:
        parts |= {"backend": check.name, **check.backend.versions()}
        if piece.needs:
            parts["engines"] = hashlib.sha256(
                (find_engines(check.bundle, check.backend) / RECORD).read_bytes()
            ).hexdigest()
    except (GumihoError, OSError) as error:
        needs_no_engines = piece.needs == "" or (piece.needs == "backend" and check.runs)
        missing = "" if needs_no_engines else str(error)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16], missing


def _source_digest() -> str:
    """A digest of the runtime's code."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted(root.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def check_command(module: str, check: Check) -> str:
    """A command line that runs a module with this check's bundle, backend and device."""
    options = {"--backend": check.name, "--device": check.device}
    if module in ("device_check", "selftest"):
        options["--threads"] = str(check.threads or "")
    arguments = [part for name, value in options.items() if value for part in (name, value)]
    return shlex.join(["python", "-m", f"runtime.{module}", str(check.bundle.path), *arguments])


def about(check: Check) -> dict[str, Any]:
    """Facts about the bundle and the machine for the report."""
    manifest, facts = check.bundle.manifest, dict[str, str]()
    with suppress(GumihoError):
        facts = check.backend.versions() | check.backend.details()
    return {
        "command": check_command("device_check", check),
        "bundle": {
            "name": check.bundle.path.name,
            "hash": check.bundle.hash[:16],
            "dtype": manifest.dtype,
            "weights": dict(manifest.weights),
            "rows": manifest.rows,
            "capacity": manifest.capacity,
            "bytes": check.bundle.weights(),
            "sources": dict(manifest.sources),
        },
        "backend": check.name,
        "device": check.device,
        "threads": check.threads,
        "facts": facts,
        "packages": doctor.installed(),
        "platform": platform.platform(),
        "runtime": _source_digest(),
    }


@contextmanager
def _terminable() -> Iterator[None]:
    """Treats SIGTERM as an interruption, like Ctrl-C."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("device-check", __doc__)
    parser.add_argument("bundle", help="folder made by gumiho-export")
    add_engine_options(parser, "check", threads="CPU threads")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for the report (default: device_check-BUNDLE-BACKEND in the current folder)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=25,
        metavar="M",
        help="time budget in minutes, compiling not included (default: 25)",
    )
    parser.add_argument("--again", action="store_true", help="start over instead of continuing an earlier check")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)

    def work() -> int:
        if not 0 < args.minutes < 1e6:
            raise InputError(f"--minutes is {args.minutes}: give more than 0")
        if args.threads < 0:
            raise InputError(f"--threads is {args.threads}: give 0 for as many as compiling found fastest, or more")
        check = Check(
            args.bundle,
            args.backend,
            args.device,
            args.threads,
            lambda step: print(f"{step} ...", file=sys.stderr, flush=True),
        )
        names = [check.bundle.path.name, check.name, args.device.replace(":", "")]
        out: Path = args.out or Path("-".join(["device_check", *filter(None, names)]))
        try:
            out.mkdir(parents=True, exist_ok=True)
            with locked(
                out / ".lock", f"another check writes to {out}: wait for it to end, or name another folder with --out"
            ):
                report = Report(out, about(check), args.again)
                check_all(check, report, args.minutes)
        except OSError as error:
            raise InputError(
                f"'{out}' cannot be written ({error.strerror or error}): name another folder with --out"
            ) from None
        except KeyboardInterrupt:
            print("interrupted: run the same command again to continue", file=sys.stderr)
            raise
        finally:
            with suppress(Exception):
                check.close()
        print(f"{'all passed' if report.passed else 'FAILED'}: {out / MARKDOWN}, {out / JSON}")
        return 0 if report.passed else 1

    with _terminable():
        return run_command(work)
