"""Embeddings of quantized targets for the CPU are codes: which exports have them, what they stand for, and that it is
stored once."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exporter.backends.specs import UNSIGNED
from exporter.options import config_of
from exporter.recipe.resolve import recipe_of
from exporter.tracing.capture import capture
from exporter.tracing.trace import _name_codes
from exporter.weights.quantize import quantize, scale_of
from graphs.dialects.plain import Plain
from graphs.dialects.quantization import EMBEDDING, Scheme
from graphs.layer import Embedding
from runtime.bundle.reader import Bundle
from tests.conftest import DEMO, MakeBundle
from tests.end_to_end.test_quantized import WHOLE
from tests.pairs import RandomPair

BITS = st.sampled_from([4, 8])


def filled(bits: int, blocks: int, rows: int, seed: int) -> tuple[Embedding, list[list[float]]]:
    """A table of codes, and the numbers that they stand for."""
    scheme, draw = Scheme(32, torch.uint8, bits), np.random.default_rng(seed)
    table = Embedding(rows, blocks * 32, Plain, scheme)
    numbers = draw.integers(0, 2**bits, (rows, blocks, 32))
    scales = draw.uniform(0.1, 2.0, (rows, blocks)).astype(np.float32)
    codes = numbers if bits == 8 else numbers[..., 0::2] | numbers[..., 1::2] << 4
    table.load_state_dict({"weight": torch.from_numpy(codes.astype(np.uint8)), "scale": torch.from_numpy(scales)})
    middle = 2 ** (bits - 1)
    values = [
        [float(np.float32(numbers[r, b, i] - middle) * scales[r, b]) for b in range(blocks) for i in range(32)]
        for r in range(rows)
    ]
    return table, values


@settings(max_examples=20)
@given(BITS, st.integers(2, 4), st.integers(1, 9), st.integers(0, 99))
def test_rows_against_a_loop(bits: int, blocks: int, rows: int, seed: int) -> None:
    table, values = filled(bits, blocks, rows, seed)
    tokens = torch.randint(0, rows, (5,), generator=torch.Generator().manual_seed(seed))
    assert table(tokens).tolist() == [values[token] for token in tokens]


def in_onnxruntime(table: Embedding, tokens: Tensor) -> np.ndarray:
    model = capture(table, [("tokens", tokens, {0: "rows"})], ["rows"], Plain.opset)
    for name, value in model.graph.initializers.items():
        stored = table.get_parameter(name).detach().numpy()
        value.const_value = ir.ExternalTensor(
            "x", 0, stored.nbytes, value.dtype, shape=ir.Shape(stored.shape), name=name
        )
    _name_codes(model)
    for name, value in model.graph.initializers.items():
        stored = table.get_parameter(name).detach().numpy()
        value.const_value = ir.tensor(stored.reshape(tuple(value.shape)), name=name)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {session.get_inputs()[0].name: tokens.numpy()})[0]
    return found


@pytest.mark.parametrize("bits", [4, 8])
def test_the_operator_gives_the_same_bits(bits: int) -> None:
    table, values = filled(bits, 3, 41, 5)
    tokens = torch.tensor([40, 0, 7, 7, 39])
    np.testing.assert_array_equal(
        in_onnxruntime(table, tokens), np.array([values[token] for token in tokens], np.float32)
    )


def test_which_exports_have_codes(tmp_path: Path) -> None:
    pair = RandomPair(
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
        layers=1,
        heads=1,
    )
    pair.write(tmp_path)

    def coded(*options: str) -> set[str]:
        made = recipe_of(
            config_of(
                [
                    "--ckpt",
                    str(tmp_path / "drafter"),
                    "--target",
                    str(tmp_path / "target"),
                    "--capacity",
                    "100",
                    *options,
                ]
            )
        )
        found = {file for file, sources in made.sources().items() if scale_of(EMBEDDING) in sources}
        for model in made.models:
            scheme = made.schemes(UNSIGNED).get(model)
            assert (scheme is not None and scheme[EMBEDDING] is not None) == (f"weights/{model}.bin" in found)
        return found

    both = {"weights/target.bin", "weights/draft.bin"}
    for weights in ("int8", "int4", "w8a8"):
        assert coded("--weights", weights) == both
    assert coded("--weights", "int4", "--draft-weights", "none") == both  # the drafter reads the target's
    assert coded() == set()
    assert coded("--draft-weights", "int4") == set()
    assert coded("--weights", "int8", "--backend", "cpu", "migraphx") == set()
    assert coded("--weights", "int8", "--backend", "cuda") == set()
    assert coded("--weights", "int8", "--link-weights") == set()
    RandomPair({"hidden_size": 48}, layers=1, heads=1).write(tmp_path / "odd")
    made = recipe_of(config_of(["--target", str(tmp_path / "odd/target"), "--capacity", "100", "--weights", "w8a8"]))
    assert scale_of(EMBEDDING) not in made.sources()["weights/target.bin"]  # rows of 48 are no whole blocks


def test_the_codes_are_stored_once_and_not_counted_as_read(make_bundle: MakeBundle) -> None:
    bundle = make_bundle(DEMO, *WHOLE)
    manifest = Bundle(bundle).manifest
    graphs, places = manifest.forms["cpu"].graphs, dict[str, set[tuple[str, str]]]()
    for graph in graphs.values():
        for tensor in onnx.load(bundle / graph.file, load_external_data=False).graph.initializer:
            if tensor.name.startswith("embed_tokens."):
                where = {entry.key: entry.value for entry in tensor.external_data}
                places.setdefault(tensor.name, set()).add((where["location"], where["offset"]))
                assert list(tensor.dims) == [2048, 192 if tensor.name == EMBEDDING else 3]
    assert {name: len(own) for name, own in places.items()} == {EMBEDDING: 1, scale_of(EMBEDDING): 1}
    for name in ("target", "extend"):  # which multiply by no matrix twice
        assert graphs[name].weights - graphs[name].reads >= 2048 * (192 + 4 * 3)


def test_eight_bits_are_within_half_a_step_of_the_checkpoint() -> None:
    values = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    table = Embedding(50, 64, Plain, Scheme(32, torch.uint8, 8))
    codes, scale = quantize(values, Scheme(32, torch.uint8, 8), torch.float32)
    table.load_state_dict({"weight": codes, "scale": scale})
    steps = values.unflatten(1, (2, 32)).abs().amax(-1) / 127
    assert ((table(torch.arange(50)) - values).abs().unflatten(1, (2, 32)).amax(-1) <= 0.501 * steps).all()
