"""Tokenizers of GGUF files give the ids and the ends that llama.cpp gives, as recorded by tools/record_llama_cpp.py."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from exporter.checkpoints.gguf_tokenizer import write_tokenizer
from exporter.checkpoints.pre_tokenizers import PRE_TOKENIZERS

RECORDED = json.loads((Path(__file__).parent / "recorded" / "llama_cpp.json").read_text("utf-8"))
# Where the models' own tokenizers differ from llama.cpp, they are followed: Qwen's composes characters, and those of
# Mistral and of GPT-4o know marks, and the case of letters beyond a to z.
COMPOSED, CASED = ("e\u0301",), ("e\u0301", "Ñandú", "हिन्दी")


def written(fields: dict[str, Any], folder: Path) -> tuple[Tokenizer, list[int], list[str]]:
    """The tokenizer, the ends of a text and the notes."""
    notes = write_tokenizer(
        {name if "." in name else f"tokenizer.ggml.{name}": value for name, value in fields.items()}, folder
    )
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return Tokenizer.from_file(str(folder / "tokenizer.json")), ends, notes


@pytest.mark.parametrize("pre", RECORDED["pre"])
def test_texts_are_split_as_llama_cpp_splits_them(pre: str, tmp_path: Path) -> None:
    tokenizer, _, notes = written(RECORDED["byte level"] | ({"pre": pre} if pre else {}), tmp_path)
    rules = PRE_TOKENIZERS[pre or "default"]
    own = COMPOSED if rules.composes else CASED if r"\p{Lu}" in rules.patterns[0] else ()
    for text, ids in zip(RECORDED["texts"], RECORDED["splits"][RECORDED["pre"][pre]], strict=True):
        if not any(other in text for other in own):
            assert tokenizer.encode(text).ids == ids, text
    assert [note[:54] for note in notes] == ([] if pre else ["the file does not say how its tokenizer splits a text "])


def test_every_pre_tokenizer_is_recorded() -> None:
    assert RECORDED["pre"].keys() == {"", *PRE_TOKENIZERS}


@pytest.mark.parametrize(
    "case", RECORDED["sentencepiece"], ids=["as it is", "no prefix", "with an end", "without ids", "of Phi-3"]
)
def test_special_tokens_of_sentencepiece(case: dict[str, Any], tmp_path: Path) -> None:
    tokenizer, ends, _ = written(case["fields"], tmp_path)
    assert [tokenizer.encode(text).ids for text in RECORDED["texts"]] == case["ids"]
    assert sorted(ends) == case["ends"]


def with_tokens(case: dict[str, Any], kind: int) -> dict[str, Any]:
    """The vocabulary of pieces, with a case's tokens behind them and its keys."""
    base = RECORDED["sentencepiece"][0]["fields"]
    tokens = ["<none>" if text == "</s>" else text for text in base["tokens"]]
    return (
        base
        | {
            "tokens": [*tokens, *case["tokens"]],
            "token_type": base["token_type"] + [kind] * len(case["tokens"]),
            "scores": base["scores"] + [0.0] * len(case["tokens"]),
        }
        | {f"{name}_token_id": len(tokens) + i for name, i in case["keys"].items()}
    )


def test_texts_end_where_llama_cpp_ends_them(tmp_path: Path) -> None:
    for case in RECORDED["ends"]:
        assert sorted(written(with_tokens(case, 3), tmp_path)[1]) == case["ids"], case["tokens"]


def test_spelling_makes_tokens_special_and_others_normal(tmp_path: Path) -> None:
    for case in RECORDED["spelled"]:
        tokenizer, ends, _ = written(with_tokens(case, case["kind"]), tmp_path)
        assert [tokenizer.encode(f"a{text}b").ids for text in case["tokens"]] == case["ids"], case
        assert sorted(ends) == case["ends"], case["tokens"]


def test_a_token_that_looks_like_an_end_is_special_whatever_its_type(tmp_path: Path) -> None:
    """llama.cpp overrides the type, which some converters get wrong."""
    base = RECORDED["byte level"]
    fields = base | {
        "pre": "qwen2",
        "tokens": [*base["tokens"], "<|im_end|>"],
        "token_type": [1] * (len(base["tokens"]) + 1),
    }
    tokenizer, ends, _ = written(fields, tmp_path)
    end = len(base["tokens"])
    assert tokenizer.encode("a<|im_end|>").ids[-1] == end
    assert tokenizer.decode([end]) == ""
    assert end in ends
