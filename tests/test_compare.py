"""The comparison of drafters: what it measures is what was decoded, the tree it chooses is the fastest of its
neighbours."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.errors import InputError
from tests.conftest import DEMO
from tools import best_tree, compare

ALONE = ("target",)  # the demo target as a small model that drafts for itself
BESIDE = "drafter", "target"


def argv(out: Path, names: Sequence[str] = ALONE) -> list[str]:
    return [
        "--target",
        str(DEMO / "target"),
        "--drafters",
        *(str(DEMO / name) for name in names),
        "--count",
        "2",
        "--tuning",
        "1",
        "--new-tokens",
        "13",
        "--temperatures",
        "0",
        "--rows",
        "4",
        "--out",
        str(out),
    ]


@pytest.fixture(scope="module", params=[pytest.param(BESIDE, marks=pytest.mark.exhaustive), ALONE], ids=["two", "one"])
def names(request: pytest.FixtureRequest) -> Sequence[str]:
    return tuple(request.param)


@pytest.fixture(scope="module")
def results(names: Sequence[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compare")
    assert compare.main(argv(out, names)) == 0
    return out


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "texts.jsonl").read_text().splitlines()]


def test_every_drafter_decodes_every_prompt(results: Path, names: Sequence[str]) -> None:
    lines = read(results)
    assert [(line["set"], line["number"]) for line in lines] == [("held-out", 0), ("held-out", 1)]
    ways = [f"{name}, {kind}" for name in names for kind in ("planned", "planned, lookup", "paper")]
    for line in lines:
        assert list(line["ways"]) == ["plain", *ways]
        assert all(found["ids"] == line["ways"]["plain"]["ids"] for found in line["ways"].values())
        assert line["ways"]["plain"]["draft_seconds"] == 0 < line["ways"]["target, paper"]["draft_seconds"]
    assert len({tuple(line["ways"]["plain"]["ids"]) for line in lines}) == 2


def test_tau_is_tokens_by_passes(results: Path) -> None:
    # 12 tokens after the first. A chain of 5 of its own tokens is accepted, but for what quantizing the drafter to int4
    # changes.
    cycles = [line["ways"]["target, paper"]["cycles"] for line in read(results)]
    assert all(2 <= count <= 4 for count in cycles)
    row = next(
        line for line in (results / "compare.md").read_text().splitlines() if line.startswith("| target, paper |")
    )
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1].endswith(f"x {24 / sum(cycles):.2f}")
    assert cells[2] == cells[1]
    assert cells[-1] == "2 of 2"


def test_an_interrupted_run_goes_on_and_what_differs_shows(results: Path, names: Sequence[str]) -> None:
    lines = read(results)
    lines[0]["ways"]["target, paper"]["ids"][3] += 1
    (results / "texts.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert compare.main(argv(results, names)) == 1
    again = read(results)
    assert again[0] == lines[0]
    assert [found["ids"] for found in again[1]["ways"].values()] == [
        found["ids"] for found in lines[1]["ways"].values()
    ]
    row = next(
        line for line in (results / "compare.md").read_text().splitlines() if line.startswith("| target, paper |")
    )
    assert row.endswith("| 1 of 2 |")


@pytest.mark.parametrize(
    ("family", "heads", "levels", "best"),
    [
        ("gumiho", 5, None, {"--rows": 8, "--heads": 4}),
        ("gumiho", 5, None, {"--rows": 16, "--heads": 0}),
        ("eagle", 0, None, {"--rows": 8, "--serial-steps": 1}),
        ("eagle3", 0, None, {"--rows": 4, "--serial-steps": 9}),
        ("hydra", 0, 4, {"--rows": 16, "--serial-steps": 4}),
        ("medusa", 3, None, {"--rows": 8, "--heads": 1}),
    ],
)
def test_the_search_finds_the_best_of_a_hill(
    family: str, heads: int, levels: int | None, best: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(out=tmp_path, rows=[4, 8, 16])
    pair: Any = SimpleNamespace(family=family, heads=heads, reader=SimpleNamespace(levels=levels))
    monkeypatch.setattr(best_tree, "export", lambda args, drafter, weights, options, out: _made(out, options))
    tried: list[dict[str, int]] = []

    def speed(args: object, bundle: Path, prompts: object) -> float:
        found = json.loads((bundle / "options").read_text())
        tried.append(dict(zip(found[::2], map(int, found[1::2]), strict=True)))
        usual = best_tree.usual_tree(family, tried[-1]["--rows"], heads, levels=levels or 64)
        level = "--heads" if heads else "--serial-steps"
        own = {level: usual.heads if heads else usual.serial_steps, **tried[-1]}
        return 9.0 - sum(abs(own[option] - count) for option, count in best.items())

    monkeypatch.setattr(best_tree, "speed", speed)
    search = best_tree.Search(args, "somewhere/drafter", "none", [])  # type: ignore[arg-type]
    chosen = search.best(pair)
    found = dict(zip(chosen[::2], map(int, chosen[1::2]), strict=True))
    usual = best_tree.usual_tree(family, found["--rows"], heads, levels=levels or 64)
    level = "--heads" if heads else "--serial-steps"
    assert {level: usual.heads if heads else usual.serial_steps, **found} == best
    assert all(0 < one.get("--serial-steps", 1) <= (levels or 10) for one in tried)
    assert all((family == "medusa") <= one["--heads"] <= heads for one in tried if "--heads" in one)
    assert len(tried) == len({tuple(sorted(one.items())) for one in tried}), "no tree is measured twice"
    assert list((tmp_path / "bundles" / "none").iterdir()) == [search.place(chosen)], "the others' bundles are removed"
    count = len(tried)
    again = best_tree.Search(args, "somewhere/drafter", "none", [])  # type: ignore[arg-type]
    assert again.best(pair) == chosen
    assert len(tried) == count, "what is known is not measured again"


def _made(out: Path, options: Sequence[str]) -> Path:
    out.mkdir(parents=True)
    (out / "options").write_text(json.dumps(list(options)))
    return out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--heads", "9"], r"failed: --heads is 9 and drafter .* has \d: give at most that many$"),
        (["--rows", "x"], "failed: .*'x'"),
    ],
)
def test_a_candidate_that_cannot_be_exported_tells_why(
    options: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args: Any = SimpleNamespace(target=str(DEMO / "target"))
    with pytest.raises(InputError, match=reason):
        best_tree.export(args, str(DEMO / "drafter"), "none", options, tmp_path / "out")
    assert capsys.readouterr() == ("", "")


def test_an_interrupted_candidate_ends_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("exporter.export", interrupted)
    with pytest.raises(KeyboardInterrupt):
        best_tree.export(SimpleNamespace(target="somewhere"), "drafter", "none", [], tmp_path / "out")  # type: ignore[arg-type]


def test_results_of_other_drafters_are_not_mixed(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(argv(results, ["drafter"])) == 1
    assert "holds results with another --drafters" in capsys.readouterr().err


def test_too_few_prompts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "few.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert compare.main([*argv(tmp_path / "out"), "--prompts", str(tmp_path)]) == 1
    assert "set 'few' has 2 prompts, and 2 are measured after 1 others" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([*argv(tmp_path / "out"), "--rows", "100000"]) == 1
    assert "100000" in capsys.readouterr().err
