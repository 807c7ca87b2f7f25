"""``python -m runtime.device_check``: a sound bundle passes, a stopped run goes on, and what is wrong is found in each
piece."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.api.generation import Generation
from runtime.api.loader import load
from runtime.backends import backend, onnxruntime_cuda
from runtime.backends import onnxruntime as ort_backend
from runtime.bundle.reader import Bundle
from runtime.cli.checks import selftest
from runtime.decoding import acceptance
from runtime.decoding.prices import Costs
from runtime.device_check import main as device_check
from runtime.device_check import pieces as device_pieces
from runtime.device_check import report as device_report
from runtime.device_check import times as device_times
from runtime.device_check import tokens as device_tokens
from runtime.device_check.main import JSON, MARKDOWN, PIECES, main
from runtime.device_check.prompts import TEXTS, prompts
from runtime.engines.store import compile_engines, find_engines
from runtime.errors import GumihoError
from tests.conftest import DEMO, EVERY_BACKEND, MakeBundle
from tests.end_to_end.test_forms import stand_in
from tests.pairs import SMALL

NAMES = [piece.name for piece in PIECES]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and shorter texts; what is checked is the same."""
    monkeypatch.setattr(device_tokens, "prompts", lambda model: prompts(model)[::5])
    monkeypatch.setattr(device_tokens, "_TOKENS", 10)
    monkeypatch.setattr(device_tokens, "_CPU_TOKENS", 6)
    monkeypatch.setattr(device_pieces, "_SELFTEST", (1, 8, 250))


@pytest.fixture
def bundle(make_bundle: MakeBundle, tmp_path: Path) -> Path:
    """A copy, since engines and files are changed."""
    return shutil.copytree(make_bundle(SMALL, "--capacity", "100"), tmp_path / "bundle")


def ran(bundle: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and the pieces of the report."""
    out = bundle.parent / "out"
    status = main([str(bundle), "--out", str(out), *options])
    content = json.loads((out / JSON).read_text("utf-8"))
    assert (out / MARKDOWN).read_text("utf-8") == device_report.markdown(content)
    return status, content["pieces"]


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(device_check, "PIECES", tuple(piece for piece in PIECES if piece.name in names))


def counted(monkeypatch: pytest.MonkeyPatch, **instead: Callable[..., Any]) -> Counter[str]:
    """Counts how often each piece is run. instead: of a piece's own function."""
    counts = Counter[str]()

    def wrapped(piece: device_check.Piece) -> device_check.Piece:
        def run(check: device_pieces.Check) -> device_pieces.Findings:
            counts[piece.name] += 1
            return instead.get(piece.name, piece.run)(check)

        return replace(piece, run=run)

    monkeypatch.setattr(device_check, "PIECES", tuple(map(wrapped, PIECES)))
    return counts


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[Mapping[str, Any]], None]) -> None:
    """Changes what engines write, after every pass."""
    bind = ort_backend.Engine.bind

    def spoiled(self: Any, buffers: Mapping[str, Any]) -> Callable[[], None]:
        call = bind(self, buffers)

        def run() -> None:
            call()
            change(buffers)

        return run

    monkeypatch.setattr(ort_backend.Engine, "bind", spoiled)


def table(markdown: str, first: str) -> dict[str, dict[str, str]]:
    """The table whose heading begins with a word: cells by the row's first cell and by heading."""
    lines = markdown.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


# --- a sound bundle ---------------------------------------------------------------------------------------------------


def test_a_sound_bundle(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every piece runs, and the tables say what the JSON says."""
    shutil.rmtree(bundle / "engines")
    status, pieces = ran(bundle)
    assert status == 0
    assert {name: outcome["state"] for name, outcome in pieces.items()} == dict.fromkeys(NAMES, "ok") | {
        "cpu": "skipped"
    }
    assert pieces["compile"]["facts"]["compiled"]
    for name in ("greedy", "sampled"):
        facts = pieces[name]["facts"]
        assert (facts["prompts"], facts["texts"], facts["alike"], facts["defects"]) == (8, 8, 8, 0)
        assert 60 < facts["tokens"] <= 80
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["ok"] * 8 + ["skipped", "all"]

    text = (bundle.parent / "out" / MARKDOWN).read_text("utf-8")
    (row,) = table(text, "device").values()
    greedy, sampled, golden = (pieces[name]["facts"] for name in ("greedy", "sampled", "golden"))
    for column, way in (("plain, tokens/s", "plain"), ("speculative, tokens/s", "speculative")):
        assert row[column] == f"{greedy[way]['tokens_per_second']} / {sampled[way]['tokens_per_second']}"
    assert row["texts as in plain decoding, greedy / sampled"] == "8 of 8 / 8 of 8"
    target, draft = (float(part.split()[1]) for part in row["golden run, largest error"].split(", "))
    assert target == pytest.approx(golden["target"]["error"], rel=0.1)
    assert draft == pytest.approx(golden["draft"]["error"], rel=0.1)
    assert {name: cells["result"] for name, cells in table(text, "piece").items()} == {
        name: outcome["state"] for name, outcome in pieces.items()
    }
    times = table(text, "context")
    for at in pieces["times"]["facts"]["contexts"]:
        cells = times[str(at["context"])]
        assert float(cells["plain pass"].split()[0]) == pytest.approx(at["plain"][0], rel=0.01)
        for rows, (fastest, _) in at["target"].items():
            assert float(cells[f"target, {rows} rows"].split()[0]) == pytest.approx(fastest, rel=0.01)
    held = pieces["memory"]["facts"]["used"]["host"]
    assert float(table(text, "when")["used"]["process"].split()[0]) == pytest.approx(held / 1e9, abs=0.01)


def test_the_cpus_tokens(make_bundle: MakeBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of graphs made for another backend, whose passes are static; one token that is another one is a defect, or a
    near-tie."""
    monkeypatch.setattr(onnxruntime_cuda, "Cuda", stand_in("cuda", lazy=False))
    bundle = shutil.copytree(make_bundle(DEMO, *EVERY_BACKEND), tmp_path / "bundle")
    vocabulary = Bundle(bundle).manifest.vocabulary
    only(monkeypatch, "compile", "times", "cpu")
    status, pieces = ran(bundle, "--backend", "cuda")
    facts = pieces["cpu"]["facts"]
    assert status == 0
    assert (facts["texts"], facts["alike"], facts["defects"]) == (16, 16, 0)
    assert all(list(at["target"]) == ["1", "2", "8"] for at in pieces["times"]["facts"]["contexts"])

    generated, calls = selftest.generated, Counter[str]()

    def changed(*given: Any) -> Generation:
        generation = generated(*given)
        if given[2] == device_tokens._CPU_TOKENS:
            calls["texts"] += 1
            if calls["texts"] == 7:
                # the last: later ones would no longer fit the text
                generation.ids[-1] = (generation.ids[-1] + 1) % vocabulary
        return generation

    monkeypatch.setattr(selftest, "generated", changed)
    only(monkeypatch, "cpu")
    status, pieces = ran(bundle, "--backend", "cuda", "--again")
    assert status == 1
    assert pieces["cpu"]["wrong"][0].startswith("1 of")
    place = pieces["cpu"]["facts"]["places"][0]
    assert (place["prompt"], place["near"]) == (3, False)
    assert place["token"] == (place["choice"] + 1) % vocabulary
    calls.clear()
    monkeypatch.setitem(device_tokens.NEAR, "float32", 1e9)
    status, pieces = ran(bundle, "--backend", "cuda", "--again")
    assert (status, pieces["cpu"]["facts"]["near_ties"], pieces["cpu"]["facts"]["defects"]) == (0, 1, 0)
    assert pieces["cpu"]["facts"]["widest_near_tie"] == pytest.approx(place["margin"], rel=0.01)
    assert pieces["cpu"]["facts"]["alike"] == 15


def test_prompts_of_a_tokenizer(demo_bundle: Path) -> None:
    with load(demo_bundle) as model:
        made = prompts(model)
        assert len(made) == len(TEXTS) == len(set(TEXTS)) == 40
        assert made == prompts(model)
        assert max(map(len, made)) == min(512, model.bundle.manifest.capacity // 2)
        assert model.encode(TEXTS[0]) == made[0]


def test_on_migraphx(make_bundle: MakeBundle, tmp_path: Path) -> None:
    """Its reference target is slow: as many prompts as a minute allows."""
    try:
        backend("migraphx", "ref")
    except GumihoError as error:
        pytest.skip(str(error))
    source = make_bundle(SMALL, "--backend", "cpu", "migraphx", "--dtype", "fp32", "--rows", "8", "--capacity", "100")
    bundle = shutil.copytree(source, tmp_path / "bundle")
    status, pieces = ran(bundle, "--backend", "migraphx", "--device", "ref", "--minutes", "1")
    assert status == 0
    assert [outcome["state"] for outcome in pieces.values()] == ["ok"] * len(PIECES)
    for name in ("greedy", "sampled", "cpu"):
        facts = pieces[name]["facts"]
        assert facts["alike"] == facts["texts"] > 0


# --- going on ---------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pieces that are done are not run again, unless something they depend on has changed, or one starts over."""

    def interrupted(check: device_pieces.Check) -> device_pieces.Findings:
        raise KeyboardInterrupt

    quick = {name: lambda check: device_pieces.Findings({}) for name in ("greedy", "times", "selftest")}
    counts = counted(monkeypatch, sampled=interrupted, **quick)
    assert ran(bundle)[0] == 130
    assert "run the same command again to continue" in capsys.readouterr().err
    assert dict(counts) == dict.fromkeys(NAMES[: NAMES.index("sampled") + 1], 1)

    quick["sampled"] = quick["greedy"]
    counts = counted(monkeypatch, **quick)
    assert ran(bundle)[0] == 0
    assert dict(counts) == dict.fromkeys(NAMES[NAMES.index("sampled") :], 1)

    counts = counted(monkeypatch, **quick)
    assert ran(bundle)[0] == 0
    assert dict(counts) == {"cpu": 1}  # what was skipped may be possible now
    assert capsys.readouterr().out.count("(checked before)") == 5 + 8

    compile_engines(Bundle(bundle), backend("cpu"), tune=True)
    counts = counted(monkeypatch, **quick)
    assert ran(bundle)[0] == 0
    assert dict(counts) == dict.fromkeys(NAMES[1:], 1)

    for options in (["--threads", "1"], ["--threads", "1", "--again"]):
        counts = counted(monkeypatch, **quick)
        assert ran(bundle, *options)[0] == 0
        assert dict(counts) == dict.fromkeys(NAMES, 1)


def test_a_piece_that_ends_the_process(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried twice, then left out and reported; the pieces after it are run."""
    code = (
        "import os, sys\nfrom dataclasses import replace\nfrom runtime.device_check import main as d\n"
        "die = lambda check: os._exit(9)\nkept = [p for p in d.PIECES if p.name in ('doctor', 'golden', 'times')]\n"
        "d.PIECES = tuple(replace(p, run=die) if p.name == 'golden' else p for p in "
        "kept)\nsys.exit(d.main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", code, str(bundle), "--out", str(bundle.parent / "out")]
    statuses = []
    for _ in range(4):
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        statuses.append(done.returncode)
    assert statuses == [9, 9, 1, 1]
    pieces = json.loads((bundle.parent / "out" / JSON).read_text("utf-8"))["pieces"]
    assert {name: outcome["state"] for name, outcome in pieces.items()} == {
        "doctor": "ok",
        "golden": "failed",
        "times": "ok",
    }
    assert "the process ended 2 times during this piece" in pieces["golden"]["wrong"][0]
    only(monkeypatch, "doctor", "golden", "times")
    assert ran(bundle, "--again")[0] == 0


@pytest.mark.exhaustive
def test_time_that_is_up(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece does the least it can, says so, and is made again where there is more time."""
    only(monkeypatch, "greedy", "times", "selftest")
    status, pieces = ran(bundle, "--minutes", "1e-9")
    assert status == 0
    assert pieces["greedy"]["facts"]["texts"] == 1
    assert pieces["greedy"]["notes"][0] == "checked only 1 of 8 prompts before the time limit"
    assert len(pieces["times"]["facts"]["contexts"]) == 1
    assert "200 texts" in pieces["selftest"]["facts"]["results"][-1]["found"]
    assert ran(bundle)[1]["greedy"]["facts"]["texts"] == 8


# --- what is wrong ----------------------------------------------------------------------------------------------------


def states(pieces: Mapping[str, Any], state: str) -> list[str]:
    return [name for name, outcome in pieces.items() if outcome["state"] == state]


@pytest.mark.exhaustive  # the self-test's own test has the same walk
def test_a_walk_that_prefers_what_was_drafted(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong tokens are found by every comparison, with their places; what was printed is what a report of an issue
    needs."""
    walk, calls = acceptance.accept_path, Counter[str]()

    def wrong(tokens: Sequence[int], parents: Sequence[int], take: Callable[[int], int | None]) -> list[int]:
        calls["walk"] += 1
        if calls["walk"] % 3 or len(tokens) < 2:
            return walk(tokens, parents, take)
        owner = take.__self__  # type: ignore[attr-defined]
        if owner.selector.add(tokens[1]) is None:
            return [0]
        take(1)
        return [0, 1]

    monkeypatch.setattr(acceptance, "accept_path", wrong)
    status, pieces = ran(bundle)
    assert status == 1
    assert states(pieces, "failed") == ["greedy", "sampled", "selftest"]
    facts = pieces["greedy"]["facts"]
    assert facts["defects"] > 0
    assert not facts["places"][0]["near"]
    first = facts["places"][0]
    assert (
        f"prompt {first['prompt']}, token {first['index']}: {first['token']} instead of {first['choice']}"
        in pieces["greedy"]["wrong"][0]
    )
    printed = capsys.readouterr().err
    assert f"error:     {pieces['greedy']['wrong'][0]}" in printed
    assert "packages:  Python" in printed
    assert f"again:     python -m runtime.device_check {bundle} --backend cpu" in printed
    assert f"again:     python -m runtime.selftest {bundle} --backend cpu" in printed
    text = (bundle.parent / "out" / MARKDOWN).read_text("utf-8")
    assert "Failed: greedy, sampled, selftest." in text
    assert "DEFECT" in text

    monkeypatch.setattr(acceptance, "accept_path", walk)
    counts = counted(monkeypatch)
    assert ran(bundle)[0] == 0  # what failed is tried again
    assert dict(counts) == dict.fromkeys(["greedy", "sampled", "selftest", "cpu"], 1)


def other_choice(buffers: Mapping[str, Any]) -> None:
    if "choice" in buffers:
        buffers["choice"][0] = (buffers["choice"][0] + 1) % 40


def other_tree(buffers: Mapping[str, Any]) -> None:
    if "tree_parent" in buffers:
        buffers["tree_parent"][2:] = 0


def nothing_finite(buffers: Mapping[str, Any]) -> None:
    if "logits" in buffers:
        buffers["logits"][...] = np.nan
        buffers["choice"][...] = -1


@pytest.mark.parametrize(
    ("change", "message", "failed"),
    [
        (other_choice, "in its choice", ["golden", "greedy"]),
        (other_tree, "parent", ["golden"]),
        (nothing_finite, "NaN or infinity", ["golden", "memory", "greedy", "times"]),
    ],
    ids=["choice", "tree", "nan"],
)
def test_engines_that_are_wrong(
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Mapping[str, Any]], None],
    message: str,
    failed: list[str],
) -> None:
    spoil(monkeypatch, change)
    only(monkeypatch, "golden", "memory", "greedy", "times")
    status, pieces = ran(bundle)
    assert status == 1
    assert message in pieces["golden"]["wrong"][0]
    assert set(failed) <= set(states(pieces, "failed"))
    assert all("\n" not in wrong for outcome in pieces.values() for wrong in outcome["wrong"])


@pytest.mark.exhaustive
def test_a_device_that_fails(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a library is told in a line, with its place in the report, and the other pieces go on with a model
    loaded anew."""

    def lost(call: object) -> list[int]:
        raise RuntimeError("hipErrorLaunchFailure:\n  unspecified launch failure")

    monkeypatch.setattr(device_times, "timed", lost)
    status, pieces = ran(bundle)
    assert status == 1
    assert states(pieces, "failed") == ["times"]
    assert pieces["times"]["wrong"] == ["RuntimeError: hipErrorLaunchFailure: unspecified launch failure"]
    assert "in lost" in pieces["times"]["trace"]
    assert pieces["selftest"]["state"] == "ok"
    assert "in lost" in (bundle.parent / "out" / MARKDOWN).read_text("utf-8")


def test_what_cannot_be_compiled(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise GumihoError("no kernel for this device: install another version")

    monkeypatch.setattr(ort_backend.Cpu, "compile", fails)
    shutil.rmtree(bundle / "engines")
    status, pieces = ran(bundle)
    assert status == 1
    assert pieces["compile"]["wrong"] == ["no kernel for this device: install another version"]
    assert states(pieces, "skipped") == NAMES[2:]
    assert "has no engines" in pieces["golden"]["notes"][0]


def test_a_backend_that_does_not_run(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise GumihoError("there is no device: install a driver")

    monkeypatch.setattr(ort_backend.Cpu, "__init__", fails)
    status, pieces = ran(bundle)
    assert status == 1
    assert "there is no device: install a driver" in pieces["doctor"]["wrong"][0]
    assert states(pieces, "skipped") == NAMES[1:]


def test_a_damaged_file(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = max((bundle / "weights").iterdir(), key=lambda file: file.stat().st_size)
    with file.open("r+b") as content:
        content.write(bytes([content.read(1)[0] ^ 1]) * 2)
    only(monkeypatch, "doctor", "memory")
    status, pieces = ran(bundle)
    assert status == 1
    assert states(pieces, "failed") == ["doctor", "memory"]
    assert f"{file} is damaged" in pieces["doctor"]["wrong"][0]


@pytest.mark.parametrize(
    ("speculative", "planned", "state"), [(50.0, True, "failed"), (90.0, True, "ok"), (50.0, False, "ok")]
)
def test_drafting_that_does_not_pay(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, speculative: float, planned: bool, state: str
) -> None:
    """It should rest where passes were measured; else the report says how slow it is."""
    if planned:
        Costs({1: 1e6, 8: 1e6}, 1e6, 1e5).save(find_engines(Bundle(bundle), backend("cpu")))
    speed, told = device_tokens._speed, iter([speculative, 100.0])  # asked for in this order
    monkeypatch.setattr(device_tokens, "_speed", lambda stats: speed(stats) | {"tokens_per_second": next(told)})
    only(monkeypatch, "greedy")
    outcome = ran(bundle)[1]["greedy"]
    assert outcome["state"] == state
    (line,) = outcome["wrong"] if state == "failed" else outcome["notes"]
    assert f"makes {speculative} tokens/s and plain decoding 100.0" in line


def test_memory_that_grows(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter(range(100, 1000, 100))
    monkeypatch.setattr(
        device_times, "memory_in_use", lambda made: {"host": next(held) << 20, "host_peak": None, "device": None}
    )
    only(monkeypatch, "memory")
    status, pieces = ran(bundle)
    assert status == 0
    assert pieces["memory"]["notes"] == ["eight texts added 105 MB to the process after loading"]


@pytest.mark.parametrize(
    ("target", "odd"), [({1: 1.0, 2: 1.1, 8: 1.0}, ""), ({1: 88.0, 2: 52.0}, "a pass over 1 rows takes 88 ms")]
)
def test_times_that_fall_with_rows(target: dict[int, float], odd: str) -> None:
    assert device_times.odd_times(target).startswith(odd)
    assert bool(device_times.odd_times(target)) == bool(odd)


# --- input ------------------------------------------------------------------------------------------------------------


def test_a_damaged_report(bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    only(monkeypatch, "golden")
    assert ran(bundle)[0] == 0
    capsys.readouterr()
    file, out = bundle.parent / "out" / JSON, str(bundle.parent / "out")
    whole = file.read_text("utf-8")
    for text in (whole.replace('"ok"', '"failed"'), whole[:-9], "[]", "null", '{"pieces": 3}', "[" * 100_000, ""):
        file.write_text(text)
        assert main([str(bundle), "--out", out]) == 1
        said = capsys.readouterr().err
        assert "start over with --again" in said
        assert said.count("\n") == 1
    assert ran(bundle, "--again")[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--minutes", "0"], "--minutes is 0.0: give more than 0"),
        (["--minutes", "nan"], "--minutes is nan"),
        (["--threads", "-1"], "--threads is -1"),
        (["--backend", "tensorrt"], "none for tensorrt"),
        (["--backend", "abacus"], "none for abacus"),
    ],
)
def test_bad_options(bundle: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, and nothing is written."""
    assert main([str(bundle), "--out", str(bundle.parent / "out"), *options]) == 1
    assert message in capsys.readouterr().err
    assert not (bundle.parent / "out").exists()


def test_a_report_that_cannot_be_written(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle.parent / "out").write_text("a file")
    assert main([str(bundle), "--out", str(bundle.parent / "out")]) == 1
    assert "name another folder with --out" in capsys.readouterr().err
