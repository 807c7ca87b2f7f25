"""A grown pair computes what the old one does: transformers' Llama, the naive drafter, and whole generations."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import runtime
from exporter.checkpoints.checkpoint import Checkpoint
from exporter.checkpoints.llama import llama_config, transformers_config
from exporter.checkpoints.pair import Pair
from graphs.layer import LlamaShape
from tests.conftest import DEMO, MakeBundle
from tests.naive import NaiveDrafter
from tests.pairs import RandomPair
from tools import grow_pair

# Epsilons that matter, so that one which is not rescaled shows.
BASE = {"vocab_size": 101, "max_position_embeddings": 64, "rms_norm_eps": 0.03}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
WIDER = ["--hidden", "72"]
SHAPES = {
    "nothing": ({}, []),
    "hidden": ({"attention_bias": True, "mlp_bias": True}, ["--hidden", "66"]),
    "intermediate": ({"mlp_bias": True}, ["--intermediate", "91"]),
    "layers": ({"attention_bias": True, "mlp_bias": True}, ["--layers", "5"]),
    "vocabulary": ({}, ["--vocabulary", "150"]),
    "tied": ({"tie_word_embeddings": True}, ["--vocabulary", "113", "--hidden", "54"]),
    "heads twice as long": ({"attention_bias": True, "rope_parameters": LLAMA3}, ["--head-dim", "16"]),
    "heads three times as long": ({}, ["--head-dim", "24"]),
    "heads four times as long": ({"rope_parameters": LINEAR}, ["--head-dim", "32"]),
    "more groups": ({"attention_bias": True}, [*WIDER, "--heads", "8", "--kv-heads", "4"]),
    "larger groups": ({"attention_bias": True}, [*WIDER, "--heads", "12"]),
    "smaller groups": ({"attention_bias": True}, [*WIDER, "--kv-heads", "6"]),
    "groups in uneven parts": (
        {"num_key_value_heads": 2, "attention_bias": True},
        [*WIDER, "--heads", "8", "--kv-heads", "4"],
    ),
    "one group in parts": ({"num_key_value_heads": 1}, [*WIDER, "--heads", "12", "--kv-heads", "6"]),
    "MHA": ({"num_key_value_heads": 6}, [*WIDER, "--heads", "9", "--kv-heads", "9"]),
    "all": (
        {"num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True},
        [
            "--hidden",
            "80",
            "--intermediate",
            "99",
            "--layers",
            "3",
            "--heads",
            "10",
            "--kv-heads",
            "5",
            "--head-dim",
            "24",
            "--vocabulary",
            "128",
        ],
    ),
}


def grow(pair: Path, out: Path, *options: str) -> Path:
    assert grow_pair.main([str(pair), str(out), *options]) == 0
    return out


@torch.no_grad()
def run(folder: Path, ids: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' own Llama in fp64: hidden states after the final norm and logits, [n, T, H] and [n, T, V]."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    hidden = model.model(ids).last_hidden_state
    return hidden, model.lm_head(hidden)


def draft(folder: Path, tokens: list[int], hidden: Tensor) -> Tensor:
    """What the naive drafter makes of a context: both serial steps, and every head behind them. [2 + heads, H]."""
    target, drafter = Checkpoint(str(folder / "target"), "target"), Checkpoint(str(folder / "drafter"), "drafter")
    state = {name: drafter.read(name) for name in drafter.names()}
    naive = NaiveDrafter(state, transformers_config(llama_config(drafter)), target.read("embed_tokens.weight"))
    first = naive.read(tokens, hidden.float()).first()
    rows = (7, first), (8, naive.serial([(7, first)], [0])[0])
    return torch.stack([first, rows[1][1], *(naive.head(i, rows) for i in range(Pair(target, drafter).heads))])


def same(found: Tensor, expected: Tensor) -> None:
    """Equal as far as fp32 weights go, and zero in what was added."""
    width = expected.shape[-1]
    torch.testing.assert_close(found[..., :width], expected, rtol=1e-4, atol=1e-4)
    assert not found[..., width:].any()


# "all" has the other cases in it; these it has not.
USUAL = (
    "all",
    "tied",
    "heads twice as long",
    "one group in parts",
    "larger groups",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in USUAL else pytest.mark.exhaustive) for n in SHAPES])
def test_computes_the_same(name: str, tmp_path: Path) -> None:
    fields, options = SHAPES[name]
    old, new = tmp_path / "old", tmp_path / "new"
    RandomPair({**BASE, **fields}, heads=2, seed=5).write(old)
    grow(old, new, *options)
    ids = torch.randint(0, 101, (2, 40), generator=torch.Generator().manual_seed(1))
    (hidden, logits), (grown, scores) = run(old / "target", ids), run(new / "target", ids)
    same(grown, hidden)
    torch.testing.assert_close(scores[..., :101], logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(scores.argmax(-1), logits.argmax(-1))
    same(draft(new, ids[0, 1:].tolist(), grown[0, :-1]), draft(old, ids[0, 1:].tolist(), hidden[0, :-1]))

    # The shape that was asked for, as the exporter reads it, and else the old one.
    before, after = (
        Pair(Checkpoint(str(pair / "target"), "target"), Checkpoint(str(pair / "drafter"), "drafter"))
        for pair in (old, new)
    )
    wanted = {flag[2:].replace("-", "_"): int(size) for flag, size in zip(options[::2], options[1::2], strict=True)}
    for shape, other, found in (
        (before.target_shape, wanted, after.target_shape),
        (before.draft_shape, {k: v for k, v in wanted.items() if k != "layers"}, after.draft_shape),
    ):
        eps = shape.eps * shape.hidden / found.hidden
        assert found == LlamaShape(**{**vars(shape), **other, "eps": eps})
    assert after.embedding_shared
    # Under the names that transformers gives them.
    index = json.loads((new / "target/model.safetensors.index.json").read_text())["weight_map"]
    assert set(LlamaForCausalLM.from_pretrained(old / "target").state_dict()) - set(index) <= {"lm_head.weight"}
    assert ("lm_head.weight" in index) is not before.target_config.tie_word_embeddings


def test_added_tokens_are_copies(tmp_path: Path) -> None:
    RandomPair(BASE).write(tmp_path / "old")
    grow(tmp_path / "old", tmp_path / "new", "--vocabulary", "120")
    scores = run(tmp_path / "new/target", torch.arange(60)[None])[1][0]
    copied = next(i for i in range(101) if torch.allclose(scores[:, i], scores[:, 101]))
    for i in range(101, 120):
        torch.testing.assert_close(scores[:, i], scores[:, copied])
    assert (scores[:, copied] < scores[:, :101].amax(-1)).all()


def test_half_precision_is_exact_for_powers_of_four(tmp_path: Path) -> None:
    options = ["--hidden", "768", "--head-dim", "128", "--dtype", "fp16"]
    grown = grow(DEMO, tmp_path / "new", *options) / "target"
    ids = torch.arange(30)[None]
    torch.testing.assert_close(run(grown, ids)[1], run(DEMO / "target", ids)[1], rtol=1e-9, atol=1e-9)
    assert Checkpoint(str(grown), "target").read("norm.weight").dtype == torch.float16


@pytest.fixture(scope="module")
def grown_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = "--hidden 288 --intermediate 544 --layers 8 --heads 12 --kv-heads 4 --head-dim 64 --vocabulary 3000"
    return grow(DEMO, tmp_path_factory.mktemp("grown") / "pair", *options.split())


@pytest.mark.exhaustive
def test_demo_pair_drafts_the_same(demo_bundle: Path, grown_demo: Path, make_bundle: MakeBundle) -> None:
    """The same tokens in the same cycles, each over the same tree."""
    prompts = [
        "def read_lines(path):\n",
        "class Server:\n    def __init__(",
        "import os\nimport sys\n\n",
        "    for key, value in ",
    ]
    found, taus = list[Any](), list[float]()
    for bundle in (demo_bundle, make_bundle(grown_demo)):
        with runtime.load(bundle) as model:
            for prompt in prompts:
                generation = model.generate(prompt, 80, trace=True)
                found.append(
                    [(c.tokens, c.path, c.tree and (c.tree.tokens, c.tree.parents)) for c in generation.cycles()]
                )
                taus.append(generation.stats.summary()["tau"])
    assert found[: len(prompts)] == found[len(prompts) :]
    assert taus[: len(prompts)] == taus[len(prompts) :]
    assert min(taus) > 1.5


def test_what_is_written(grown_demo: Path) -> None:
    assert {path.name for path in grown_demo.iterdir()} == {"target", "drafter"}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (grown_demo / "target" / name).read_bytes() == (DEMO / "target" / name).read_bytes()
    # An export stores equal tensors once: no matrix of the target is like another.
    target = Checkpoint(str(grown_demo / "target"), "target")
    matrices = [target.read(name) for name in target.names() if len(target.shape(name)) == 2]
    assert len({matrix.numpy().tobytes() for matrix in matrices}) == len(matrices) == 1 + 7 * 8
    # Memory holds a shard: a layer or the embedding.
    index = json.loads((grown_demo / "target/model.safetensors.index.json").read_text())["weight_map"]
    shards = {shard: [name for name in index if index[name] == shard] for shard in index.values()}
    assert max(len({name.split("layers.")[-1].split(".")[0] for name in names}) for names in shards.values()) == 1


FITS = [
    (m, g, n, s) for m, g, n, s in product(range(1, 4), range(1, 5), range(1, 9), range(1, 6)) if n >= m * -(-g // s)
]


def test_longer_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    RandomPair(BASE, heads=1, seed=5).write(old)
    assert grow_pair.main([str(old), str(new), "--positions", "63"]) == 1
    assert "--positions 63 is less than the target has: give 64 or more" in capsys.readouterr().err
    assert not new.exists()
    grow(old, new, "--positions", "4096")
    for kind in ("target", "drafter"):
        assert json.loads((new / kind / "config.json").read_text())["max_position_embeddings"] == 4096
    ids = torch.randint(0, 101, (1, 40), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(run(new / "target", ids), run(old / "target", ids))


def test_every_head_keeps_its_keys() -> None:
    for kv_heads, share, new_kv_heads, new_share in FITS:
        old = LlamaShape(9, 9, 9, 1, kv_heads * share, kv_heads, 2, 0.1)
        new = LlamaShape(9, 9, 9, 1, new_kv_heads * new_share, new_kv_heads, 2, 0.1)
        query, kv = (source.tolist() for source in grow_pair.head_sources(old, new))
        assert sorted(h for h in query if h >= 0) == list(range(old.heads))
        assert all(kv[i // new_share] == h // share for i, h in enumerate(query) if h >= 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--hidden 191", "--hidden 191 is less than the target has: give 192 or more"),
        ("--layers 5", "--layers 5 is less than the target has: give 6 or more"),
        ("--vocabulary 0", "--vocabulary 0 is less than the target has: give 2048 or more"),
        ("--heads 4", "--heads 4 is less than the target has: give 6 or more"),
        ("--head-dim 48", "--head-dim 48 is not a multiple of the target's 32"),
        ("--heads 8 --kv-heads 3", "--heads 8 cannot share --kv-heads 3 evenly"),
        ("--heads 10", "--hidden 192 is not a multiple of --heads 10"),
        ("--heads 6 --kv-heads 3", "give --heads 8 --kv-heads 4, or more heads"),
    ],
)
def test_refuses_what_does_not_fit(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grow_pair.main([str(DEMO), str(tmp_path / "new"), *options.split()]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_advised_works(tmp_path: Path) -> None:
    grow(DEMO, tmp_path / "new", "--heads", "8", "--kv-heads", "4")


def test_refuses_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "target").mkdir()
    for pair, out, message in (
        ("nowhere", tmp_path / "new", "'nowhere' has no folder 'target'"),
        (str(tmp_path), tmp_path / "new", "has no folder 'drafter'"),
        (str(DEMO), tmp_path, "exists: name another folder\n"),
    ):
        assert grow_pair.main([pair, str(out)]) == 1
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_refuses_another_architecture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RandomPair({"model_type": "mistral", "num_hidden_layers": 1}, heads=1, layers=1).write(tmp_path / "old")
    assert grow_pair.main([str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    assert "is a Mistral, not a Llama: name another folder" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_refuses_a_drafter_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its layers have shapes of their own."""
    made = RandomPair({**BASE, "num_key_value_heads": 6})
    target = RandomPair(BASE).make_target()
    target.save_pretrained(tmp_path / "old/target")
    drafter = made.write(tmp_path / "other")[1]
    drafter.rename(tmp_path / "old/drafter")
    assert grow_pair.main([str(tmp_path / "old"), str(tmp_path / "new"), "--kv-heads", "3"]) == 1
    assert "--kv-heads 3 is less than the drafter has: give 6 or more" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["overflow", "full"])
def test_nothing_is_half_written(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, options = tmp_path / "old", list[str]()
    drafter = RandomPair(BASE).write(old)[1]
    if kind == "overflow":
        state: dict[str, Any] = torch.load(drafter / "pytorch_model.bin")
        state["fc.weight"][0, 0] = 1e6
        torch.save(state, drafter / "pytorch_model.bin")
        options = ["--dtype", "fp16"]
        message = "drafter: tensor 'fc.weight' has values too large for torch.float16: use --dtype fp32"
    else:
        save, saved = grow_pair.save_file, list[str]()

        def failing(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
            saved.append(file.name)
            # Where a file cannot be written the library raises an error of its own.
            save(tensors, file if len(saved) < 3 else tmp_path / "nowhere/file", metadata)

        monkeypatch.setattr(grow_pair, "save_file", failing)
        message = "new' failed"
    assert grow_pair.main([str(old), str(tmp_path / "new"), *options]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
