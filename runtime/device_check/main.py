"""Checks and measures everything about a bundle on this device, and writes device_check.json and device_check.md after every step.

Run the same command again to continue after an interruption; it repeats steps that failed or that depend on something that has
changed.
"""

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

from .. import doctor
from ..backends import DEVICES, NAMES
from ..bundle.files import read_regular, replaced
from ..bundle.locks import locked
from ..bundle.records import Damage, parse, sealed, unsealed
from ..command import argument_parser
from ..command import run as run_command
from ..engines.store import RECORD, find_engines
from ..errors import GumihoError
from . import pieces as device_pieces
from . import report as device_report
from . import times as device_times
from . import tokens as device_tokens
from .pieces import Check, Found, Skip

JSON, MARKDOWN = "device_check.json", "device_check.md"
FORMAT = 1
_MOST = 16 << 20  # bytes of a report
_CRASHES = 2  # times that a piece may end the process before it is left out


@dataclass(frozen=True)
class Piece:
    """share: of the minutes, where it stops by itself. needs: what must be there: "", "backend" or "engines". again: the command that
    shows its failure."""

    name: str
    run: Callable[[Check], Found]
    share: float
    needs: str
    again: str = "device_check"


PIECES = (
    Piece("doctor", device_pieces.look, 1, "", "doctor"),
    Piece("compile", device_pieces.compile, 0, "backend", "compile"),
    Piece("golden", device_pieces.replay, 1, "engines"),
    Piece("memory", device_times.footprint, 2, "engines"),
    Piece("greedy", device_tokens.greedy, 5, "engines"),
    Piece("sampled", device_tokens.sampled, 5, "engines"),
    Piece("times", device_times.times, 2, "engines"),
    Piece("selftest", device_pieces.prove, 4, "engines", "selftest"),
    Piece("cpu", device_tokens.against_cpu, 5, "engines"),
)


@dataclass
class Outcome:
    """Of a piece. state: ok, failed, skipped, or running where the process ended in the middle of it. key: of what it depends on.
    crashes: how often the process ended in the middle of it. trace: of an error that is none of ours."""

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
        """fresh: forget what is there. Raises GumihoError where it is damaged."""
        self.folder, self.about = folder, about
        self.pieces: dict[str, Outcome] = {} if fresh else self._read()

    def _read(self) -> dict[str, Outcome]:
        file = self.folder / JSON
        try:
            raw = parse(read_regular(file, _MOST))
            if not isinstance(raw, dict):
                raise Damage("it holds no JSON object")
            content = unsealed(raw)
            if content.get("format") != FORMAT:
                return {}
            return {name: Outcome(**outcome) for name, outcome in content["pieces"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, Damage, KeyError, TypeError, AttributeError) as error:
            raise GumihoError(f"{file} is damaged ({error}): start over with --again") from None

    def save(self) -> None:
        # In the order of the table: an earlier run may have stopped anywhere.
        pieces = {piece.name: asdict(self.pieces[piece.name]) for piece in PIECES if piece.name in self.pieces}
        text = sealed({"format": FORMAT, "about": self.about, "pieces": pieces})
        with replaced(self.folder / JSON) as file:
            file.write(text.encode())
        with replaced(self.folder / MARKDOWN) as file:
            file.write(device_report.markdown(json.loads(text)).encode())

    @property
    def holds(self) -> bool:
        return all(outcome.state in ("ok", "skipped") for outcome in self.pieces.values())


def check_all(check: Check, report: Report, minutes: float) -> None:
    """Runs the pieces that are not done, and saves the report after each."""
    total = sum(piece.share for piece in PIECES)
    for i, piece in enumerate(PIECES):
        before = report.pieces.get(piece.name)
        current, missing = _key(check, piece, minutes)
        if before and before.key == current and _done(before):
            print(device_report.line(piece.name, asdict(before)) + " (checked before)")
            continue
        left = minutes / total * sum(later.share for later in PIECES[i:])
        check.say(f"[{i + 1}/{len(PIECES)}] {piece.name}, {left:.0f} minutes left at most")
        crashes = before.crashes + 1 if before and before.state == "running" and before.key == current else 0
        if missing:
            outcome = Outcome("skipped", current, notes=[f"not run: {missing}"])
        elif crashes >= _CRASHES:
            wrong = f"the process ended {crashes} times in the middle of this piece: the backend crashed, or memory ran out (--again tries it anew)"
            outcome = Outcome("failed", current, wrong=[wrong], crashes=crashes)
        else:
            report.pieces[piece.name] = Outcome("running", current, crashes=crashes)
            report.save()
            check.deadline = monotonic() + 60 * minutes * piece.share / total
            try:
                outcome = _made(check, piece)
            except BaseException:  # interrupted: that is no crash
                del report.pieces[piece.name]
                report.save()
                raise
            outcome.key = _key(check, piece, minutes)[0]  # a compile changes what the engines are
        outcome.again = check_command(piece.again, check)
        report.pieces[piece.name] = outcome
        report.save()
        print(device_report.line(piece.name, asdict(outcome)))
        if outcome.state == "failed":
            print(device_report.failure(piece.name, asdict(outcome), report.about), file=sys.stderr)


def _done(outcome: Outcome) -> bool:
    return outcome.state == "ok" or (outcome.state == "failed" and outcome.crashes >= _CRASHES)


def _made(check: Check, piece: Piece) -> Outcome:
    """A piece's outcome, whatever happens in it. After an error the next piece loads the model anew."""
    started, trace = monotonic(), ""
    try:
        found = piece.run(check)
        state = "failed" if found.wrong else "ok"
    except Skip as reason:
        found, state = Found(notes=[str(reason)]), "skipped"
    except Exception as error:  # libraries of devices raise all kinds of things, and the other pieces are to go on
        text = " ".join(str(error).split())[:500]
        found, state = Found(wrong=[text if isinstance(error, GumihoError) else f"{type(error).__name__}: {text}"]), "failed"
        trace = "" if isinstance(error, GumihoError) else traceback.format_exc()[-4000:]
        with suppress(Exception):
            check.close()
    return Outcome(state, "", round(monotonic() - started, 3), found.facts, found.wrong, found.notes, trace=trace)


def _key(check: Check, piece: Piece, minutes: float) -> tuple[str, str]:
    """A digest of what a piece depends on, and what it lacks to be run; "" where it lacks nothing."""
    parts: dict[str, Any] = {
        "bundle": check.bundle.hash,
        "runtime": _source(),
        "device": check.device,
        "threads": check.threads,
    }
    parts |= {"minutes": minutes} if piece.share else {}
    missing = ""
    try:
        parts |= {"backend": check.name, **check.backend.versions()}
        if piece.needs:
            parts["engines"] = hashlib.sha256((find_engines(check.bundle, check.backend) / RECORD).read_bytes()).hexdigest()
    except (GumihoError, OSError) as error:
        needs_no_engines = piece.needs == "" or (piece.needs == "backend" and check.runs)
        missing = "" if needs_no_engines else str(error)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16], missing


def _source() -> str:
    """A digest of the runtime's own code."""
    digest, root = hashlib.sha256(), Path(__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def check_command(module: str, check: Check) -> str:
    """The command line of a module for what is checked."""
    options = {"--backend": check.name, "--device": check.device}
    if module in ("device_check", "selftest"):
        options["--threads"] = str(check.threads or "")
    given = [part for name, value in options.items() if value for part in (name, value)]
    return shlex.join(["python", "-m", f"runtime.{module}", str(check.bundle.path), *given])


def about(check: Check) -> dict[str, Any]:
    """What a reader of the report has to know of bundle and machine."""
    manifest, facts = check.bundle.manifest, dict[str, str]()
    with suppress(GumihoError):
        facts = check.backend.versions() | check.backend.details()
    return {
        "command": check_command("device_check", check),
        "bundle": {
            "name": check.bundle.path.name, "hash": check.bundle.hash[:16], "dtype": manifest.dtype,
            "weights": dict(manifest.weights), "rows": manifest.rows, "capacity": manifest.capacity,
            "bytes": check.bundle.weights(), "sources": dict(manifest.sources),
        },
        "backend": check.name, "device": check.device, "threads": check.threads, "facts": facts,
        "packages": doctor.installed(), "platform": platform.platform(), "runtime": _source(),
    }  # fmt: skip


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM is an interruption like Ctrl-C."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser("device-check", __doc__)
    parser.add_argument("bundle", help="folder made by gumiho-export")
    parser.add_argument("--backend", default="", help=f"backend to check: {', '.join(NAMES)} (default: the bundle's first)")
    parser.add_argument("--device", default="", help=DEVICES)
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="CPU threads of the engines (default: one per physical core)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for the report (default: device_check-BUNDLE-BACKEND in the current folder)",
    )
    parser.add_argument(
        "--minutes", type=float, default=25, metavar="M", help="time budget in minutes, compiling not included (default: 25)"
    )
    parser.add_argument("--again", action="store_true", help="start over instead of continuing an earlier check")
    args = parser.parse_args(argv)

    def work() -> int:
        if not 0 < args.minutes < 1e6:
            raise GumihoError(f"--minutes is {args.minutes}: give more than 0")
        if args.threads < 0:
            raise GumihoError(f"--threads is {args.threads}: give 0 for one per physical core, or more")
        check = Check(
            args.bundle, args.backend, args.device, args.threads, lambda what: print(f"{what} ...", file=sys.stderr, flush=True)
        )
        named = [check.bundle.path.name, check.name, args.device.replace(":", "")]
        out: Path = args.out or Path("-".join(["device_check", *filter(None, named)]))
        try:
            out.mkdir(parents=True, exist_ok=True)
            with locked(out / ".lock", f"another check writes to {out}: wait for it to end, or name another folder with --out"):
                report = Report(out, about(check), args.again)
                check_all(check, report, args.minutes)
        except OSError as error:
            raise GumihoError(
                f"'{out}' cannot be written ({error.strerror or error}): name another folder with --out"
            ) from None
        except KeyboardInterrupt:
            print("interrupted: the same command goes on from here", file=sys.stderr)
            raise
        finally:
            with suppress(Exception):
                check.close()
        print(f"{'all holds' if report.holds else 'FAILED'}: {out / MARKDOWN}, {out / JSON}")
        return 0 if report.holds else 1

    with _terminable():
        return run_command(work)
