"""The output is the target's, token for token, whatever the drafter proposes."""

import sysconfig
from pathlib import Path

import pytest

from runtime import Model, load
from tests.conftest import DEMO, MakeBundle
from tests.end_to_end import llama
from tests.pairs import RandomPair

NEW_TOKENS = 128


def demo_prompts(model: Model, count: int, length: int, offset: int) -> list[list[int]]:
    """Beginnings of lines of the standard library, ``length`` tokens each."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text("utf-8") for path in sorted(root.glob("*.py"))]
    lines = "\n".join(texts).splitlines()
    prompts = []
    for start in range(offset, len(lines), len(lines) // count):
        ids = model.encode("\n".join(lines[start : start + length]))[:length]
        if len(ids) == length and len(prompts) < count:
            prompts.append(ids)
    assert len(prompts) == count
    return prompts


@pytest.mark.parametrize(
    ("length", "offset", "count"),
    [
        (129, 13, 6),
        *(
            pytest.param(length, offset, 40, marks=pytest.mark.exhaustive)  # 20 to 29 s: 40 texts by transformers too
            for length, offset in [(4, 11), (9, 37), (16, 71), (40, 3), (127, 5), (128, 7), (129, 13), (250, 17)]
        ),
    ],
)
def test_demo_pair_equals_transformers(demo_bundle: Path, length: int, offset: int, count: int) -> None:
    """40 prompts at each of eight lengths, 128 tokens each; chunks are 128 rows."""
    with load(demo_bundle) as model:
        prompts = demo_prompts(model, count, length, offset)
        expected = llama.generate(DEMO / "target", prompts, NEW_TOKENS)
        ties = 0
        for prompt, wanted in zip(prompts, expected, strict=True):
            generation = model.generate(prompt, NEW_TOKENS)
            list(generation.cycles())
            ties += llama.assert_same(DEMO / "target", prompt, generation.ids, wanted)
            assert generation.stats.tokens == len(generation.ids)
        assert ties <= 1


TREES = [
    ("--rows", "3", "--draft-tree", "chain"),
    ("--rows", "16", "--heads", "2", "--top-k", "3", "--head-top-k", "4"),
    ("--rows", "33", "--serial-steps", "3", "--beam", "3"),
    ("--rows", "2"),
    ("--rows", "5", "--draft-tree", "reference"),
    ("--rows", "64"),
    ("--rows", "64", "--draft-tree", "reference"),
    ("--rows", "8", "--draft-tree", "chain"),
    ("--rows", "12", "--serial-steps", "1", "--heads", "0"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", TREES, ids=" ".join)
def test_every_tree_equals_transformers(make_bundle: MakeBundle, options: tuple[str, ...]) -> None:
    """The trained pair, so that paths of every length are accepted."""
    with load(make_bundle(DEMO, *options)) as model:
        prompts = demo_prompts(model, 12, 20, 29)
        accepted = 0
        for prompt, wanted in zip(prompts, llama.generate(DEMO / "target", prompts, 64), strict=True):
            generation = model.generate(prompt, 64)
            list(generation.cycles())
            llama.assert_same(DEMO / "target", prompt, generation.ids, wanted)
            accepted += sum(generation.stats.accepted)
        assert accepted > 0


ODD = [
    (RandomPair({"num_hidden_layers": 1}, layers=1, heads=2), ("--rows", "4")),
    (RandomPair({"head_dim": 24, "tie_word_embeddings": True}, seed=2, scale=1.0), ("--rows", "16")),
    (
        RandomPair({"vocab_size": 61, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}, seed=3),
        ("--rows", "9"),
    ),
    (
        RandomPair(
            {"hidden_size": 96, "head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 1},
            layers=3,
            heads=7,
            seed=4,
        ),
        ("--rows", "64"),
    ),
    (
        RandomPair(
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, fc_bias=False, seed=5
        ),
        ("--rows", "7", "--draft-tree", "chain"),
    ),
    (
        RandomPair(
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "rope_theta": 5e5,
                },
                "head_dim": 16,
            },
            seed=6,
        ),
        ("--rows", "16", "--draft-tree", "reference"),
    ),
    (RandomPair({"head_dim": 16}, layers=1, heads=0, seed=7), ("--rows", "60")),  # EAGLE-2
    # EAGLE-1
    (RandomPair({"num_key_value_heads": 1}, layers=1, heads=0, fc_bias=False, seed=8), ("--draft-tree", "static")),
]


@pytest.mark.parametrize(
    ("pair", "options"),
    [pytest.param(*odd, marks=() if odd[0].seed == 0 else pytest.mark.exhaustive) for odd in ODD],
)
def test_odd_shapes_equal_transformers(make_bundle: MakeBundle, pair: RandomPair, options: tuple[str, ...]) -> None:
    """Every prompt length around the chunk's edges, and the whole room behind each."""
    bundle = make_bundle(pair, "--capacity", "200", *options)
    target = bundle.parent / "pair/target"
    vocabulary = pair.config().vocab_size
    with load(bundle) as model:
        for length in (1, 2, 3, 126, 127, 128, 129, 130, 131, 199, 200):
            prompt = [(7 * i * i + length) % (vocabulary - 2) + 2 for i in range(length)]
            room = min(40, 201 - length)
            wanted = llama.generate(target, [prompt], room)[0]
            generation = model.generate(prompt, room)
            list(generation.cycles())
            llama.assert_same(target, prompt, generation.ids, wanted)


@pytest.mark.exhaustive  # 26 s with 64 rows: two texts from each of 80 lengths
@pytest.mark.parametrize(
    "options", [("--rows", "8"), ("--rows", "64"), ("--rows", "6", "--draft-tree", "chain")], ids=" ".join
)
def test_last_position(make_bundle: MakeBundle, options: tuple[str, ...]) -> None:
    """Generation runs to the last position and stops there, with and without speculation, from every prompt length."""
    capacity = 80 if "64" in options else 40  # a pass fits
    with load(make_bundle(DEMO, "--capacity", str(capacity), *options)) as model:
        text = model.encode("def main():\n    parser = argparse.ArgumentParser(description=__doc__)\n" * 6)
        for length in range(1, capacity + 1):
            prompt = text[:length]
            plain = model.generate(prompt, 1000, speculate=False)
            list(plain.cycles())
            generation = model.generate(prompt, 1000)
            list(generation.cycles())
            assert generation.ids == plain.ids
            if generation.finish_reason != "stop":
                assert generation.finish_reason == plain.finish_reason == "context"
                assert length + len(generation.ids) == capacity + 1
