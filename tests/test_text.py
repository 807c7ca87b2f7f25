"""The text of a generation against a function that decodes everything anew at every token and looks at all of it."""

from collections.abc import Collection, Sequence
from itertools import accumulate, chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from runtime.decoding.text.stream import TextStream
from tests.conftest import DEMO, examples

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
BYTE_LEVEL = Tokenizer.from_file(str(DEMO / "target/tokenizer.json"))
WORDS = ("a", "b", "ab", "ba", "aab", "▁", "▁a", "▁b", "é", "b数", "c")
FIRST_BYTE = 2 + len(WORDS)


def byte_fallback() -> Tokenizer:
    """Of Llama 2's kind: spaces are letters, characters it has no token for are bytes, and a text's first space is
    dropped."""
    names = ["<s>", "</s>", *WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return made


BYTE_FALLBACK = byte_fallback()


def raw(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text's bytes, one a token."""
    if tokenizer is BYTE_FALLBACK:
        return [FIRST_BYTE + byte for byte in text.encode()]
    # The alphabet of byte-level tokenizers: bytes that can be printed stand for themselves, others for what follows
    # U+0100.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + i) for i, byte in enumerate(sorted(set(range(256)) - set(plain)))
    }
    return [tokenizer.token_to_id(names[byte]) for byte in text.encode()]


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True)


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    before, whole = decode(tokenizer, prompt), decode(tokenizer, [*prompt, *ids])
    assert whole.startswith(before)
    return whole[len(before) :]


def text_and_length(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], stop: Sequence[str], least: int = 0
) -> tuple[str, int]:
    """Where a text ends that is stopped, by looking at all of it after every token; and after how many tokens.

    least: tokens before which no stop string counts. Stop strings without U+FFFD.
    """
    known = ""
    for n in range(1, len(ids) + 1):
        if decode(tokenizer, [*prompt, *ids[:n]]).endswith(UNKNOWN):
            continue
        text = continuation(tokenizer, prompt, ids[:n])
        ends = [(at, at + len(s)) for s in stop for at in range(len(text)) if text.startswith(s, at)]
        if n >= least and (new := [start for start, end in ends if end > len(known)]):
            return text[: min(new)], n
        known = text
    return continuation(tokenizer, prompt, ids), len(ids)


def streamed(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    ids: Sequence[int],
    stop: Sequence[str] = (),
    least: int = 0,
    shown: Collection[int] | None = None,
) -> tuple[list[str], int]:
    """The pieces as a generation yields them, and how many tokens it took. shown: after how many tokens it yields; None
    for all."""
    stream, pieces = TextStream(tokenizer, prompt, stop), list[str]()
    for n, token in enumerate(ids, 1):
        piece = stream.push(token)
        ended = n >= least and stream.stopped(piece)
        if ended or shown is None or n in shown:
            pieces.append(stream.take())
        if ended:
            return [*pieces, stream.rest()], n
        if (shown is None or n in shown) and not decode(tokenizer, [*prompt, *ids[:n]]).endswith(UNKNOWN):
            held = continuation(tokenizer, prompt, ids[:n])[len("".join(pieces)) :]
            assert any(s.startswith(held) for s in ("", *stop)), f"{held!r} is held back for nothing"
    return [*pieces, stream.rest()], len(ids)


def freely(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text as it is shown after every token, without stop strings."""
    stream, text = TextStream(tokenizer, prompt), ""
    for token in ids:
        stream.push(token)
        text += stream.take()
    text += stream.rest()
    assert stream.rest() == ""
    return text


TEXT = st.lists(st.sampled_from(["a", "b", "ab", " ", "é", "数", "数", "🦊", "Ω"]), max_size=12).map("".join)


@st.composite
def tokens(draw: st.DrawFn, tokenizer: Tokenizer, most: int = 24) -> list[int]:
    """Any tokens, of which those that are bytes make up whole characters."""
    if tokenizer is BYTE_FALLBACK:
        word = st.integers(0, FIRST_BYTE - 1).map(lambda i: [i])
    else:
        names = ("a", "b", "ab", "aa", "ba", " a", " b", "\n", "    ", "self")
        ids = [
            0,
            1,
            *(
                i
                for name in names
                if len(found := tokenizer.encode(name, add_special_tokens=False).ids) == 1
                for i in found
            ),
        ]
        word = st.sampled_from(ids).map(lambda i: [i])
    character = st.sampled_from("ab é数🦊").map(lambda c: raw(tokenizer, c))
    return list(chain.from_iterable(draw(st.lists(st.one_of(word, character), max_size=most))))


KINDS = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])


@KINDS
@given(data=st.data())
def test_pieces_are_the_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Every token's piece is of whole characters, and all of them are what decoding adds to the prompt."""
    prompt, ids = data.draw(tokens(tokenizer)), data.draw(tokens(tokenizer))
    pieces, count = streamed(tokenizer, prompt, ids)
    assert "".join(pieces) == continuation(tokenizer, prompt, ids)
    assert not any(UNKNOWN in piece for piece in pieces)
    assert count == len(ids)


@KINDS
@given(data=st.data())
def test_a_character_is_shown_with_its_last_byte(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Not before it, and not later: pieces are cut where characters are."""
    text = data.draw(TEXT.filter(bool))
    prompt = [0, *raw(tokenizer, "ab")]
    pieces, _ = streamed(tokenizer, prompt, raw(tokenizer, text))
    ends = dict(zip(accumulate(len(c.encode()) for c in text), text, strict=True))
    assert pieces == [ends.get(n, "") for n in range(1, len(text.encode()) + 1)] + [""]


@KINDS
@given(data=st.data())
def test_the_prompt_may_break_off_within_a_character(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Then the character is the continuation's, and nothing else of the prompt is."""
    before, character, after = data.draw(TEXT), data.draw(st.sampled_from("é数🦊")), data.draw(TEXT)
    ids = [0, *raw(tokenizer, before + character + after)]
    cut = 1 + len(before.encode()) + data.draw(st.integers(1, len(character.encode()) - 1))
    assert freely(tokenizer, ids[:cut], ids[cut:]) == character + after


@KINDS
@given(data=st.data())
def test_the_prompt_may_end_in_an_unknown_character(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Which is no part of the continuation, whether it was written so or was never a character."""
    after = "b数" + data.draw(TEXT)
    ids = [BYTE_FALLBACK.token_to_id("b数")] if tokenizer is BYTE_FALLBACK else raw(tokenizer, "b数")
    broken = data.draw(st.sampled_from([raw(tokenizer, UNKNOWN), raw(tokenizer, "数")[:1], raw(tokenizer, "🦊")[:3]]))
    assert freely(tokenizer, [0, *ids, *broken], [*ids, *raw(tokenizer, after[2:])]) == after


def lossy(tokenizer: Tokenizer, content: bytes) -> str:
    """Where bytes are tokens, one that begins no character makes unknown what is behind it, up to a token that is
    none."""
    if tokenizer is BYTE_LEVEL:
        return content.decode(errors="replace")
    good = next(n for n in range(len(content), -1, -1) if UNKNOWN not in content[:n].decode(errors="replace"))
    return content[:good].decode() + UNKNOWN * (len(content) - good)


@KINDS
@given(data=st.data())
def test_bytes_that_are_no_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """A target that is sampled hot writes any bytes. They are shown as unknown, in one piece or several, and break
    nothing."""
    some = "ab数é\n".encode()
    runs = data.draw(st.lists(st.lists(st.sampled_from(some), max_size=6).map(bytes), max_size=5))
    word = [BYTE_FALLBACK.token_to_id("b数")] if tokenizer is BYTE_FALLBACK else raw(tokenizer, "b数")
    numbers = dict(zip(some, raw(tokenizer, "ab数é\n"), strict=True))
    ids = [i for run in runs for i in (*(numbers[byte] for byte in run), *word)]
    assert freely(tokenizer, [0, *word], ids) == "".join(lossy(tokenizer, run) + "b数" for run in runs)


@KINDS
@examples(400)
@given(data=st.data())
def test_stop_strings(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Text and length as all of the text says: stop strings within a token and over several, that overlap, lie in one
    another, begin like one another or like the text, stand in the prompt or half in it; shown after every token, or
    after some, as blocks are."""
    prompt, ids = data.draw(tokens(tokenizer, 8)), data.draw(tokens(tokenizer))
    text = decode(tokenizer, [*prompt, *ids])
    stop = set[str]()
    for _ in range(data.draw(st.integers(1, 4))):
        start, size = data.draw(st.integers(0, len(text))), data.draw(st.integers(1, 7))
        taken = text[start : start + size]
        stop |= {taken + data.draw(st.sampled_from(["", "", "a", "b", "c"])), taken[: data.draw(st.integers(0, size))]}
    strings = data.draw(st.permutations(sorted(stop - {""})))
    least = data.draw(st.sampled_from([0, 0, 0, 3, 9]))
    shown = data.draw(st.one_of(st.none(), st.sets(st.integers(1, 30))))
    wanted = text_and_length(tokenizer, prompt, ids, strings, least)
    pieces, count = streamed(tokenizer, prompt, ids, strings, least, shown)
    assert ("".join(pieces), count) == wanted


@pytest.mark.parametrize(
    ("words", "stop", "text", "count"),
    [
        (["a", "b", "a"], ["b"], "a", 2),
        (["a", "ab", "c"], ["ba"], "aabc", 3),
        (["a", "ba", "b"], ["ab"], "", 2),
        (["a", "a", "b", "c"], ["ab"], "a", 3),
        (["ab", "a", "b", "c"], ["bab", "ba"], "a", 2),  # the shorter one is there first
        (["aab", "c"], ["b", "aab"], "", 1),  # both come with one token: the one that begins first counts
        (["aab", "c"], ["ab", "a"], "", 1),
        (["a", "▁", "a", "b"], [" ab"], "a", 4),
        (["b", "a", "b"], ["xb", "aba"], "bab", 3),
        (["é", "b数", "c"], ["数c", "éb数d"], "éb", 3),
    ],
)
def test_stop_strings_by_hand(words: list[str], stop: list[str], text: str, count: int) -> None:
    prompt, ids = [0, *raw(BYTE_FALLBACK, "ab")], [2 + WORDS.index(word) for word in words]
    pieces, taken = streamed(BYTE_FALLBACK, prompt, ids, stop)
    assert ("".join(pieces), taken) == (text, count)
