"""Targets that are no Llama: configurations and windows as transformers has them, bundles that generate its text, GGUF
files."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from exporter import cli
from exporter.checkpoints.architectures import ARCHITECTURES
from exporter.checkpoints.checkpoint import Checkpoint
from exporter.checkpoints.gguf_file import GgufCheckpoint
from exporter.checkpoints.json_config import llama_fields
from exporter.checkpoints.llama import LlamaConfig, llama_config, llama_shape, transformers_class, transformers_config
from exporter.checkpoints.lone_target import LoneTarget
from exporter.options import config_of
from exporter.progress import Progress
from exporter.recipe.resolve import recipe_of
from exporter.training import cli as training
from exporter.training import start
from exporter.training.drafters.gumiho import Gumiho
from exporter.training.text import Slots
from exporter.writing.calibration import calibrated
from exporter.writing.validate import validate
from runtime import GumihoError, InputError, load
from runtime.cli.checks.lossless import differences
from tests import gguf_files
from tests.conftest import DEMO, EVERY_BACKEND
from tests.end_to_end import llama
from tests.pairs import RandomPair, drafter_config, write_drafter
from tests.test_target_only import ended, with_lookups

CAPACITY = 100
# Sizes that fit into blocks of codes, and heads that every dialect takes.
WIDE = {"vocab_size": 40, "hidden_size": 96, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 1}
TARGETS = {
    "mistral": RandomPair(WIDE | {"model_type": "mistral", "sliding_window": CAPACITY}, seed=5),
    "qwen2": RandomPair(WIDE | {"model_type": "qwen2"}, seed=6),
    "qwen3": RandomPair(WIDE | {"model_type": "qwen3", "attention_bias": True}, seed=7),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """The target's folder and its bundle, by architecture and options."""
    folder = tmp_path_factory.mktemp("architectures")

    @cache
    def make(kind: str, *options: str) -> tuple[Path, Path]:
        target, out = folder / kind, folder / "-".join(("out", kind, *options))
        if not target.exists():
            TARGETS[kind].make_target().save_pretrained(target)
        assert cli.main(["--target", str(target), "--out", str(out), "--capacity", str(CAPACITY), *options]) == 0
        return target, out

    return make


def planned(target: Path, *options: str) -> Any:
    return recipe_of(config_of(["--target", str(target), "--out", "nowhere", *options]))


# --- what they generate -----------------------------------------------------------------------------------------------


# the first as a Llama
@pytest.mark.parametrize("kind", [pytest.param("mistral", marks=pytest.mark.exhaustive), "qwen2", "qwen3"])
def test_greedy_text_is_that_of_transformers(bundles: Callable[..., tuple[Path, Path]], kind: str) -> None:
    target, bundle = bundles(kind)
    with load(bundle, threads=1) as model:
        with_lookups(model)
        for prompt in ([3], [5, 6, 7] * 8, list(range(2, 38))):
            expected = llama.generate(target, [prompt], 50)[0]
            for speculate in (True, False):
                llama.assert_same(target, prompt, ended(model.generate(prompt, 50, speculate)).ids, expected)


QUANTIZED = [
    ("qwen3", "w8a8"),
    *(
        pytest.param(kind, how, marks=pytest.mark.exhaustive)
        for kind, how in (
            ("qwen3", "int4"),
            ("qwen3", "int8"),
            ("qwen2", "int4"),
            ("qwen2", "int8"),
            ("qwen2", "w8a8"),
            ("mistral", "int4"),
        )
    ),
]


@pytest.mark.parametrize(("kind", "weights"), QUANTIZED)
def test_quantized_rows_are_the_same_in_any_pass(
    bundles: Callable[..., tuple[Path, Path]], kind: str, weights: str
) -> None:
    _, bundle = bundles(kind, "--weights", weights)
    with load(bundle, threads=1) as model:
        with_lookups(model)
        looked_up = 0
        for prompt in ([3], [5, 6, 7] * 8, [9] * 20):
            for asked in ({}, {"temperature": 0.8, "seed": 3}):
                found = ended(model.generate(prompt, 30, **asked))  # type: ignore[arg-type]
                assert found.ids == ended(model.generate(prompt, 30, speculate=False, **asked)).ids  # type: ignore[arg-type]
                assert differences(model, found) == []
                looked_up += found.stats.looked_up
        assert looked_up > 0


def test_smoothed_weights_are_validated(bundles: Callable[..., tuple[Path, Path]]) -> None:
    """With their own norms: those of the checkpoint belong to other matrices."""
    target, bundle = bundles("qwen3", "--weights", "w8a8")
    with Progress() as progress:
        made = calibrated(planned(target, "--weights", "w8a8", "--capacity", str(CAPACITY)), progress)
    assert made.factors
    errors = validate(made, bundle, "cpu")
    assert max(errors["target logits"], errors["target hidden"]) < 0.05


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_every_backend_takes_the_graphs(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a drafter of Llama layers; the backends' operator tables are checked while exporting."""
    target, drafter = TARGETS[kind].write(tmp_path)
    argv = ["--ckpt", str(drafter), "--target", str(target), "--out", str(tmp_path / "out"), *EVERY_BACKEND]
    assert cli.main([*argv, "--validate"]) == 0
    with load(tmp_path / "out", "cpu", threads=1) as model:
        for prompt in ([3], [5, 6, 7] * 8):
            found = ended(model.generate(prompt, 50))
            assert found.ids == ended(model.generate(prompt, 50, speculate=False)).ids
            llama.assert_same(target, prompt, found.ids, llama.generate(target, [prompt], 50)[0])


def test_a_drafters_layers_are_those_of_a_llama(tmp_path: Path) -> None:
    """Whatever its config.json calls it."""
    config = drafter_config(TARGETS["qwen3"].config(), 2) | {"model_type": "qwen3"}
    folder = write_drafter(tmp_path, {"fc.weight": torch.ones(1)}, config)
    found = llama_config(Checkpoint(str(folder), "drafter"))
    assert found.model_type == "llama"
    assert not llama_shape(found).qk_norm


# --- configurations ---------------------------------------------------------------------------------------------------


@st.composite
def raw_configs(draw: st.DrawFn) -> dict[str, Any]:
    heads = draw(st.sampled_from([8, 32]))
    raw = {
        "hidden_size": 4 * heads,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "vocab_size": 9,
    }
    layer = st.sampled_from(["full_attention", "sliding_attention"])
    optional: dict[str, st.SearchStrategy[Any]] = {
        "num_key_value_heads": st.sampled_from([1, heads, None]),
        "head_dim": st.sampled_from([2, 64]),
        "max_position_embeddings": st.integers(1, 1 << 31),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "rms_norm_eps": st.floats(1e-12, 0.1),
        "rope_theta": st.floats(1, 1e7),
        "sliding_window": st.sampled_from([4, 512, None]),
        "use_sliding_window": st.booleans(),
        "max_window_layers": st.integers(0, 5),
        "layer_types": st.lists(layer, min_size=3, max_size=3) | st.none(),
    }
    return raw | draw(st.fixed_dictionaries({}, optional=optional))


def window_of(model: Any) -> int | None:
    """The smallest window of transformers' layers, whose masks are made by these."""
    config = model.config
    kinds = [None] * config.num_hidden_layers if config.model_type == "mistral" else config.layer_types
    return config.sliding_window if {None, "sliding_attention"} & set(kinds) else None


@settings(max_examples=30)
@given(st.sampled_from([kind for kind in ARCHITECTURES if kind != "llama"]), raw_configs())
def test_a_configuration_is_transformers_own(kind: str, raw: dict[str, Any]) -> None:
    """Its fields, defaults included, and the parameters that a model of it has."""
    assume(kind != "mistral" or raw.get("num_key_value_heads", 1) is not None)  # transformers refuses it
    if (
        raw["num_attention_heads"] == 8 and "num_key_value_heads" not in raw and kind != "mistral"
    ):  # transformers' default is 32
        with pytest.raises(InputError, match="cannot share"):
            llama_fields(raw, "it", ARCHITECTURES[kind])
        return
    ours = LlamaConfig(**llama_fields(raw, "it", ARCHITECTURES[kind]), model_type=kind)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **raw))
        same = transformers_class(ours)(transformers_config(ours))
    shapes = {name: p.shape for name, p in theirs.named_parameters()}
    assert shapes == {name: p.shape for name, p in same.named_parameters()}
    assert ours.sliding_window == window_of(theirs)
    assert window_of(same) is None
    for name in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs.config, name), name
    assert ours.rope_parameters["rope_theta"] == theirs.config.rope_parameters["rope_theta"]
    shape, own = llama_shape(ours), "model.layers.0.self_attn"
    assert (shape.qkv_bias, shape.o_bias, shape.mlp_bias, shape.qk_norm) == (
        f"{own}.q_proj.bias" in shapes,
        f"{own}.o_proj.bias" in shapes,
        "model.layers.0.mlp.up_proj.bias" in shapes,
        f"{own}.q_norm.weight" in shapes,
    )
    assert shapes[f"{own}.q_proj.weight"][0] == shape.heads * shape.head_dim


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("sliding_window", "4096", "a whole number from 4"),
        ("sliding_window", 2, "a whole number from 4"),
        ("use_sliding_window", 1, "true or false"),
        ("max_window_layers", None, "a whole number from 0"),
        ("layer_types", ["linear_attention"], "a list of 'full_attention' and 'sliding_attention'"),
        ("layer_types", 7, "a list of"),
    ],
)
def test_fields_of_windows(key: str, value: Any, expected: str) -> None:
    raw = TARGETS["qwen2"].config().to_dict() | {
        "use_sliding_window": True,
        "max_window_layers": 0,
        "sliding_window": 64,
    }
    raw |= {"layer_types": None, key: value}
    with pytest.raises(InputError, match=f"as '{key}', expected {expected}"):
        llama_fields(raw, "it", ARCHITECTURES["qwen2"])


def test_yarn_is_refused_by_name() -> None:
    raw = TARGETS["qwen3"].config().to_dict() | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    with pytest.raises(InputError, match="rotary scaling 'yarn', expected plain, linear or llama3"):
        llama_fields(raw, "it", ARCHITECTURES["qwen3"])


# --- windows ----------------------------------------------------------------------------------------------------------

SLIDING = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0, "layer_types": None}


@pytest.mark.parametrize(
    ("kind", "fields", "window"),
    [
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", SLIDING, 64),
        ("qwen3", SLIDING | {"max_window_layers": 1}, None),
        ("qwen3", SLIDING | {"use_sliding_window": False}, None),
        ("qwen2", SLIDING | {"max_window_layers": 1, "layer_types": ["sliding_attention"]}, 64),
    ],
)
def test_no_capacity_is_beyond_a_window(tmp_path: Path, kind: str, fields: dict[str, Any], window: int | None) -> None:
    TARGETS[kind].make_target().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    assert planned(tmp_path).capacity == (window or 256)
    assert planned(tmp_path, "--capacity", "64").capacity == 64
    if window is None:
        assert planned(tmp_path, "--capacity", "65").capacity == 65
        return
    with pytest.raises(
        GumihoError, match=r"--capacity is 65, but .* a sliding window of 64 .*: give --capacity 64 or less$"
    ):
        planned(tmp_path, "--capacity", "65")


@torch.inference_mode()
def test_one_position_beyond_a_window_is_not_the_same() -> None:
    """What the rule is for: transformers' Mistral computes the same up to its window, and no further."""
    windowed = RandomPair(WIDE | {"model_type": "mistral", "sliding_window": 20}, seed=5).make_target()
    full = RandomPair(WIDE | {"model_type": "mistral", "sliding_window": None}, seed=5).make_target()
    ids = torch.arange(25)[None]
    apart = (windowed(ids).logits - full(ids).logits)[0].abs().amax(-1)
    assert apart[:20].max() < 1e-4 < apart[20:].min()


# --- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TARGETS)
def test_a_gguf_file_is_the_folder_it_was_made_from(kind: str, tmp_path: Path) -> None:
    model = TARGETS[kind].make_target()
    model.save_pretrained(tmp_path / "folder")
    letters = [chr(ord("a") + i) for i in range(26)] + [f"a{chr(ord('a') + i)}" for i in range(14)]
    tokens = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.merges": ["a a", "a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    written = {"llama.attention.sliding_window": CAPACITY} if kind == "mistral" else tokens
    file = gguf_files.write(model, tmp_path / "m.gguf", fields=written)
    targets = [LoneTarget(Checkpoint(str(tmp_path / "folder"), "target")), LoneTarget(GgufCheckpoint(str(file), file))]
    for name in ("model_type", "sliding_window", "max_position_embeddings", "attention_bias", "tie_word_embeddings"):
        assert getattr(targets[0].target_config, name) == getattr(targets[1].target_config, name), name
    sources = [target.target_sources(50) for target in targets]
    assert sources[0].keys() == sources[1].keys()
    for name, source in sources[0].items():
        assert torch.equal(source.whole(), sources[1][name].whole()), name
    for mine, theirs in zip(*(vars(target.target_shape).values() for target in targets), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TARGETS)
@torch.inference_mode()
def test_a_drafters_first_layer_reads_as_the_targets_own_does(kind: str) -> None:
    """Queries and keys of what the target's layer reads, from the features that the drafter's reads. The norms of a
    Qwen3's heads become one factor for each head, which is right at the median."""
    model = TARGETS[kind].make_target()
    drafter = Gumiho(start.config(model, 1), 1)
    record = torch.arange(2, 39).numpy().astype("uint32")
    start.last_layers(drafter.serial, model, record)
    own, stream = model.model.layers[0], model.model.embed_tokens(torch.arange(2, 39))[None]
    # Of the same size at all positions, as the linear prediction of ``fc`` has them.
    features = stream / stream.square().mean(-1, keepdim=True).sqrt() * model.model.norm.weight
    rotary = drafter.rotary(torch.zeros(1, 37, dtype=torch.int64))
    *found, value = drafter.serial[0].project(features, rotary)
    normed, attention = own.input_layernorm(stream), own.self_attn
    heads = (linear(normed).unflatten(-1, (-1, 16)) for linear in (attention.q_proj, attention.k_proj))
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    for mine, theirs, norm in zip(found, heads, norms, strict=True):
        expected = (norm(theirs) if norm else theirs).transpose(1, 2)
        apart = (mine * expected).sum(-1) / expected.square().sum(-1)
        assert (mine - apart[..., None] * expected).abs().max() < 1e-3 * expected.abs().max()
        if norm:
            assert (apart.median(-1).values - 1).abs().max() < 1e-3
        else:
            assert (apart - 1).abs().max() < 1e-3
    torch.testing.assert_close(
        value, attention.v_proj(normed).unflatten(-1, (-1, 16)).transpose(1, 2), rtol=1e-3, atol=1e-3
    )
    bias = drafter.serial[0].self_attn.o_proj.bias
    if kind == "qwen2":
        assert not bias.any()


@pytest.mark.parametrize("kind", TARGETS)
def test_slots_compute_the_logits_of_transformers(kind: str) -> None:
    model = TARGETS[kind].make_target()
    expected = model(torch.arange(2, 22)[None]).logits[0]
    model.config._attn_implementation = "gumiho_slots"
    slots = Slots(model, [(1, 64)])
    found = torch.cat([slots.step(torch.tensor([2 + i]), torch.tensor([i])) for i in range(20)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", TARGETS)
def test_what_training_makes_exports_and_is_lossless(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, out = tmp_path / "target", tmp_path / "drafter"
    # transformers adds an end of text for Qwen.
    fields = TARGETS[kind].target | {"vocab_size": 2056, "num_hidden_layers": 2}
    RandomPair(fields, seed=3).make_target().save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / "target" / name, target / name)
    arguments = [
        "--target",
        str(target),
        "--out",
        str(out),
        "--data",
        __file__,
        "--tokens",
        "2000",
        "--steps",
        "2",
        "--window",
        "96",
        "--batch",
        "192",
        "--anchors",
        "64",
        "--threads",
        "1",
        "--dtype",
        "fp32",
        "--heads",
        "1",
    ]
    assert training.main(arguments) == 0
    bundle = tmp_path / "bundle"
    argv = ["--ckpt", str(out), "--target", str(target), "--out", str(bundle), "--capacity", str(CAPACITY)]
    assert cli.main([*argv, "--validate"]) == 0
    with load(bundle, "cpu", threads=1) as model:
        found = ended(model.generate([5, 6, 7], 40))
        llama.assert_same(target, [5, 6, 7], found.ids, llama.generate(target, [[5, 6, 7]], 40)[0])
    if kind == "mistral":
        assert training.main([*arguments, "--window", "101"]) == 1
        assert "--window is 101: give at most 100, the positions that target" in capsys.readouterr().err
