"""Guided decoding: masks the tokens that a grammar does not allow (with the library llguidance)."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..errors import InputError, MisuseError, UnavailableError
from .token_bytes import spell

# By default the library forces its own tokenization if only one text can follow. Here the grammar decides the text, and the
# model how it is split into tokens. The options come last, so that the line numbers in messages stay those of the grammar.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# The line and column at the beginning of a message; meaningless in a grammar that the user has not written.
_PLACE = r"^(at )?\d+\(\d+\): "
_NOTHING = "the grammar allows no next token, so nothing can follow: stop here, or change it to what this vocabulary can spell"
# The upper bounds of eight tokens' logits, by the byte that holds their bits: float32 [256, 8], inf if allowed, otherwise -inf.
_BOUNDS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_BOUNDS = _BOUNDS.astype(np.float32)


@dataclass(frozen=True)
class Grammar:
    """A grammar that the whole text must match.

    kind: ``json``, ``regex`` or ``lark``. text: a JSON schema, a regular expression in the syntax of Rust's regex, or a grammar
    in llguidance's dialect of Lark. JSON may have any whitespace between its tokens unless the schema contains
    ``"x-guidance": {"whitespace_flexible": false}``.
    """

    kind: str
    text: str

    @classmethod
    def json(cls, schema: str | Mapping[str, Any]) -> "Grammar":
        """schema: its text, or the object itself. Raises InputError for an object that cannot be written as JSON."""
        try:
            return cls("json", schema if isinstance(schema, str) else json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"the JSON schema has a value that JSON cannot express ({error}): correct it") from None

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        return cls("lark", text)


class _Vocabulary:
    """The tokenizer in the library's form. Built once, because that takes long for a large vocabulary.

    size: width of a row of logits. ends, end_ids: the ids that end a text, as a tuple and as int64. library_ids: int64 [size],
    the id that the library has for each token: the lowest id with the same spelling, -1 for a token without a spelling.
    duplicates: int64, the ids whose library id is another one; originals: int64, that other id. spellable: int32 [words], a bit
    for each id that the library may allow.
    """

    def __init__(self, tokenizer_json: str, size: int, ends: Sequence[int]) -> None:
        llguidance = _library()
        self.size, self.ends = size, tuple(sorted({end for end in ends if 0 <= end < size}))
        self.library_ids = np.full(size, -1, np.int64)
        first_ids: dict[bytes, int] = {}
        for token, spelled in sorted(spell(tokenizer_json).items()):
            # The byte 0xff occurs in no UTF-8 text, and the library uses it as a mark.
            if 0 <= token < size and token not in self.ends and spelled and not spelled.startswith(b"\xff"):
                self.library_ids[token] = first_ids.setdefault(spelled, token)
        is_first = np.zeros((size // 32 + 1) * 32, bool)
        is_first[:size] = self.library_ids == np.arange(size)
        self.spellable = np.packbits(is_first, bitorder="little").view(np.int32)
        self.duplicates = np.flatnonzero((self.library_ids >= 0) & ~is_first[:size])
        self.originals, self.end_ids = self.library_ids[self.duplicates], np.array(self.ends, np.int64)
        # The library needs one token that ends a text, and it must not be one of the model's: it gets an additional id after
        # them. Its name begins with the mark of special tokens, so no grammar can contain it.
        tokens = [b""] * size + [b"\xffend"]
        for spelled, token in first_ids.items():
            tokens[token] = spelled
        vocabulary = SimpleNamespace(tokens=tokens, eos_token_id=size, bos_token_id=None, special_token_ids=())
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary))
        tokens.clear()  # the library has copied the tokens, but keeps a reference to the list


class GrammarMatchers:
    """Creates the grammar matchers of a loaded bundle, which share one vocabulary."""

    def __init__(self, tokenizer_json: str, vocabulary: int, ends: Sequence[int]) -> None:
        """tokenizer_json: its text. vocabulary: width of a row of logits. ends: ids that end a text; may be empty."""
        self._source = (tokenizer_json, vocabulary, tuple(ends))

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        return _Vocabulary(*self._source)

    def start(self, grammar: Grammar) -> "GrammarMatcher":
        """A matcher for one generation.

        Raises InputError for a wrong grammar, UnavailableError without llguidance, and GumihoError for a tokenizer whose tokens
        have no spelling of their own.
        """
        llguidance = _library()
        text, limits = _lark(grammar), llguidance.LLParserLimits(verbose_errors=False)
        vocabulary = self._vocabulary

        def new_state() -> Any:
            return llguidance.LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)

        first = new_state()
        if first.is_error():
            place = "" if grammar.kind == "lark" else _PLACE
            raise InputError(f"the {grammar.kind} grammar is wrong ({_brief(first.get_error(), place)}): correct it")
        return GrammarMatcher(vocabulary, new_state, first)


class GrammarMatcher:
    """The state of a grammar in one generation: which tokens may follow. A token that ends the text counts as accepted, too."""

    def __init__(self, vocabulary: _Vocabulary, new_state: Callable[[], Any], first: Any) -> None:
        """``GrammarMatchers.start`` creates one. new_state: creates a state of the library, at the start of the text; first:
        such a state."""
        self._vocabulary, self._new_state, self._state = vocabulary, new_state, first
        self._accepted: list[int] = []
        self._ended = False
        self._bits = np.zeros_like(vocabulary.spellable)  # the allowed tokens, if they are current
        self._bounds = np.empty((self._bits.nbytes, 8), np.float32)
        self._current = False

    def mask(self, row: np.ndarray) -> None:
        """Sets the logits of tokens that the grammar does not allow to -inf. row: float32 [vocabulary], changed in place.

        Raises InputError if no token is allowed: after the end, if the vocabulary cannot spell what must follow, and if the
        grammar became too complex.
        """
        vocabulary, bits, may_end = self._vocabulary, self._allowed(), self._may_end()
        if self._ended or not (bits.any() or (may_end and vocabulary.ends)):
            raise InputError(_NOTHING)
        # Far cheaper than a mask of bools, whose branches a processor cannot predict. mode="clip" avoids a copy.
        np.take(_BOUNDS, bits.view(np.uint8), axis=0, out=self._bounds, mode="clip")
        bounds = self._bounds.reshape(-1)[: vocabulary.size]
        bounds[vocabulary.duplicates] = bounds[vocabulary.originals]
        bounds[vocabulary.end_ids] = np.inf if may_end else -np.inf
        np.minimum(row, bounds, out=row)

    def accept(self, token: int) -> None:
        """Appends a token to the text. Raises InputError if the grammar does not allow it; the matcher is then unchanged."""
        if token in self._vocabulary.ends and self._may_end():
            self._ended = True
        elif not self._continue(token):
            raise InputError(f"token {token} cannot follow by the grammar: accept only a token that mask leaves finite")
        self._accepted.append(token)

    def rewind(self, count: int) -> None:
        """Takes back the last ``count`` tokens. Raises MisuseError if fewer were accepted."""
        if not 0 <= count <= len(self._accepted):
            raise MisuseError(
                f"{count} tokens cannot be taken back, because {len(self._accepted)} were accepted: take back no more"
            )
        remaining = self._accepted[: len(self._accepted) - count]
        # The library never saw the token that ended the text. Grammars that limit the number of tokens cannot go back: they
        # start anew.
        if not self._state.rollback(count - (self._ended and count > 0)):
            self._state = self._new_state()
            self._state.consume_tokens([int(self._vocabulary.library_ids[token]) for token in remaining])
        self._accepted, self._ended, self._current = remaining, self._ended and count == 0, False

    @property
    def done(self) -> bool:
        """Whether the text is complete: only its end can follow."""
        return self._ended or (self._may_end() and not self._allowed().any())

    def _continue(self, token: int) -> bool:
        library_id = int(self._vocabulary.library_ids[token]) if 0 <= token < self._vocabulary.size else -1
        if self._ended or library_id < 0:
            return False
        accepted = bool(self._state.try_consume_tokens([library_id]))
        self._check()
        self._current = self._current and not accepted
        return accepted

    def _may_end(self) -> bool:
        return not self._ended and bool(self._state.is_accepting())

    def _allowed(self) -> np.ndarray:
        if not self._current:
            self._state.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._check()
            self._bits &= self._vocabulary.spellable
            self._current = True
        return self._bits

    def _check(self) -> None:
        # A state with an error allows the end of the text anywhere, so it must not be used.
        if self._state.is_error():
            problem = _brief(self._state.get_error())
            dead = problem.startswith("NoExtensionBias")
            raise InputError(_NOTHING if dead else f"the grammar cannot be followed further ({problem}): simplify it")


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UnavailableError("guided decoding needs llguidance: pip install 'llguidance>=1.1.2'") from None
    return llguidance


def _lark(grammar: Grammar) -> str:
    if grammar.kind == "json":
        try:
            schema = json.dumps(json.loads(grammar.text))
        except ValueError as error:
            raise InputError(f"the JSON schema is not JSON ({error}): correct it") from None
        except RecursionError:
            raise InputError("the JSON schema is nested too deeply: make it flatter") from None
        return f"start: %json {schema}{_OPTIONS}"
    if grammar.kind == "regex":
        if (len(grammar.text) - len(grammar.text.rstrip("\\"))) % 2:
            raise InputError("the regex grammar ends with a backslash that escapes nothing: double it or remove it")
        return f"start: /{_library().regex_to_lark(grammar.text, '')}/{_OPTIONS}"
    if grammar.kind == "lark":
        return grammar.text + _OPTIONS
    raise InputError(f"'{grammar.kind}' is not a kind of grammar: give json, regex or lark")


def _brief(problem: str, place: str = "") -> str:
    """The library's message without the source and state that it appends. place: pattern to remove at the beginning."""
    return " ".join(re.sub(place, "", re.split(r"\n *\d+ \| |\n<", problem)[0]).split())
