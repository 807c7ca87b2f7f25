"""Ids are those of sentencepiece itself, which trains the vocabularies and encodes the same texts."""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer

from exporter.checkpoints.gguf_tokenizer import write_tokenizer
from exporter.checkpoints.sentencepiece_bpe import read, tokenizer_of
from exporter.checkpoints.tokenizer import load_tokenizer
from runtime import InputError
from tests.test_tokenizer import CONFIG

TEXT = [
    "The archive keeps one record per parcel: when it came in, who brought it, and where it lies now.",
    "def lowest(shelf):\n    for place in sorted(shelf):\n        if place.free:\n            return place  # the "
    "first",
    "naïve café — déjà vu 2024,   3 spaces\tand a tab; x = [1, 22, 333]",
] * 3
FORMS: dict[str, dict[str, Any]] = {
    "as Llama 2": {},
    "as Gemma": {"add_dummy_prefix": False, "user_defined_symbols": ["\n\n", "<b>"]},
    "without bytes": {"byte_fallback": False},
    "trimmed and normalized": {"remove_extra_whitespaces": True, "normalization_rule_name": "nmt_nfkc"},
}


@cache
def trained(form: str, kind: str = "bpe") -> bytes:
    out, options = io.BytesIO(), {"byte_fallback": kind == "bpe", "remove_extra_whitespaces": False} | FORMS[form]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=out,
        model_type=kind,
        vocab_size=420 if options["byte_fallback"] else 150 if kind == "bpe" else 70,
        character_coverage=0.99,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        **{"normalization_rule_name": "identity", **options},
    )
    return out.getvalue()


@cache
def both(form: str) -> tuple[Any, Tokenizer, Tokenizer]:
    """sentencepiece's tokenizer, ours of its file, and ours of a GGUF's metadata."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer.model").write_bytes(trained(form))
        ours = tokenizer_of(read(folder / "tokenizer.model"))
        write_tokenizer(fields(form), folder)
        return (
            sentencepiece.SentencePieceProcessor(model_proto=trained(form)),
            ours,
            Tokenizer.from_file(f"{name}/tokenizer.json"),
        )


def fields(form: str) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes of a tokenizer.model."""
    model = sentencepiece_model_pb2.ModelProto.FromString(trained(form))
    texts, scores, kinds = zip(*((p.piece, p.score, p.type) for p in model.pieces), strict=True)
    rules = model.normalizer_spec
    return {
        f"tokenizer.ggml.{name}": value
        for name, value in {
            "model": "llama",
            "pre": "default",
            "tokens": list(texts),
            "scores": list(scores),
            "token_type": list(kinds),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
            "add_space_prefix": rules.add_dummy_prefix,
            "remove_extra_whitespaces": rules.remove_extra_whitespaces,
            "precompiled_charsmap": list(rules.precompiled_charsmap),
        }.items()
    }


@pytest.mark.parametrize("form", FORMS)
@given(
    text=st.text(st.sampled_from("aeinrt Td=[]:#1234\n\té—\U0001f98a,._<"), max_size=60)
    | st.lists(
        st.sampled_from(["  ", "    ", "\n\n", "place", " the", "<b>", "<0x41>", "22", "é", "日本"]), max_size=9
    ).map("".join)
    | st.text(max_size=20)
    | st.sampled_from(TEXT)
)
@example(text=" leading")
@example(text="   ")
@example(text="a  b   c    d" + " " * 17)
def test_ids_are_sentencepiece_s(form: str, text: str) -> None:
    theirs, *ours = both(form)
    if any(special in text for special in ("<s>", "</s>", "<unk>", "\0", "\u2581")):
        return  # which sentencepiece takes for text; a NUL ends it
    expected = theirs.encode(text)
    for tokenizer in ours:
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected
    if form in ("as Llama 2", "as Gemma"):
        assert ours[0].decode(expected) == theirs.decode(expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "scores",
            None,
            "the tokenizer has no tokenizer.ggml.scores, without which it is not supported: convert the model again, "
            "or name ",
        ),
        (
            "token_type",
            None,
            "the tokenizer has no tokenizer.ggml.token_type, without which it is not supported: convert the model "
            "again",
        ),
        ("scores", [float("nan")] * 420, "tokenizer.ggml.scores holds NaN or infinity: convert the model again"),
        (
            "scores",
            [0.0] * 420,
            "the tokenizer gives '▁▁' and '▁▁▁▁' the same score, so that a text decides which is made first, which is "
            "not supported: convert the model again, or name another target",
        ),
        (
            "add_space_prefix",
            1,
            "tokenizer.ggml.add_space_prefix is 1, expected true or false: convert the model again",
        ),
        (
            "precompiled_charsmap",
            "x",
            "tokenizer.ggml.precompiled_charsmap is 'x', expected a list of whole numbers: convert the model again",
        ),
    ],
)
def test_what_no_converter_writes_is_refused(name: str, value: Any, message: str, tmp_path: Path) -> None:
    """llama.cpp takes the leftmost of pieces with the same score, and bytes for text if there are no types."""
    changed = fields("as Llama 2") | {f"tokenizer.ggml.{name}": value}
    with pytest.raises(InputError) as raised:
        write_tokenizer({key: own for key, own in changed.items() if own is not None}, tmp_path)
    assert str(raised.value).startswith(message)


def test_a_folder_with_sentencepiece_s_file_alone(tmp_path: Path) -> None:
    """Vicuna's, with the settings that Llama's tokenizers have had since 2023."""
    (tmp_path / "tokenizer.model").write_bytes(trained("as Llama 2"))
    token = {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "eos_token": {"__type": "AddedToken", **token}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer, theirs = load_tokenizer(tmp_path, CONFIG), both("as Llama 2")[0]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    for text in TEXT:
        assert tokenizer(text).input_ids == [1, *theirs.encode(text)]
    assert tokenizer.decode(tokenizer("a  b</s>").input_ids) == "<s> a  b</s>"


def test_other_models_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    for content in (trained("as Llama 2", "unigram"), b"IQ== 0\nIg== 1\n", b""):
        file.write_bytes(content)
        with pytest.raises(
            InputError, match="is no SentencePiece model of byte pairs: put the model's tokenizer.json into"
        ):
            load_tokenizer(tmp_path, CONFIG)
