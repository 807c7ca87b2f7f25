"""4-bit codes with zero points: read as loops read them, and multiplied alike by every spelling that takes them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exporter.backends.operators import refusals
from exporter.tracing.capture import capture
from exporter.tracing.trace import _external, _name_codes
from exporter.weights.packer import Packer
from exporter.weights.quantize import recoded, scale_of, zero_of
from exporter.weights.source import Location, Source
from exporter.writing import golden_recorder as golden
from graphs.dialects.basic import Basic
from graphs.dialects.exact import Exact
from graphs.dialects.plain import Plain
from graphs.dialects.quantization import Scheme, dequantize, flip_top_bits, pack_zeros
from graphs.dialects.standard import Standard
from graphs.layer import Linear
from runtime import InputError
from runtime.backends.processor import one_row_differs
from tests.test_quantize import runs

BLOCK = 32
UNSIGNED, SIGNED = (Scheme(BLOCK, codes, zeros=True) for codes in (torch.uint8, torch.int8))


def drawn(rows: int, blocks: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [rows, blocks, 32] and zero points [rows, blocks] from 0 to 15, and scales of either sign."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, blocks, BLOCK), generator=draw, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (rows, blocks), generator=draw, dtype=torch.uint8)
    return codes, torch.randn(rows, blocks, generator=draw) * 0.02, zeros


def packed(rows: int, blocks: int, scheme: Scheme, seed: int = 0) -> dict[str, Tensor]:
    """The parameters of a matrix."""
    codes, scale, zeros = drawn(rows, blocks, seed)
    found = {"weight": codes[..., 0::2] | codes[..., 1::2] << 4, "scale": scale, "zero": pack_zeros(zeros)}
    if scheme.codes == torch.int8:
        found |= {name: flip_top_bits(found[name], 4).view(torch.int8) for name in ("weight", "zero")}
    return found


def values(rows: int, blocks: int, seed: int = 0) -> Tensor:
    """By loops, in double precision: [rows, blocks * 32]."""
    codes, scale, zeros = drawn(rows, blocks, seed)
    made = torch.empty(rows, blocks, BLOCK, dtype=torch.float64)
    for i in range(rows):
        for j in range(blocks):
            for k in range(BLOCK):
                made[i, j, k] = float(scale[i, j]) * (int(codes[i, j, k]) - int(zeros[i, j]))
    return made.flatten(1)


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(2, 5), st.sampled_from([UNSIGNED, SIGNED]), st.integers(0, 99))
def test_codes_scales_and_zero_points_against_loops(rows: int, blocks: int, scheme: Scheme, seed: int) -> None:
    parts, shape = packed(rows, blocks, scheme, seed), (rows, blocks * BLOCK)
    layer = Linear(shape[1], rows, False, Plain, scheme)
    assert {name: (p.shape, p.dtype) for name, p in layer.named_parameters()} == {
        n: (t.shape, t.dtype) for n, t in parts.items()
    }
    assert parts["zero"].shape == scheme.zeros_shape(shape)
    found = dequantize(parts["weight"], parts["scale"], 4, parts["zero"])
    np.testing.assert_allclose(found.double().numpy(), values(rows, blocks, seed).numpy(), rtol=1e-6)
    layer.load_state_dict(parts)
    x = torch.randn(3, shape[1])
    with torch.inference_mode():
        torch.testing.assert_close(layer(x).double(), x.double() @ values(rows, blocks, seed).T, rtol=1e-4, atol=1e-5)


def source(tensor: Tensor, fixed: torch.dtype | None = None) -> Source:
    return Source(tuple(tensor.shape), lambda: iter((tensor,)), fixed)


def located(folder: Path, blocks: int, scheme: Scheme) -> dict[str, Location]:
    """A matrix of 37 rows in a weight file, packed as codes for MatMulNBits first, as a bundle for both kinds of
    backend does."""
    parts = packed(37, blocks, UNSIGNED)
    names = {"weight": "w.weight", "scale": scale_of("w.weight"), "zero": zero_of("w.weight")}
    packer = Packer(folder, torch.float32, lambda _: None)
    kinds = {name: torch.uint8 if name != "scale" else None for name in names}
    places = packer.pack("w.bin", {names[n]: source(tensor, kinds[n]) for n, tensor in parts.items()})
    if scheme.codes == torch.int8:
        other = {n: recoded(place, folder, 4) for n, place in places.items() if place.dtype == torch.uint8}
        places |= packer.pack("w-signed.bin", other)
    return {name: places[own] for name, own in names.items()}


def traced(folder: Path, ops: type[Plain], scheme: Scheme, blocks: int = 8, rows: int | None = None) -> ir.Model:
    """One product over a weight file, for so many rows or any number."""
    module, places = Linear(blocks * BLOCK, 37, False, ops, scheme), located(folder, blocks, scheme)
    axes = {0: "rows"} if rows is None else {}
    model = capture(module, [("x", torch.zeros(rows or 3, blocks * BLOCK), axes)], ["product"], ops.opset)
    for name, value in model.graph.initializers.items():
        tensor = _external(name, places[name], folder)
        value.const_value, value.shape, value.type = tensor, tensor.shape, ir.TensorType(tensor.dtype)
    _name_codes(model)
    return model


def rounded(x: Tensor) -> Tensor:
    """Each block of a row as whole steps of its largest number / 127."""
    blocks = x.unflatten(1, (-1, BLOCK))
    step = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / step).round() * step).flatten(1).double()


@pytest.mark.parametrize(
    ("ops", "scheme", "operator", "blocks"),
    [
        (Exact, UNSIGNED, "MatMulNBits", 3),
        (Standard, UNSIGNED, "MatMulNBits", 3),
        (Basic, SIGNED, "DequantizeLinear", 8),
        pytest.param(Exact, UNSIGNED, "MatMulNBits", 8, marks=pytest.mark.exhaustive),
        pytest.param(Standard, SIGNED, "DequantizeLinear", 8, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_every_spelling_in_onnxruntime(
    tmp_path: Path, ops: type[Plain], scheme: Scheme, operator: str, blocks: int
) -> None:
    model = traced(tmp_path, ops, scheme, blocks)
    if ops is Basic:
        model.opset_imports[""] = 21  # ONNX has blocks from there on
    node = next(node for node in model.graph if node.op_type == operator)
    assert len(node.inputs) == (4 if operator == "MatMulNBits" else 3)
    run = runs(tmp_path, model)
    least = 2 if one_row_differs() else 1  # as the backend's passes have
    for rows in (least, 4, 17):
        x = torch.randn(rows, blocks * BLOCK, generator=torch.Generator().manual_seed(rows))
        (found,) = run(x)
        read = rounded(x) if ops is Exact else x.double()
        torch.testing.assert_close(found.double(), read @ values(37, blocks).T, rtol=1e-4, atol=1e-5)
        if ops is Exact:
            assert (x.double() @ values(37, blocks).T - found).abs().max() > 1e-4  # rounded, and each row alike
            assert torch.equal(found, torch.cat([run(x[[i] * least])[0][:1] for i in range(rows)]))


def test_who_takes_zero_points(tmp_path: Path) -> None:
    model = traced(tmp_path, Basic, SIGNED, rows=3)
    assert refusals(model, "migraphx") == []
    found = refusals(traced(tmp_path / "t", Standard, SIGNED, rows=3), "tensorrt")
    assert any(operator == "DequantizeLinear" and "has INT4 as input 2" in said for operator, said in found)
    with pytest.raises(InputError, match="'weight' has zero points and an odd number of blocks in a row"):
        traced(tmp_path / "odd", Basic, SIGNED, blocks=3)


@torch.inference_mode()
def test_the_golden_run_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slice by slice."""
    monkeypatch.setattr(golden, "_SLICE_ELEMENTS", 7 * 3 * BLOCK)
    places, x = located(tmp_path, 3, UNSIGNED), torch.randn(5, 3 * BLOCK)
    with torch.device("meta"):
        module = Linear(3 * BLOCK, 37, False, Plain, UNSIGNED)
    with golden.weights(tmp_path) as weights:
        weights.fill(module, places)  # type: ignore[arg-type]
        module.ops = weights.dialect()
        torch.testing.assert_close(module(x).double(), x.double() @ values(37, 3).T, rtol=1e-4, atol=1e-5)


def test_matrices_without_zero_points_are_as_before() -> None:
    made: Callable[[Scheme | None], Linear] = lambda scheme: Linear(64, 3, False, Plain, scheme)  # noqa: E731
    assert (
        made(Scheme(BLOCK, torch.uint8)).zero
        is made(None).zero
        is made(Scheme(64, torch.uint8, zeros=True)).zero
        is None
    )
