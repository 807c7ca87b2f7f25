"""The tools that compare: they agree with themselves, and show what is broken."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from runtime.bundle.reader import Bundle
from runtime.engines.store import compile_engines
from tests.conftest import DEMO, MakeBundle
from tests.pairs import RandomPair
from tests.seal import update
from tools import cross_check, measure, parity


def row(out: str, start: str) -> dict[str, str]:
    """A row of the printed table, by column."""
    lines = [
        [cell.strip() for cell in line.strip("|\n").split("|")] for line in out.splitlines() if line.startswith("|")
    ]
    return dict(zip(lines[0], next(line for line in lines if line[0].startswith(start)), strict=True))


@pytest.fixture(scope="module")
def bundle(make_bundle: MakeBundle) -> Path:
    """The demo pair with few positions, all of which parity reads."""
    return make_bundle(DEMO, "--weights", "int8", "--rows", "8", "--capacity", "200")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [{"turns": ["one two three"]}, {"prompt": "four five six seven eight nine"}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "prompts.jsonl"


def test_parity_of_equals(bundle: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(bundle), "--contexts", "1", "--texts", "2", "--tokens", "8", "--prompts", str(prompts)]
    assert parity.main(argv) == 0
    found = row(capsys.readouterr().out, "cpu, float32")
    assert (found["logits, first quarter"], found["last quarter"], found["widest margin"]) == (
        "0.0e+00",
        "0.0e+00",
        "0.0e+00",
    )
    assert found["same choice"] == "200 of 200"
    assert found["texts that differ"] == "0 of 2"
    assert float(found["tau"]) >= 1


def test_parity_shows_a_difference(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys of the last quarter of the positions are rotated wrongly: an error that grows with position."""
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy, ignore=shutil.ignore_patterns("engines"))
    weights = copy / "weights/target.bin"
    data = weights.read_bytes()
    graph = onnx.load(str(copy / "graphs/cpu/target.onnx"), load_external_data=False).graph
    table = next(t for t in graph.initializer if t.name == "rotary.sin")
    place = {entry.key: entry.value for entry in table.external_data}
    values = (
        np.frombuffer(data, np.float32, table.dims[0] * table.dims[1], int(place["offset"])).reshape(table.dims).copy()
    )
    values[150:] *= -1
    start = int(place["offset"])
    weights.write_bytes(data[:start] + values.tobytes() + data[start + values.nbytes :])
    update(copy, "weights/target.bin")
    compile_engines(Bundle(copy), parity.backend("cpu"))
    assert parity.main([str(bundle), str(copy), "--contexts", "1", "--texts", "2", "--tokens", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = row("\n".join([lines[0], lines[-1]]), "cpu, float32")
    assert float(found["logits, first quarter"]) == 0
    assert float(found["last quarter"]) > 0.01
    assert int(re.match(r"\d+", found["same choice"])[0]) < 200  # type: ignore[index]


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read as prompts"), ('{"x": 1}', "'turns' or 'prompt'")])
def test_parity_of_bad_prompts(
    bundle: Path, tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad").write_text(text)
    assert parity.main([str(bundle), "--prompts", str(tmp_path / "bad")]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
def test_cross_check_of_eager_with_eager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RandomPair(seed=21).write(tmp_path)
    argv = [
        "--ckpt",
        str(tmp_path / "drafter"),
        "--target",
        str(tmp_path / "target"),
        "--compiler",
        "eager",
        "--torch-device",
        "cpu",
    ]
    capsys.readouterr()
    assert cross_check.main([*argv, "--dtype", "fp32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("target logits: ") for line in lines)
    assert any(line.startswith("draft tree_tokens: ") for line in lines)
    differing = [line for line in lines if "difference 0.0e+00" not in line and ": 0 of" not in line]
    assert not differing


def test_cross_check_without_its_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("PyTorch sees a GPU here")
    assert cross_check.main(["--ckpt", "x", "--compiler", "eager"]) == 1
    assert "--torch-device cpu" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_measured_memory_and_cycles(demo_bundle: Path) -> None:
    sizes = measure.memory(demo_bundle)
    assert 0 < sizes["weights"] + sizes["caches"] < sizes["loaded"]
    plain, whole, planned, with_lookup = measure.decode(demo_bundle, measure.prompts(1), 16)
    assert plain.cycles == 15
    assert whole.cycles < 15
    assert plain.tokens == whole.tokens == planned.tokens == with_lookup.tokens
