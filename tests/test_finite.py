"""NaN, infinity and what becomes infinite never reach a bundle: each is one sentence that names the tensor."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import exporter.writing.bundle
from exporter.checkpoints import vllm
from exporter.checkpoints.checkpoint import Checkpoint
from exporter.checkpoints.pair import Pair
from exporter.cli import main
from exporter.options import config_of
from exporter.recipe.resolve import recipe_of
from exporter.weights.packer import Packer
from exporter.weights.source import is_finite
from runtime.errors import GumihoError
from tests.pairs import RandomPair, drafter_config, write_drafter

WIDE = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TREE = ["--rows", "4", "--capacity", "64"]
TARGET, MLP, NORM = "model.layers.0.mlp.up_proj.weight", "mlp.0.3.linear.weight", "model.norm.weight"


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A pair to spoil, the drafter in .safetensors as well, so that it can be linked."""
    made = RandomPair(WIDE, layers=1, heads=1)
    target = made.make_target()
    target.save_pretrained(tmp_path / "target")
    write_drafter(tmp_path / "drafter", made.make_drafter(target), drafter_config(target.config, 1), safetensors=True)
    return tmp_path


def spoil(folder: Path, name: str, value: float, dtype: torch.dtype | None = None, at: int = -1) -> None:
    """Changes one number of a tensor, and the dtype of all of the file."""
    file = folder / "model.safetensors"
    state = {n: t.to(dtype or t.dtype) for n, t in load_file(file).items()}
    state[name].view(-1)[at] = value
    save_file(state, file, {"format": "pt"})


def options(pair: Path, *more: str) -> list[str]:
    argv = ["--ckpt", str(pair / "drafter"), "--target", str(pair / "target"), "--out", str(pair / "out"), *TREE, *more]
    return argv if "--draft-weights" in more else [*argv, "--draft-weights", "none"]


def packed(pair: Path, *more: str) -> None:
    wanted = recipe_of(config_of(options(pair, *more)))
    packer = Packer(pair / "packed", wanted.dtype, lambda _: None)
    for file, sources in wanted.sources().items():
        packer.pack(file, sources)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [0, 1, 7, 64, 1001])
def test_every_place_is_looked_at(dtype: torch.dtype, size: int) -> None:
    values = torch.randn(size).to(dtype)
    assert is_finite(values)
    for at in range(size):
        for bad in (math.nan, math.inf, -math.inf):
            spoiled = values.clone()
            spoiled[at] = bad
            assert not is_finite(spoiled)
    if size == 64:
        spoiled = values.clone().view(8, 8)
        spoiled[3, 5] = math.nan
        assert not is_finite(spoiled.T)
        assert is_finite(torch.full((8,), torch.finfo(dtype).max, dtype=dtype))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("side", "name"),
    [
        ("target", TARGET),
        ("target", NORM),
        ("target", "model.embed_tokens.weight"),
        ("drafter", MLP),
        ("drafter", "fc.bias"),
    ],
)
def test_packing_names_the_tensor_and_the_checkpoint(
    pair: Path, side: str, name: str, dtype: torch.dtype, value: float
) -> None:
    spoil(pair / side, name, value, dtype)
    with pytest.raises(GumihoError) as caught:
        packed(pair)
    short = name.removeprefix("model.")
    assert str(caught.value).startswith(f"{side} '{pair / side}': tensor '{short}' holds NaN or infinity")


@pytest.mark.parametrize("legacy", [False, True])
def test_pickled_weights_are_looked_at(pair: Path, legacy: bool) -> None:
    state = load_file(pair / "drafter" / "model.safetensors")
    (pair / "drafter" / "model.safetensors").unlink()
    state[MLP][0, 0] = math.nan
    torch.save(state, pair / "drafter" / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(GumihoError, match=f"tensor '{MLP}' holds NaN"):
        packed(pair)


@pytest.mark.parametrize(
    ("backend", "how"), [("cpu", "int4"), ("cpu", "int8"), ("cpu", "w8a8"), ("tensorrt", "int4"), ("tensorrt", "fp8")]
)
def test_nothing_is_quantized_to_a_code_that_hides_it(pair: Path, backend: str, how: str) -> None:
    spoil(pair / "target", TARGET, math.nan)
    with pytest.raises(GumihoError, match="'layers.0.mlp.up_proj.weight' holds NaN"):
        packed(pair, "--backend", backend, "--weights", how)
    spoil(pair / "target", TARGET, 0.0)
    if how != "w8a8":
        spoil(pair / "drafter", MLP, -math.inf)
        with pytest.raises(GumihoError, match=f"'{MLP}' holds NaN or infinity"):
            packed(pair, "--backend", backend, "--draft-weights", how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_is_too_large_for_fp16_is_called_that(pair: Path, dtype: torch.dtype) -> None:
    spoil(pair / "target", TARGET, 1e5, dtype)
    with pytest.raises(GumihoError) as caught:
        packed(pair, "--backend", "migraphx")
    assert "'layers.0.mlp.up_proj.weight' holds a value too large for fp16" in str(caught.value)
    assert "NaN" not in str(caught.value)
    packed(pair, "--backend", "migraphx", "--dtype", "bf16")


def test_a_scale_that_fp16_cannot_hold(pair: Path) -> None:
    """Its codes are finite, whatever becomes of the scale."""
    spoil(pair / "target", TARGET, 1e7)
    with pytest.raises(
        GumihoError, match="a scale of the quantized 'layers.0.mlp.up_proj.weight' holds a value too large for fp16"
    ):
        packed(pair, "--backend", "migraphx", "--weights", "int8")
    packed(pair, "--backend", "migraphx", "--weights", "int8", "--dtype", "fp32")


@pytest.mark.parametrize(("value", "says"), [(math.nan, "holds NaN"), (1e30, "too large for fp16")])
def test_vllm_gets_none_either(pair: Path, value: float, says: str) -> None:
    spoil(pair / "drafter", MLP, value)
    opened = Pair(Checkpoint(str(pair / "target"), "target"), Checkpoint(str(pair / "drafter"), "drafter"))
    (pair / "out").mkdir()
    with pytest.raises(GumihoError, match=f"'{MLP}' .*{says}"):
        vllm.write(opened, pair / "out", torch.float16)


# --- whole exports ----------------------------------------------------------------------------------------------------


def refused(pair: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """The sentence of an export that writes nothing."""
    before = sorted(pair.rglob("*"))
    capsys.readouterr()
    assert main(options(pair, *more)) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert sorted(pair.rglob("*")) == before
    return error[0]


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs, which the golden run does not read."""
    monkeypatch.setattr(exporter.writing.bundle, "_form", lambda *_: None)
    monkeypatch.setattr(exporter.writing.bundle, "_golden_work", lambda _: 0)


@pytest.mark.parametrize("name", [TARGET, NORM, "model.embed_tokens.weight", "lm_head.weight"])
def test_linked_weights_are_looked_at_where_they_are_read(
    pair: Path, untraced: None, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(pair / "target", name, math.nan)
    assert f"tensor '{name.removeprefix('model.')}' holds NaN" in refused(pair, capsys, "--link-weights")


def test_what_overflows_in_the_golden_run_is_not_recorded(
    pair: Path, untraced: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each number is finite, and their products are not."""
    spoil(pair / "target", TARGET, 3e38)
    spoil(pair / "target", "model.layers.0.mlp.gate_proj.weight", 3e38)
    said = refused(pair, capsys)
    assert "the golden run's 'prompt." in said
    assert "holds NaN or infinity" in said


@pytest.mark.parametrize(
    ("key", "value"), [("rope_theta", "NaN"), ("rms_norm_eps", "Infinity"), ("rope_theta", "1e400")]
)
def test_a_configuration_of_no_numbers(pair: Path, key: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = pair / "target" / "config.json"
    config: dict[str, Any] = json.loads(file.read_text()) | {key: "@"}
    file.write_text(json.dumps(config).replace('"@"', value))
    assert str(file) in refused(pair, capsys, "--dry-run")


@pytest.mark.parametrize(
    "value", [torch.finfo(torch.float32).max, torch.finfo(torch.float32).min, torch.finfo(torch.float32).tiny]
)
def test_the_largest_and_the_smallest_numbers_are_numbers(pair: Path, value: float) -> None:
    spoil(pair / "target", TARGET, value)
    packed(pair)
