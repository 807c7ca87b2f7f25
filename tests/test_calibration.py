"""Int4 codes with zero points, chosen by what the inputs of a matrix look like: against loops, brute force and
transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from exporter.checkpoints.checkpoint import Checkpoint
from exporter.checkpoints.lone_target import LoneTarget
from exporter.options import config_of
from exporter.recipe.calibration_text import TOKENS
from exporter.recipe.resolve import recipe_of
from exporter.weights.quantize import quantize, quantized, scale_of, zero_of
from exporter.weights.source import Source
from exporter.writing.calibration import observe
from graphs.dialects.quantization import Scheme, dequantize
from runtime import GumihoError
from tests.conftest import DEMO
from tests.pairs import RandomPair

BLOCK = 32
ZEROS = [Scheme(BLOCK, codes, zeros=True) for codes in (torch.uint8, torch.int8)]
SMALL = RandomPair(
    {"hidden_size": 96, "intermediate_size": 64, "vocab_size": 301, "attention_bias": True}, heads=1, seed=3
)


def numbers(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def error(values: Tensor, made: Tensor, importance: Tensor | None = None) -> float:
    off = (made.double() - values.double()).square()
    return float((off if importance is None else off * importance).sum())


@settings(max_examples=40)
@given(
    st.integers(1, 3),
    st.integers(2, 3),
    st.sampled_from(ZEROS),
    st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from(["normal", "positive", "negative", "zero", "small", "spike"]),
    st.booleans(),
    st.integers(0, 99),
)
def test_codes_with_zero_points_against_loops(
    rows: int, blocks: int, scheme: Scheme, dtype: torch.dtype, kind: str, weighted: bool, seed: int
) -> None:
    values = numbers(rows, blocks * BLOCK, seed)
    values = {
        "normal": values,
        "positive": values.abs(),
        "negative": -values.abs(),
        "zero": values * 0,
        "small": values * 1e-9,
        "spike": torch.where(values > 0.1, 3.0, values),
    }[kind]
    importance = numbers(1, blocks * BLOCK, seed + 1)[0].square() if weighted else None
    codes, scale, zero = quantize(values, scheme, dtype, importance)
    assert (codes.shape, scale.shape) == scheme.shapes(tuple(values.shape))
    assert (zero.shape, zero.dtype, codes.dtype, scale.dtype) == (
        scheme.zeros_shape(tuple(values.shape)),
        scheme.codes,
        scheme.codes,
        dtype,
    )
    assert bool((scale > 0).all())
    made = dequantize(codes, scale.float(), 4, zero)
    for i in range(rows):
        for j in range(blocks):
            own = slice(j * BLOCK, (j + 1) * BLOCK)
            block = values[i, own].double()
            counts = (importance[own] if importance is not None else torch.ones(BLOCK)).double()
            least = min(_brute(block, counts, steps, dtype) for steps in (13.0, 14.0, 15.0, 16.0, 17.0))
            assert error(block, made[i, own], counts) <= least * (1 + 1e-4) + 1e-20
    if kind == "zero":
        assert not made.any()


def _brute(block: Tensor, counts: Tensor, steps: float, dtype: torch.dtype) -> float:
    """The error with a range cut into so many steps, value by value."""
    low, high = min(0.0, float(block.min())), max(0.0, float(block.max()))
    scale = float(torch.tensor((high - low) / steps).to(dtype)) or 1.0
    zero, total = min(15, max(0, round(-low / scale))), 0.0
    for value, count in zip(block.tolist(), counts.tolist(), strict=True):
        total += count * (scale * (min(15, max(0, round(value / scale) + zero)) - zero) - value) ** 2
    return total


def test_zero_points_are_worth_a_fifth_of_the_error() -> None:
    values = numbers(64, 1024)
    with_zeros = error(values, dequantize(*_reordered(quantize(values, ZEROS[0], torch.float32))))
    without = error(values, dequantize(*quantize(values, Scheme(BLOCK, torch.uint8), torch.float32)))
    assert with_zeros < 0.8 * without


def _reordered(made: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, int, Tensor]:
    codes, scale, zero = made
    return codes, scale, 4, zero


def test_columns_that_matter_are_closer() -> None:
    """The error of the products falls, though that of the weights rises; equal columns choose as none do."""
    values, importance = numbers(64, 512), torch.ones(512)
    importance[::16] = 400.0
    plain, chosen = (dequantize(*_reordered(quantize(values, ZEROS[0], torch.float32, w))) for w in (None, importance))
    assert error(values, chosen, importance) < 0.6 * error(values, plain, importance)
    assert error(values, chosen) > error(values, plain)
    even = quantize(values, ZEROS[0], torch.float32, torch.full((512,), 0.25))
    assert all(torch.equal(a, b) for a, b in zip(even, quantize(values, ZEROS[0], torch.float32), strict=True))


def test_parts_of_a_matrix_are_read_in_one_pass_or_again() -> None:
    values, read, names = numbers(40, 96), list[int](), ("w.weight", "w.scale", "w.zero")

    def slices() -> object:
        for i in range(4):
            read.append(i)
            yield values[i * 10 : i * 10 + 10]

    made = quantized(Source((40, 96), slices, None), "w.weight", ZEROS[0], torch.float32)  # type: ignore[arg-type]
    assert tuple(made) == names == ("w.weight", scale_of("w.weight"), zero_of("w.weight"))
    wanted = quantize(values, ZEROS[0], torch.float32)
    for name, part in zip(names, wanted, strict=True):
        assert torch.equal(torch.cat(list(made[name].slices())), part)
    assert read == [0, 1, 2, 3]
    assert torch.equal(made["w.zero"].whole(), wanted[2])  # as if an interrupted run had packed the others
    assert made["w.zero"].shape == wanted[2].shape == (40, 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated")
    SMALL.make_target().save_pretrained(folder)
    return folder


@torch.inference_mode()
def test_what_is_observed_is_transformers_own(target: Path) -> None:
    model, ids = SMALL.make_target(), torch.randint(0, 301, (50,), generator=torch.Generator().manual_seed(4))
    inputs: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda _, given, name=name: inputs.update({name: given[0][0].square().mean(0)})
            )
    logits = model(ids[None]).logits[0]
    read: list[int] = []  # bytes
    found = observe(LoneTarget(Checkpoint(str(target), "target")), ids.tolist(), 20, True, read.append)
    wanted = {f"{name.removeprefix('model.')}.weight": values for name, values in inputs.items()}
    assert found.moments.keys() == wanted.keys()
    for name, values in wanted.items():
        torch.testing.assert_close(found.moments[name], values, rtol=1e-4, atol=1e-6)
        weight = model.get_parameter(name if name == "lm_head.weight" else f"model.{name}")
        torch.testing.assert_close(found.columns[name], weight.square().sum(0))
    torch.testing.assert_close(found.logits, logits[:20], rtol=1e-4, atol=1e-4)
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n)
    assert sum(read) == 4 * matrices
    read.clear()
    few = observe(LoneTarget(Checkpoint(str(target), "target")), ids.tolist(), progress=read.append)
    # nobody asked for what only lm_head's numbers give
    assert sum(read) == 4 * (matrices - model.lm_head.weight.numel())
    assert few.moments.keys() == wanted.keys()
    assert not few.columns
    assert not few.logits.numel()


def test_which_exports_have_zero_points(target: Path) -> None:
    def planned(*options: str) -> tuple[bool, str, int]:
        made = recipe_of(config_of(["--target", str(target), "--weights", "int4", "--capacity", "100", *options]))
        scheme = made.schemes(made.codes[0])["target"]["layers.0.mlp.up_proj.weight"]
        assert scheme is not None
        assert (
            scheme.zeros == made.zeros == any(name.endswith(".zero") for name in made.sources()["weights/target.bin"])
        )
        return made.zeros, made.how("target"), len(made.calibration)

    assert planned() == (True, "int4, blocks of 32 with zero points, lm_head int8", 100)
    assert planned("--backend", "cpu", "cuda", "--dtype", "fp32")[0]
    assert planned("--backend", "cpu", "migraphx", "--dtype", "fp32") == (False, "int4, blocks of 32", 0)
    assert recipe_of(config_of(["--target", str(target), "--weights", "none"])).calibration == ()


def test_another_text_is_another_plan(tmp_path: Path) -> None:
    """It chooses other codes, so an interrupted export does not go on with it."""
    (tmp_path / "text").write_text("def main(argv=None):\n    return run(argv)\n" * 100)
    argv = ["--target", str(DEMO / "target"), "--weights", "int4"]
    usual, own = (recipe_of(config_of([*argv, *more])) for more in ([], ["--calibrate", str(tmp_path / "text")]))
    assert len(own.calibration) == TOKENS
    assert usual.fingerprint() != own.fingerprint()
    assert len(np.unique(usual.calibration)) > 100


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--weights", "none"],
            "is for --weights int4 on cpu and cuda, and int8 and w8a8 on the CPU alone: leave it out",
        ),
        (["--weights", "int4", "--backend", "tensorrt"], "is for --weights int4 on cpu and cuda"),
        (["--weights", "int4", "--calibrate", "nowhere"], "--calibrate nowhere cannot be read"),
        (["--weights", "int4"], "has 1 tokens: give a text of 512 or more"),
    ],
)
def test_texts_that_cannot_be_used(tmp_path: Path, options: list[str], said: str) -> None:
    (tmp_path / "short").write_text("")
    with pytest.raises(GumihoError, match=said):
        recipe_of(config_of(["--target", str(DEMO / "target"), "--calibrate", str(tmp_path / "short"), *options]))


def test_a_target_without_a_tokenizer(target: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text " * 1000)
    with pytest.raises(GumihoError, match="has no tokenizer to read --calibrate with: leave the option out"):
        recipe_of(config_of(["--target", str(target), "--weights", "int4", "--calibrate", str(tmp_path / "text")]))
