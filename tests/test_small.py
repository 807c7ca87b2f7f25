"""A small model as drafter: its graphs against transformers, what it reads of a text, and what is refused."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from exporter.checkpoints.pair import Pair
from exporter.cli import main
from exporter.options import config_of
from exporter.recipe.resolve import recipe_of
from exporter.recipe.sources import open_pair
from graphs.dialects.contrib import Contrib
from graphs.dialects.plain import Plain
from graphs.dialects.rounded import Rounded
from graphs.dialects.standard import Standard
from graphs.token_digits import digits_of, tokens_of
from graphs.tree import TreeConfig
from runtime import load
from runtime.errors import DamageError
from tests import gguf_files
from tests.end_to_end import llama
from tests.pairs import RandomPair
from tests.test_drafter import cycles, eager, onnx, tree_of
from tests.test_streams import assert_as_plain

TARGET = RandomPair(scale=1.0)
OWN = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MADE = {
    "llama": OWN,
    "tied": {**OWN, "tie_word_embeddings": True},
    "three layers": {**OWN, "num_hidden_layers": 3},
    "qwen2": {
        "model_type": "qwen2",
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
    },
    "qwen3": {**OWN, "model_type": "qwen3"},
    "fewer tokens": {**OWN, "vocab_size": 900},
    "more tokens": {**OWN, "vocab_size": 1100},
}


class Naive:
    """transformers' own model, which reads the whole text anew for every node; implements ``naive.Model``. A feature is
    a row of logits."""

    def __init__(self, model: PreTrainedModel, vocabulary: int) -> None:
        self.model, self.vocabulary, self.text = model, vocabulary, list[int]()
        self.ids = torch.arange(min(vocabulary, model.config.vocab_size))

    def read(self, tokens: Sequence[int], rows: Tensor) -> Self:
        """rows: the digits of the text's tokens, of which the first token's are the only ones that ``tokens`` lacks."""
        high, middle, low = (int(digit) for digit in rows[0])
        self.text = [65536 * high + 256 * middle + low, *tokens]
        return self

    @torch.no_grad()
    def _logits(self, drafted: Sequence[int]) -> Tensor:
        text = [token if token < self.model.config.vocab_size else 0 for token in (*self.text, *drafted)]
        return self.model(torch.tensor([text])).logits[0]

    def first(self) -> Tensor:
        return self._logits([])[-1]

    def serial(self, rows: Sequence[tuple[int, Tensor]], depth: Sequence[int]) -> list[Tensor]:
        return list(self._logits([token for token, _ in rows])[len(self.text) :])

    def head(self, i: int, pair: Any) -> Tensor:
        raise NotImplementedError

    def log_probs(self, feature: Tensor) -> np.ndarray:
        """Of the target's tokens, of those that both have."""
        found = torch.full((self.vocabulary,), -torch.inf)
        both = feature[: self.vocabulary].log_softmax(0)
        found[: len(both)] = both
        return found.numpy()


def tree(rows: int, beam: int, serial: int = 4) -> TreeConfig:
    return tree_of(rows, serial=serial, heads=0, top_k=10, beam=beam, wide=True)


def written(folder: Path, name: str, scale: float = 1.0) -> tuple[list[str], PreTrainedModel]:
    """Writes target and drafter. Returns the options that name them, and the drafter."""
    small = RandomPair(MADE[name], seed=7, scale=scale).make_target()
    TARGET.make_target().save_pretrained(folder / "target")
    small.save_pretrained(folder / "small")
    return ["--ckpt", str(folder / "small"), "--target", str(folder / "target")], small


def opened(argv: list[str], *more: str) -> Pair:
    return open_pair(config_of([*argv, *more]))


def rows_of(text: list[int]) -> Tensor:
    return torch.tensor([[token // 65536, token // 256 % 256, token % 256] for token in text], dtype=torch.float32)


@given(
    st.lists(st.integers(0, (1 << 24) - 1), min_size=1), st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
)
def test_digits_are_exact(tokens: list[int], dtype: torch.dtype) -> None:
    digits = digits_of(torch.tensor(tokens)).to(dtype)
    assert torch.equal(digits.float(), rows_of(tokens))
    assert tokens_of(digits).tolist() == tokens


@given(st.lists(st.tuples(*[st.floats(-(2.0**99), 2.0**99, width=32)] * 3), min_size=1))
def test_other_numbers_become_some_token(digits: list[tuple[float, ...]]) -> None:
    assert all(0 <= token < 1 << 24 for token in tokens_of(torch.tensor(digits)).tolist())


@pytest.mark.parametrize("shape", [tree(24, beam=6), tree(8, beam=1)], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_eager_tree_is_the_naive_one(name: str, shape: TreeConfig, tmp_path: Path) -> None:
    argv, small = written(tmp_path, name)
    pair = opened(argv)
    assert (pair.family, pair.features) == ("small", 3)
    cycles(eager(pair, shape), Naive(small, 1009), shape, 3, 1009, seed=shape.rows, rows_of=rows_of)


@pytest.mark.parametrize("dialect", [Contrib, Standard, Rounded])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        pytest.param("qwen3", marks=pytest.mark.exhaustive),
        pytest.param("fewer tokens", marks=pytest.mark.exhaustive),
    ],
)
def test_exported_tree_is_the_naive_one(name: str, dialect: type[Plain], tmp_path: Path) -> None:
    argv, small = written(tmp_path, name)
    (tmp_path / "graphs").mkdir()
    shape = tree(16, beam=3, serial=3)
    made = onnx(opened(argv), shape, dialect, tmp_path / "graphs")
    cycles(made, Naive(small, 1009), shape, 3, 1009, seed=1, rows_of=rows_of)


def exported(folder: Path, argv: list[str], *options: str) -> Path:
    argv = [*argv, "--capacity", "200", "--out", str(folder / "out"), *options]
    assert main(argv) == 0
    return folder / "out"


def test_a_drafter_that_is_the_target_is_always_right(tmp_path: Path) -> None:
    """So it reads the whole text, the first token too, at the target's positions; in prompts of several passes and
    beside lookups too."""
    made = RandomPair(OWN, seed=3).make_target()
    made.save_pretrained(tmp_path / "target")
    bundle = exported(
        tmp_path,
        ["--ckpt", str(tmp_path / "target"), "--target", str(tmp_path / "target")],
        "--draft-weights",
        "none",
        "--draft-tree",
        "chain",
        "--rows",
        "3",
        "--validate",
    )
    with load(bundle) as model:
        for length in (1, 2, 7, 130):
            prompt = [(5 * i * i + length) % 1000 + 2 for i in range(length)]
            generation = model.generate(prompt, 22, rows=3, lookup=False)
            accepted = [len(cycle.tokens) for cycle in generation.cycles()]
            llama.assert_same(
                tmp_path / "target", prompt, generation.ids, llama.generate(tmp_path / "target", [prompt], 22)[0]
            )
            if len(generation.ids) == 22:
                assert accepted[1:-1] == [3] * len(accepted[1:-1])
                assert len(accepted) == 8
        for temperature, more in (
            (0.3, {}),
            (1.0, {}),
            (3.0, {"logit_bias": {7: 9.0}, "banned": [8, 9]}),
            (0.0, {"banned": [*range(500)]}),
        ):
            drawn = model.generate([5, 6], 40, temperature=temperature, seed=3, rows=3, lookup=False, **more)
            accepted = [len(cycle.tokens) for cycle in drawn.cycles()]
            assert accepted[1:-1] == [3] * len(accepted[1:-1]), "the drafter knows the draws' noise"
            assert len(set(drawn.ids)) > 5


def test_draws_of_a_part_of_the_tokens_are_known_by_their_ids(tmp_path: Path) -> None:
    """A drafter that is the target, but may draft only some tokens, has all draws of these accepted."""
    made = RandomPair(OWN, seed=3).make_target()
    made.save_pretrained(tmp_path / "target")
    bundle = exported(
        tmp_path,
        ["--ckpt", str(tmp_path / "target"), "--target", str(tmp_path / "target")],
        "--draft-weights",
        "none",
        "--draft-tree",
        "chain",
        "--rows",
        "3",
        "--draft-vocab",
        "700",
    )
    with np.load(bundle / "draft_tokens.npz") as file:
        known = set(file["ids"].tolist())
    assert len(known) == 700
    with load(bundle) as model:
        drawn = model.generate([5, 6], 120, temperature=1.0, seed=3, rows=3, lookup=False)
        cycles = [cycle.tokens for cycle in drawn.cycles()][1:-1]
    assert {len(tokens) for tokens in cycles} == {1, 2, 3}
    for tokens in cycles:
        assert len(tokens) == 3 or tokens[-1] not in known
        assert known.issuperset(tokens[:-1])
    (bundle / "draft_tokens.npz").write_bytes((bundle / "draft_tokens.npz").read_bytes()[:-9] + bytes(9))
    with pytest.raises(DamageError, match=r"draft_tokens\.npz is damaged"):
        load(bundle)


@pytest.mark.parametrize("weights", ["none", pytest.param("int8", marks=pytest.mark.exhaustive)])
def test_the_output_is_that_of_plain_decoding(weights: str, tmp_path: Path) -> None:
    """To the last bit where the target is quantized, in sampling, and beside another stream, whose passes it shares."""
    made = RandomPair({**OWN, "hidden_size": 64, "intermediate_size": 128}, seed=4).make_target()
    made.save_pretrained(tmp_path / "target")
    RandomPair({**OWN, "intermediate_size": 64, "num_hidden_layers": 1}, seed=5).make_target().save_pretrained(
        tmp_path / "small"
    )
    bundle = exported(
        tmp_path,
        ["--ckpt", str(tmp_path / "small"), "--target", str(tmp_path / "target")],
        "--weights",
        weights,
        "--rows",
        "8",
        "--beam",
        "2",
        "--serial-steps",
        "3",
    )
    prompts = [[(7 * i * i + length) % 1000 + 2 for i in range(length)] for length in (1, 130, 40)]
    with load(bundle, streams=2) as model:
        assert model.bundle.manifest.hidden == 3
        assert_as_plain(model, prompts, 8)


def test_a_gguf_file_is_a_drafter_too(tmp_path: Path) -> None:
    argv, small = written(tmp_path, "llama")
    file = gguf_files.write(small, tmp_path / "small.gguf")
    pairs = opened(argv), opened(["--ckpt", str(file), *argv[2:]])
    theirs, ours = (pair.draft_sources(0, positions=9) for pair in pairs)
    assert theirs.keys() == ours.keys()
    for name, source in theirs.items():
        torch.testing.assert_close(ours[name].whole().float(), source.whole().float(), rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["migraphx", pytest.param("tensorrt", marks=pytest.mark.exhaustive), "cuda"])
def test_every_backend(backend: str, tmp_path: Path) -> None:
    """In-place caches have room for the row that a pass reads behind the accepted ones."""
    argv, _ = written(tmp_path, "qwen3")
    bundle = exported(tmp_path, argv, "--backend", backend, "--rows", "8", "--serial-steps", "2")
    manifest = json.loads((bundle / "gumiho.json").read_text())
    assert manifest["hidden"] == 3


def test_fewer_tokens_can_be_drafted(tmp_path: Path) -> None:
    argv, small = written(tmp_path, "llama")
    made = recipe_of(config_of([*argv, "--draft-vocab", "300", "--out", str(tmp_path / "out")]))
    head = made.pair.draft_sources(0, positions=9)
    ids = head["token_ids"].whole()
    assert len(ids) == 300
    assert torch.equal(head["lm_head.weight"].whole(), small.lm_head.weight[ids])


@pytest.mark.exhaustive
def test_codes_of_a_gguf_drafter(tmp_path: Path) -> None:
    """The target's codes are kept as they are, the drafter's are not."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    large, small = (RandomPair(sizes, seed=seed).make_target() for seed in (1, 2))
    files = (
        gguf_files.write(large, tmp_path / "large.gguf", "Q8_0"),
        gguf_files.write(small, tmp_path / "small.gguf", "Q4_0"),
    )
    assert (
        main(
            [
                "--target",
                str(files[0]),
                "--ckpt",
                str(files[1]),
                "--capacity",
                "64",
                "--out",
                str(tmp_path / "out"),
                "--validate",
            ]
        )
        == 0
    )


@pytest.mark.parametrize(
    ("capacity", "rows"),
    [pytest.param(5, 5, marks=pytest.mark.exhaustive), (8, 8), pytest.param(11, 8, marks=pytest.mark.exhaustive)],
)
def test_small_capacities(capacity: int, rows: int, tmp_path: Path) -> None:
    argv, _ = written(tmp_path, "llama")
    assert (
        main(
            [
                *argv,
                "--capacity",
                str(capacity),
                "--rows",
                str(rows),
                "--serial-steps",
                "2",
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fewer tokens", "more tokens"])
def test_a_vocabulary_of_its_own_is_not_cut(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv, _ = written(tmp_path, name)
    assert main([*argv, "--draft-vocab", "300", "--out", str(tmp_path / "out")]) == 1
    assert "leave --draft-vocab out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--taps", "1"), "--taps and --norm-before-residual are for an EAGLE-3"),
        (("--heads", "1"), "has 0: give at most that many"),
        (("--draft-tree", "static"), "--draft-tree static is for EAGLE-1"),
        (("--backend", "vllm"), "is of the family small, which vLLM runs as it is"),
    ],
)
def test_what_is_refused(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, _ = written(tmp_path, "llama")
    assert main([*argv, "--out", str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_tokens_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = Path(__file__).parent.parent / "demo" / "target"
    shutil.copytree(demo, tmp_path / "small")
    tokenizer = json.loads((tmp_path / "small" / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = list(vocab)[500:502]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (tmp_path / "small" / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["--ckpt", str(tmp_path / "small"), "--target", str(demo), "--out", str(tmp_path / "out")]) == 1
    assert "its tokenizer gives" in capsys.readouterr().err


def test_lacking_tensors_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv, _ = written(tmp_path, "llama")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    (tmp_path / "small" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert main([*argv, "--out", str(tmp_path / "out")]) == 1
    assert "layers.2.self_attn.q_proj.weight" in capsys.readouterr().err
