"""Matrices that read the same rows and are stored as one: the bits are those of the parts."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exporter.cli import main
from exporter.recipe.recipe import Recipe
from exporter.weights.joined import joined
from exporter.weights.source import Coded, Source
from graphs.dialects.quantization import Scheme, Schemes
from runtime.bundle.reader import Bundle
from tests.pairs import RandomPair
from tests.test_as_is import written
from tests.test_quantize import WIDE

SCHEME = Scheme(32, torch.uint8)
ROWS = 5


def outputs(bundle: Path) -> tuple[list[np.ndarray], Counter[str]]:
    """All outputs of the target's graph over random rows behind random positions, and how many operators of each type
    it has."""
    graph = bundle / Bundle(bundle).manifest.forms["cpu"].graphs["target"].file
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle))
    session = ort.InferenceSession(graph.read_bytes(), options, providers=["CPUExecutionProvider"])
    drawn = np.random.default_rng(1)
    feed: dict[str, Any] = {
        "tokens": drawn.integers(0, 200, ROWS),
        "depth": np.arange(ROWS),
        "mask": np.tri(ROWS, dtype=bool),
        "wanted": np.arange(ROWS),
        "past_length": np.array([9]),
    }
    for value in session.get_inputs():
        if value.name.startswith("past_") and value.name != "past_length":
            shape = [size if isinstance(size, int) else 128 for size in value.shape]
            feed[value.name] = drawn.standard_normal(shape, np.float32)
    kinds = Counter(node.op_type for node in onnx.load(graph, load_external_data=False).graph.node)
    return session.run(None, {value.name: feed[value.name] for value in session.get_inputs()}), kinds


def exported(folder: Path, out: str, *flags: str) -> Path:
    """The target alone, since its graph is what is compared."""
    assert main(["--target", str(folder / "target"), "--out", str(folder / out), "--capacity", "64", *flags]) == 0
    return folder / out


@pytest.mark.parametrize(
    "weights", [*(pytest.param(to, marks=pytest.mark.exhaustive) for to in ("w8a8", "int8")), "int4"]
)
def test_outputs_are_those_of_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    layers, biased = 1, {"attention_bias": True, "mlp_bias": True}
    RandomPair(WIDE | biased | {"num_hidden_layers": layers}, layers=1, heads=1).write(tmp_path)
    one, kinds = outputs(exported(tmp_path, "one", "--weights", weights))
    monkeypatch.setattr(Recipe, "joined", False)
    apart, parts = outputs(exported(tmp_path, "apart", "--weights", weights))
    product = "MatMulIntegerToFloat" if weights == "w8a8" else "MatMulNBits"
    assert (kinds[product], parts[product]) == (4 * layers + 1, 7 * layers + 1)
    for own, other in zip(one, apart, strict=True):
        assert own.dtype == other.dtype
        np.testing.assert_array_equal(own, other)


@pytest.mark.exhaustive
def test_codes_of_a_checkpoint_too_where_they_are_of_one_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = written("mix", tmp_path)
    flags = ("--target", str(file), "--weights", "as-is", "--capacity", "64")
    found = []
    for name, joins in (("one", True), ("apart", False)):
        monkeypatch.setattr(Recipe, "joined", joins)
        assert main([*flags, "--out", str(tmp_path / name)]) == 0
        found.append(outputs(tmp_path / name))
    (one, kinds), (apart, parts) = found
    # one layer has a v_proj of its own kind
    assert (kinds["MatMulNBits"], parts["MatMulNBits"]) == (3 * 4 + 2 + 1, 3 * 7 + 1)
    for own, other in zip(one, apart, strict=True):
        np.testing.assert_array_equal(own, other)


@given(st.lists(st.integers(1, 5), min_size=3, max_size=3), st.booleans(), st.booleans())
def test_rows_in_turn(widths: list[int], bias: bool, coded: bool) -> None:
    def source(rows: int, *shape: int) -> Source:
        values = torch.randn(rows, *shape)
        held = Coded(4, False, torch.float32, lambda: iter([(values, values, None)])) if coded else None
        return Source(values.shape, lambda: iter(values.split(2)), coded=held)

    names = [f"layers.7.self_attn.{part}_proj" for part in "qkv"]
    sources = {f"{name}.weight": source(width, 64) for name, width in zip(names, widths, strict=True)}
    others = {"layers.7.self_attn.o_proj.weight": source(3, 64), "layers.7.mlp.gate_proj.weight": source(3, 64)}
    others |= {"layers.7.mlp.up_proj.weight": source(3, 64)}
    biases = {f"{name}.bias": source(width) for name, width in zip(names, widths, strict=True)} if bias else {}
    schemes = Schemes(SCHEME, {"layers.7.mlp.up_proj.weight": None}, joined=True)
    found = joined({**sources, **biases, **others}, schemes)
    whole = "layers.7.self_attn.qkv_proj"
    assert found.keys() == others.keys() | {f"{whole}.weight"} | ({f"{whole}.bias"} if bias else set())
    parts = [part.whole() for part in sources.values()]
    assert torch.equal(found[f"{whole}.weight"].whole(), torch.cat(parts))
    held = found[f"{whole}.weight"].coded
    assert (held is not None) == coded
    if held:
        assert torch.equal(torch.cat([codes for codes, _, _ in held.parts()]), torch.cat(parts))
    if bias:
        assert torch.equal(found[f"{whole}.bias"].whole(), torch.cat([part.whole() for part in biases.values()]))
    assert joined({**sources, **biases, **others}, Schemes(SCHEME)) == {**sources, **biases, **others}
