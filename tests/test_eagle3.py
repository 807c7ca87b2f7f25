"""EAGLE-3: its layouts, its graphs against an independent implementation, and what its checkpoints may leave unsaid."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from exporter.checkpoints.llama import rotary_tables
from exporter.checkpoints.pair import Pair
from exporter.cli import main
from exporter.options import config_of
from exporter.recipe.resolve import recipe_of
from exporter.recipe.sources import open_pair
from exporter.tracing.signature import caches
from graphs.dialects.contrib import Contrib
from graphs.dialects.plain import Plain
from graphs.dialects.rounded import Rounded
from graphs.dialects.standard import Standard
from graphs.tree import TreeConfig
from runtime import load
from tests.eagle3 import LAYOUTS, RandomEagle3
from tests.end_to_end import llama
from tests.pairs import RandomPair
from tests.test_drafter import cycles, eager, onnx, tree_of
from tests.test_streams import assert_as_plain

QWEN3 = {"model_type": "qwen3", "head_dim": 16, "num_hidden_layers": 4}
PLAIN = RandomEagle3(RandomPair(scale=1.0))
MADE = {
    "plain": PLAIN,
    "whole vocabulary": replace(PLAIN, drafted=None),
    "the target's lm_head": replace(PLAIN, drafted=None, own_head=False),
    "qwen3": RandomEagle3(RandomPair(QWEN3, seed=3), taps=(1, 2, 3), embedding=False, qk_norm=True),
    "biases": replace(PLAIN, bias=True, fc_bias=True),
    "normed": replace(PLAIN, normed=True),
    "narrow": replace(PLAIN, hidden=36, pair=RandomPair({"head_dim": 16}, scale=1.0)),
    "two taps": replace(PLAIN, taps=(2, 1)),
    "two layers": replace(PLAIN, layers=2),
    "in another order": replace(PLAIN, drafted=1009),
}


def eagle_3(rows: int, beam: int, serial: int = 8) -> TreeConfig:
    return tree_of(rows, serial=serial, heads=0, top_k=10, beam=beam, wide=True)


def opened(argv: list[str], *more: str) -> Pair:
    return open_pair(config_of([*argv, *more]))


@pytest.mark.parametrize(
    "tree",
    [
        eagle_3(8, beam=2, serial=5),
        pytest.param(eagle_3(60, beam=10), marks=pytest.mark.exhaustive),
        eagle_3(9, beam=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", MADE)
def test_eager_tree_is_the_naive_one(name: str, tree: TreeConfig, tmp_path: Path) -> None:
    made = MADE[name]
    pair = opened(made.write(tmp_path))
    assert pair.family == "eagle3"
    assert pair.returns.taps == made.taps
    assert pair.features == len(made.taps) * 48
    cycles(eager(pair, tree), made.naive(), tree, pair.features, 1009, seed=tree.rows)


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("qwen3", Contrib),
        ("qwen3", Standard),
        ("qwen3", Rounded),
        ("normed", Contrib),
        *(pytest.param("normed", dialect, marks=pytest.mark.exhaustive) for dialect in (Standard, Rounded)),
    ],
)
def test_exported_tree_is_the_naive_one(name: str, dialect: type[Plain], tmp_path: Path) -> None:
    made, tree = MADE[name], eagle_3(16, beam=3, serial=3)
    if dialect is Contrib and "head_dim" not in made.pair.target:
        made = replace(made, pair=replace(made.pair, target={**made.pair.target, "head_dim": 16}))
    pair = opened(made.write(tmp_path))
    (tmp_path / "graphs").mkdir()
    cycles(onnx(pair, tree, dialect, tmp_path / "graphs"), made.naive(), tree, pair.features, 1009, seed=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, tmp_path: Path) -> None:
    """All of them are the same drafter."""
    pair, tree = opened(PLAIN.write(tmp_path, layout)), eagle_3(16, beam=3, serial=4)
    cycles(eager(pair, tree), PLAIN.naive(), tree, pair.features, 1009, seed=2)


@pytest.mark.parametrize("layers", [2, 5])
@torch.inference_mode()
def test_taps_are_what_enters_the_layers(layers: int, tmp_path: Path) -> None:
    """As transformers gives it, in an eager pass. Of the last one that is not its ``hidden_states``, which are
    normed."""
    made = replace(PLAIN, pair=RandomPair({"num_hidden_layers": layers}), taps=(layers, 0, layers - 1))
    pair = opened(made.write(tmp_path))
    model, kept = AutoModelForCausalLM.from_pretrained(tmp_path / "target"), list[Any]()
    model.model.norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    ids = torch.randint(0, 1009, (9,))
    states = model.model(ids[None], output_hidden_states=True).hidden_states
    target = pair.modules(tree_of(8), 16, 16)["target"]
    target.load_state_dict({name: source.whole() for name, source in pair.target_sources(16).items()}, assign=True)
    shape = pair.target_shape
    empty = caches(layers, shape.kv_heads, 16, shape.head_dim, torch.float32)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    hidden = target(ids, torch.arange(9), mask, None, torch.tensor([0]), empty)[2]
    torch.testing.assert_close(
        hidden, torch.cat((kept[0], states[0], states[layers - 1]), dim=-1)[0], rtol=1e-4, atol=1e-4
    )


@torch.inference_mode()
def test_taps_that_exceed_fp16(tmp_path: Path) -> None:
    """In bf16 a few numbers of real models are very large: they must stay finite in the fp16 of the caches."""
    pair = opened(PLAIN.write(tmp_path))
    target = pair.modules(tree_of(8), 16, 16)["target"]
    state = {name: source.whole() for name, source in pair.target_sources(16).items()}
    state["embed_tokens.weight"] = state["embed_tokens.weight"].clone()
    state["embed_tokens.weight"][3, :2] = torch.tensor([1e5, -1e5])
    target.load_state_dict(
        {n: t.bfloat16() if not n.startswith("rotary.") else t for n, t in state.items()}, assign=True
    )
    empty = caches(2, pair.target_shape.kv_heads, 16, pair.target_shape.head_dim, torch.float16)
    hidden = target(
        torch.tensor([3]), torch.tensor([0]), torch.ones(1, 1, dtype=torch.bool), None, torch.tensor([0]), empty
    )[2]
    assert hidden.dtype == torch.float16
    assert hidden[0, :2].tolist() == [65504, -65504]
    assert hidden.isfinite().all()


@pytest.mark.parametrize(
    ("said", "options", "taps"),
    [
        ([1, 2, 3], (), (1, 2, 3)),
        ([1, 2, 3], ("--taps", "output"), (2, 3, 4)),
        ([1, 2, 3], ("--taps", "0", "5", "6"), (0, 5, 6)),
        (None, (), (2, 3, 4)),  # the official code's, of seven layers
    ],
)
def test_which_taps(said: list[int] | None, options: tuple[str, ...], taps: tuple[int, ...], tmp_path: Path) -> None:
    made = replace(PLAIN, pair=RandomPair({"num_hidden_layers": 7}))
    argv = made.write(tmp_path)
    changed(tmp_path, eagle_config={} if said is None else {"eagle_aux_hidden_state_layer_ids": said})
    assert opened(argv, *options).returns.taps == taps


def changed(folder: Path, **fields: Any) -> None:
    file = folder / "drafter" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_what_is_asked_for_overrides_what_is_said(tmp_path: Path) -> None:
    argv = replace(PLAIN, normed=True).write(tmp_path)
    assert opened(argv).reader.normed  # type: ignore[attr-defined]
    assert not opened(argv, "--norm-before-residual", "no").reader.normed  # type: ignore[attr-defined]
    theirs, asked = opened(argv), opened(argv, "--draft-rope-theta", "500000")
    assert asked.draft_config.rope_parameters["rope_theta"] == 500000
    assert not torch.equal(rotary_tables(theirs.draft_config, 9)[0], rotary_tables(asked.draft_config, 9)[0])
    assert asked.target_config == theirs.target_config
    plans = (recipe_of(config_of([*argv, *more])) for more in ((), ("--draft-rope-theta", "500000")))
    # an interrupted export goes on with what the same options packed
    assert len({made.fingerprint() for made in plans}) == 2


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        (
            {"eagle_config": {}},
            (),
            "does not say what it reads, and the official code's taps are 2, 1, -1, but its fc reads 3 rows",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
            (),
            "reads layers 1, 2, but its fc reads 3 rows of a target of 2 layers",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, "2"]}},
            (),
            "expected a list of layers: give --taps",
        ),
        ({}, ("--taps", "0", "1"), "--taps are 0, 1, but its fc reads 3 rows"),
        ({}, ("--taps", "0", "1", "3"), "give --taps with 3 numbers from 0 to 2"),
        ({}, ("--taps", "0", "1", "-2"), "--taps is 0 1 -2: give numbers of layers, from 0, or the word output"),
        ({}, ("--draft-rope-theta", "0"), "--draft-rope-theta is 0: give 1 to 1e12"),
        ({}, ("--draft-vocab", "20"), "has an lm_head of its own, for 200 tokens: leave --draft-vocab out"),
        ({}, ("--backend", "vllm"), "is of the family eagle3, which vLLM runs as it is"),
        ({}, ("--heads", "1"), "has 0: give at most that many"),
        ({"norm_output": True}, (), "has norm_output, which is not supported"),
        ({"norm_before_residual": "yes"}, (), "has norm_before_residual 'yes', expected true or false"),
        ({"vocab_size": 1000}, (), "its vocab_size is 1000, expected 1009"),
    ],
)
def test_what_is_refused(
    fields: dict[str, Any], options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = PLAIN.write(tmp_path)
    changed(tmp_path, **fields)
    assert main([*argv, "--out", str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": torch.zeros(48, 100)}, "its fc reads [100] numbers, not rows of the target of 48 each"),
        ({"fc.weight": None}, "lacks the tensor 'fc.weight'"),
        ({"lm_head.weight": None}, "lacks the tensor 'lm_head.weight'"),
        ({"norm.weight": None}, "lacks the tensor 'norm.weight'"),
        (
            {"midlayer.self_attn.q_proj.weight": torch.tensor(1.0)},
            "tensor 'layers.0.self_attn.q_proj.weight' has shape []",
        ),
        ({"d2t": None}, "its lm_head's number of rows without a d2t is 200, expected 1009"),
        ({"d2t": torch.zeros(200)}, "its d2t is torch.float32 of shape [200], expected integers"),
        ({"d2t": torch.full((200,), 900)}, "its d2t has a token twice, or one outside the vocabulary of 1009"),
        (
            {"d2t": torch.zeros(150, dtype=torch.int64), "lm_head.weight": torch.zeros(1009, 48)},
            "its d2t has 150 tokens and its lm_head 1009 rows",
        ),
        ({"d2t": torch.zeros(150, dtype=torch.int64)}, "its d2t has 150 tokens and its lm_head 200 rows"),
        ({"mask_hidden": torch.zeros(48)}, "has the tensor 'mask_hidden'"),
        ({"input_norm.weight": torch.zeros(144)}, "has the tensor 'input_norm.weight'"),
    ],
)
def test_tensors_that_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = PLAIN.write(tmp_path)
    file = tmp_path / "drafter" / "pytorch_model.bin"
    state = torch.load(file) | change
    torch.save({name: tensor for name, tensor in state.items() if tensor is not None}, file)
    assert main([*argv, "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [("--taps", "1"), ("--norm-before-residual", "no")])
def test_options_that_are_for_eagle_3_alone(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RandomPair({"vocab_size": 61}).write(tmp_path)
    argv = ["--ckpt", str(tmp_path / "drafter"), "--target", str(tmp_path / "target"), "--dry-run", *options]
    assert main(argv) == 1
    assert "--taps and --norm-before-residual are for an EAGLE-3" in capsys.readouterr().err


def test_norm_before_residual_is_asked_for_where_readers_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = PLAIN.write(tmp_path, "speculators")
    file = tmp_path / "drafter" / "config.json"
    config = json.loads(file.read_text())
    del config["norm_before_residual"]
    file.write_text(json.dumps(config))
    assert main([*argv, "--dry-run"]) == 1
    assert "give --norm-before-residual yes or no" in capsys.readouterr().err
    assert main([*argv, "--dry-run", "--norm-before-residual", "no"]) == 0
    assert "an EAGLE-3 that reads what enters layers 0, 1, 2" in capsys.readouterr().out


def test_trees_and_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The paper's depth 8 and 60 rows, of ten tokens a node and ten nodes a level."""
    argv = replace(PLAIN, pair=RandomPair({"num_hidden_layers": 9})).write(tmp_path)
    made = recipe_of(config_of([*argv, "--rows", "60", "--draft-tree", "reference", "--dry-run"]))
    assert made.tree == TreeConfig(60, 8, 0, 10, 35, 10, wide=True)
    assert main([*argv, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "Draft tree: 8 rows, depth 5, beam 1, top-k 10." in said
    assert "Drafted: 200 of 1009 tokens, the drafter's d2t with an lm_head of its own." in said


def exported(folder: Path, made: RandomEagle3, weights: str) -> Path:
    options = [
        "--weights",
        weights,
        "--rows",
        "8",
        "--beam",
        "2",
        "--capacity",
        "200",
        "--validate",
        "--out",
        str(folder / "out"),
    ]
    assert main([*made.write(folder, "speculators"), *options]) == 0
    return folder / "out"


def test_greedy_texts_are_transformers(tmp_path: Path) -> None:
    """Of a target of more layers than are traced."""
    target = {"num_hidden_layers": 4, "hidden_size": 96, "intermediate_size": 128, "head_dim": 16}
    bundle = exported(tmp_path, RandomEagle3(RandomPair(target, seed=8), taps=(0, 2, 4), hidden=192), "none")
    with load(bundle) as model:
        assert model.bundle.manifest.hidden == 3 * 96
        for length in (1, 3, 130):
            prompt = [(5 * i * i + length) % 1000 + 2 for i in range(length)]
            generation = model.generate(prompt, 20, rows=8, lookup=False)
            list(generation.cycles())
            llama.assert_same(
                tmp_path / "target", prompt, generation.ids, llama.generate(tmp_path / "target", [prompt], 20)[0]
            )


@pytest.mark.exhaustive
def test_the_output_is_that_of_plain_decoding(tmp_path: Path) -> None:
    """To the last bit, in sampling, and beside another stream, whose passes it shares."""
    target = {**QWEN3, "hidden_size": 96, "intermediate_size": 128}
    made = RandomEagle3(RandomPair(target, seed=9), taps=(3,), embedding=False, qk_norm=True)
    bundle = exported(tmp_path, made, "int8")
    prompts = [[(7 * i * i + length) % 1000 + 2 for i in range(length)] for length in (1, 130, 40)]
    with load(bundle, streams=2) as model:
        assert model.bundle.manifest.hidden == 96
        assert_as_plain(model, prompts, 8)
