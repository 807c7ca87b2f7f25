"""Guided decoding: masks the tokens that a grammar does not allow (with the library llguidance)."""

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np

from ..errors import InputError, MisuseError, UnavailableError, reason
from .grammar_child import COMPILE_SECONDS, MEMORY, STEP_SECONDS, TEXT_SECONDS
from .grammar_process import EndedError, GrammarProcess
from .grammar_vocabulary import Vocabulary

_MOST = 1 << 20  # characters of a grammar
_T = TypeVar("_T")
_CLOSED = "this grammar is closed: prepare another"
# The line and column at the beginning of a message; meaningless in a grammar that the user has not written.
_PLACE = r"^(at )?(?P<line>\d+)\(\d+\): "
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


class GrammarError(InputError):
    """A grammar that the library refuses. reason: why. line: of the grammar's text, from 1; 0 if it is about none."""

    def __init__(self, message: str, reason: str, line: int) -> None:
        super().__init__(message)
        self.reason, self.line = reason, line


@dataclass(frozen=True, eq=False)
class PreparedGrammar(Grammar):
    """A grammar that is compiled once, for any number of texts. In settings it is used like another."""

    compiled: "_Compiled" = field(repr=False)

    def prepare(self) -> None:
        """Compiles it. Raises what ``GrammarMatchers.start`` does."""
        self.compiled.prepare()

    def close(self) -> None:
        """Ends all that is done for it, in any thread: a compilation that runs, and texts that follow it."""
        self.compiled.close()


class GrammarMatchers:
    """Creates the grammar matchers of a loaded bundle, which share one vocabulary."""

    def __init__(self, tokenizer_json: str, vocabulary: int, ends: Sequence[int]) -> None:
        """tokenizer_json: its text. vocabulary: width of a row of logits. ends: ids that end a text; may be empty."""
        self._source = (tokenizer_json, vocabulary, tuple(ends))

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(*self._source)

    def start(self, grammar: Grammar) -> "GrammarMatcher":
        """A matcher for one generation.

        Raises InputError for a grammar that is wrong, or takes more than it may; UnavailableError without llguidance, and GumihoError
        for a tokenizer whose tokens have no spelling of their own.
        """
        if isinstance(grammar, PreparedGrammar):
            return grammar.compiled.start()
        return GrammarMatcher(*self.compiled(Grammar(grammar.kind, _checked(grammar))))

    def prepared(self, grammar: Grammar) -> PreparedGrammar:
        """A grammar for several texts. It is compiled by ``prepare``, or with the first text. Raises InputError for one that is too long
        or no JSON."""
        grammar = Grammar(grammar.kind, _checked(grammar))
        return PreparedGrammar(grammar.kind, grammar.text, _Compiled(self, grammar))

    def compiled(
        self, grammar: Grammar, opened: Callable[[GrammarProcess], None] = lambda process: None
    ) -> tuple[Vocabulary, GrammarProcess]:
        """grammar: checked. opened: called with the process before it compiles. Raises what ``start`` does."""
        _require_library()
        process = self._vocabulary.processes.start()
        opened(process)
        try:
            process.compile(grammar.kind, grammar.text)
        except EndedError:
            raise InputError(
                f"the {grammar.kind} grammar takes more than {COMPILE_SECONDS:g} s or {MEMORY >> 20} MiB to compile, or is chained or "
                "nested too deeply: simplify it"
            ) from None
        if process.problem:
            raise _refused(grammar, process.problem)
        return self._vocabulary, process


class _Compiled:
    """A grammar's process, and copies of it that follow texts."""

    def __init__(self, matchers: GrammarMatchers, grammar: Grammar) -> None:
        self._matchers, self._grammar = matchers, grammar
        self._compiling, self._changing = threading.Lock(), threading.Lock()
        self._found: tuple[Vocabulary, GrammarProcess] | None = None
        self._processes = WeakSet[GrammarProcess]()
        self._closed = False

    def prepare(self) -> tuple[Vocabulary, GrammarProcess]:
        with self._compiling:
            try:
                self._found = self._found or self._matchers.compiled(self._grammar, self._add)
            except InputError:
                if self._closed:
                    raise InputError(_CLOSED) from None
                raise
            return self._found

    def start(self) -> "GrammarMatcher":
        vocabulary, process = self.prepare()
        with self._compiling:
            try:
                copy = process.copy()
            except EndedError:
                raise InputError(_CLOSED) from None
        self._add(copy)
        return GrammarMatcher(vocabulary, copy)

    def close(self) -> None:
        with self._changing:
            self._closed = True
            for process in self._processes:
                process.close()

    def _add(self, process: GrammarProcess) -> None:
        with self._changing:
            self._processes.add(process)
            if self._closed:
                process.close()


class GrammarMatcher:
    """The state of a grammar in one generation: which tokens may follow. A token that ends the text counts as accepted, too."""

    def __init__(self, vocabulary: Vocabulary, process: GrammarProcess) -> None:
        """``GrammarMatchers.start`` creates one. process: at the start of the text."""
        self._vocabulary, self._process = vocabulary, process
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
        if seen := count - (self._ended and count > 0):  # the library never saw the token that ended the text
            self._do(lambda: self._process.rollback(seen))
        self._accepted, self._ended, self._current = remaining, self._ended and count == 0, False

    @property
    def done(self) -> bool:
        """Whether the text is complete: only its end can follow."""
        return self._ended or (self._may_end() and not self._allowed().any())

    def _continue(self, token: int) -> bool:
        library_id = int(self._vocabulary.library_ids[token]) if 0 <= token < self._vocabulary.size else -1
        if self._ended or library_id < 0:
            return False
        accepted = self._do(lambda: self._process.consume(library_id))
        self._current = self._current and not accepted
        return accepted

    def _may_end(self) -> bool:
        return not self._ended and self._process.may_end

    def _allowed(self) -> np.ndarray:
        if not self._current:
            self._do(lambda: self._process.mask(self._bits))
            self._bits &= self._vocabulary.spellable
            self._current = True
        return self._bits

    def _do(self, work: Callable[[], _T]) -> _T:
        try:
            done = work()
        except EndedError:
            raise InputError(
                f"the grammar cannot be followed further (a token takes more than {STEP_SECONDS:g} s, or the text {TEXT_SECONDS} s or "
                f"{MEMORY >> 20} MiB): simplify it"
            ) from None
        # A state with an error allows the end of the text anywhere, so it must not be used.
        if problem := _brief(self._process.problem):
            dead = problem.startswith("NoExtensionBias")
            raise InputError(_NOTHING if dead else f"the grammar cannot be followed further ({problem}): simplify it")
        return done


def _require_library() -> None:
    try:
        found = find_spec("llguidance")
    except ValueError:
        found = None
    if not found:
        raise UnavailableError("guided decoding needs llguidance: pip install 'llguidance>=1.1.2'")


def _checked(grammar: Grammar) -> str:
    """The text as the library takes it. Raises InputError."""
    if grammar.kind not in ("json", "regex", "lark"):
        raise InputError(f"'{grammar.kind}' is not a kind of grammar: give json, regex or lark")
    if len(grammar.text) > _MOST:
        raise InputError(f"the {grammar.kind} grammar has {len(grammar.text)} characters and may have {_MOST}: shorten it")
    try:
        grammar.text.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"the {grammar.kind} grammar is not Unicode (it has a byte that is not UTF-8, or half a character): give UTF-8 text"
        ) from None
    if grammar.kind == "json":
        try:
            return json.dumps(json.loads(grammar.text))
        except ValueError as error:
            raise InputError(f"the JSON schema is not JSON ({reason(error)}): correct it") from None
        except RecursionError:
            raise InputError("the JSON schema is nested too deeply: make it flatter") from None
    if grammar.kind == "regex" and (len(grammar.text) - len(grammar.text.rstrip("\\"))) % 2:
        raise InputError("the regex grammar ends with a backslash that escapes nothing: double it or remove it")
    return grammar.text


def _refused(grammar: Grammar, problem: str) -> GrammarError:
    place = re.match(_PLACE, problem)
    said = _brief(problem, "" if grammar.kind == "lark" else _PLACE)
    reason = _brief(problem, _PLACE).removeprefix("failed to compile JSON schema: ")
    return GrammarError(f"the {grammar.kind} grammar is wrong ({said}): correct it", reason, int(place["line"]) if place else 0)


def _brief(problem: str, place: str = "") -> str:
    """The library's message without the source and state that it appends. place: pattern to remove at the beginning."""
    return " ".join(re.sub(place, "", re.split(r"\n *\d+ \| |\n<", problem)[0]).split())
