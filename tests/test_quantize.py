"""Quantized weights: packed as loops unpack them, multiplied alike by every spelling, and sized as they are written."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import exporter.writing.bundle
from exporter import cli, options
from exporter.backends.operators import refusals
from exporter.backends.specs import BACKENDS, SIGNED, UNSIGNED
from exporter.recipe.recipe import Recipe
from exporter.recipe.resolve import recipe_of
from exporter.tracing.capture import capture
from exporter.tracing.trace import _external, _name_codes, _split_parts
from exporter.weights.ahead import ahead
from exporter.weights.notes import NOTES
from exporter.weights.packer import Packer
from exporter.weights.quantize import quantize, quantized, recoded, scale_of
from exporter.weights.source import Location, Source
from graphs.dialects.basic import Basic
from graphs.dialects.contrib import Contrib
from graphs.dialects.decomposed import Decomposed
from graphs.dialects.exact import Exact
from graphs.dialects.plain import Plain
from graphs.dialects.quantization import FP8, Scheme, Schemes, bits_of, dequantize
from graphs.dialects.rounded import Rounded
from graphs.dialects.standard import Standard
from graphs.drafters.gumiho import Heads
from graphs.layer import Linear
from runtime.backends.processor import one_row_differs, overflows
from tests.conftest import numbers as as_asked
from tests.pairs import RandomPair

CODES = [torch.uint8, torch.int8]
BLOCKS = [Scheme(block, codes, bits) for block in (32, 64) for codes in CODES for bits in (4, 8)]
ROWS_OF_FP8, WHOLE = Scheme(0, FP8), Scheme(0, torch.int8, 8)
OFFSET = Scheme(0, torch.uint8, 8)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_schemes_by_name() -> None:
    four, eight = Scheme(32, torch.uint8), Scheme(32, torch.uint8, 8)
    schemes = Schemes(
        four, {"lm_head.weight": eight, "layers.1.mlp.up_proj.weight": None, "layers.10.mlp.up_proj.weight": eight}
    )
    assert schemes.of("lm_head.weight", 64) == eight
    assert (
        schemes.of("lm_head.weight", 32)
        is schemes.of("fc.weight", 40)
        is schemes.of("layers.1.mlp.up_proj.weight", 64)
        is None
    )
    found = [schemes.within(f"layers.{i}").within("mlp")["up_proj.weight"] for i in (0, 1, 10)]
    assert found == [four, None, eight]


def source(tensor: Tensor, pieces: int = 1) -> Source:
    return Source(tuple(tensor.shape), lambda: iter(tensor.reshape(-1, tensor.shape[-1]).chunk(pieces)))


# --- rounding and packing ---------------------------------------------------------------------------------------------


def unpacked(codes: np.ndarray, twos_complement: bool, bits: int) -> list[int]:
    """One row's codes [blocks, bytes], byte by byte, the low half first where a byte is two."""
    found, half = [], 2 ** (bits - 1)
    for byte in codes.reshape(-1).view(np.uint8).tolist():
        for code in (byte,) if bits == 8 else (byte % 16, byte // 16):
            found.append((code - 2 * half if code >= half else code) if twos_complement else code - half)
    return found


def squared_error(block: np.ndarray, scale: float) -> float:
    return sum((float(w) - scale * min(7, max(-8, round(float(w) / scale)))) ** 2 for w in block)


@settings(max_examples=90)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(BLOCKS),
    st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from(["normal", "positive", "small", "zero", "spike"]),
    st.integers(0, 99),
)
def test_codes_and_scales_against_loops(
    rows: int, blocks: int, scheme: Scheme, dtype: torch.dtype, kind: str, seed: int
) -> None:
    block, codes, bits = scheme.block, scheme.codes, scheme.bits
    values = numbers(rows, blocks * block, seed=seed)
    values = {
        "normal": values,
        "positive": values.abs(),
        "small": values * 1e-9,
        "zero": values * 0,
        "spike": torch.where(values > 2, 50, values),
    }[kind]
    packed, scales = quantize(values, scheme, dtype)
    assert (packed.shape, packed.dtype) == ((rows, blocks, block * bits // 8), codes)
    assert (packed.shape, scales.shape) == scheme.shapes(tuple(values.shape))
    assert (scales.shape, scales.dtype) == ((rows, blocks), dtype)
    assert bool((scales > 0).all())
    made = dequantize(packed, scales, bits)
    assert (made.shape, made.dtype) == (values.shape, dtype)
    assert bits_of(packed, blocks * block) == bits
    for row, stored, scale, found in zip(values.numpy(), packed.numpy(), scales.numpy(), made.numpy(), strict=True):
        by_hand = np.array(unpacked(stored, codes == torch.int8, bits))
        for i in range(blocks):
            own = slice(i * block, (i + 1) * block)
            step, largest = float(scale[i]), float(np.abs(row[own]).max())
            np.testing.assert_array_equal(found[own], by_hand[own].astype(scale.dtype) * scale[i])
            off = by_hand[own] * step - row[own].astype(np.float64)
            if dtype == torch.float16 and kind == "small":
                assert not by_hand[own].any()  # fp16 has no such scales
            elif largest and bits == 8:
                assert step == pytest.approx(largest / 127, rel=1e-6 if dtype == torch.float32 else 1e-3)
                assert np.abs(by_hand[own]).max() == 127
                assert np.abs(off).max() <= 0.5001 * step
            elif largest:
                error = float((off**2).sum())
                for steps in (7, 8):
                    assert error <= squared_error(row[own], float(scale.dtype.type(largest / steps))) * (1 + 1e-4)
                assert error <= block * (largest / 14) ** 2 * 1.01  # half a step of 7 each
                assert np.abs(off).max() <= 1.51 * step  # what lies beyond the last code is cut off
            else:
                assert not off.any()


def test_several_scales_are_a_fifth_better_than_one() -> None:
    values = numbers(64, 1024)
    found = ((dequantize(*quantize(values, Scheme(32, torch.uint8), torch.float32)) - values) ** 2).sum()
    scale = values.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 7
    one = ((values.unflatten(-1, (-1, 32)) / scale).round() * scale).flatten(-2)
    assert found < 0.83 * ((one - values) ** 2).sum()


def searched(blocks: Tensor, columns: Tensor) -> float:
    """The squared error with zero points of a search that computes each difference, in double precision."""
    blocks, columns = blocks.double(), columns.double()
    low, high = blocks.amin(-1, keepdim=True).clamp_max(0), blocks.amax(-1, keepdim=True).clamp_min(0)
    least = torch.full_like(low, torch.inf)
    for steps in (13, 14, 15, 16, 17):
        scale = (high - low) / steps
        zero = (-low / scale).round().clamp(0, 15)
        codes = (blocks / scale).round().clamp(-zero, 15 - zero)
        better = (columns * codes * blocks).sum(-1, keepdim=True) / (columns * codes**2).sum(-1, keepdim=True)
        for tried in (scale, better):
            off = (blocks / tried).round().clamp(-zero, 15 - zero) * tried - blocks
            least = least.minimum((columns * off**2).sum(-1, keepdim=True))
    return float(least.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_zero_points_leave_no_more_error_than_a_search_by_differences(spread: float, dtype: torch.dtype) -> None:
    """spread: of the columns' importance, and of the blocks' sizes."""
    values = numbers(300, 256) * (spread * numbers(300, 1, seed=1)).exp() + 0.3 * spread
    columns = (spread * numbers(256, seed=2)).exp()
    codes, scales, zeros = quantize(values, Scheme(32, torch.uint8, zeros=True), dtype, columns)
    off = dequantize(codes, scales.float(), 4, zeros).double() - values
    tolerance = 1.0 if dtype == torch.float32 else 1.02  # rounded scales
    assert float((off**2 * columns).sum()) <= tolerance * searched(values.unflatten(1, (8, 32)), columns.view(8, 32))


def test_columns_that_do_not_count() -> None:
    """Blocks of them keep sensible scales."""
    values, columns = numbers(5, 128), torch.ones(128)
    columns[32:64] = 0
    made = dequantize(
        *(parts := quantize(values, Scheme(32, torch.uint8, zeros=True), torch.float32, columns))[:2], 4, parts[2]
    )
    assert (made - values).abs().max() < 0.3


def e4m3() -> np.ndarray:
    """Every number that the 8 bits can be, by the format's definition (arXiv 2209.05433, table 1)."""
    magnitudes = [
        (mantissa / 8) * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)
    ]
    return np.array([-m for m in magnitudes[:0:-1]] + magnitudes)


@settings(max_examples=40)
@given(
    st.integers(1, 4),
    st.integers(1, 70),
    st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from([1.0, 1e-3, 1e-9, 0.0, 300.0]),
    st.integers(0, 99),
)
def test_fp8_is_the_nearest_number_of_its_row(
    rows: int, width: int, dtype: torch.dtype, size: float, seed: int
) -> None:
    values = numbers(rows, width, seed=seed) * size
    codes, scales = quantize(values, ROWS_OF_FP8, dtype)
    assert (codes.shape, codes.dtype, scales.shape, scales.dtype) == ((rows, width), FP8, (rows,), dtype)
    assert bool((scales > 0).all())
    known = e4m3()
    assert known.max() == 448
    made = dequantize(codes, scales)
    assert made.dtype == dtype
    for row, stored, scale, found in zip(
        values.double(), codes.double().numpy(), scales.double(), made.double(), strict=True
    ):
        assert set(stored) <= set(known)
        wanted = row.numpy() / float(scale)
        nearest = np.abs(wanted[:, None] - known[None]).min(1)
        np.testing.assert_allclose(np.abs(wanted - stored), nearest, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            found.numpy(), stored * float(scale), rtol=1e-3 if dtype == torch.float16 else 1e-6, atol=1e-7
        )
        if size in (1.0, 300.0):
            assert np.abs(stored).max() >= 416  # the row fills the format's range


@settings(max_examples=40)
@given(
    st.integers(1, 40),
    st.integers(1, 70),
    st.integers(1, 7),
    st.sampled_from([1.0, 1e-9, 0.0, 300.0]),
    st.integers(0, 99),
)
def test_whole_rows_of_int8(rows: int, width: int, pieces: int, size: float, seed: int) -> None:
    """Input-major, whatever slices they are read in, and each number the nearest that its row's scale has."""
    values = numbers(rows, width, seed=seed) * size
    codes, scales = quantize(values, WHOLE, torch.float32)
    assert (codes.shape, scales.shape) == WHOLE.shapes((rows, width)) == ((width, rows), (rows,))
    assert codes.dtype == torch.int8
    offset, same = quantize(values, OFFSET, torch.float32)
    assert torch.equal(offset.int() - 128, codes.int())
    assert torch.equal(same, scales)
    assert torch.equal(dequantize(offset, same), dequantize(codes, scales))
    made = quantized(source(values, pieces), "w.weight", WHOLE, torch.float32)
    assert torch.equal(made["w.weight"].whole(), codes)
    assert torch.equal(made["w.scale"].whole(), scales)
    found = dequantize(codes, scales)
    assert found.shape == values.shape
    for row, own, scale in zip(values.double(), found.double(), scales.double(), strict=True):
        assert float(scale) == pytest.approx(float(row.abs().max()) / 127, rel=1e-6) or not row.any()
        assert (row - own).abs().max() <= 0.5001 * scale


NEEDS_VNNI = pytest.mark.skipif(overflows(), reason="the processor cannot sum products of signed bytes")


@pytest.mark.parametrize("scheme", [pytest.param(WHOLE, marks=NEEDS_VNNI), OFFSET], ids=["signed", "unsigned"])
@torch.inference_mode()
def test_whole_products_round_each_row_alike(tmp_path: Path, scheme: Scheme) -> None:
    """To 127 steps of its largest number; a row of zeros stays one."""
    weight, bias = numbers(37, 128), numbers(37, seed=5)

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = Linear(128, 37, True, Exact, scheme)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    module = Product()
    weight[:, :64] = 1 - 2 * (weight[:, :64] < 0).float()  # the largest codes, whose sums would overflow 16 bits
    codes, scale = quantize(weight, scheme, torch.float32)
    module.load_state_dict({"linear.weight": codes.contiguous(), "linear.scale": scale, "linear.bias": bias})
    model = capture(module, [("x", torch.zeros(3, 128), {0: "rows"})], ["product"], Exact.opset)
    for name, value in model.graph.initializers.items():
        if name in (own := dict(module.named_parameters())):
            value.const_value = ir.tensor(own[name].detach().numpy(), name=name)
    run, meant = runs(tmp_path, model), dequantize(codes, scale).double()
    for rows in (1, 4, 17, 64):
        x = numbers(rows, 128, seed=rows)
        x[rows // 2] *= 0 if rows > 1 else 1
        x[0, :64] = weight[0, :64]
        (found,) = run(x)
        steps = (x / x.abs().amax(1, keepdim=True) * 127 + 0.5).floor().nan_to_num(0.0)
        wanted = (steps * x.abs().amax(1, keepdim=True) / 127).double() @ meant.T + bias
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(module(x).double(), x.double() @ meant.T + bias, rtol=1e-5, atol=1e-5)
        assert (x.double() @ meant.T + bias - wanted).abs().max() > 1e-3
        assert torch.equal(found, torch.cat([run(x[i : i + 1])[0] for i in range(rows)]))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("first", CODES)
def test_the_other_way_of_keeping_codes(tmp_path: Path, first: torch.dtype, bits: int) -> None:
    """Made from the packed file, as if it had been packed so from the start; equal ones are found again."""
    other = next(c for c in CODES if c != first)
    values = numbers(3, 70, 64)
    p = Packer(tmp_path, torch.float16, lambda _: None)
    one = p.pack("a.bin", quantized(source(values), "heads.weight.0", Scheme(32, first, bits), torch.float16))
    two = p.pack("b.bin", {"heads.weight.0": recoded(one["heads.weight.0"], tmp_path, bits)})
    three = p.pack("c.bin", quantized(source(values), "x.weight", Scheme(32, other, bits), torch.float16))
    assert list(one) == ["heads.weight.0", "heads.scale.0"]
    assert three["x.weight"] == two["heads.weight.0"]
    assert three["x.scale"] == one["heads.scale.0"]
    scale = one["heads.scale.0"].mapped(tmp_path)
    found = [
        dequantize(place.mapped(tmp_path), scale, bits) for place in (one["heads.weight.0"], two["heads.weight.0"])
    ]
    assert torch.equal(*found)
    assert found[0].shape == values.shape


@pytest.mark.parametrize("workers", [1, 3])
def test_slices_are_quantized_as_they_are_read(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By any number of workers, and few are held at a time."""
    monkeypatch.setattr("exporter.weights.ahead.physical_cores", lambda: workers)
    parts, read = [numbers(10, 64, seed=i) for i in range(9)], list[int]()

    def slices() -> Iterator[Tensor]:
        for i, part in enumerate(parts):
            read.append(i)
            yield part

    made = quantized(Source((90, 64), slices), "w.weight", Scheme(32, torch.uint8), torch.float32)
    codes, scales = quantize(torch.cat(parts), Scheme(32, torch.uint8), torch.float32)
    for i, found in enumerate(made["w.weight"].slices()):
        assert len(read) <= i + 1 + workers
        assert torch.equal(found, codes[10 * i : 10 * (i + 1)])
    assert torch.equal(made["w.scale"].whole(), scales)
    assert [made[n].nbytes(torch.float16) for n in ("w.weight", "w.scale")] == [90 * 32, 90 * 2 * 4]
    with pytest.raises(ZeroDivisionError):  # as without workers
        list(ahead(lambda n: 1 // n, [1, 0, 1]))


# --- products ---------------------------------------------------------------------------------------------------------


class Products(nn.Module):
    """A matrix with a bias, twice, one without, and the residual blocks of heads."""

    def __init__(self, ops: type[Plain], scheme: Scheme | None) -> None:
        super().__init__()
        self.ops = ops
        self.first, self.second = Linear(256, 128, True, ops, scheme), Linear(128, 37, False, ops, scheme)
        self.heads = Heads(3, 128, 2, ops, Schemes(scheme))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.second(self.first(x) + self.first(x * x)), self.heads(x)


def drawn() -> dict[str, Tensor]:
    """The numbers behind the parameters, output-major."""
    shapes = {n: tuple(p.shape) for n, p in Products(Plain, None).named_parameters()}
    return {
        n: numbers(*shape, seed=i) * (0.1 if "bias" in n else shape[-1] ** -0.5)
        for i, (n, shape) in enumerate(shapes.items())
    }


def expected(x: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """In double precision, from the numbers that codes and scales stand for."""
    w = {
        n: (t if "bias" in n else dequantize(*quantize(t, scheme, torch.float32), scheme.bits)).double()
        for n, t in drawn().items()
    }
    out = ((x + x * x).double() @ w["first.weight"].T + 2 * w["first.bias"]) @ w["second.weight"].T
    heads = (
        torch.nn.functional.silu(x.double() @ w["heads.first.weight"].T + w["heads.first.bias"])
        .unflatten(1, (3, 128))
        .transpose(0, 1)
    )
    for i in range(2):
        heads = heads + torch.nn.functional.silu(heads @ w[f"heads.weight.{i}"].transpose(1, 2) + w[f"heads.bias.{i}"])
    return out, heads


def packed(folder: Path, scheme: Scheme) -> dict[str, Location]:
    sources: dict[str, Source] = {}
    for name, tensor in drawn().items():
        sources |= {name: source(tensor)} if "bias" in name else quantized(source(tensor), name, scheme, torch.float32)
    packer = Packer(folder, torch.float32, lambda _: None)
    places = packer.pack("w.bin", sources)
    shutil.rmtree(folder / NOTES)
    return places


def traced(folder: Path, ops: type[Plain], scheme: Scheme, rows: int | None = None) -> ir.Model:
    """The products as a bundle spells them, for so many rows or any number."""
    module, places = Products(ops, scheme), packed(folder, scheme)
    axes = {0: "rows"} if rows is None else {}
    model = capture(module, [("x", torch.zeros(rows or 3, 256), axes)], [f"out{i}" for i in range(2)], ops.opset)
    graph = model.graph
    for name, value in graph.initializers.items():
        if name in places:
            tensor = _external(name, places[name], folder)
            value.const_value, value.shape, value.type = tensor, tensor.shape, ir.TensorType(tensor.dtype)
    _split_parts(model, places, folder)
    _name_codes(model)
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
    return model


def runs(folder: Path, model: ir.Model) -> Callable[[Tensor], list[Tensor]]:
    """In ONNX Runtime."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    made = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda x: [torch.from_numpy(out) for out in made.run(None, {made.get_inputs()[0].name: x.numpy()})]


@pytest.mark.parametrize("scheme", [ROWS_OF_FP8, *BLOCKS], ids=str)
@torch.inference_mode()
def test_eager_products(tmp_path: Path, scheme: Scheme) -> None:
    module = Products(Plain, scheme)
    module.load_state_dict({n: place.mapped(tmp_path) for n, place in packed(tmp_path, scheme).items()}, assign=True)
    x = numbers(5, 256)
    for found, wanted in zip(module(x), expected(x, scheme), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
@torch.inference_mode()
def test_eager_products_of_many_slices(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setattr("graphs.dialects.plain._SLICE_ELEMENTS", 128 * 7)
    weight, x = numbers(37, 128), numbers(5, 128, seed=1)
    made = quantize(weight, Scheme(32, torch.uint8, bits), torch.float32)
    torch.testing.assert_close(Plain.linear(x, *made, None), x @ dequantize(*made, bits).T)


@pytest.mark.parametrize(
    ("ops", "scheme", "operator"),
    [
        *(
            pytest.param(
                Standard,
                Scheme(block, torch.uint8, bits),
                "MatMulNBits",
                marks=pytest.mark.exhaustive if block == 64 else (),
            )
            for block in (32, 64)
            for bits in (4, 8)
        ),
        (Decomposed, Scheme(64, torch.int8), "DequantizeLinear"),
        pytest.param(Standard, Scheme(64, torch.int8), "DequantizeLinear", marks=pytest.mark.exhaustive),
        *(
            pytest.param(
                Basic,
                Scheme(block, torch.int8, bits),
                "DequantizeLinear",
                marks=pytest.mark.exhaustive if block == 64 else (),
            )
            for block in (32, 64)
            for bits in (4, 8)
        ),
        (Standard, ROWS_OF_FP8, "DequantizeLinear"),
        pytest.param(Decomposed, ROWS_OF_FP8, "DequantizeLinear", marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_every_spelling_in_onnxruntime(tmp_path: Path, ops: type[Plain], scheme: Scheme, operator: str) -> None:
    model = traced(tmp_path, ops, scheme)
    if ops is Basic:
        model.opset_imports[""] = 21  # ONNX has blocks from there on; MIGraphX' parser asks for no opset
    run = runs(tmp_path, model)
    assert [node.op_type for node in model.graph].count(operator) == 4 + 3 * 2  # a product per head and block
    for rows in (1, 4, 17):
        x = numbers(rows, 256, seed=rows)
        for found, wanted in zip(run(x), expected(x, scheme), strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def rounded(x: Tensor, block: int) -> Tensor:
    """Each block of a row as whole steps, of which its largest number is 127 long."""
    blocks = x.float().unflatten(1, (-1, block))
    step = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / step).round() * step).flatten(1).double()


@pytest.mark.parametrize(
    ("ops", "scheme"),
    [
        pytest.param(ops, scheme, marks=pytest.mark.exhaustive if ops is Exact or scheme.block == 64 else ())
        for ops in (Contrib, Exact)
        for scheme in BLOCKS
        if scheme.codes == torch.uint8
    ],
    ids=str,
)
def test_rows_are_rounded_to_int8_and_each_alike(tmp_path: Path, ops: type[Plain], scheme: Scheme) -> None:
    model = traced(tmp_path, ops, scheme)
    run = runs(tmp_path, model)
    levels = [n.attributes.get_int("accuracy_level") for n in model.graph if n.op_type == "MatMulNBits"]
    assert levels == [4] * 10
    first, second = (
        dequantize(*quantize(drawn()[f"{n}.weight"], scheme, torch.float32), scheme.bits).double()
        for n in ("first", "second")
    )
    for rows in (1, 4, 17):
        x = numbers(rows, 256, seed=rows)
        middle = sum(rounded(part, scheme.block) @ first.T + drawn()["first.bias"].double() for part in (x, x * x))
        found, wanted = run(x)[0].double(), rounded(middle, scheme.block) @ second.T
        off = ~torch.isclose(found, wanted, rtol=1e-5, atol=1e-5).all(1)
        assert int(off.sum()) <= rows // 10  # where a sum in another order has turned a rounding of ``middle``
        assert (expected(x, scheme)[0] - wanted).abs().max() > 1e-3  # so much less exact than the others
        if (scheme.bits, scheme.block) != (4, 64):  # the one that forms.layout makes no exact target of
            copies = 2 if scheme.bits == 4 and one_row_differs() else 1
            alone = [[out.narrow(-2, 0, 1) for out in run(x[[i] * copies])] for i in range(rows)]
            together = run(x) if rows >= copies else alone[0]
            assert all(
                torch.equal(a, torch.cat(b, dim=-2)) for a, b in zip(together, zip(*alone, strict=True), strict=True)
            )


@pytest.mark.parametrize(
    ("backend", "ops", "scheme"),
    [
        *(
            pytest.param(
                "migraphx", Basic, Scheme(block, dtype, bits), marks=pytest.mark.exhaustive if block == 64 else ()
            )
            for block in (32, 64)
            for bits, dtype in ((4, torch.int8), (4, torch.uint8), (8, torch.int8))
        ),
        ("tensorrt", Standard, Scheme(64, torch.int8)),
        ("tensorrt", Standard, ROWS_OF_FP8),
    ],
    ids=str,
)
def test_parsers_take_the_spelling_of_their_backend(
    tmp_path: Path, backend: str, ops: type[Plain], scheme: Scheme
) -> None:
    assert refusals(traced(tmp_path, ops, scheme, rows=3), backend) == []


@pytest.mark.parametrize("scheme", [s for s in BLOCKS if s.codes == torch.int8], ids=str)
def test_migraphx_itself_multiplies_alike(tmp_path: Path, scheme: Scheme) -> None:
    """On its reference target, where its Python module is; weights come from their files, as in a bundle."""
    migraphx = pytest.importorskip("migraphx")
    model = traced(tmp_path, Basic, scheme, rows=4)
    program = migraphx.parse_onnx_buffer(ir.to_proto(model).SerializeToString(), external_data_path=str(tmp_path))
    program.compile(migraphx.get_target("ref"))
    x = numbers(4, 256)
    for found, wanted in zip(
        program.run({model.graph.inputs[0].name: migraphx.argument(x.numpy())}), expected(x, scheme), strict=True
    ):
        np.testing.assert_allclose(np.array(found), wanted.numpy(), rtol=1e-4, atol=1e-5)


# --- what is written --------------------------------------------------------------------------------------------------

WIDE = {
    "vocab_size": 701,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TREE = ("--rows", "9", "--heads", "1", "--top-k", "2", "--head-top-k", "2", "--beam", "2", "--capacity", "64")
BOTH = ("--weights", "int4", "--draft-weights", "int4")
MIXED = ("--weights", "int8", "--draft-weights", "int4")
ALL = ("--backend", "cpu", "migraphx", "tensorrt", "cuda", "--dtype", "fp32")


def argv(folder: Path, *more: str) -> list[str]:
    return [
        "--ckpt",
        str(folder / "drafter"),
        "--target",
        str(folder / "target"),
        "--out",
        str(folder / "out"),
        *TREE,
        *as_asked(more),
    ]


def wanted(folder: Path, *more: str) -> Recipe:
    return recipe_of(options.config_of(argv(folder, *more)))


def pack(plan: Recipe, folder: Path) -> dict[torch.dtype, dict[str, dict[str, Location]]]:
    return exporter.writing.bundle._pack(plan, Packer(folder / "out", plan.dtype, lambda _: None))


@pytest.mark.parametrize(
    ("tied", "backends"),
    [
        pytest.param(tied, backends, marks=() if tied == (len(backends) > 1) else pytest.mark.exhaustive)
        for tied in (False, True)
        for backends in (("cpu",), ("cpu", "migraphx"))
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "which", [(), BOTH[:2], BOTH[2:], BOTH, MIXED, ("--weights", "int8", "--draft-weights", "int8")], ids=" ".join
)
def test_sizes_are_what_gets_written(
    tmp_path: Path, which: tuple[str, ...], backends: tuple[str, ...], tied: bool
) -> None:
    RandomPair(WIDE | {"tie_word_embeddings": tied}, heads=1).write(tmp_path)
    plan = wanted(tmp_path, *which, "--backend", *backends, "--dtype", "fp32")
    pack(plan, tmp_path)
    written = {str(p.relative_to(tmp_path / "out")): p.stat().st_size for p in (tmp_path / "out").rglob("*.bin")}
    sizes = plan.sizes()
    assert written.keys() == sizes.keys()
    assert all(written[file] <= size for file, size in sizes.items())
    # Both rotary tables are the same, too, which nobody promised.
    tables = 2 * 4096 * -(-plan.positions * 16 * 4 // 4096)
    assert sum(written.values()) == sum(sizes.values()) - plan.shared() - tables


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("how", [("fp8", "fp8"), ("fp8", "int4"), ("int4", "fp8"), ("fp8", None)], ids=str)
def test_sizes_of_fp8_are_what_gets_written(tmp_path: Path, how: tuple[str, str | None], tied: bool) -> None:
    RandomPair(WIDE | {"tie_word_embeddings": tied}, heads=1).write(tmp_path)
    options = [("--weights", how[0]), *([("--draft-weights", how[1])] if how[1] else [])]
    plan = wanted(tmp_path, "--backend", "tensorrt", *(part for option in options for part in option))
    places = pack(plan, tmp_path)[SIGNED]
    for model, to in zip(("target", "draft"), how, strict=True):
        codes = {"fp8": FP8, "int4": torch.int8, None: torch.float16}[to]
        assert places[model]["lm_head.weight"].dtype == codes
        assert places[model]["embed_tokens.weight"].dtype == torch.float16
    assert (places["target"]["lm_head.weight"] == places["draft"]["lm_head.weight"]) == (how[0] == how[1])
    written = sum(p.stat().st_size for p in (tmp_path / "out").rglob("*.bin"))
    tables = 2 * 4096 * -(-plan.positions * 16 * 4 // 4096)
    assert written == sum(plan.sizes().values()) - plan.shared() - tables
    assert plan.unquantized() == [] or "int4" in how


@pytest.mark.parametrize("option", ["--weights", "--draft-weights"])
@pytest.mark.parametrize(
    ("how", "backends", "taken"),
    [
        ("fp8", ("cpu",), "int4, int8"),
        ("fp8", ("tensorrt", "migraphx"), "int4, int8"),
        ("int8", ("cpu", "tensorrt"), "int4, fp8"),
    ],
)
def test_what_a_backend_does_not_take(
    tmp_path: Path, option: str, how: str, backends: tuple[str, ...], taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    RandomPair(WIDE, heads=1).write(tmp_path)
    assert cli.main(argv(tmp_path, option, how, "--backend", *backends)) == 1
    name, said = backends[-1], capsys.readouterr().err
    taken += ", w8a8, w8a8-unsigned" if (name, option) == ("cpu", "--weights") else ""
    assert f"{option} {how} is not for {name}, which takes {taken}: give one of these, or leave {name} out" in said
    assert not (tmp_path / "out").exists()


def test_both_lm_heads_are_one_and_no_embedding(tmp_path: Path) -> None:
    RandomPair(WIDE | {"tie_word_embeddings": True}, heads=1).write(tmp_path)
    places = pack(wanted(tmp_path, *ALL, *BOTH), tmp_path)
    assert list(places) == [UNSIGNED, BACKENDS["migraphx"].codes, SIGNED]
    for codes, models in places.items():
        for name in ("lm_head.weight", "lm_head.scale", "embed_tokens.weight"):
            assert models["target"][name] == models["draft"][name]
        assert models["target"]["lm_head.weight"].dtype == codes.four
        assert models["target"]["embed_tokens.weight"].dtype == torch.float32
        assert models["extend"] is models["draft"]
    one, same, two = (models["target"] for models in places.values())
    assert one == same
    assert {name for name in one if one[name] != two[name]} == {
        n for n in one if scale_of(n) in one and scale_of(n) != n
    }


def test_one_of_the_two_alone(tmp_path: Path) -> None:
    RandomPair(WIDE, heads=1).write(tmp_path)
    for which, quantized_one, other in ((BOTH[:2], "target", "draft"), (BOTH[2:], "draft", "target")):
        places = pack(wanted(tmp_path, *which), tmp_path)[UNSIGNED]
        assert places[quantized_one]["lm_head.weight"].dtype == torch.uint8
        coded = {name for name, place in places[other].items() if place.dtype != torch.float32}
        assert coded == ({"embed_tokens.weight"} if quantized_one == "target" else set())  # which both models share


def test_biases_norms_and_tables_keep_their_dtype(tmp_path: Path) -> None:
    RandomPair(WIDE | {"attention_bias": True, "mlp_bias": True}, heads=2).write(tmp_path)
    plan = wanted(tmp_path, *BOTH, "--backend", "tensorrt")
    for places in pack(plan, tmp_path)[SIGNED].values():
        for name, place in places.items():
            if name.startswith("rotary."):
                assert place.dtype == torch.float32
            elif scale_of(name) in places and scale_of(name) != name:
                assert place.dtype == torch.int8
                assert name.endswith("weight") or name.startswith("heads.weight.")
            else:
                assert place.dtype == torch.float16


def test_rows_that_are_no_whole_blocks_stay_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """48 wide, and 80 between: only what reads two states side by side has whole blocks; and of 64, where rows are that
    long, one."""
    RandomPair({"vocab_size": 61}, heads=1).write(tmp_path)
    plan = wanted(tmp_path, *BOTH)
    places = pack(plan, tmp_path)[UNSIGNED]
    found = {name for places in places.values() for name, place in places.items() if place.dtype == torch.uint8}
    assert found == {"fc.weight", "heads.first.weight"}
    assert "target lm_head.weight" in plan.unquantized()
    assert cli.main(argv(tmp_path, *BOTH, "--out", str(tmp_path / "other"), "--dry-run")) == 0
    assert (
        f"{len(plan.unquantized()) - 1} more, because the length of their rows is no multiple of a block's"
        in capsys.readouterr().out
    )
    RandomPair(WIDE | {"hidden_size": 64}, heads=1).write(tmp_path / "64")
    places = pack(wanted(tmp_path / "64", *BOTH, "--backend", "tensorrt"), tmp_path / "64")[SIGNED]
    found = {name for name, place in places["target"].items() if place.dtype == torch.int8}
    assert found == {f"layers.{i}.mlp.down_proj.weight" for i in (0, 1)}  # 192 wide


def test_blocks_are_those_of_the_pickiest_backend(tmp_path: Path) -> None:
    RandomPair(WIDE, heads=1).write(tmp_path / "wide")
    RandomPair(WIDE | {"intermediate_size": 224}, heads=1).write(tmp_path / "odd")  # not a multiple of 64
    for pair, flags, blocks in (
        ("wide", (), {4: 32, 8: 64}),
        ("odd", (), {4: 32, 8: 32}),
        ("wide", ("--backend", "cpu", "cuda"), {4: 32, 8: 32}),
        ("wide", ALL, {4: 64, 8: 64}),
    ):
        assert wanted(tmp_path / pair, *BOTH, *flags).blocks == blocks


def test_only_exact_products_round_a_targets_rows(tmp_path: Path) -> None:
    RandomPair(WIDE, heads=1).write(tmp_path / "wide")
    RandomPair(WIDE | {"head_dim": 24}, heads=1).write(tmp_path / "odd")
    RandomPair(WIDE | {"head_dim": 160}, heads=1).write(tmp_path / "long heads")
    RandomPair(heads=1).write(tmp_path / "narrow")  # whose rows are not several blocks, most of them
    int8 = ("--weights", "int8", "--draft-weights", "int8")
    for pair, flags, dialects in (
        ("wide", (), (Contrib, Contrib)),
        ("odd", (), (Standard, Standard)),
        ("wide", BOTH, (Exact, Contrib)),
        ("wide", int8, (Exact, Contrib)),
        ("odd", int8, (Exact, Rounded)),
        ("wide", BOTH[2:], (Contrib, Contrib)),
        ("odd", BOTH[2:], (Standard, Rounded)),
        ("wide", (*BOTH, *ALL), (Standard, Contrib)),
        ("narrow", int8, (Standard, Rounded)),
        ("long heads", int8, (Standard, Contrib)),
        ("long heads", (), (Contrib, Contrib)),
    ):
        made = wanted(tmp_path / pair, *flags).trace_specs["cpu"]
        assert (made.dialect, made.drafting) == dialects, (pair, flags)


@pytest.mark.parametrize(
    ("backend", "how", "warned"),
    [
        ("migraphx", "int4", True),
        ("migraphx", "int8", False),
        ("cpu", "int4", False),
        ("tensorrt", "int4", False),
    ],
)
def test_an_int4_drafter_for_migraphx_is_warned_of(
    tmp_path: Path, backend: str, how: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    RandomPair(WIDE, heads=1).write(tmp_path)
    assert cli.main(argv(tmp_path, "--backend", backend, "--draft-weights", how, "--dry-run")) == 0
    assert ("Warning: on a GPU MIGraphX unpacks int4 weights" in capsys.readouterr().out) == warned


def test_vllm_quantizes_on_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RandomPair(WIDE, heads=1).write(tmp_path)
    folders = argv(tmp_path)[:6]
    assert cli.main([*folders, "--backend", "vllm", "--draft-weights", "int4"]) == 1
    assert "leave them out" in capsys.readouterr().err
