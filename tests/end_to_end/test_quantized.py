"""Bundles of quantized weights: every form gives the tokens of the quantized model itself.

Of that model transformers is told the numbers that codes and scales stand for. ONNX Runtime's CPU provider stands in for the
accelerators. As a backend of its own it lets the drafter round the rows of a pass to int8, which changes no token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from exporter.weights import quantize
from graphs.ops import FP8, Scheme, dequantize
from runtime import GumihoError, Model, load
from runtime.bundle import Bundle
from runtime.engines import compile_engines
from runtime.golden import TOLERANCE
from tests.conftest import DEMO, MakeBundle
from tests.end_to_end import llama
from tests.end_to_end.test_forms import opened, stand_in, tokens
from tests.pairs import RandomPair

FORMS = ("migraphx", "tensorrt", "cuda")
BOTH = ("--weights", "int4", "--draft-weights", "int4")
OPTIONS = ("--backend", "cpu", *FORMS, "--dtype", "fp32", "--capacity", "200", *BOTH)
ODD = RandomPair(
    {
        "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "attention_bias": True, "mlp_bias": True, "vocab_size": 301,
    }, layers=3, heads=3, seed=11,
)  # fmt: skip
TRIMMED = ("--draft-vocab", "100")  # of ODD's tokens
BLOCK = 64
LENGTHS = ((1, 40), (7, 40), (8, 40), (9, 30), (65, 20), (129, 20), (190, 50))


def meant(target: Path, folder: Path, scheme: Scheme) -> Path:
    """A checkpoint of the target whose matrices are what theirs are rounded to, and whose lm_head is one of them."""
    folder.mkdir()
    state = {n: t.float() for n, t in load_file(target / "model.safetensors").items()}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"].clone())
    for name, tensor in state.items():
        if tensor.ndim == 2 and "embed_tokens" not in name and scheme.fits(tensor.shape[1]):
            state[name] = dequantize(*quantize(tensor, scheme, torch.float32))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = (target / "config.json").read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (folder / "config.json").write_text(config)
    return folder


def prompts(model: Model) -> list[tuple[list[int], int]]:
    draw = np.random.default_rng(0)
    vocabulary = model.bundle.manifest.vocabulary
    return [(draw.integers(2, vocabulary, length).tolist(), count) for length, count in LENGTHS]


@pytest.mark.parametrize("pair", [DEMO, ODD], ids=["demo", "odd"])
def test_forms_equal_the_quantized_model(make_bundle: MakeBundle, pair: Path | RandomPair, tmp_path: Path) -> None:
    bundle = make_bundle(pair, *OPTIONS, *(TRIMMED if pair is ODD else ()))
    folder = meant(bundle.parent / "pair/target", tmp_path / "meant", Scheme(BLOCK, torch.uint8))
    manifest = Bundle(bundle).manifest
    # Where heads are no multiple of 16 wide, the CPU's graphs are the standard ones.
    rounded = "int8" if pair is DEMO else "float32"
    for form, drafted in (("cpu", rounded), *((form, "float32") for form in FORMS)):
        graphs = manifest.forms[form].graphs
        assert (graphs["target"].precision, graphs["draft"].precision) == ("float32", drafted)
    assert manifest.weights == {"target": "int4, blocks of 64", "draft": "int4, blocks of 64"}
    ties = 0
    for form in ("cpu", *FORMS):
        with load(bundle, "cpu", threads=1) if form == "cpu" else opened(bundle, form, lazy=False) as model:
            for prompt, count in prompts(model):
                (wanted,) = llama.generate(folder, [prompt], min(count, 201 - len(prompt)))
                found = tokens(model, prompt, count)[0]
                ties += llama.assert_same(folder, prompt, found, wanted)
                assert tokens(model, prompt, count, speculate=False)[0] == found
    assert ties <= 1


@pytest.mark.parametrize("drafter", [("--draft-weights", "fp8"), ("--draft-weights", "int4")], ids=" ".join)
def test_fp8_equals_the_quantized_model(make_bundle: MakeBundle, tmp_path: Path, drafter: tuple[str, str]) -> None:
    """Rows of 80 numbers between, which are no whole blocks of int4, are quantized too."""
    pair = RandomPair({"vocab_size": 301, "attention_bias": True}, layers=3, heads=3, seed=12)
    options = ("--backend", "tensorrt", "--dtype", "fp32", "--capacity", "200", "--rows", "8", "--weights", "fp8", *drafter)
    bundle = make_bundle(pair, *options)
    assert Bundle(bundle).manifest.weights["target"] == "fp8, a scale a row"
    folder = meant(bundle.parent / "pair/target", tmp_path / "meant", Scheme(0, FP8))
    with opened(bundle, "tensorrt", lazy=True) as model:
        for prompt, count in prompts(model):
            (wanted,) = llama.generate(folder, [prompt], min(count, 201 - len(prompt)))
            found = tokens(model, prompt, count)[0]
            llama.assert_same(folder, prompt, found, wanted)
            assert tokens(model, prompt, count, speculate=False)[0] == found


@pytest.mark.parametrize("pair", [DEMO, ODD], ids=["demo", "odd"])
def test_a_quantized_drafter_changes_no_token(make_bundle: MakeBundle, pair: Path | RandomPair) -> None:
    plain, quantized = make_bundle(pair, "--capacity", "200"), make_bundle(pair, "--capacity", "200", *BOTH[2:])
    assert {g.precision for g in Bundle(plain).manifest.forms["cpu"].graphs.values()} == {"float32"}
    graphs = Bundle(quantized).manifest.forms["cpu"].graphs
    assert (graphs["target"].precision, graphs["draft"].precision) == ("float32", "int8" if pair is DEMO else "float32")
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
def test_wrong_codes_are_beyond_every_tolerance(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Also where rounded rows are put up with. The ``-signed`` files hold codes and nothing else."""
    bundle = make_bundle(DEMO, *OPTIONS)
    monkeypatch.setattr(Bundle, "verify", lambda self: None)
    monkeypatch.setitem(TOLERANCE, "float32", TOLERANCE["int8"])
    with (
        spoiled(bundle, f"{model}-signed.bin"),
        pytest.raises(GumihoError, match=f"{model} engine differs from the golden run"),
    ):
        compile_engines(Bundle(bundle), stand_in("tensorrt", lazy=False)("", 1), tune=True)
