"""Trimmed draft vocabularies: which tokens, which rows of lm_head, the trees that grow from them, and the bundles that
hold them."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from exporter import cli, options
from exporter.checkpoints import draft_vocabulary as vocabulary
from exporter.checkpoints.checkpoint import Checkpoint
from exporter.checkpoints.draft_vocabulary import DraftVocabulary, by_age, choose, frequent
from exporter.checkpoints.pair import Pair
from exporter.recipe.recipe import Recipe
from exporter.recipe.resolve import recipe_of
from exporter.weights.packer import Packer
from exporter.weights.quantize import quantize
from exporter.writing.bundle import _pack
from graphs.dialects.quantization import Scheme
from graphs.tree import TreeConfig
from runtime import GumihoError, Model, load
from runtime.bundle.reader import Bundle
from tests.conftest import DEMO, MakeBundle, examples, numbers
from tests.naive import NaiveDrafter
from tests.pairs import RandomPair, drafter_config, write_drafter
from tests.test_drafter import CAPACITY, cycles, eager, naive_of

V = 61
SMALL = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
}


# --- which tokens -----------------------------------------------------------------------------------------------------


def one_by_one(size: int, counts: dict[int, int], order: Sequence[int], always: Sequence[int]) -> set[int]:
    """``choose`` again, a token at a time."""
    chosen = set(always)
    while len(chosen) < size:
        left = [i for i in counts if i not in chosen]
        if left:
            most = max(counts[i] for i in left)
            chosen.add(min(i for i in left if counts[i] == most))
        else:
            chosen.add(next(i for i in order if i not in chosen))
    return chosen


@examples(200)
@given(st.data())
def test_the_most_frequent_are_chosen(data: st.DataObject) -> None:
    everything = data.draw(st.permutations(range(data.draw(st.integers(2, 24)))))
    counts = data.draw(st.dictionaries(st.sampled_from(everything), st.integers(1, 4)))
    always = data.draw(st.sets(st.sampled_from(everything), max_size=3))
    size = data.draw(st.integers(max(1, len(always)), len(everything)))
    found = choose(size, counts, everything, always)
    assert found == sorted(set(found))
    assert set(found) == one_by_one(size, counts, everything, sorted(always))


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_letters_come_before_what_was_merged_of_them() -> None:
    """Numbered as SentencePiece does it: what was merged, in order, then the letters. Ids without a token are the
    last."""
    ids = {"<unk>": 0, "ab": 1, "abc": 2, "cb": 3, "a": 4, "b": 5, "c": 6}
    merges = [("a", "b"), ("c", "b"), ("ab", "c")]
    assert by_age(fast(Tokenizer(BPE(ids, merges))), 9) == [0, 4, 5, 6, 1, 3, 2, 7, 8]
    assert by_age(fast(Tokenizer(WordLevel({"b": 1, "a": 0}, "a"))), 3) == [0, 1, 2]
    assert by_age(None, 3) == [0, 1, 2]


def test_a_byte_level_tokenizer_numbered_its_tokens_by_age() -> None:
    assert by_age(demo_pair().tokenizer, 2048) == list(range(2048))


def demo_pair() -> Pair:
    return Pair(Checkpoint(str(DEMO / "target"), "target"), Checkpoint(str(DEMO / "drafter"), "drafter"))


def words() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(["?", *"abcdefgh"])}, "?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="? $A", special_tokens=[("?", 0)])  # which no text has
    return fast(tokenizer)


def test_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("a b b\nc")
    records = [{"text": "d d d d"}, {"turns": ["e e e", "c"], "id": 7}, {"prompt": "a a a", "text": "f"}]
    (tmp_path / "two.jsonl").write_text("\n\n".join(json.dumps(record) for record in records) + "\n")
    files = [tmp_path / "plain", tmp_path / "two.jsonl"]
    assert vocabulary.count(files, words()) == Counter({1: 4, 2: 2, 3: 2, 4: 4, 5: 3, 6: 1})
    found = frequent(4, 9, words(), files, ends=(8, 99))
    assert found.ids.tolist() == [1, 4, 5, 8]
    assert found.ids.dtype == torch.int64
    assert "68.8%" in found.origin  # 11 of 16
    # what never comes, by age
    assert frequent(8, 9, words(), files, ends=(8,)).ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 8]


@pytest.mark.parametrize("piece", [1, 2, 7])
def test_long_texts_are_counted_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(vocabulary, "_PIECE", piece)
    (tmp_path / "text").write_text("a b c " * 50)
    assert vocabulary.count([tmp_path / "text"], words()) == Counter({1: 50, 2: 50, 3: 50})


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.txt", None, ("a.txt cannot be read (No such file",)),
        ("a.txt", b"\xff\xfe\x00", ("a.txt is not UTF-8 text",)),
        ("a.txt", b"", ("--draft-text hold no text",)),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', ("a.jsonl, line 2 has no text", "'prompt', 'text' or 'turns'")),
        ("a.jsonl", b'{"content": "a"}', ("a.jsonl, line 1 has no text",)),
        ("a.jsonl", b'["a"]', ("a.jsonl, line 1 has no text",)),
        ("a.jsonl", b'{"turns": [{"content": "a"}]}', ("a.jsonl, line 1 has no text",)),
        ("a.jsonl", b'{"text": "a"}\n\xff', ("a.jsonl is not UTF-8 text",)),
    ],
)
def test_files_that_cannot_be_counted_are_one_sentence(
    tmp_path: Path, name: str, content: bytes | None, parts: tuple[str, ...]
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(GumihoError) as caught:
        frequent(3, 9, words(), [tmp_path / name])
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in parts), caught.value


# --- the graph --------------------------------------------------------------------------------------------------------


class Trimmed(NaiveDrafter):
    """Scores of what may not be drafted are -inf, as where trimmed logits are scattered into the whole vocabulary."""

    ids: Tensor

    def log_probs(self, feature: Tensor) -> np.ndarray:
        known = super().log_probs(feature)
        out = np.full(1009, -np.inf, np.float32)
        out[self.ids.numpy()] = known
        return out


def trimmed_naive(made: RandomPair, ids: Tensor, rows: Tensor) -> Trimmed:
    model = made.make_target()
    naive = naive_of(model, made.make_drafter(model), drafter_config(model.config, 2))
    out = Trimmed.__new__(Trimmed)
    out.__dict__ = naive.__dict__ | {"ids": ids, "lm_head": rows}
    return out


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, RandomPair]:
    made = RandomPair({"head_dim": 16}, heads=5, seed=5, scale=1.0)
    target, drafter = made.write(tmp_path_factory.mktemp("pair"))
    return Pair(Checkpoint(str(target), "target"), Checkpoint(str(drafter), "drafter")), made


def trimmed_to(random: tuple[Pair, RandomPair], size: int) -> tuple[Pair, Trimmed]:
    pair, made = random
    ids = torch.randperm(1009, generator=torch.Generator().manual_seed(size))[:size].sort().values
    return pair.drafting(DraftVocabulary(ids, "drawn")), trimmed_naive(
        made, ids, made.make_target().lm_head.weight.detach()[ids]
    )


def tree_of(rows: int, size: int, **more: Any) -> TreeConfig:
    return TreeConfig(rows, 2, 5, **{"top_k": 14, "head_top_k": 35, "beam": 4, **more}).fitted(size)


TREES = [
    (16, 300, {}),
    (33, 5, {}),  # fewer than a node would try
    (33, 50, {"reference": True, "beam": 14}),
    pytest.param(64, 40, {"beam": 14}, marks=pytest.mark.exhaustive),
    pytest.param(8, 1, {}, marks=pytest.mark.exhaustive),
    pytest.param(8, 50, {"top_k": 1, "head_top_k": 1, "beam": 1}, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("rows", "size", "more"), TREES, ids=str)
def test_a_trimmed_tree_is_the_naive_one(
    random: tuple[Pair, RandomPair], rows: int, size: int, more: dict[str, Any]
) -> None:
    pair, naive = trimmed_to(random, size)
    cycles(eager(pair, tree_of(rows, size, **more)), naive, tree_of(rows, size, **more), 48, 1009, seed=rows)


# --- a drafter's own token_map ----------------------------------------------------------------------------------------


def with_map(folder: Path, own: dict[str, Tensor], prefix: str = "", vocabulary: int = V) -> Pair:
    made = RandomPair(SMALL | {"vocab_size": vocabulary}, heads=1, seed=3)
    target = made.make_target()
    target.save_pretrained(folder / "target")
    state = made.make_drafter(target) | {f"{prefix}{name}": tensor for name, tensor in own.items()}
    write_drafter(folder / "drafter", state, drafter_config(target.config, 2), safetensors=True)
    return opened_pair(folder)


def opened_pair(folder: Path) -> Pair:
    return Pair(Checkpoint(str(folder / "target"), "target"), Checkpoint(str(folder / "drafter"), "drafter"))


def head_of(pair: Pair) -> tuple[Tensor | None, Tensor]:
    sources = pair.draft_sources(1, 8)
    return sources["token_ids"].whole() if "token_ids" in sources else None, sources["lm_head.weight"].whole()


MAP = torch.tensor([50, 3, 7, 60, 0])


@pytest.mark.parametrize("prefix", ["", "model.", "model.model."])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("rows", [None, V, 5])
def test_a_token_map_is_kept(tmp_path: Path, prefix: str, kind: torch.dtype, rows: int | None) -> None:
    """A trimmed lm_head is the drafter's own, in its order; the rows of a whole one, as of none, are the target's."""
    own = {"token_map": MAP.to(kind)} | ({"lm_head.weight": torch.randn(rows, 32)} if rows else {})
    pair = with_map(tmp_path, own, prefix)
    ids, head = head_of(pair)
    if rows == 5:
        assert torch.equal(ids, MAP)
        assert torch.equal(head, own["lm_head.weight"])
    else:
        assert torch.equal(ids, MAP.sort().values)
        assert torch.equal(head, load_file(tmp_path / "target/model.safetensors")["lm_head.weight"][MAP.sort().values])
    assert pair.drafted == 5


@pytest.mark.parametrize("own", [{}, {"lm_head.weight": torch.ones(V, 32)}, {"lm_head.weight": torch.ones(9, 32)}])
def test_without_a_map_everything_is_drafted(tmp_path: Path, own: dict[str, Tensor]) -> None:
    for extra in (
        ({}, {"token_map": torch.randperm(V)}) if own.get("lm_head.weight", torch.ones(V)).shape[0] == V else ({},)
    ):
        pair = with_map(tmp_path / str(len(extra)), own | extra)
        ids, head = head_of(pair)
        assert ids is None
        assert torch.equal(head, pair.target.read("lm_head.weight"))
        assert pair.drafted == V


@pytest.mark.parametrize(
    ("own", "parts"),
    [
        ({"token_map": torch.tensor([1, 2, 1])}, ("has a token twice", "vocabulary of 61")),
        ({"token_map": torch.tensor([1, 61])}, ("outside the vocabulary of 61",)),
        ({"token_map": torch.tensor([-1, 6])}, ("outside",)),
        ({"token_map": torch.tensor([1.0, 2.0])}, ("torch.float32 of shape [2]",)),
        ({"token_map": torch.tensor([[1, 2]])}, ("shape [1, 2]",)),
        ({"token_map": torch.zeros(0, dtype=torch.int64)}, ("shape [0]",)),
        ({"token_map": MAP, "lm_head.weight": torch.ones(4, 32)}, ("has 5 tokens", "lm_head 4 rows")),
        (
            {"token_map": MAP, "lm_head.weight": torch.ones(5, 31)},
            ("'lm_head.weight' has shape [5, 31], expected 32 columns",),
        ),
        ({"token_map": MAP, "lm_head.weight": torch.ones(5, 32, dtype=torch.int8)}, ("is int8, expected float16",)),
    ],
    ids=str,
)
def test_a_map_that_is_none_is_refused(
    tmp_path: Path, own: dict[str, Tensor], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with_map(tmp_path, own)
    capsys.readouterr()
    refused(tmp_path, capsys, *parts)
    assert wanted(tmp_path, "--draft-vocab", "7").pair.drafted == 7  # it is not looked at


def test_a_tree_grows_from_the_drafters_own_rows(tmp_path: Path) -> None:
    own = {"token_map": torch.randperm(1009)[:60], "lm_head.weight": torch.randn(60, 32) / 6}
    pair = with_map(tmp_path, own, vocabulary=1009)
    made = RandomPair(SMALL | {"vocab_size": 1009}, heads=1, seed=3)
    naive = trimmed_naive(made, own["token_map"], own["lm_head.weight"])
    tree = TreeConfig(16, 2, 1, 14, 35, 4).fitted(60)
    cycles(eager(pair, tree, CAPACITY), naive, tree, 32, 1009, seed=1)


# --- the command ------------------------------------------------------------------------------------------------------


def argv(folder: Path, *more: str) -> list[str]:
    out = ["--out", str(folder / "out")]
    return [
        "--ckpt",
        str(folder / "drafter"),
        "--target",
        str(folder / "target"),
        *out,
        "--capacity",
        "64",
        *numbers(more),
    ]


def wanted(folder: Path, *more: str) -> Recipe:
    return recipe_of(options.config_of(argv(folder, *more)))


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *parts: str, more: Sequence[str] = ()) -> None:
    assert cli.main(argv(folder, *more)) == 1
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert all(part in text for part in parts), text
    assert not (folder / "out").exists()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    with_map(folder, {})
    return folder


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (("--draft-vocab", "1"), ("--draft-vocab is 1", "give 2 to 61", "end a text (1)")),
        (("--draft-vocab", "-4"), ("--draft-vocab is -4",)),
        (("--draft-vocab", "62"), ("--draft-vocab is 62", "2 to 61")),
        (("--draft-text", __file__), ("--draft-text is what --draft-vocab counts",)),
        (("--draft-vocab", "9", "--draft-text", __file__), ("has no tokenizer", "leave the option out")),
        (("--backend", "vllm", "--draft-vocab", "9"), ("--draft-vocab", "mean nothing to --backend vllm")),
        (("--backend", "vllm", "--draft-text", __file__), ("--draft-text", "mean nothing to --backend vllm")),
    ],
)
def test_what_cannot_be_is_one_sentence(
    plain: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    if "vllm" in more:
        at = argv(plain).index("--capacity")
        assert cli.main([*argv(plain)[:at], *more]) == 1
        text = capsys.readouterr().err
        assert all(part in text for part in parts), text
    else:
        refused(plain, capsys, *parts, more=more)


def test_the_option_is_before_the_map(tmp_path: Path) -> None:
    """Its rows are the target's, whatever lm_head the map came with; the whole vocabulary sets it aside."""
    with_map(tmp_path, {"token_map": MAP, "lm_head.weight": torch.randn(5, 32)})
    target = load_file(tmp_path / "target/model.safetensors")["lm_head.weight"]
    ids, head = head_of(wanted(tmp_path, "--draft-vocab", "7").pair)
    assert ids is not None
    assert ids.tolist() == list(range(7))
    assert torch.equal(head, target[:7])
    plan = wanted(tmp_path, "--draft-vocab", str(V))
    assert plan.pair.draft_vocabulary is None
    assert head_of(plan.pair)[0] is None


def test_the_tree_has_no_more_than_there_is(plain: Path) -> None:
    tree = wanted(plain, "--draft-vocab", "3", "--rows", "64").tree
    assert (tree.top_k, tree.head_top_k) == (3, 3)
    assert tree == wanted(plain, "--rows", "64").tree.fitted(3)


def test_ends_of_text_are_drafted(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    (tmp_path / "target/generation_config.json").write_text('{"eos_token_id": [40, 1]}')
    found = wanted(tmp_path, "--draft-vocab", "5").pair.draft_vocabulary
    assert found is not None
    assert found.ids.tolist() == [0, 1, 2, 3, 40]


def test_another_vocabulary_is_another_export(plain: Path) -> None:
    """What an interrupted export has packed is gone on with only where the tokens are the same."""
    plans = [
        wanted(plain, *more) for more in ((), ("--draft-vocab", "9"), ("--draft-vocab", "9"), ("--draft-vocab", "10"))
    ]
    assert plans[2].pair.draft_vocabulary is not None
    notes = [plan.fingerprint() for plan in plans]
    assert notes[1] == notes[2]
    shifted = DraftVocabulary(plans[2].pair.draft_vocabulary.ids + 1, "")
    plans[2] = replace(plans[2], pair=plans[2].pair.drafting(shifted))
    assert len({plan.fingerprint() for plan in plans}) == 4


@pytest.mark.parametrize(
    ("tied", "backends"),
    [
        pytest.param(tied, backends, marks=() if tied == (len(backends) > 1) else pytest.mark.exhaustive)
        for tied in (False, True)
        for backends in (("cpu",), ("cpu", "tensorrt"))
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "how", [(), ("--draft-weights", "int4"), ("--weights", "int4", "--draft-weights", "int4")], ids=" ".join
)
def test_rows_are_cut_before_they_are_quantized_and_sizes_say_so(
    tmp_path: Path, how: tuple[str, ...], backends: tuple[str, ...], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of which some hold no row that is kept
    monkeypatch.setattr("exporter.checkpoints.checkpoint._SLICE_ELEMENTS", 37 * 128)
    fields = {"hidden_size": 128, "vocab_size": 301, "tie_word_embeddings": tied}
    RandomPair(SMALL | fields, heads=1).write(tmp_path)
    plan = wanted(tmp_path, *how, "--backend", *backends, "--dtype", "fp32", "--draft-vocab", "80")
    ids = torch.cat((torch.arange(50), torch.arange(271, 301)))
    plan = replace(plan, pair=plan.pair.drafting(DraftVocabulary(ids, "")))
    places = _pack(plan, Packer(tmp_path / "out", plan.dtype, lambda _: None))
    for codes, models in places.items():
        draft, rows = models["draft"], plan.pair.target_sources(8)["lm_head.weight"].whole()[ids].float()
        assert torch.equal(draft["token_ids"].mapped(tmp_path / "out"), ids)
        stored = draft["lm_head.weight"].mapped(tmp_path / "out")
        if how:
            wanted_codes, wanted_scale = quantize(rows, Scheme(plan.blocks[4], codes.four), torch.float32)
            assert torch.equal(stored, wanted_codes)
            assert torch.equal(draft["lm_head.scale"].mapped(tmp_path / "out"), wanted_scale)
        else:
            assert torch.equal(stored, rows)
        assert models["target"]["lm_head.weight"].shape[0] == 301
    written = sum(p.stat().st_size for p in (tmp_path / "out").rglob("*.bin"))
    tables = 2 * 4096 * -(-plan.positions * 32 * 4 // 4096)  # both rotary tables are the same, which nobody promised
    assert written == sum(plan.sizes().values()) - plan.shared() - tables


# --- bundles ----------------------------------------------------------------------------------------------------------

SIZE = 256
OPTIONS = ("--draft-vocab", str(SIZE), "--draft-text", __file__)


@pytest.fixture(scope="module")
def bundle(make_bundle: MakeBundle) -> Path:
    return make_bundle(DEMO, *OPTIONS)


@pytest.fixture(scope="module")
def kept() -> set[int]:
    """The tokens of this file, counted by the tokenizer itself."""
    counts = Counter(Tokenizer.from_file(str(DEMO / "target/tokenizer.json")).encode(Path(__file__).read_text()).ids)
    del counts[0]  # what begins a text
    assert len(counts) > SIZE
    return {1, *sorted(counts, key=lambda i: (-counts[i], i))[: SIZE - 1]}


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with load(bundle, "cpu", threads=1) as model:
        yield model


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.3}], ids=str)
def test_no_token_is_changed_and_no_other_one_drafted(model: Model, kept: set[int], settings: dict[str, Any]) -> None:
    """Also where the text itself goes beyond what may be drafted."""
    outside = drafted = 0
    for text in ("def read_lines(path):", "class Zephyr(Quux):\n    ", "import ", "xylophone = ~0x7f @ \u00df"):
        generation = model.generate(text, 40, rows=model.bundle.manifest.rows, trace=True, **settings)
        for cycle in generation.cycles():
            assert cycle.tree is None or set(cycle.tree.tokens[1:]) <= kept
            drafted += len(cycle.path) - 1
        plain = model.generate(text, 40, False, **settings)
        list(plain.cycles())
        assert generation.ids == plain.ids
        outside += len(set(generation.ids) - kept)
    assert outside > 5
    assert drafted > 10


def test_the_manifest_and_the_traffic(bundle: Path, demo_bundle: Path) -> None:
    """lm_head is read three times a draft: by both serial steps, and by the heads."""
    small, whole = (Bundle(path).manifest for path in (bundle, demo_bundle))
    assert (small.tree.vocabulary, whole.tree.vocabulary, small.vocabulary) == (SIZE, 2048, 2048)
    one, other = (manifest.forms["cpu"].graphs for manifest in (small, whole))
    less = (2048 - SIZE) * 192 * 4
    assert other["draft"].reads - one["draft"].reads == 3 * less
    assert other["draft"].weights - one["draft"].weights == less - 8 * SIZE
    for name in ("target", "extend"):
        assert (one[name].reads, one[name].weights) == (other[name].reads, other[name].weights)


def test_validation_knows_what_was_cut(bundle: Path, make_bundle: MakeBundle) -> None:
    from exporter.writing.validate import validate

    pair = bundle.parent / "pair"
    args = ["--ckpt", str(pair / "drafter"), "--target", str(pair / "target"), *numbers(OPTIONS)]
    errors = validate(recipe_of(options.config_of(args)), bundle, "cpu")
    assert all(error < 1e-3 for error in errors.values()), errors


def test_a_dry_run_says_what_is_drafted(capsys: pytest.CaptureFixture[str], kept: set[int]) -> None:
    args = ["--ckpt", str(DEMO / "drafter"), "--target", str(DEMO / "target"), *OPTIONS, "--dry-run"]
    assert cli.main(args) == 0
    ids = Tokenizer.from_file(str(DEMO / "target/tokenizer.json")).encode(Path(__file__).read_text()).ids[1:]
    share = sum(i in kept for i in ids) / len(ids)
    assert f"Drafted: 256 of 2048 tokens, which are {share:.1%} of the given text.\n" in capsys.readouterr().out
