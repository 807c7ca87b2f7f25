"""Guides against brute force over small vocabularies, and what they let through against parsers of its language."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache, reduce
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from runtime.decoding.grammar import Grammar, GrammarMatchers
from runtime.decoding.grammar_matcher import GrammarMatcher
from runtime.errors import GumihoError, InputError, MisuseError, UnavailableError
from tests.conftest import examples
from tests.test_token_bytes import DEMO, metaspace

Node = tuple[str, Any]
PADDING = 5  # rows of logits behind the tokenizer's last id

# A byte-level vocabulary with parts of characters and tokens across them. Ids 0 and 1 are special, and so are the last
# two.
SPELLED = [
    *(c.encode() for c in 'abc01 \n"{}[]:,.+-*/()'),
    b"\xc3",
    b"\xa9",
    b"\xa8",
    b"\xe2",
    b"\x82",
    b"\xac",
    b"\x80",
    *(t.encode() for t in ("ab", "ba", "abc", "aé", "é", "€", "01", "a b", "\n\n", '{"', '":', "a1", "(1", "1)")),
    b"a\xc3",
    b"\xa9b",
    b"\xe2\x82",
    b"\x82\xacc",
]
TEXT = range(2, 2 + len(SPELLED))
BEGIN, UNUSED, END, TURN = 0, 1, TEXT.stop, TEXT.stop + 1
WIDTH = TURN + 1 + PADDING


def tiny() -> Tokenizer:
    # The library writes what it spells: not a line of the table under test.
    write = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    table = {byte: char for char, byte in _byte_characters(write)}
    vocabulary = {"".join(table[byte] for byte in spelled): i for i, spelled in zip(TEXT, SPELLED, strict=True)}
    special = {"<s>": BEGIN, "<unused>": UNUSED, "</s>": END, "<turn>": TURN}
    tokenizer = Tokenizer(models.BPE(vocabulary | special, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _byte_characters(write: Any) -> Iterator[tuple[str, int]]:
    """Pairs of a character and its byte, for every byte that UTF-8 has."""
    for code in [*range(0x800), *range(0x800, 0xD800, 64), *range(0xE000, 0x110000, 64)]:
        yield from zip(write.pre_tokenize_str(chr(code))[0][0], chr(code).encode(), strict=True)


TINY = GrammarMatchers(tiny().to_str(), WIDTH, [END, TURN])


def allowed(matcher: GrammarMatcher, width: int = WIDTH) -> set[int]:
    row = np.arange(width, dtype=np.float32)
    matcher.mask(row)
    kept = np.flatnonzero(row != -np.inf)
    assert np.array_equal(row[kept], kept)
    return set(kept.tolist())


# ---- regular expressions ----

LETTERS = "abc01 \né€"
WHOLE: Node = ("all", ())  # a language that holds the empty text alone: all of nothing, one after the other
EMPTY: Node = ("any", frozenset())  # and one that holds no text


def some(characters: str, negated: bool = False) -> Node:
    return ("none of" if negated else "one of", frozenset(characters))


def joined(*parts: Node) -> Node:
    flat = tuple(inner for part in parts for inner in (part[1] if part[0] == "all" else (part,)))
    return EMPTY if EMPTY in flat else flat[0] if len(flat) == 1 else ("all", flat)


def either(*parts: Node) -> Node:
    flat = frozenset(inner for part in parts for inner in (part[1] if part[0] == "any" else (part,)))
    return next(iter(flat)) if len(flat) == 1 else ("any", flat)


def repeated(part: Node, least: int, most: int | None) -> Node:
    rest = ("many", part) if most is None else joined(*[either(part, WHOLE)] * (most - least))
    return joined(*[part] * least, rest)


def is_whole(node: Node) -> bool:
    """Whether the language holds the empty text."""
    kind, inner = node
    return kind == "many" or (
        kind in ("all", "any") and {"all": all, "any": any}[kind](is_whole(part) for part in inner)
    )


@lru_cache(10000)
def behind(node: Node, character: str) -> Node:
    """The language of what follows the character (Brzozowski's derivative); EMPTY where nothing does."""
    kind, inner = node
    if kind in ("one of", "none of"):
        return WHOLE if (character in inner) == (kind == "one of") else EMPTY
    if kind == "many":
        return joined(behind(inner, character), node)
    if kind == "any":
        return either(*(behind(part, character) for part in inner))
    if node == WHOLE:
        return EMPTY
    first, rest = inner[0], joined(*inner[1:])
    return either(joined(behind(first, character), rest), behind(rest, character) if is_whole(first) else EMPTY)


def leads_on(node: Node, text: bytes) -> bool:
    """Whether a text of the language begins with this one."""
    try:
        return reduce(behind, text.decode(), node) != EMPTY
    except UnicodeDecodeError as error:
        node, cut = reduce(behind, text[: error.start].decode(), node), text[error.start :]
        return any(behind(node, c) != EMPTY for c in completions(cut))


def completions(cut: bytes) -> list[str]:
    """Characters that begin with these bytes: all that a pattern can tell apart."""
    known = [c for c in LETTERS if c.encode().startswith(cut)]
    for rest in range(1, 4):
        try:
            return [*known, (cut + b"\x80" * rest).decode()]
        except UnicodeDecodeError:
            continue
    return []


def classes(negated: bool) -> st.SearchStrategy[tuple[str, Node]]:
    letters = st.sets(st.sampled_from(LETTERS), min_size=1, max_size=4).map(sorted).map("".join)
    return letters.map(lambda s: (f"[{'^' * negated}{s}]", some(s, negated)))


COUNTS = {
    "*": (0, None),
    "+": (1, None),
    "?": (0, 1),
    "{2}": (2, 2),
    "{1,3}": (1, 3),
    "{0,2}": (0, 2),
    "{2,}": (2, None),
}


def larger(inner: st.SearchStrategy[tuple[str, Node]]) -> st.SearchStrategy[tuple[str, Node]]:
    several = st.lists(inner, min_size=2, max_size=4)
    return (
        several.map(lambda parts: ("".join(t for t, _ in parts), joined(*(n for _, n in parts))))
        | several.map(lambda parts: (f"(?:{'|'.join(t for t, _ in parts)})", either(*(n for _, n in parts))))
        | st.builds(
            lambda part, n: (f"(?:{part[0]}){n}", repeated(part[1], *COUNTS[n])), inner, st.sampled_from([*COUNTS])
        )
    )


LEAVES = (
    st.sampled_from(LETTERS).map(lambda c: (c, some(c)))
    | st.just((".", some("\n", True)))
    | classes(False)
    | classes(True)
)
PATTERNS = st.recursive(LEAVES, larger, max_leaves=8)


def matches(pattern: str, text: bytes) -> bool:
    try:
        return re.fullmatch(pattern, text.decode()) is not None
    except UnicodeDecodeError:
        return False


@examples(300)
@given(PATTERNS, st.integers(0, 2**32))
def test_regex_against_brute_force(drawn: tuple[str, Node], seed: int) -> None:
    (pattern, node), random, spelled = drawn, Random(seed), b""
    matcher = TINY.start(Grammar.regex(pattern))
    for _ in range(8):
        expected = {i for i, token in zip(TEXT, SPELLED, strict=True) if leads_on(node, spelled + token)}
        whole = matches(pattern, spelled)
        assert matcher.done == (whole and not expected)
        if not whole and not expected:
            with pytest.raises(GumihoError, match="nothing can follow"):
                matcher.mask(np.zeros(WIDTH, np.float32))
            return
        expected |= {END, TURN} if whole else set()
        assert allowed(matcher) == expected
        for token in set(range(WIDTH)) - expected:
            with pytest.raises(GumihoError, match=f"token {token} cannot follow"):
                matcher.accept(token)
        token = random.choice(sorted(expected))
        matcher.accept(token)
        if token in (END, TURN):
            assert matcher.done
            with pytest.raises(GumihoError, match="nothing can follow"):
                matcher.mask(np.zeros(WIDTH, np.float32))
            with pytest.raises(GumihoError, match="cannot follow"):
                matcher.accept(token)
            return
        spelled += SPELLED[token - TEXT.start]


# ---- rewinding ----

REWOUND = [
    Grammar.regex(r"(?:ab|é)*[01]{2,4}"),
    Grammar.json({"type": "object"}),
    Grammar.lark('start: e\ne: e "+" e | "(" e ")" | /[01]+/'),
    Grammar.lark('start: "a" x "c"\nx[max_tokens=3]: /[ab]*/'),  # has no way back in the library
]


@pytest.mark.parametrize("grammar", REWOUND, ids=lambda g: g.text[:20])
@examples(40)
@given(seed=st.integers(0, 2**32))
def test_rewinding_leads_to_the_same_masks(grammar: Grammar, seed: int) -> None:
    matcher, path, random = TINY.start(grammar), [], Random(seed)
    for _ in range(30):
        if path and random.random() < 0.3:
            count = random.randint(0, len(path))
            matcher.rewind(count)
            del path[len(path) - count :]
        if path and path[-1] in (END, TURN):
            assert matcher.done
            continue
        fresh = TINY.start(grammar)
        for token in path:
            fresh.accept(token)
        options = allowed(matcher)
        assert (matcher.done, options) == (fresh.done, allowed(fresh))
        token = random.choice(sorted(options))
        matcher.accept(token)
        path.append(token)


def test_rewinding_further_than_the_start() -> None:
    matcher = TINY.start(Grammar.regex("ab*"))
    matcher.accept(TEXT[0])
    for count in (2, -1):
        with pytest.raises(MisuseError, match="1 were accepted"):
            matcher.rewind(count)
    matcher.rewind(1)
    assert allowed(matcher) == {i for i, t in zip(TEXT, SPELLED, strict=True) if t in (b"a", b"ab")}


# ---- JSON ----

SCHEMAS: dict[str, Any] = {
    "required": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "null"}},
        "required": ["a", "c"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["a", "größe", "日本", 3, None, True, {"x": [1]}, 'q"\\']},
    "bounds": {
        "type": "array",
        "items": {"type": "integer", "minimum": -17, "maximum": 230},
        "minItems": 1,
        "maxItems": 4,
    },
    "number": {"type": "number", "exclusiveMinimum": 0.5, "maximum": 2.25},
    "strings": {
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": 6},
        "minItems": 2,
        "maxItems": 3,
    },
    "pattern": {"type": "string", "pattern": "^[é€ü]{2,5}$"},
    "nested": {
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2},
            "or": {"anyOf": [{"type": "string", "maxLength": 3}, {"$ref": "#/$defs/point"}]},
        },
        "required": ["list", "or"],
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
        "additionalProperties": False,
    },
}

TOKENIZERS = {"demo": Tokenizer.from_str(DEMO), "metaspace": metaspace()}
ENDS = {"demo": [1], "metaspace": [2]}
WIDTHS = {name: tokenizer.get_vocab_size() + PADDING for name, tokenizer in TOKENIZERS.items()}
MATCHERS = {name: GrammarMatchers(t.to_str(), WIDTHS[name], ENDS[name]) for name, t in TOKENIZERS.items()}


def walk(name: str, grammar: Grammar, seed: int, steps: int = 4000) -> str:
    """The text of tokens drawn among those allowed until an end is."""
    matcher, random = MATCHERS[name].start(grammar), np.random.default_rng(seed)
    prompt = [TOKENIZERS[name].token_to_id("a")]
    stream, text = DecodeStream(ids=prompt), ""
    for _ in range(steps):
        token = int(random.choice(sorted(allowed(matcher, WIDTHS[name]))))
        matcher.accept(token)
        if token in ENDS[name]:
            return text
        text += stream.step(TOKENIZERS[name], token) or ""
    raise AssertionError(f"no end: {text[:200]}")


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("schema", SCHEMAS)
def test_json_walks_are_what_the_schema_wants(tokenizer: str, schema: str) -> None:
    for seed in range(5):
        text = walk(tokenizer, Grammar.json(SCHEMAS[schema]), seed)
        jsonschema.validate(json.loads(text), SCHEMAS[schema])
        assert text == text.strip()


@pytest.mark.parametrize("schema", SCHEMAS)
def test_json_may_end_where_it_is_whole(schema: str) -> None:
    """At every step of a walk, and only there."""
    matcher, spelled, random = TINY.start(Grammar.json(SCHEMAS[schema])), b"", np.random.default_rng(3)
    for _ in range(150):
        try:
            jsonschema.validate(json.loads(spelled.decode()), SCHEMAS[schema])
            whole = True
        except (ValueError, jsonschema.ValidationError):
            whole = False
        options = allowed(matcher) if whole or not stuck(matcher) else set()
        assert ({END, TURN} <= options) == whole
        if not options - {END, TURN}:
            return
        token = int(random.choice(sorted(options - {END, TURN})))
        matcher.accept(token)
        spelled += SPELLED[token - TEXT.start]


def stuck(matcher: GrammarMatcher) -> bool:
    """Whether the tiny vocabulary cannot spell what the grammar wants."""
    try:
        matcher.mask(np.zeros(WIDTH, np.float32))
    except GumihoError:
        return True
    return False


def test_a_schema_is_text_or_an_object() -> None:
    assert Grammar.json('{"const": "é"}').text == '{"const": "é"}'
    for grammar in (
        Grammar.json('{"const": "é"}'),
        Grammar.json({"const": "é"}),
        Grammar("json", '{"const": "\\u00e9"}'),
    ):
        assert walk("demo", grammar, 0) == '"é"'
    jsonschema.validate(
        json.loads(walk("demo", Grammar.json({"type": "array", "items": True, "maxItems": 1}), 0)), {"maxItems": 1}
    )


def test_compact_json() -> None:
    schema = SCHEMAS["required"] | {"x-guidance": {"whitespace_flexible": False}}
    text = walk("demo", Grammar.json(schema), 0)
    assert text == json.dumps(json.loads(text), separators=(",", ":"))


def test_metaspace_json_starts_with_its_brace() -> None:
    """And tokens spelled alike, a piece and its byte, stand or fall together."""
    tokenizer, matcher = TOKENIZERS["metaspace"], MATCHERS["metaspace"].start(Grammar.json({"type": "object"}))
    ids = {token: tokenizer.token_to_id(token) for token in ("{", "▁{", "<0x7B>", '"', "<0x22>", "▁", "<0x20>", "▁▁")}
    assert allowed(matcher, WIDTHS["metaspace"]) == {ids["{"], ids["<0x7B>"]}
    for token in ("<0x7B>", "<0x22>"):
        matcher.accept(ids[token])
    matcher.rewind(1)
    after = allowed(matcher, WIDTHS["metaspace"])
    assert {ids[token] for token in ('"', "<0x22>", "▁", "<0x20>", "▁▁")} <= after
    assert not {ids["{"], ids["<0x7B>"], ids["▁{"]} & after
    matcher.accept(ids['"'])


# ---- Lark ----

ARITHMETIC = 'start: e\ne: t (("+" | "-") t)*\nt: f (("*" | "/") f)*\nf: /[01]+/ | "-" f | "(" e ")"\n'


class Parser:
    """Recursive descent over the same language; raises ValueError for what is not of it."""

    def __init__(self, text: str) -> None:
        self.rest = text

    def take(self, options: str) -> str:
        if not self.rest or self.rest[0] not in options:
            raise ValueError(self.rest)
        taken, self.rest = self.rest[0], self.rest[1:]
        return taken

    def sums(self) -> None:
        self.products()
        while self.rest[:1] in ("+", "-"):
            self.take("+-")
            self.products()

    def products(self) -> None:
        self.factor()
        while self.rest[:1] in ("*", "/"):
            self.take("*/")
            self.factor()

    def factor(self) -> None:
        taken = self.take("01-(")
        if taken == "(":
            self.sums()
            self.take(")")
        elif taken == "-":
            self.factor()
        else:
            self.rest = self.rest.lstrip("01")


def parses(text: str) -> bool:
    parser = Parser(text)
    try:
        parser.sums()
    except ValueError:
        return False
    return not parser.rest


def can_parse(text: str) -> bool:
    """Whether the text begins one of the language: what is open can be closed, behind a number if one is missing."""
    return any(parses(text + number + ")" * count) for number in ("", "1") for count in range(text.count("(") + 1))


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_lark_against_a_parser(seed: int) -> None:
    matcher, text, random = TINY.start(Grammar.lark(ARITHMETIC)), "", Random(seed)
    options = [(i, t.decode()) for i, t in zip(TEXT, SPELLED, strict=True) if t.isascii()]
    for _ in range(20):
        expected = {i for i, spelled in options if can_parse(text + spelled)} | ({END, TURN} if parses(text) else set())
        assert allowed(matcher) == expected
        token = random.choice(sorted(expected))
        matcher.accept(token)
        if token in (END, TURN):
            return
        text += SPELLED[token - TEXT.start].decode()


# ---- ends, special tokens, widths ----


def test_every_end_and_nothing_else_where_the_text_is_over() -> None:
    matcher = TINY.start(Grammar.regex("a"))
    assert allowed(matcher) == {TEXT[0]}
    assert not matcher.done
    matcher.accept(TEXT[0])
    assert matcher.done
    assert allowed(matcher) == {END, TURN}
    matcher.accept(TURN)
    matcher.rewind(1)
    matcher.accept(END)
    matcher.rewind(2)
    assert not matcher.done
    assert allowed(matcher) == {TEXT[0]}


@pytest.mark.parametrize("ends", [(), (WIDTH, -1)])
def test_without_ends_a_text_is_done(ends: tuple[int, ...]) -> None:
    matcher = GrammarMatchers(tiny().to_str(), WIDTH, ends).start(Grammar.regex("[ab]c?"))
    a, c = TEXT[0], TEXT[2]
    matcher.accept(a)
    assert not matcher.done
    assert allowed(matcher) == {c}
    matcher.accept(c)
    assert matcher.done
    with pytest.raises(GumihoError, match="nothing can follow"):
        matcher.mask(np.zeros(WIDTH, np.float32))
    assert GrammarMatchers(tiny().to_str(), WIDTH, ends).start(Grammar.regex("")).done


def test_a_text_that_may_be_empty() -> None:
    assert allowed(TINY.start(Grammar.regex("a?"))) == {TEXT[0], END, TURN}
    matcher = TINY.start(Grammar.regex(""))
    assert matcher.done
    assert allowed(matcher) == {END, TURN}


def test_nothing_follows_an_end() -> None:
    matcher = TINY.start(Grammar.regex("a*"))
    matcher.accept(END)
    for token in (TEXT[0], END, TURN):
        with pytest.raises(GumihoError, match="cannot follow"):
            matcher.accept(token)
    with pytest.raises(GumihoError, match="nothing can follow"):
        matcher.mask(np.zeros(WIDTH, np.float32))


def test_special_tokens_are_no_text() -> None:
    """Not where a grammar allows any token, nor by their number, nor by what they look like; an end only where the text
    may end."""
    assert allowed(TINY.start(Grammar.lark("start: <[*]>"))) == set(TEXT)
    for special in (BEGIN, UNUSED, END, WIDTH - 1, WIDTH):
        with pytest.raises(GumihoError, match="nothing can follow"):
            TINY.start(Grammar.lark(f"start: <[{special}]>")).mask(np.zeros(WIDTH, np.float32))
    with pytest.raises(GumihoError, match='unknown special token: "<unused>"'):
        TINY.start(Grammar.lark("start: <unused>"))
    # A byte that no text has, with which the library marks special tokens.
    assert TOKENIZERS["demo"].token_to_id("ÿ") not in allowed(
        MATCHERS["demo"].start(Grammar.lark("start: <[*]>")), WIDTHS["demo"]
    )
    matcher = GrammarMatchers(DEMO, 2048, [1]).start(Grammar.regex(r"<\|end_of_text\|>|<\|begin_of_text\|>"))
    for character in "<|end_of_text|>":
        assert not {0, 1} & allowed(matcher, 2048)
        matcher.accept(Tokenizer.from_str(DEMO).token_to_id(character))
    assert allowed(matcher, 2048) == {1}


def test_an_end_that_is_no_special_token() -> None:
    """Nothing but an end, however it is spelled: another token of that spelling is text."""
    newline = TEXT[SPELLED.index(b"\n\n")]
    matcher = GrammarMatchers(tiny().to_str(), WIDTH, [newline]).start(Grammar.regex("\n{0,2}"))
    assert allowed(matcher) == {TEXT[SPELLED.index(b"\n")], newline}
    tokenizer = TOKENIZERS["metaspace"]
    brace, byte = tokenizer.token_to_id("{"), tokenizer.token_to_id("<0x7B>")
    for end, text in ((brace, byte), (byte, brace)):
        matcher = GrammarMatchers(tokenizer.to_str(), 300, [end]).start(Grammar.regex("[{]"))
        assert allowed(matcher, 300) == {text}
        with pytest.raises(GumihoError, match="cannot follow"):
            matcher.accept(end)
        matcher.accept(text)
        assert allowed(matcher, 300) == {end}


@pytest.mark.parametrize("width", [1, 8, 31, 32, 33, 64, 65, WIDTH, 4096])
def test_any_width(width: int) -> None:
    """Narrower than the tokenizer too, where what has no row is not there."""
    matcher = GrammarMatchers(tiny().to_str(), width, [END, TURN]).start(Grammar.regex(r"(?s:.*)"))
    text = {i for i, t in zip(TEXT, SPELLED, strict=True) if leads_on(("many", some("", True)), t)}
    expected = {i for i in text | {END, TURN} if i < width}
    assert matcher.done == (not expected)
    if expected:
        assert allowed(matcher, width) == expected


def test_a_mask_keeps_what_it_allows_to_the_bit() -> None:
    row = np.array([np.inf, -np.inf, -0.0, 3.4e38, 1e-45] * WIDTH, np.float32)[:WIDTH]
    masked, matcher = row.copy(), TINY.start(Grammar.regex(r"(?s:.*)"))
    kept = sorted(allowed(matcher))
    matcher.mask(masked)
    assert masked[kept].tobytes() == row[kept].tobytes()
    assert np.isneginf(np.delete(masked, kept)).all()


def test_a_token_that_cannot_follow_changes_nothing() -> None:
    matcher = TINY.start(Grammar.regex("ab+"))
    before = allowed(matcher)
    for token in (TEXT[1], BEGIN, END, WIDTH - 1, WIDTH, -1, 10**9):
        with pytest.raises(GumihoError, match=f"token {token} cannot follow by the grammar"):
            matcher.accept(token)
    assert allowed(matcher) == before
    matcher.accept(TEXT[0])


def test_text_at_the_first_and_the_last_id() -> None:
    source = json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [], "decoder": {"type": "ByteLevel"}})
    for ends in ((), (2,)):
        for pattern, token in (("a*", 0), ("b*", 1)):
            matcher = GrammarMatchers(source, 2, ends).start(Grammar.regex(pattern))
            assert allowed(matcher, 2) == {token}
            for other in (1 - token, -1, -2):
                with pytest.raises(GumihoError, match="cannot follow"):
                    matcher.accept(other)


# ---- what is wrong with a grammar ----

WRONG = {
    "the JSON schema is not JSON": Grammar.json("{'a': 1}"),
    "the json grammar is wrong \\(failed to compile JSON schema: Invalid type: text\\): correct it": Grammar.json(
        {"type": "text"}
    ),
    "schema must be an object or boolean": Grammar.json("3"),
    "Unsatisfiable schema": Grammar.json({"type": "integer", "minimum": 2, "maximum": 1}),
    "the regex grammar is wrong .*unclosed group": Grammar.regex("a(b"),
    "look-around": Grammar.regex("a(?=b)"),
    "ends with a backslash": Grammar.regex("a\\\\\\"),
    'the lark grammar is wrong \\(at 2\\(4\\): unknown name: "y"\\)': Grammar.lark("start: x\nx: y"),
    "no start rule": Grammar.lark(""),
    "lexer error": Grammar.lark('start: "a'),
    "'yaml' is not a kind of grammar: give json, regex or lark": Grammar("yaml", "a: 1"),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_grammars(message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        TINY.start(WRONG[message])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_schema_that_is_no_json() -> None:
    with pytest.raises(GumihoError, match="the JSON schema has a value that JSON cannot express .*: correct it"):
        Grammar.json({"enum": {1, 2}})


def test_a_slash_and_an_escaped_backslash_in_a_regex() -> None:
    assert walk("demo", Grammar.regex("a/b\\\\"), 0) == "a/b\\"


def test_a_grammar_that_the_vocabulary_cannot_spell() -> None:
    matcher = TINY.start(Grammar.regex("az|b"))
    matcher.accept(TEXT[0])
    assert not matcher.done
    for _ in range(2):
        with pytest.raises(GumihoError, match="change it to what this vocabulary can spell"):
            matcher.mask(np.zeros(WIDTH, np.float32))
    matcher.rewind(1)
    matcher.accept(TEXT[1])
    assert allowed(matcher) == {END, TURN}


def test_the_library_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnavailableError, match="pip install 'llguidance>=1.1.2'"):
        TINY.start(Grammar.regex("a"))


def test_grammars_leave_the_processor_to_decoding() -> None:
    """By niceness, and by that of the scheduler's group where the system has such groups: each session has one."""
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc")
    matcher = TINY.start(Grammar.regex("a"))
    processes = [
        path.name
        for path in Path("/proc").glob("[0-9]*")
        if f"PPid:\t{os.getpid()}\n" in _read(path / "status") and "grammar_child" in _read(path / "cmdline")
    ]
    assert processes
    nice = min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)
    for process in processes:
        assert os.getpriority(os.PRIO_PROCESS, int(process)) == nice
        if group := _read(Path(f"/proc/{process}/autogroup")):
            assert group.split()[-1] == str(nice)
    assert matcher.done is False


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from runtime.decoding.grammar import Grammar, GrammarMatchers; assert 'llguidance' not in "
        "sys.modules; GrammarMatchers(sys.stdin.read(), 2048, [1]).start(Grammar.json({})); assert not {'torch', "
        "'transformers', 'onnx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], input=DEMO, text=True, check=True)
