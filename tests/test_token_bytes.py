"""What tokens spell against the tokenizers library's own decoding."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from runtime.decoding.token_bytes import spell
from runtime.errors import GumihoError

DEMO = (Path(__file__).parent.parent / "demo/target/tokenizer.json").read_text("utf-8")


def metaspace(decoder: Any = None) -> Tokenizer:
    """As Llama 2's: words with their space in front, and bytes for what no piece spells. Id 3 + b is byte b."""
    pieces = ["▁", "a", "b", "▁a", "▁b", "ab", "é", "▁é", "▁▁", "{", "▁{", '"', "<0x", "0", "<0xZZ>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoder or decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def added() -> Tokenizer:
    """The demo's with added tokens, some of characters that stand for no byte, or for another one."""
    tokenizer = Tokenizer.from_str(DEMO)
    tokenizer.add_tokens(["ab cd", "日本", "<think>", "é", "a\u00a0b"])
    tokenizer.add_special_tokens(["<|eot_id|>"])
    return tokenizer


TOKENIZERS = {"demo": Tokenizer.from_str(DEMO), "metaspace": metaspace(), "added": added()}
SPELLED = {name: spell(tokenizer.to_str()) for name, tokenizer in TOKENIZERS.items()}


def is_decoded(tokenizer: Tokenizer, ids: list[int], spelled: bytes) -> bool:
    # A space that opens the text is another matter.
    text = tokenizer.decode([tokenizer.token_to_id("a"), *ids])
    try:
        return bool(text == "a" + spelled.decode())
    except UnicodeDecodeError:
        return "\ufffd" in text  # for a part of a character, but how often depends on the tokenizer


@pytest.mark.parametrize("name", TOKENIZERS)
def test_each_token_is_decoded_as_it_is_spelled(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert not [i for i, spelled in SPELLED[name].items() if not is_decoded(tokenizer, [i], spelled)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.data())
def test_a_text_is_what_its_tokens_spell(name: str, data: st.DataObject) -> None:
    spelled = SPELLED[name]
    ids = data.draw(st.lists(st.sampled_from(sorted(spelled)), min_size=1, max_size=8))
    assert is_decoded(TOKENIZERS[name], ids, b"".join(spelled[i] for i in ids))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_spell_nothing(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert special
    assert set(SPELLED[name]) == set(tokenizer.get_vocab().values()) - special


def test_every_byte_is_spelled_once() -> None:
    assert sorted(b for b in spell(DEMO).values() if len(b) == 1) == [bytes([b]) for b in range(256)]
    assert [spell(metaspace().to_str())[3 + b] for b in range(256)] == [bytes([b]) for b in range(256)]


def test_a_unigram_model() -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0)], unk_id=0, byte_fallback=False))
    tokenizer.decoder = decoders.Metaspace()
    assert spell(tokenizer.to_str()) == {0: b"<unk>", 1: b" a", 2: b"b"}


def test_tokens_that_spell_nothing_alone_are_refused() -> None:
    with pytest.raises(GumihoError, match="its decoder is WordPiece"):
        spell(metaspace(decoders.WordPiece()).to_str())
    with pytest.raises(GumihoError, match="its decoder is none"):
        spell(json.dumps(json.loads(DEMO) | {"decoder": None}))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": {"vocab": 3}}', DEMO[:1000]])
def test_damage(text: str) -> None:
    with pytest.raises(GumihoError, match="the tokenizer is damaged"):
        spell(text)
