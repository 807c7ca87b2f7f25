"""A tokenizer that is recognized as loadable without transformers is one that transformers loads as it is."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, WordLevel

from exporter.checkpoints.llama import LlamaConfig
from exporter.checkpoints.tokenizer import load_tokenizer, surely_loads
from runtime.errors import GumihoError, InputError
from tests.conftest import examples

DEMO = Path(__file__).parent.parent / "demo"
CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)
PLAIN: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "a", "model_max_length": 1024}
WORDS = {"a": 0, "b": 1, "<s>": 2}


def written(folder: Path, config: object = None, tokenizer: Tokenizer | None = None) -> Path:
    (tokenizer or Tokenizer(WordLevel(WORDS, "a"))).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(PLAIN if config is None else config))
    return folder


def test_plain_ones_are_recognized(tmp_path: Path) -> None:
    assert surely_loads(DEMO / "target", 2048)
    assert surely_loads(written(tmp_path), 61)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert surely_loads(tmp_path, 61)


def oddities(folder: Path) -> dict[str, Any]:
    def rewrite(**fields: Any) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(content | fields))

    token = {
        "id": 2,
        "content": "<s>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {
        "no tokenizer.json": lambda: (folder / "tokenizer.json").unlink(),
        "no configuration": lambda: (folder / "tokenizer_config.json").unlink(),
        "older special tokens": lambda: (folder / "special_tokens_map.json").write_text("{}"),
        "older added tokens": lambda: (folder / "added_tokens.json").write_text("{}"),
        "several templates": lambda: (folder / "additional_chat_templates").mkdir(),
        "a damaged template": lambda: (folder / "chat_template.jinja").write_bytes(b"\xff\xfe"),
        "a template that is a folder": lambda: (folder / "chat_template.jinja").mkdir(),
        "a damaged configuration": lambda: (folder / "tokenizer_config.json").write_text("{"),
        "padding": lambda: rewrite(padding={"strategy": "BatchLongest"}),
        "truncation": lambda: rewrite(truncation={"max_length": 3}),
        "no added tokens": lambda: rewrite(added_tokens=None),
        "an odd added token": lambda: rewrite(added_tokens=[token | {"odd": 1}]),
        "an added token of another type": lambda: rewrite(added_tokens=[token | {"special": 1}]),
    }


@pytest.mark.parametrize("name", oddities(Path()))
def test_anything_else_is_left_to_transformers(tmp_path: Path, name: str) -> None:
    written(tmp_path)
    oddities(tmp_path)[name]()
    assert not surely_loads(tmp_path, 61)


def test_a_large_vocabulary_is_left_to_transformers(tmp_path: Path) -> None:
    assert not surely_loads(written(tmp_path), 128_256)


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(),
        st.sampled_from(["a", "\ud800", ""]),
    ),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
CLASS = st.sampled_from([*("PreTrainedTokenizerFast", "TokenizersBackend") * 4, "LlamaTokenizer", "Odd", None])
TOKEN = st.one_of(st.text(), st.none(), *[st.sampled_from(["a", "b", "<s>"])] * 4)
FIELDS = {
    **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), TOKEN),
    "clean_up_tokenization_spaces": st.booleans(),
    "model_max_length": st.one_of(st.integers(), st.floats()),
    "chat_template": st.text(),
}
RARE = dict.fromkeys(
    (*FIELDS, "mask_token", "add_bos_token", "added_tokens_decoder", "extra_special_tokens", "auto_map", "odd"), JSON
)
TOKENIZERS = [WordLevel(WORDS, "a"), BPE(WORDS, [])]


@examples(150)
@given(
    st.fixed_dictionaries({"tokenizer_class": CLASS}, optional=FIELDS),
    st.one_of(st.just({}), st.fixed_dictionaries({}, optional=RARE)),
    st.sampled_from(TOKENIZERS),
    st.lists(st.builds(AddedToken, st.text(min_size=1), special=st.booleans(), lstrip=st.booleans()), max_size=3),
)
def test_what_is_recognized_loads_as_it_is(
    config: dict[str, Any], odd: dict[str, Any], model: Any, added: list[AddedToken]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        tokenizer = Tokenizer(model)
        tokenizer.add_tokens(added)
        folder = written(Path(name), config | odd, tokenizer)
        if surely_loads(folder, 61):
            loaded = load_tokenizer(folder, CONFIG).backend_tokenizer
            assert loaded.get_vocab(with_added_tokens=False) == tokenizer.get_vocab(with_added_tokens=False)


# --- folders that have only SentencePiece's file ----------------------------------------------------------------------

MARKS = {"<|im_start|>": 420, "<mask>": 421, "[extra]": 422}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "added alone": {"added_tokens.json": MARKS},
    "added and named": {
        "added_tokens.json": MARKS,
        "tokenizer_config.json": {
            "additional_special_tokens": ["<mask>"],
            "pad_token": {"__type": "AddedToken", "content": "[extra]", **FLAGS},
        },
        "special_tokens_map.json": {name: {"content": text, **FLAGS} for name, text in NAMES.items()},
    },
    "described": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {str(i): {"content": t, "special": False, **FLAGS} for t, i in MARKS.items()}
        }
    },
}


def with_pieces(folder: Path, files: dict[str, Any]) -> Path:
    from tests.test_sentencepiece_bpe import trained

    (folder / "tokenizer.model").write_bytes(trained("as Llama 2"))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_beside_sentencepiece_s_are_found_anywhere(tmp_path: Path, layout: str) -> None:
    """The texts between them are sentencepiece's, as in transformers 4.57.1's LlamaTokenizer, which gives the same
    ids."""
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(
        model_file=str(with_pieces(tmp_path, LAYOUTS[layout]) / "tokenizer.model")
    )
    tokenizer, known = load_tokenizer(tmp_path, CONFIG), MARKS | {"<s>": 1, "</s>": 2}
    for parts in (
        ["hi ", "<mask>"],
        ["\n", "<|im_start|>", "user\nthe ", "<|im_start|>"],
        ["<mask>", "<mask>"],
        ["<mask>", " ", "<mask>", "a the"],
        ["  ", "<mask>", "  the  "],
        ["the", "[extra]", "the ", "[extra]", " the"],
        ["a ", "</s>", " b", "<s>", "c"],
    ):
        expected = [i for part in parts for i in ([known[part]] if part in known else theirs.encode(part))]
        assert tokenizer("".join(parts)).input_ids == [1, *expected]


def test_a_space_before_the_text_only(tmp_path: Path) -> None:
    """As transformers 4.57.1's LlamaTokenizer: it adds the space to the text and lets sentencepiece add none."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as protobuf

    folder = with_pieces(tmp_path, {"added_tokens.json": MARKS, "tokenizer_config.json": {"legacy": False}})
    model = protobuf.ModelProto.FromString((folder / "tokenizer.model").read_bytes())
    model.normalizer_spec.add_dummy_prefix = False
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    tokenizer = load_tokenizer(folder, CONFIG)
    for first, mark, rest in (
        ("hi the ", "<mask>", "the a"),
        ("  the", "</s>", " the"),
        (" ", "<|im_start|>", "user\nthe"),
        ("", "<mask>", "a"),
    ):
        expected = [*theirs.encode(" " + first if first else ""), (MARKS | {"</s>": 2})[mark], *theirs.encode(rest)]
        assert tokenizer(first + mark + rest).input_ids == [1, *expected]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {"added_tokens.json": {"<x>": 421}},
            "gives '<x>' the id 421, but tokenizer.model and the tokens before it leave 420 for it, which is not "
            "supported: put the model's tokenizer.json into the folder, as transformers saves it",
        ),
        (
            {"added_tokens.json": {"<s>": 420}},
            "gives '<s>' the id 420, but tokenizer.model and the tokens before it leave 1 for it",
        ),
        (
            {"tokenizer_config.json": {"bos_token": "zz"}},
            "tokenizer_config.json puts 'zz' around every text, which is no token of tokenizer.model: correct its "
            "bos_token and eos_token",
        ),
    ],
)
def test_tokens_that_are_not_where_they_should_be(tmp_path: Path, files: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        load_tokenizer(with_pieces(tmp_path, files), CONFIG)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("added_tokens.json", "3", "added_tokens.json does not hold a JSON object: download it again"),
        ("added_tokens.json", '{"<x>": -1}', "added_tokens.json has -1 as '<x>', expected a token id: correct it"),
        ("tokenizer_config.json", "", "tokenizer_config.json cannot be read as JSON (it is empty): download it again"),
        (
            "tokenizer_config.json",
            '{"eos_token": {"content": "a"}}',
            "has {'content': 'a'} as 'eos_token', expected the text of a token: correct it",
        ),
        (
            "special_tokens_map.json",
            '{"eos_token": {"text": "a"}}',
            "has {'text': 'a'} as 'eos_token', expected the text of a token: correct it",
        ),
        (
            "tokenizer_config.json",
            '{"additional_special_tokens": [3]}',
            "has [3] as 'additional_special_tokens', expected the texts of tokens: correct",
        ),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"x": {}}}',
            "as 'added_tokens_decoder', expected tokens, each with its content, by id",
        ),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": 5}',
            "has 5 as 'tokenizer_class', expected the name of a class: correct it",
        ),
        (
            "tokenizer_config.json",
            '{"chat_template": 5}',
            "has 5 as its chat template 'default', expected a text: correct it",
        ),
    ],
)
def test_settings_that_no_tokenizer_has(tmp_path: Path, file: str, content: str, says: str) -> None:
    (written(tmp_path) / file).write_text(content)
    with pytest.raises(GumihoError, match=re.escape(says)) as caught:
        load_tokenizer(tmp_path, CONFIG)
    assert str(tmp_path / file) in str(caught.value)


def test_a_dry_run_imports_no_transformers(tmp_path: Path) -> None:
    code = f"""
import sys
from exporter.cli import main
assert main(["--ckpt", {str(DEMO / "drafter")!r}, "--target", {str(DEMO / "target")!r},
    "--out", {str(tmp_path / "out")!r}, "--dry-run"]) == 0
heavy = {{"transformers", "torch._dynamo", "sympy", "onnx", "onnx_ir", "onnxscript",
    "onnxruntime", "huggingface_hub", "jinja2"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
