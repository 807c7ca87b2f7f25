"""Bundles of quantized weights: every form gives the tokens of the quantized model itself.

Of that model transformers is told the numbers that codes and scales stand for. ONNX Runtime's CPU provider stands in
for the accelerators. As a backend of its own it rounds the rows of a pass to int8, so it is held against the same
rounding in PyTorch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from exporter.backends.specs import BACKENDS
from exporter.options import config_of
from exporter.progress import Progress
from exporter.recipe.resolve import recipe_of
from exporter.weights.quantize import quantize, scale_of, zero_of
from exporter.writing.calibration import calibrated
from graphs.dialects.quantization import FP8, Scheme, dequantize
from runtime import GumihoError, Model, load
from runtime.backends.processor import overflows
from runtime.bundle.reader import Bundle
from runtime.engines.golden_replay import TOLERANCE
from runtime.engines.store import compile_engines
from tests.conftest import DEMO, EVERY_BACKEND, SIZES, MakeBundle
from tests.end_to_end import llama
from tests.end_to_end.test_forms import opened, stand_in, tokens
from tests.pairs import RandomPair
from tests.rounding import Rounding

# Where TensorRT is one of them, blocks are of 64 numbers, for which the CPU has no exact products of rounded rows.
FORMS = {
    "int4": ("cpu", "migraphx", "tensorrt", "cuda"),
    "int8": ("migraphx",),
    "int8 everywhere": ("migraphx", "cuda"),
}
INT4, INT8, MORE_INT8 = (
    (
        "--backend",
        "cpu",
        *(form for form in forms if form != "cpu"),
        "--dtype",
        "fp32",
        "--capacity",
        "200",
        "--heads",
        "1",
        "--weights",
        how.split()[0],
        "--draft-weights",
        how.split()[0],
    )
    for how, forms in FORMS.items()
)
CPU4 = ("--capacity", "200", "--heads", "1", "--weights", "int4", "--draft-weights", "int4")
INTEGERS = "w8a8-unsigned" if overflows() else "w8a8"  # as this processor multiplies them
WHOLE = ("--capacity", "510", "--heads", "1", "--weights", INTEGERS, "--draft-weights", "int4")
ODD = RandomPair(
    {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
        "vocab_size": 301,
    },
    layers=2,
    heads=1,
    seed=12,
    scale=3.0,  # a larger scale, and rounding moves an untrained drafter too far
)
FP8_PAIR = RandomPair({"vocab_size": 301, "attention_bias": True}, layers=1, heads=1, seed=12)
FP8_TARGET = ("--backend", "tensorrt", *SIZES, "--weights", "fp8")
TRIMMED = ("--draft-vocab", "100")  # of ODD's tokens
LENGTHS = ((1, 24), (7, 16), (8, 24), (9, 16), (129, 12), (190, 50))


def fp8_bundle(make_bundle: MakeBundle) -> Path:
    """Without TensorRT's spare forms, which are two thirds of the tracing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, "tensorrt", replace(BACKENDS["tensorrt"], spare=()))  # type: ignore[arg-type]
        return make_bundle(FP8_PAIR, *FP8_TARGET, "--draft-weights", "fp8")


def meant(target: Path, folder: Path, scheme: Scheme) -> Path:
    """A checkpoint of the target whose matrices are what theirs are rounded to, and whose lm_head is one of them."""
    folder.mkdir()
    state = {n: t.float() for n, t in load_file(target / "model.safetensors").items()}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"].clone())
    for name, tensor in state.items():
        if tensor.ndim == 2 and "embed_tokens" not in name and scheme.fits(tensor.shape[1]):
            state[name] = dequantize(*quantize(tensor, scheme, torch.float32), scheme.bits)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = (target / "config.json").read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (folder / "config.json").write_text(config)
    return folder


def meant_by(pair: Path, options: Sequence[str], folder: Path) -> Path:
    """The same for a target of int4 or w8a8 on the CPU, which depends on a page that is read first: as its export plans
    it."""
    plan = recipe_of(config_of(["--ckpt", str(pair / "drafter"), "--target", str(pair / "target"), *options]))
    with Progress() as progress:
        sources = calibrated(plan, progress).sources(apart=True)["weights/target.bin"]
    state = dict[str, Tensor]()
    for name, source in sources.items():
        values = source.whole()
        if scale_of(name) != name and scale_of(name) in sources:
            zero = sources[zero_of(name)].whole() if zero_of(name) in sources else None
            values = dequantize(values, sources[scale_of(name)].whole(), 4 if zero is not None else 8, zero)
        if not name.endswith((".scale", ".zero")) and "rotary" not in name:
            state[name if name == "lm_head.weight" else f"model.{name}"] = values.float().contiguous()
    folder.mkdir()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = (
        (pair / "target/config.json").read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    (folder / "config.json").write_text(config)
    return folder


def rounding(folder: Path, scheme: Scheme) -> LlamaForCausalLM:
    """transformers' Llama over what ``meant`` wrote, its rows rounded where the weights are quantized."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for module in model.modules():
        if isinstance(module, nn.Linear) and scheme.fits(module.in_features):
            module.__class__, module.block = Rounding, scheme.block or module.in_features
    if scheme.bits == 4:
        model.lm_head.block = 64  # which is int8
    return model


def prompts(model: Model) -> list[tuple[list[int], int]]:
    draw = np.random.default_rng(0)
    vocabulary = model.bundle.manifest.vocabulary
    return [(draw.integers(2, vocabulary, length).tolist(), count) for length, count in LENGTHS]


CASES = pytest.mark.parametrize(
    ("pair", "how"),
    [
        pytest.param(DEMO, "int4", id="demo int4", marks=pytest.mark.exhaustive),  # 26 s: four backends
        pytest.param(ODD, "int4", id="odd int4", marks=pytest.mark.exhaustive),
        pytest.param(ODD, "int8", id="odd int8"),
        pytest.param(ODD, "int8 everywhere", id="odd int8 everywhere", marks=pytest.mark.exhaustive),
    ],
)


def test_token_ids_stay_in_migraphxs_graphs(make_bundle: MakeBundle) -> None:
    """Those of a trimmed draft vocabulary, among weights and codes that become inputs."""
    bundle = make_bundle(
        ODD, "--backend", "migraphx", *SIZES, "--heads", "1", "--weights", "int4", "--draft-weights", "int4", *TRIMMED
    )
    form = Bundle(bundle).manifest.form("migraphx")
    assert {weight.dtype for weights in form.weights.values() for weight in weights.values()} == {"float32", "uint8"}
    for name, graph in form.graphs.items():
        model = onnx.load(bundle / graph.file, load_external_data=False)
        assert [tensor.name for tensor in model.graph.initializer if tensor.external_data] == ["token_ids"] * (
            name == "draft"
        )
        inputs = {value.name for value in model.graph.input}
        assert inputs == {tensor.name for tensor in graph.inputs} | (form.inputs(name).keys() & inputs)
    compile_engines(Bundle(bundle), stand_in("migraphx", lazy=False)(""))


@CASES
def test_forms_equal_the_quantized_model(
    make_bundle: MakeBundle, pair: Path | RandomPair, how: str, tmp_path: Path
) -> None:
    forms, options = FORMS[how], {"int4": INT4, "int8": INT8, "int8 everywhere": MORE_INT8}[how]
    how = how.split()[0]
    scheme = {"int4": Scheme(64, torch.uint8), "int8": Scheme(32, torch.uint8, 8)}[how]
    bundle = make_bundle(pair, *options, *(TRIMMED if (pair, how) == (ODD, "int4") else ()))
    folder = meant(bundle.parent / "pair/target", tmp_path / "meant", scheme)
    manifest = Bundle(bundle).manifest
    assert set(manifest.weights.values()) == {f"{how}, blocks of {scheme.block}"}
    wanted: dict[int, list[int]] = {}
    ties = 0
    for form in forms:
        drafted = "int8" if form == "cpu" else "float32"
        for name, graph in manifest.forms[form].graphs.items():
            assert graph.precision == ("float32" if name.startswith(("target", "shared")) else drafted)
        with load(bundle, "cpu", threads=1) if form == "cpu" else opened(bundle, form, lazy=False) as model:
            for prompt, count in prompts(model):
                if len(prompt) not in wanted:
                    (wanted[len(prompt)],) = llama.generate(folder, [prompt], min(count, 201 - len(prompt)))
                found = tokens(model, prompt, count)[0]
                ties += llama.assert_same(folder, prompt, found, wanted[len(prompt)])
                assert tokens(model, prompt, count, speculate=False)[0] == found
    assert ties <= 1


@pytest.mark.parametrize(
    ("pair", "how", "scheme"),
    [
        pytest.param(DEMO, CPU4, Scheme(32, torch.uint8), id="demo int4", marks=pytest.mark.exhaustive),
        pytest.param(ODD, INT8, Scheme(32, torch.uint8, 8), id="odd int8"),
        pytest.param(DEMO, WHOLE, Scheme(0, torch.int8, 8), id="demo w8a8"),
    ],
)
@torch.inference_mode()
def test_the_cpu_rounds_the_rows_of_the_quantized_model(
    make_bundle: MakeBundle, pair: Path | RandomPair, how: tuple[str, ...], scheme: Scheme, tmp_path: Path
) -> None:
    """Which moves the logits by up to a few hundredths of the largest, exactly as the same rounding in PyTorch does.

    For as long as both round alike: the two add up in other orders, and a rounding that turns over on it turns over
    others. With zero points, whose part is subtracted from a larger sum, more of them do, and with whole rows, which
    hold more numbers.
    """
    bundle, share = make_bundle(pair, *how), 0.5 if how == INT8 else 0.25
    if how in (CPU4, WHOLE):
        folder = meant_by(bundle.parent / "pair", how, tmp_path / "meant")
    else:
        folder = meant(bundle.parent / "pair/target", tmp_path / "meant", scheme)
    with load(bundle, "cpu", threads=1) as model:
        assert {graph.precision for graph in model.bundle.manifest.forms["cpu"].graphs.values()} == {"int8"}
        far, near = [], []
        # Of few rows: with every number that is rounded, the chance grows that the order of a sum flips a rounding.
        for ids in np.random.default_rng(3).integers(2, model.bundle.manifest.vocabulary, (12, 3)).tolist():
            model.decoder.clear()
            model.decoder.feed(ids)
            found = torch.from_numpy(model.decoder.target.logits[: len(ids)].copy())
            for errors, judge in ((far, llama.load(folder)), (near, rounding(folder, scheme))):
                wanted = judge(torch.tensor([ids])).logits[0]
                errors.append(float((found - wanted).abs().max() / wanted.abs().max()))
    assert 1e-3 < np.median(far) <= max(far) < 0.05
    assert np.quantile(near, share) < 2e-6


@pytest.mark.parametrize(
    "exported",
    [
        fp8_bundle,
        pytest.param(lambda make: make(FP8_PAIR, *FP8_TARGET, "--draft-weights", "int4"), marks=pytest.mark.exhaustive),
    ],
    ids=["fp8", "int4 drafter"],
)
def test_fp8_equals_the_quantized_model(
    make_bundle: MakeBundle, tmp_path: Path, exported: Callable[[MakeBundle], Path]
) -> None:
    """Rows of 80 numbers between, which are no whole blocks of int4, are quantized too."""
    bundle = exported(make_bundle)
    assert Bundle(bundle).manifest.weights["target"] == "fp8, a scale a row"
    folder = meant(bundle.parent / "pair/target", tmp_path / "meant", Scheme(0, FP8))
    with opened(bundle, "tensorrt", lazy=True) as model:
        for prompt, count in prompts(model):
            (wanted,) = llama.generate(folder, [prompt], min(count, 201 - len(prompt)))
            found = tokens(model, prompt, count)[0]
            llama.assert_same(folder, prompt, found, wanted)
            assert tokens(model, prompt, count, speculate=False)[0] == found


@pytest.mark.parametrize(
    ("pair", "how"),
    [
        pytest.param(DEMO, "int4", id="demo int4"),
        pytest.param(ODD, "int8", id="odd int8", marks=pytest.mark.exhaustive),
    ],
)
def test_a_quantized_drafter_changes_no_token(make_bundle: MakeBundle, pair: Path | RandomPair, how: str) -> None:
    plain = make_bundle(pair, *(EVERY_BACKEND if pair is DEMO else SIZES))
    quantized = make_bundle(pair, *SIZES, "--heads", "1", "--draft-weights", how)
    assert {g.precision for g in Bundle(plain).manifest.forms["cpu"].graphs.values()} == {"float32"}
    graphs = Bundle(quantized).manifest.forms["cpu"].graphs
    assert [graphs[name].precision for name in ("target", "draft", "extend")] == ["float32", "int8", "int8"]
    with load(plain, threads=1) as one, load(quantized, threads=1) as two:
        for prompt, count in prompts(one):
            assert tokens(two, prompt, count)[0] == tokens(one, prompt, count)[0]


@contextmanager
def spoiled(bundle: Path, file: str) -> Iterator[None]:
    """Codes are kept in the other way."""
    path = bundle / "weights" / file
    content = path.read_bytes()
    path.write_bytes((np.frombuffer(content, np.uint8) ^ 0x88).tobytes())
    try:
        yield
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("model", ["target", "draft"])
def test_wrong_codes_are_beyond_every_tolerance(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Also where rounded rows are put up with. The ``-signed`` files hold codes and nothing else."""
    bundle = make_bundle(ODD, *INT8)
    monkeypatch.setattr(Bundle, "verify", lambda self: None)
    monkeypatch.setitem(TOLERANCE, "float32", TOLERANCE["int8"])
    with (
        spoiled(bundle, f"{model}-signed.bin"),
        pytest.raises(GumihoError, match=f"{model} engine is discarded, since it differs from the golden run"),
    ):
        compile_engines(Bundle(bundle), stand_in("migraphx", lazy=False)(""), tune=True)
