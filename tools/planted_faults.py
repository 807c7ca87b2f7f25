"""Plants faults in a copy of the sources, one at a time, and checks that the tests catch each.

    python -m tools.planted_faults                     # every fault, each with the test that is named for it
    python -m tools.planted_faults eos-ignored --all   # this one, with all tests that `make test` runs

First the tests pass without a fault. Exits with 1 if a fault is missed, or if something keeps it from being tried.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runtime.cli.command import run
from runtime.errors import GumihoError, InputError
from tools.planted import FAULTS, Fault

ROOT = Path(__file__).parent.parent
# The seed repeats hypothesis' draws as far as possible. Without --assert=plain, explaining how long lists differ may
# take minutes.
_HOW = ("-rA", "--show-capture=no", "--tb=line", "--assert=plain", "--hypothesis-seed=0")
_ALL = ("--numprocesses=auto", "--maxprocesses=8", "--dist=loadfile", "--no-loadscope-reorder")  # as in the Makefile
_WHERE = (
    "from importlib.util import find_spec; print(*(find_spec(p).origin for p in ('exporter', 'graphs', 'runtime')), "
    "sep='\\n')"
)
_SECONDS = 3600  # tests that take longer count as hanging


def fault_of(name: str) -> Fault:
    if found := next((fault for fault in FAULTS if fault.name == name), None):
        return found
    raise InputError(f"there is no fault {name!r}: --list names those there are")


def edited(fault: Fault, root: Path) -> str:
    """The text of the file with the fault. Raises InputError if there is not exactly one place for it."""
    file = root / fault.file
    text = file.read_text("utf-8") if file.is_file() else ""
    if (count := text.count(fault.old)) != 1:
        raise InputError(
            f"{fault.name}: its text occurs {count} times in {fault.file}, expected once: correct tools/planted"
        )
    return text.replace(fault.old, fault.new)


def copy(folder: Path) -> None:
    """Copies the files that git tracks, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def tested(folder: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """pytest's exit status over a copy, and what it printed. Raises GumihoError if other packages than the copy's are
    imported."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    where = subprocess.run(
        [sys.executable, "-c", _WHERE], cwd=folder.parent, env=environment, check=True, capture_output=True, text=True
    )
    if elsewhere := [file for file in where.stdout.splitlines() if not Path(file).is_relative_to(folder)]:
        raise GumihoError(f"tests of the copy would import {elsewhere[0]}: leave out what puts it before PYTHONPATH")
    command = [sys.executable, "-m", "pytest", *_HOW, f"--basetemp={folder.parent / 'tests'}", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return -1, f"ran longer than {_SECONDS} s"
    return done.returncode, done.stdout + done.stderr


def ids(printed: str, *outcomes: str) -> list[str]:
    """The tests with one of these outcomes."""
    return re.findall(rf"^(?:{'|'.join(outcomes)}) (\S+::.*?)(?: - .*)?$", printed, re.MULTILINE)


def require_sound(faults: Sequence[Fault], everything: bool) -> None:
    """Raises GumihoError unless the tests pass without a fault."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root).resolve() / "copy"
        copy(folder)
        named = list(dict.fromkeys(fault.test for fault in faults))
        status, printed = tested(folder, _ALL if everything else named)
    passed = ids(printed, "PASSED")
    without = (
        [] if everything else [test for test in named if not any(p == test or p.startswith(f"{test}[") for p in passed)]
    )
    if status or without:
        told = [
            *ids(printed, "FAILED", "ERROR"),
            *re.findall("^ERROR: .*", printed, re.MULTILINE),
            *without,
            printed[-200:],
        ]
        said = " ".join(told[0].split())
        raise GumihoError(f"not all tests pass without a fault ({said}): repair them, or name others in tools/planted")


def attempt(fault: Fault, everything: bool) -> bool:
    """Plants a fault, runs tests and prints the result. Returns whether a test failed."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root).resolve() / "copy"
        copy(folder)
        (folder / fault.file).write_text(edited(fault, folder), "utf-8")
        status, printed = tested(folder, ["-x", *(_ALL if everything else (fault.test,))])
    failed = ids(printed, "FAILED", "ERROR")
    caught = status == 1 and bool(failed)
    by = failed[0] if caught else "no test fails" if not status else " ".join(printed.split())[-200:]
    print(f"{'caught' if caught else 'MISSED'}  {fault.name}  {time.monotonic() - started:.0f} s  {by}", flush=True)
    return caught


def plant(args: argparse.Namespace) -> int:
    if args.jobs < 1:
        raise InputError(f"--jobs is {args.jobs}: give 1 or more")
    faults = [fault_of(name) for name in args.names] or FAULTS
    if args.list:
        print("\n".join(f"{fault.name}: {fault.file}, {fault.test}" for fault in faults))
        return 0
    for fault in faults:
        edited(fault, ROOT)
    require_sound(faults, args.all)
    with ThreadPoolExecutor(args.jobs) as pool:
        caught = list(pool.map(lambda fault: attempt(fault, args.all), faults))
    print(f"{sum(caught)} of {len(caught)} faults are caught")
    return int(not all(caught))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant (default: all)")
    parser.add_argument("--list", action="store_true", help="only list them, each with its file and its test")
    parser.add_argument("--all", action="store_true", help="run all tests instead of the one that is named")
    parser.add_argument("--jobs", type=int, default=1, help="faults at once (default: 1)")
    args = parser.parse_args(argv)
    return run(lambda: plant(args))


if __name__ == "__main__":
    sys.exit(main())
