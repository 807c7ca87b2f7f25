"""Guided decoding: which tokens may follow, so that the text is what a grammar wants (with the library llguidance)."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..errors import GumihoError
from .token_bytes import spell

# The library would rather force its own tokenization wherever the text is certain; here the grammar decides what the text is
# and the model how it is cut into tokens. Options may stand anywhere in a grammar, and at its end they leave its lines counted.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# What a message says of the place in a grammar that the user has not written.
_PLACE = r"^(at )?\d+\(\d+\): "
_NOTHING = "nothing can follow by the grammar: stop here, or change it to what this vocabulary can spell"
# For eight tokens' bits, what each one's logit is cut down to: float32 [256, 8], infinite either way.
_BOUNDS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_BOUNDS = _BOUNDS.astype(np.float32)


@dataclass(frozen=True)
class Grammar:
    """What the text must be.

    kind: ``json``, ``regex`` or ``lark``. text: the JSON schema; the regular expression, for the whole text, in the syntax of
    Rust's regex; or the grammar in llguidance's dialect of Lark. Whitespace between JSON's tokens is free unless the schema has
    ``"x-guidance": {"whitespace_flexible": false}``.
    """

    kind: str
    text: str

    @classmethod
    def json(cls, schema: str | Mapping[str, Any]) -> "Grammar":
        """schema: its text, or the object itself. Raises GumihoError for an object that cannot be written as JSON."""
        try:
            return cls("json", schema if isinstance(schema, str) else json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise GumihoError(f"the JSON schema holds what JSON does not ({error}): correct it") from None

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        return cls("lark", text)


class _Vocabulary:
    """The tokenizer as the library sees it, built once, since that takes a while for a big one.

    size: ids of a row of logits. ends: those that end a text, and end_ids the same as an array. stands_for: int64 [size], the id
    by which the library knows a token, the first of those spelled alike; -1 for one that spells nothing. twins: int64, the ids
    that have another one, and firsts which. plain: int32 [words], a bit for each id that the library may allow.
    """

    def __init__(self, tokenizer_json: str, size: int, ends: Sequence[int]) -> None:
        llguidance = _library()
        self.size, self.ends = size, tuple(sorted({end for end in ends if 0 <= end < size}))
        self.stands_for = np.full(size, -1, np.int64)
        first: dict[bytes, int] = {}
        for token, spelled in sorted(spell(tokenizer_json).items()):
            # A byte that UTF-8 does not know is in no text, and the library has its own use for it.
            if 0 <= token < size and token not in self.ends and spelled and not spelled.startswith(b"\xff"):
                self.stands_for[token] = first.setdefault(spelled, token)
        known = np.zeros((size // 32 + 1) * 32, bool)
        known[:size] = self.stands_for == np.arange(size)
        self.plain = np.packbits(known, bitorder="little").view(np.int32)
        self.twins = np.flatnonzero((self.stands_for >= 0) & ~known[:size])
        self.firsts, self.end_ids = self.stands_for[self.twins], np.array(self.ends, np.int64)
        # The library ends a text by one token, which must be none of the model's: it gets its own behind them. The name starts
        # with the byte that marks special tokens, and cannot be written in a grammar.
        tokens = [b""] * size + [b"\xffend"]
        for spelled, token in first.items():
            tokens[token] = spelled
        vocabulary = SimpleNamespace(tokens=tokens, eos_token_id=size, bos_token_id=None, special_token_ids=())
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary))
        tokens.clear()  # copied by the library, which holds on to the list


class GrammarMatchers:
    """Creates the grammar matchers of a loaded bundle; the first one builds what they share."""

    def __init__(self, tokenizer_json: str, vocabulary: int, ends: Sequence[int]) -> None:
        """tokenizer_json: its text. vocabulary: width of a row of logits. ends: ids that end a text; may be none."""
        self._source = (tokenizer_json, vocabulary, tuple(ends))

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        return _Vocabulary(*self._source)

    def start(self, grammar: Grammar) -> "GrammarMatcher":
        """A matcher for one generation.

        Raises GumihoError for what is wrong with the grammar, where llguidance is missing, and where the tokenizer is one whose
        tokens spell nothing on their own.
        """
        llguidance = _library()
        text, limits = _lark(grammar), llguidance.LLParserLimits(verbose_errors=False)
        vocabulary = self._vocabulary

        def new_state() -> Any:
            return llguidance.LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)

        first = new_state()
        if first.is_error():
            where = "" if grammar.kind == "lark" else _PLACE
            raise GumihoError(f"the {grammar.kind} grammar is wrong ({_brief(first.get_error(), where)}): correct it")
        return GrammarMatcher(vocabulary, new_state, first)


class GrammarMatcher:
    """What may follow in one generation. An end of the text counts among the tokens accepted."""

    def __init__(self, vocabulary: _Vocabulary, new_state: Callable[[], Any], first: Any) -> None:
        """``GrammarMatchers.start`` creates one. new_state: creates the library's, at the start of the text; first: one of them."""
        self._vocabulary, self._make, self._state = vocabulary, new_state, first
        self._accepted: list[int] = []
        self._ended = False
        self._bits = np.zeros_like(vocabulary.plain)
        self._bounds = np.empty((self._bits.nbytes, 8), np.float32)
        self._current = False

    def mask(self, row: np.ndarray) -> None:
        """Sets what must not follow to -inf. row: float32 [vocabulary], changed in place.

        Raises GumihoError where nothing may follow: behind the end, where no token of the vocabulary leads on, and where the
        grammar got too complex.
        """
        vocabulary, bits, may_end = self._vocabulary, self._allowed(), self._may_end()
        if self._ended or not (bits.any() or (may_end and vocabulary.ends)):
            raise GumihoError(_NOTHING)
        # Far cheaper than a mask of bools, whose branches a processor cannot guess; so is the mode, which takes without a copy.
        np.take(_BOUNDS, bits.view(np.uint8), axis=0, out=self._bounds, mode="clip")
        bounds = self._bounds.reshape(-1)[: vocabulary.size]
        bounds[vocabulary.twins] = bounds[vocabulary.firsts]
        bounds[vocabulary.end_ids] = np.inf if may_end else -np.inf
        np.minimum(row, bounds, out=row)

    def accept(self, token: int) -> None:
        """The token follows. Raises GumihoError where the grammar does not allow it; the matcher is then as it was."""
        if token in self._vocabulary.ends and self._may_end():
            self._ended = True
        elif not self._continue(token):
            raise GumihoError(f"token {token} cannot follow by the grammar: accept only what mask leaves")
        self._accepted.append(token)

    def rewind(self, count: int) -> None:
        """Takes back the last ``count`` tokens. Raises GumihoError where fewer were accepted."""
        if not 0 <= count <= len(self._accepted):
            raise GumihoError(f"{count} tokens cannot be taken back: {len(self._accepted)} were accepted")
        kept = self._accepted[: len(self._accepted) - count]
        # The end is not the library's. Grammars with limits on tokens cannot go back: they start anew.
        if not self._state.rollback(count - (self._ended and count > 0)):
            self._state = self._make()
            self._state.consume_tokens([int(self._vocabulary.stands_for[token]) for token in kept])
        self._accepted, self._ended, self._current = kept, self._ended and count == 0, False

    @property
    def done(self) -> bool:
        """The text is complete, and nothing but its end can follow."""
        return self._ended or (self._may_end() and not self._allowed().any())

    def _continue(self, token: int) -> bool:
        known = int(self._vocabulary.stands_for[token]) if 0 <= token < self._vocabulary.size else -1
        if self._ended or known < 0:
            return False
        accepted = bool(self._state.try_consume_tokens([known]))
        self._check()
        self._current = self._current and not accepted
        return accepted

    def _may_end(self) -> bool:
        return not self._ended and bool(self._state.is_accepting())

    def _allowed(self) -> np.ndarray:
        if not self._current:
            self._state.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._check()
            self._bits &= self._vocabulary.plain
            self._current = True
        return self._bits

    def _check(self) -> None:
        # Where the library gives up it allows the end, wherever the text is.
        if self._state.is_error():
            problem = _brief(self._state.get_error())
            dead = problem.startswith("NoExtensionBias")
            raise GumihoError(_NOTHING if dead else f"the grammar cannot be followed further ({problem}): simplify it")


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise GumihoError("guided decoding needs llguidance: pip install 'llguidance>=1.1.2'") from None
    return llguidance


def _lark(grammar: Grammar) -> str:
    if grammar.kind == "json":
        try:
            schema = json.dumps(json.loads(grammar.text))
        except ValueError as error:
            raise GumihoError(f"the JSON schema is no JSON ({error}): correct it") from None
        except RecursionError:
            raise GumihoError("the JSON schema is nested too deeply: make it flatter") from None
        return f"start: %json {schema}{_OPTIONS}"
    if grammar.kind == "regex":
        if (len(grammar.text) - len(grammar.text.rstrip("\\"))) % 2:
            raise GumihoError("the regex grammar ends with a backslash that escapes nothing: double it or leave it out")
        return f"start: /{_library().regex_to_lark(grammar.text, '')}/{_OPTIONS}"
    if grammar.kind == "lark":
        return grammar.text + _OPTIONS
    raise GumihoError(f"'{grammar.kind}' is no kind of grammar: give json, regex or lark")


def _brief(problem: str, place: str = "") -> str:
    """The library's message without the source and the state it appends. place: pattern of what to leave out in front."""
    return " ".join(re.sub(place, "", re.split(r"\n *\d+ \| |\n<", problem)[0]).split())
