"""The survey finds what it is for, and a short one of every kind finds nothing. Long ones are run by hand: see
``tests.mutations``."""

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
import types
from itertools import islice
from pathlib import Path

import pytest

from tests import mutations
from tests.mutations import KINDS, captured, mutants, survey


@pytest.mark.parametrize("cases", [8, pytest.param(40, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_short_survey(kind: str, cases: int, tmp_path: Path) -> None:
    outcomes, faults = survey(kind, range(cases), 2026, tmp_path)
    assert not faults, "\n".join(faults)
    assert sum(outcomes.values()) == 1 + cases
    assert len(outcomes) > 1


def whole(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "a.json").write_text('{"a": [1, {"b": null}], "c": "d"}')
    (folder / "b.bin").write_bytes(bytes(range(256)))


def test_a_seed_draws_the_same_mutations_and_another_draws_others(tmp_path: Path) -> None:
    whole(tmp_path / "whole")
    drawn = [[said for said, _ in islice(mutants(tmp_path / "whole", random.Random(seed)), 50)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) > 30


def test_mutations_change_the_copy_only(tmp_path: Path) -> None:
    whole(tmp_path / "whole")
    before, changed = mutations.snapshot(tmp_path / "whole"), 0
    for number, (_, apply) in enumerate(islice(mutants(tmp_path / "whole", random.Random(3)), 200)):
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", copy)
        apply(copy)
        found = {p.name: p.read_bytes() if p.is_file() and not p.is_symlink() else b"" for p in copy.iterdir()}
        changed += found != {p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()}
    assert changed > 180
    assert mutations.snapshot(tmp_path / "whole") == before


FAULTS = {
    "an error that nobody foresaw": lambda folder: 1 // 0,
    "a check of the attempt's": lambda folder: pytest.fail("a traceback"),
    "endless": lambda folder: time.sleep(100),
    "endless, and errors are ignored": lambda folder: endless(),
    "it writes": lambda folder: (folder / "new").touch(),
}


def endless() -> None:
    while True:
        with contextlib.suppress(Exception):
            time.sleep(100)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_told_with_its_mutation(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def attempt(folder: Path) -> str:
        calls.append(folder)
        if len(calls) > 1:  # the first is of what is whole
            FAULTS[fault](folder)
        return "fine"

    kind = types.ModuleType("tests.faulty")
    kind.prepare, kind.attempt = whole, attempt  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests.faulty", kind)
    monkeypatch.setitem(KINDS, "faulty", "tests.faulty")
    monkeypatch.setattr(mutations, "SECONDS", 0.5)
    outcomes, faults = survey("faulty", [0], 1, tmp_path)
    assert outcomes == {"fine, untouched": 1, "FAULT": 1}
    assert faults[0].startswith("case 0, ")
    assert list(tmp_path.glob("case*")) == []


def test_what_libraries_write_past_python_is_captured() -> None:
    with captured() as read:
        print("python")
        os.write(2, b"library\n")
        print("error", file=sys.stderr)
    assert read() == ("python\n", "library\nerror\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "seed", "case"), [("checkpoint", 7, 1546)])
def test_what_was_once_found(kind: str, seed: int, case: int) -> None:
    """A vocabulary of one token: transformers warned of its ids in lines of its own. In a process of its own, since it
    keeps the standard error that it found when it was imported."""
    argv = [sys.executable, "-m", "tests.mutations", "--kind", kind, "--seed", str(seed), "--case", str(case)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stdout
