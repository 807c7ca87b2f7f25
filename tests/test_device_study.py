"""The graphs that are measured on a device: every variant computes the tokens of the unchanged graph."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.device_study.__main__ import main
from tools.device_study.graphs import SETS
from tools.device_study.variants import VARIANTS

SMALL = replace(SETS["tiny-fp16"], shape=replace(SETS["tiny-fp16"].shape, layers=1), rows=8, sizes=(1, 8))


def results(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETS, "small", SMALL)
        assert main(["graphs", str(folder), "--sets", "small", "tiny-int4"]) == 0
    return folder


def test_every_variant_has_the_same_tokens(study: Path, tmp_path: Path) -> None:
    out = tmp_path / "check.jsonl"
    assert main(["check", str(study), "--backend", "cpu", "--sets", "small", "--out", str(out)]) == 0
    found = [result for result in results(out) if "check" in result]
    assert {result["variant"] for result in found} == {*VARIANTS, "decomposed", "heads-apart"}
    assert all(result["differ"] == 0 and result["error"] < 0.05 for result in found)
    assert sum(result.get("text", False) for result in found) > 5


def test_a_wrong_variant_shows(study: Path, tmp_path: Path) -> None:
    """One that multiplies by the up projection instead of the gate."""
    described = json.loads((study / "study.json").read_text())
    joined = described["small"]["target-8"]["joined"]["weights"]["layers.0.mlp.gate_up_proj.weight"]
    joined["parts"].reverse()
    described["small"] = {"target-8": {name: described["small"]["target-8"][name] for name in ("base", "joined")}}
    for file in study.glob("*.onnx"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "study.json").write_text(json.dumps(described))
    out = tmp_path / "check.jsonl"
    assert main(["check", str(tmp_path), "--backend", "cpu", "--sets", "small", "--out", str(out)]) == 1
    assert results(out)[-1]["differ"] > 0


def test_measures_until_the_time_is_up(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.device_study.__main__._RUNS", 5)
    common = ["--backend", "cpu", "--out", str(tmp_path / "out.jsonl"), "--sets"]
    assert main(["questions", str(study), *common, "tiny-int4"]) == 0
    timed = results(tmp_path / "out.jsonl")[1:]
    assert [result["fused"] for result in timed] == ["1", "0"]
    assert all(result["ms"] > 0 and result["profile"] for result in timed)
    assert main(["cycle", str(study), "--seconds", "0", *common, "small"]) == 0
    assert all("skipped" in result for result in results(tmp_path / "out.jsonl")[len(timed) + 2 :])
