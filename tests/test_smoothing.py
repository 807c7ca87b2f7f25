"""exporter.writing.smoothing: scales move from the inputs of matrices to their columns; the model stays, and rounded
rows are nearer to it."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from exporter.checkpoints.checkpoint import Checkpoint
from exporter.checkpoints.lone_target import LoneTarget
from exporter.options import config_of
from exporter.progress import Progress
from exporter.recipe.recipe import Recipe
from exporter.recipe.resolve import recipe_of
from exporter.weights.packer import Packer
from exporter.weights.quantize import quantize
from exporter.weights.scaled import Factors, scaled
from exporter.weights.source import Source, Stored
from exporter.writing.calibration import calibrated, observe
from exporter.writing.smoothing import smoothing
from graphs.dialects.quantization import Scheme, dequantize
from tests import peak
from tests.pairs import RandomPair
from tests.rounding import Rounding

WHOLE = Scheme(0, torch.int8, 8)
GROUPED = {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "hidden_size": 42,
    "intermediate_size": 70,
    "vocab_size": 301,
}
BIASED = {
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "hidden_size": 48,
    "intermediate_size": 33,
    "vocab_size": 97,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
}
TARGETS = {
    "grouped": RandomPair(GROUPED, seed=1),
    "biased, tied": RandomPair(BIASED, seed=2),
    "a key for every head": RandomPair({"num_key_value_heads": 6, "vocab_size": 301}, seed=3),
    "qwen2": RandomPair({"model_type": "qwen2", "vocab_size": 301, "num_key_value_heads": 2}, seed=4),
    "qwen3": RandomPair({"model_type": "qwen3", "vocab_size": 301, "head_dim": 12, "num_key_value_heads": 2}, seed=5),
}


def planned(folder: Path, *options: str) -> Recipe:
    """A recipe whose text has been read."""
    target = ["--target", str(folder / "target"), "--capacity", "100", "--weights", "w8a8"]
    with Progress() as progress:
        return calibrated(recipe_of(config_of([*target, *options])), progress)


def values(made: Recipe) -> dict[str, Tensor]:
    """The target's parameters before they are quantized, by transformers' names."""
    sources = replace(made, quantized={}).sources()["weights/target.bin"]
    names = {name: name if name == "lm_head.weight" else f"model.{name}" for name in sources if "rotary" not in name}
    return {names[name]: sources[name].whole() for name in names}


def holding(pair: RandomPair, state: dict[str, Tensor]) -> Any:
    """transformers' model with these parameters; lm_head is one of its own."""
    model = RandomPair({**pair.target, "tie_word_embeddings": False}, seed=pair.seed).make_target()
    model.load_state_dict(state)
    return model


def ids(vocabulary: int, seed: int = 7) -> Tensor:
    return torch.randint(0, vocabulary, (1, 60), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", TARGETS)
@torch.inference_mode()
def test_the_model_is_the_same(kind: str, tmp_path: Path) -> None:
    pair = TARGETS[kind]
    model = pair.make_target()
    model.save_pretrained(tmp_path / "target")
    state = values(planned(tmp_path))
    before = model.state_dict()
    moved = {name for name, value in state.items() if not torch.equal(value, before[name])}
    kept = (
        "q_proj.bias",
        "k_proj.bias",
        "o_proj.bias",
        "gate_proj.bias",
        "down_proj.bias",
        "q_norm.weight",
        "k_norm.weight",
    )
    assert moved == {name for name in state if not name.endswith((*kept, "embed_tokens.weight"))}
    tokens = ids(model.config.vocab_size)
    wanted, found = model(tokens).logits, holding(pair, state)(tokens).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@torch.inference_mode()
def test_scales_against_loops(tmp_path: Path) -> None:
    pair = TARGETS["grouped"]
    pair.make_target().save_pretrained(tmp_path / "target")
    state = load_file(tmp_path / "target/model.safetensors")
    seen = observe(LoneTarget(Checkpoint(str(tmp_path / "target"), "target")), ids(301)[0].tolist(), columns=True)
    made = smoothing(pair_shape(tmp_path), seen.moments, seen.columns)

    def ratio(reader: str, columns: list[int], weights: list[str]) -> float:
        """Of inputs and weights, as mean squares over these columns."""
        x = sum(float(seen.moments[f"{reader}.weight"][k]) for k in columns) / len(columns)
        w = sum(float(state[f"model.{name}.weight"][:, k].double().square().sum()) for name in weights for k in columns)
        return x / (w / len(columns))

    qkv = [f"layers.1.self_attn.{name}_proj" for name in "qkv"]
    raw = [ratio(qkv[0], [k], qkv) ** 0.25 for k in range(42)]
    scales = around_one(raw)
    for reader in qkv:
        torch.testing.assert_close(made[f"{reader}.weight"].columns, scales, rtol=1e-4, atol=0)
    torch.testing.assert_close(made["layers.1.input_layernorm.weight"].rows, 1 / scales, rtol=1e-4, atol=0)
    # Heads 0 to 2 of the six read the values of head 0 of the two, 3 to 5 those of head 1.
    output = "layers.1.self_attn.o_proj"
    raw = [ratio(output, [(h + i) * 20 + d for i in range(3)], [output]) ** 0.25 for h in (0, 3) for d in range(20)]
    scales = around_one(raw)
    torch.testing.assert_close(made["layers.1.self_attn.v_proj.weight"].rows, 1 / scales, rtol=1e-4, atol=0)
    by_head = made[f"{output}.weight"].columns
    assert by_head is not None
    for head in range(6):
        own = scales[head // 3 * 20 :][:20]
        torch.testing.assert_close(by_head[head * 20 :][:20], own, rtol=1e-4, atol=0)


def around_one(raw: list[float]) -> Tensor:
    """Divided by their geometric mean, and none below a half."""
    mean = prod(raw) ** (1 / len(raw))
    return torch.tensor([max(0.5, one / mean) for one in raw])


def pair_shape(folder: Path) -> Any:
    return LoneTarget(Checkpoint(str(folder / "target"), "target")).target_shape


def test_columns_that_are_not_used_keep_their_numbers() -> None:
    """Of a norm whose weight is 0 somewhere, or of no calibration at all that reached them."""
    from exporter.writing.smoothing import _scales

    inputs, columns = torch.tensor([16.0, 0.0, 1.0, 1.0, torch.inf]), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    assert _scales(inputs, columns).tolist() == pytest.approx([2**0.5, 1, 1, 0.5**0.5, 1])
    assert _scales(torch.zeros(3), torch.ones(3)).tolist() == [1, 1, 1]
    # A column that the text nearly lacks is not made more than twice as large, one that it is full of as small as may
    # be.
    assert _scales(torch.tensor([1e-12, 1e12]), torch.ones(2)).tolist() == pytest.approx([0.5, 1e3])


def rounded(model: Any) -> Any:
    """The model with its matrices and rows in 8 bits."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.__class__, module.block = Rounding, module.in_features
            module.weight.data = dequantize(*quantize(module.weight.data, WHOLE, torch.float32))
    return model


def with_outliers(pair: RandomPair) -> Any:
    """A target some of whose inputs are 50 times as large as the others, which its matrices make up for."""
    model = pair.make_target()
    with torch.no_grad():
        for layer in model.model.layers:
            for norm, readers in (
                (layer.input_layernorm, [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]),
                (layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj]),
            ):
                norm.weight[3::11] *= 50
                for reader in readers:
                    reader.weight[:, 3::11] /= 50
            layer.mlp.up_proj.weight[5::13] *= 50
            layer.mlp.down_proj.weight[:, 5::13] /= 50
            layer.self_attn.v_proj.weight[4::17] *= 50
    return model


@torch.inference_mode()
def test_outliers_cost_less(tmp_path: Path) -> None:
    pair = TARGETS["grouped"]
    with_outliers(pair).save_pretrained(tmp_path / "target")
    tokens, made = ids(301), planned(tmp_path)
    wanted = with_outliers(pair)(tokens).logits
    errors = [
        float(
            (rounded(holding(pair, state))(tokens).logits - wanted).square().mean().sqrt()
            / wanted.square().mean().sqrt()
        )
        for state in (values(made), values(replace(made, factors={})))
    ]
    assert errors[0] < 0.25 * errors[1]
    assert errors[0] < 0.05


def test_a_drafter_keeps_its_inputs_and_its_numbers(tmp_path: Path) -> None:
    """The final norm, whose rows it reads, and what it shares with the target: the embedding and lm_head."""
    TARGETS["biased, tied"].write(tmp_path)
    made = planned(tmp_path, "--ckpt", str(tmp_path / "drafter"), "--draft-weights", "none")
    plain = replace(made, factors={})
    state, before = values(made), values(plain)
    for name in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(state[name], before[name])
    assert not torch.equal(
        state["model.layers.0.input_layernorm.weight"], before["model.layers.0.input_layernorm.weight"]
    )
    drafts = [one.sources()["weights/draft.bin"] for one in (made, plain)]
    for name, source in drafts[0].items():
        assert torch.equal(source.whole(), drafts[1][name].whole())


def test_which_targets_are_smoothed(tmp_path: Path) -> None:
    TARGETS["grouped"].make_target().save_pretrained(tmp_path / "target")
    cuda = "--backend", "cpu", "cuda", "--dtype", "fp32"
    for how in ("w8a8", "int8"):
        assert planned(tmp_path, "--weights", how).factors
    for how, more in (("int8", cuda), ("int4", ()), ("none", ())):
        assert not planned(tmp_path, "--weights", how, *more).factors


def test_a_scaled_norm_is_not_the_checkpoints(tmp_path: Path) -> None:
    """With --link-weights: the embedding is linked, and what has factors is packed."""
    TARGETS["grouped"].make_target().save_pretrained(tmp_path / "target")
    made = planned(tmp_path, "--link-weights")
    places = Packer(tmp_path / "out", made.dtype, lambda _: None).pack(
        "weights/target.bin", made.sources()["weights/target.bin"]
    )
    assert places["embed_tokens.weight"].file == "weights/target/model.safetensors"
    packed = places["layers.0.input_layernorm.weight"]
    assert packed.file == "weights/target.bin"
    assert torch.equal(packed.mapped(tmp_path / "out"), values(made)["model.layers.0.input_layernorm.weight"])


def test_scaled_sources_against_products() -> None:
    draw = torch.Generator().manual_seed(0)
    matrix, vector = torch.randn(7, 5, generator=draw).half(), torch.randn(7, generator=draw)
    rows, columns = torch.rand(7, generator=draw) + 0.5, torch.rand(5, generator=draw) + 0.5
    stored = Stored(Path("file"), 0, torch.float16)
    sources = {
        "m": Source((7, 5), lambda: iter(matrix.split(3)), stored=stored),
        "v": Source((7,), lambda: iter(vector.split(3)), stored=stored),
        "other": Source((7,), lambda: iter([vector]), stored=stored),
    }
    made = scaled(sources, {"m": Factors(rows, columns), "v": Factors(rows), "missing": Factors(rows)})
    assert list(made) == list(sources)
    assert made["other"] is sources["other"]
    assert made["m"].stored is made["v"].stored is None
    torch.testing.assert_close(made["m"].whole(), torch.diag(rows) @ matrix.float() @ torch.diag(columns))
    assert torch.equal(made["v"].whole(), vector * rows)
    only = scaled(sources, {"m": Factors(columns=columns)})["m"].whole()
    assert torch.equal(only, matrix.float() * columns)


@pytest.mark.exhaustive
def test_smoothing_takes_a_slice_of_memory(tmp_path: Path) -> None:
    """Of matrices of 67 MB each in fp32: for what is observed, and for the scaled numbers."""
    code = """
from pathlib import Path
from exporter.writing.calibration import observe
from exporter.checkpoints import checkpoint
from exporter.checkpoints.checkpoint import Checkpoint
from exporter.checkpoints.lone_target import LoneTarget
from exporter.writing.smoothing import smoothing
from exporter.weights.scaled import scaled
checkpoint._SLICE_ELEMENTS = 1 << 20
target = LoneTarget(Checkpoint(sys.argv[1], "target"))
before = peak()
seen = observe(target, [1, 2, 3, 4], columns=True)
factors = smoothing(target.target_shape, seen.moments, seen.columns)
sources = scaled(target.target_sources(1), factors)
read = sum(part.numel() for name in factors if name in sources for part in sources[name].slices())
print(read, peak() - before)
"""
    hidden, between, vocabulary = 512, 1 << 15, 8
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": between,
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": vocabulary,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    mlp, attention = "model.layers.0.mlp.{}_proj.weight", "model.layers.0.self_attn.{}_proj.weight"
    shapes = {
        "model.embed_tokens.weight": [vocabulary, hidden],
        "lm_head.weight": [vocabulary, hidden],
        "model.norm.weight": [hidden],
        "model.layers.0.input_layernorm.weight": [hidden],
        "model.layers.0.post_attention_layernorm.weight": [hidden],
        **{mlp.format(name): [between, hidden] for name in ("gate", "up")},
        mlp.format("down"): [hidden, between],
        **{attention.format(name): [64 * heads, hidden] for name, heads in (("q", 8), ("k", 2), ("v", 2), ("o", 8))},
    }
    header, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end := end + 2 * prod(shape)]}
    with (tmp_path / "model.safetensors").open("wb") as file:
        written = json.dumps(header).encode()
        file.write(len(written).to_bytes(8, "little") + written)
        file.truncate(8 + len(written) + end)  # zeros that take no place on the disk
    read, grown = map(int, peak.printed(code, tmp_path).split())
    assert read == sum(map(prod, shapes.values())) - vocabulary * hidden
    assert grown < 40 << 10  # KiB
