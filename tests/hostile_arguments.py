"""Odd command lines for ``tests.mutations``: what the commands of the runtime make of them."""

import json
import os
import random
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from runtime.cli import compile, generate
from runtime.cli.checks import doctor, selftest
from tests import hostile_bundles
from tests.hostile_bundles import one_line
from tests.mutations import Apply, Way, captured

_COMMANDS = {"generate": generate.main, "doctor": doctor.main, "compile": compile.main, "selftest": selftest.main}
_FILE = "argv.json"
_VALUES = (
    "",
    " ",
    "0",
    "1",
    "-1",
    "2",
    "7",
    "60",
    "61",
    "1e9",
    "nan",
    "inf",
    "-inf",
    "0.5",
    "9" * 23,
    "-" + "9" * 30,
    "9" * 6000,
    "x",
    "é",
    "\udcff",
    "two\nlines",
    "\x1b[2J",
    "~",
    "~nouser",
    "~nouser/x",
    "/",
    "/dev/null",
    "/dev/full",
    "/etc/passwd",
    "/proc/self/mem",
    "BUNDLE/gumiho.json",
    "BUNDLE/weights",
    "BUNDLE",
    "nowhere",
    "PIPE",
    "a" * 5000,
    "a/" * 3000,
    "5=1",
    "5=nan",
    "5=inf",
    "=",
    "9=" + "9" * 400,
    "9" * 23 + "=1",
    "{",
    "{}",
    "[",
    "(",
    "(" * 5000,
    "a{999999999}",
    '{"type": "object"}',
    '{"a":' * 5000 + "1" + "}" * 5000,
    '{"not":' * 300 + "{}" + "}" * 300,
    "start: start",
    "cpu",
    "cuda",
    "json",
    "text",
    "fta",
    "typical",
    "%s%n",
    "A" * 100_000,
)
_OPTIONS = {
    "generate": (
        "--prompt",
        "--prompt-file",
        "--prompts",
        "--chat",
        "--system",
        "--no-speculation",
        "--no-lookup",
        "--rows",
        "--max-new-tokens",
        "--min-new-tokens",
        "--max-seconds",
        "--stop",
        "--stop-token",
        "--temperature",
        "--top-k",
        "--top-p",
        "--min-p",
        "--seed",
        "--repetition-penalty",
        "--presence-penalty",
        "--frequency-penalty",
        "--no-repeat-ngram",
        "--logit-bias",
        "--ban",
        "--json-schema",
        "--regex",
        "--grammar",
        "--compare",
        "--check-lossless",
        "--trace",
        "--stats",
        "--tree",
        "--accept",
        "--backend",
        "--device",
        "--threads",
    ),
    "doctor": ("--backend", "--device", "--quick"),
    "compile": ("--backend", "--device"),
    "selftest": ("--prompts", "--draws", "--max-new-tokens", "--backend", "--device", "--threads"),
}
_FLAGS = {"--chat", "--no-speculation", "--no-lookup", "--compare", "--check-lossless", "--quick"}
_FEW = {"--prompts", "--draws", "--max-new-tokens"}  # of the selftest: what is more takes long


def prepare(folder: Path) -> None:
    hostile_bundles.prepare(folder)
    (folder / _FILE).write_text(json.dumps(["doctor", "BUNDLE"]))


def mutants(folder: Path, rng: random.Random, ways: Sequence[Way] = ()) -> Iterator[tuple[str, Apply]]:
    """Command lines, which leave the bundle as it is."""
    while True:
        command = rng.choice(("generate",) * 6 + ("doctor", "compile", "selftest"))
        argv = [command, "BUNDLE" if rng.random() < 0.9 else rng.choice(_VALUES)]
        for option in rng.choices(_OPTIONS[command], k=rng.choice((1, 1, 2, 3))):
            value = rng.choice(("0", "-1", "1", "x", "0.5") if command == "selftest" and option in _FEW else _VALUES)
            argv += [option] if option in _FLAGS else [f"{option}={value}"]
        if command == "generate" and not any(a.startswith("--prompt") for a in argv) and rng.random() < 0.9:
            argv += ["--prompt", "ABCAB"]
        if command == "selftest" and not any(a.startswith("--draws") for a in argv):
            argv += ["--draws", "0"]
        said = json.dumps(argv)
        yield said[:400], lambda copy, said=said: (copy / _FILE).write_text(said)  # type: ignore[misc]


def attempt(folder: Path) -> str:
    """Runs the command line in a folder of its own. Returns its command and status."""
    command, *argv = json.loads((folder / _FILE).read_text())
    here, back = folder.parent / "here", Path.cwd()
    here.mkdir()
    os.mkfifo(here / "pipe")
    argv = [a.replace("BUNDLE", str(folder)).replace("PIPE", str(here / "pipe")) for a in argv]
    if command == "compile":
        argv = [*argv, "--backend", "none"] if argv[0] == str(folder) else argv  # the bundle stays as it is
    os.chdir(here)
    try:
        with captured() as read, patch("sys.stdin", StringIO("AB\n")):
            try:
                status = _COMMANDS[command](argv)
            except SystemExit as error:
                status = int(error.code or 0)
    finally:
        os.chdir(back)
    said = [line for line in read()[1].splitlines() if line.startswith("error: ")]
    if status == 1:
        assert len(said) == 1 or command in ("doctor", "selftest"), read()[1]
    assert status in (0, 1, 2, 3), status
    assert "Traceback" not in read()[1]
    for line in said:
        one_line(line)
    left = {p.name for p in here.iterdir()} - {"pipe"}
    assert all(name.endswith((".html", ".jsonl")) for name in left), left
    for p in here.iterdir():
        p.unlink()
    here.rmdir()
    return f"{command}: {status}"
