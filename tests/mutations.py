"""Damage to files: endless ways to spoil a folder, each drawn from a seed, and a survey of what a program makes of
them.

    python -m tests.mutations --kind checkpoint --cases 2000 --seed 1
    python -m tests.mutations --kind checkpoint --seed 1 --case 37      # one of them again

A kind is a module with ``prepare(folder)``, which makes something whole once, and ``attempt(folder)``, which gives a
spoiled copy of it to the program, returns what came of it in a word, and raises where the program did anything but
succeed or say in one line why it cannot. It may have ``WAYS``, mutations of its own, or ``mutants`` in place of those
here.
"""

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

Apply = Callable[[Path], None]
# a whole file, which is only read -> a mutation of its copy
Way = Callable[[Path, random.Random], tuple[str, Apply] | None]

KINDS = {
    "checkpoint": "tests.hostile_checkpoints",
    "gguf": "tests.hostile_ggufs",
    "bundle": "tests.hostile_bundles",
    "session": "tests.hostile_sessions",
    "arguments": "tests.hostile_arguments",
}
SECONDS = 20  # of the processor that an attempt may take; on a busy machine that is many more by the clock

_RAW = {"@1e400": "1e400", "@deep": "[" * 100_000 + "]" * 100_000, "@open": '{"a":' * 100_000, "@digits": "9" * 6000}
_HOSTILE: Sequence[Any] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    -5,
    2,
    7,
    2**31,
    2**63,
    10**9,
    10**40,
    0.0,
    1.0,
    1.5,
    -0.5,
    -3.0,
    1e-300,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "x",
    "../../victim",
    "/etc/passwd",
    "a" * 5000,
    "\ud800",
    "a\0b",
    "two\nlines",
    "{{ 1 }}",
    [],
    [[]],
    [None],
    [1, "a"],
    {},
    {"a": {}},
    {"": None},
    *_RAW,
)


def mutants(folder: Path, rng: random.Random, ways: Sequence[Way] = ()) -> Iterator[tuple[str, Apply]]:
    """What a mutation does, and a function that does it to a copy of ``folder``; without end. ways: more than the
    general ones."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    while True:
        file = rng.choice(files)
        found = rng.choice([*ways, *(general for _ in range(15))])(file, rng)
        if found:
            what, apply = found
            name = file.relative_to(folder)
            yield f"{name}: {what}", partial(_apply, apply, name)


def _apply(apply: Apply, name: Path, copy: Path) -> None:
    if not (copy / name).is_file():  # an earlier mutation may have made a pipe of it, which nobody writes to
        raise FileNotFoundError(name)
    apply(copy / name)


def general(file: Path, rng: random.Random) -> tuple[str, Apply] | None:
    """A mutation of any file: of its bytes, its name and kind, or of the JSON in it; None where the one drawn does not
    suit it."""
    return rng.choice([*(way for way in GENERAL for _ in range(2)), _json, _json, _json])(file, rng)


# --- bytes and names --------------------------------------------------------------------------------------------------


def _edit(change: Callable[[bytearray], object]) -> Apply:
    def apply(file: Path) -> None:
        content = bytearray(file.read_bytes())
        change(content)
        file.write_bytes(content)

    return apply


def _flip(file: Path, rng: random.Random) -> tuple[str, Apply] | None:
    size = file.stat().st_size
    # Headers come first and indexes last, and most of a large file is between them.
    ends = [(0, size), (0, min(size, 600)), (max(0, size - 600), size)]
    places = (
        [(rng.randrange(*rng.choice(ends)), rng.randrange(8)) for _ in range(rng.choice((1, 1, 3)))] if size else []
    )

    def flip(content: bytearray) -> None:
        for at, bit in places:
            content[at] ^= 1 << bit

    return (f"flip bits at {places}", _edit(flip)) if size else None


def _overwrite(file: Path, rng: random.Random) -> tuple[str, Apply] | None:
    size = file.stat().st_size
    if not size:
        return None
    at, length = rng.randrange(size), rng.choice((1, 4, 64, size))
    value = rng.choice((b"\0", b"\xff", b"[", rng.randbytes(1)))
    end = min(size, at + length)
    return f"bytes {at} to {end} become {value!r}", _edit(lambda c: c.__setitem__(slice(at, end), value * (end - at)))


def _truncate(file: Path, rng: random.Random) -> tuple[str, Apply] | None:
    size = file.stat().st_size
    keep = rng.choice((0, 1, size // 2, max(0, size - 1), rng.randrange(size + 1)))
    return f"cut to {keep} bytes", lambda f: os.truncate(f, keep)


def _append(file: Path, rng: random.Random) -> tuple[str, Apply] | None:
    tail = rng.choice((b"\0", b"{}", b"\xff" * 9, rng.randbytes(100)))
    return f"{tail[:8]!r}... behind it", _edit(lambda c: c.extend(tail))


def _replace(file: Path, rng: random.Random) -> tuple[str, Apply] | None:
    def by(make: Callable[[Path], object]) -> Apply:
        def apply(f: Path) -> None:
            f.unlink()
            make(f)

        return apply

    others = sorted(p for p in file.parent.iterdir() if p.is_file() and p != file)
    other = rng.choice(others).name if others else file.name
    return rng.choice(
        [
            ("gone", by(lambda f: None)),
            ("a pipe", by(os.mkfifo)),
            ("a folder", by(Path.mkdir)),
            ("a link to itself", by(lambda f: f.symlink_to(f.name))),
            ("a link to /dev/zero", by(lambda f: f.symlink_to("/dev/zero"))),
            ("empty", by(Path.touch)),
            ("deep", by(lambda f: f.write_text("[" * 100_000))),
            ("null", by(lambda f: f.write_text("null"))),
            (
                f"has the content of {other}",
                by(lambda f: (f.parent / other).exists() and shutil.copyfile(f.parent / other, f)),
            ),
            ("renamed", lambda f: f.rename(f.with_name(f"{f.name}.bak"))),
        ]
    )


GENERAL: Sequence[Way] = (_flip, _flip, _overwrite, _truncate, _append, _replace)


# --- JSON -------------------------------------------------------------------------------------------------------------


def spoil(content: Any, rng: random.Random) -> str:
    """Changes one place of a JSON document; says what."""
    path, holder, key = "", content, None
    while isinstance(holder, dict | list) and holder:
        key = rng.choice(sorted(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        path += f"[{str(key)[:60]!r}]"
        if not isinstance(holder[key], dict | list) or not holder[key] or rng.random() < 0.15:
            break
        holder = holder[key]
    value = rng.choice(_HOSTILE)
    ways = ["set", "set", "set", "set", "delete"] + (["rename", "add"] if isinstance(holder, dict) else ["repeat"])
    way = rng.choice(ways)
    if key is None or not holder:
        return "nothing"
    if way == "delete":
        del holder[key]
    elif way == "rename":
        holder[str(value)] = holder.pop(key)
    elif way == "add":
        holder["unknown"] = value
    elif way == "repeat":
        holder.extend([holder[key]] * rng.choice((1, 1000)))
    else:
        holder[key] = value
    return f"{way} {path} {str(value)[:40]!r}"


def dumped(content: Any) -> bytes:
    text = json.dumps(content)
    for mark, raw in _RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text.encode()


def _json(file: Path, rng: random.Random) -> tuple[str, Apply] | None:
    """Of a JSON file, of JSON lines, or of the header of a .safetensors file."""
    content = file.read_bytes()
    if file.suffix == ".safetensors":
        size = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + size])
        said = spoil(header, rng)
        new = dumped(header)
        return said, lambda f: void(f.write_bytes(struct.pack("<Q", len(new)) + new + content[8 + size :]))
    try:
        document = json.loads(content)
    except ValueError:
        return None
    said = spoil(document, rng)
    return said, lambda f: void(f.write_bytes(dumped(document)))


def void(_: object) -> None:
    pass


# --- the survey -------------------------------------------------------------------------------------------------------


class Hang(BaseException):
    """Not an ``Exception``, so that nothing takes it for an error of its own."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises Hang after so many seconds of the processor, or ten times as many by the clock, for what waits; where not
    even that gets through, ends the process with every thread's stack."""

    def late(*_: object) -> None:
        raise Hang(f"it ran longer than {seconds} s")

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, seconds), signal.SIGALRM: (signal.ITIMER_REAL, 10 * seconds)}
    before = {number: signal.signal(number, late) for number in timers}
    faulthandler.dump_traceback_later(20 * seconds, exit=True, file=sys.__stderr__)
    for timer, limit in timers.values():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


@contextlib.contextmanager
def captured() -> Iterator[Callable[[], tuple[str, str]]]:
    """Standard output and error of the process, what libraries write past Python included; for reading when the block
    has ended."""
    kept = [os.dup(1), os.dup(2)]
    streams, python = [tempfile.TemporaryFile() for _ in kept], (sys.stdout, sys.stderr)  # noqa: SIM115
    sys.stdout.flush(), sys.stderr.flush()
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
    sys.stdout, sys.stderr = (open(n, "w", closefd=False, errors="backslashreplace") for n in (1, 2))  # noqa: SIM115

    def read() -> tuple[str, str]:
        texts = []
        for stream in streams:
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", "replace"))
        return texts[0], texts[1]

    try:
        yield read
    finally:
        for opened in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                opened.flush()
        sys.stdout, sys.stderr = python
        for number, saved in enumerate(kept, 1):
            os.dup2(saved, number)
            os.close(saved)


def snapshot(folder: Path) -> dict[str, tuple[int, int, int, int]]:
    """Kind, size, time of change and inode of everything in a folder."""
    found = {str(p.relative_to(folder)): p.lstat() for p in folder.rglob("*")}
    return {name: (s.st_mode, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in found.items()}


def survey(
    kind: str, cases: Sequence[int], seed: int, root: Path, tell: Callable[[str], object] = void
) -> tuple[Counter[str], list[str]]:
    """Attempts on spoiled copies. cases: numbers, each of which draws the same mutation alone as among others.

    Returns how often each outcome was, and what went wrong, a text each.
    """
    module = importlib.import_module(KINDS[kind])
    whole = root / "whole"
    module.prepare(whole)
    untouched = root / "untouched" / "copy"
    shutil.copytree(whole, untouched)
    outcomes, faults = Counter({f"{module.attempt(untouched)}, untouched": 1}), list[str]()
    for case in cases:
        rng = random.Random(f"{seed}/{case}")
        copy = root / f"case{case}" / "spoiled"
        shutil.copytree(whole, copy)
        drawn = getattr(module, "mutants", mutants)(whole, rng, getattr(module, "WAYS", ()))
        said = []
        for _ in range(rng.choice((1, 1, 1, 2))):
            what, apply = next(drawn)
            # the second may find its file gone, shorter, or no JSON
            with contextlib.suppress(OSError, IndexError, ValueError):
                apply(copy)
                said.append(what)
        began = time.monotonic()
        try:
            before = snapshot(copy)
            with deadline(SECONDS):
                outcome = module.attempt(copy)
            assert snapshot(copy) == before, "it changed what it was given"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of a library's in Rust is no Exception
            outcome = "FAULT"
            faults.append(f"case {case}, {'; '.join(said)}\n{''.join(traceback.format_exception(error)[-4:])}")
            tell(faults[-1])
        outcomes[outcome] += 1
        tell(f"{case}: {time.monotonic() - began:.1f} s, {outcome}: {'; '.join(said)}")
        shutil.rmtree(copy.parent)
    return outcomes, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    cases = range(args.first, args.first + args.cases) if args.case is None else [args.case]
    with tempfile.TemporaryDirectory() as root:
        outcomes, faults = survey(args.kind, cases, args.seed, Path(root), lambda text: print(text, flush=True))
    print(dict(outcomes))
    for fault in faults:
        print(fault)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
