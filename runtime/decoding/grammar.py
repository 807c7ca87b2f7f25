"""Guided decoding: masks the tokens that a grammar does not allow (with the library llguidance)."""

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any
from weakref import WeakSet

from ..errors import InputError, UnavailableError, reason
from .grammar_child import COMPILE_SECONDS, MEMORY
from .grammar_matcher import GrammarMatcher, brief
from .grammar_process import EndedError, GrammarProcess
from .grammar_vocabulary import Vocabulary

_MOST = 1 << 20  # characters of a grammar
_CLOSED = "this grammar is closed: prepare another"
# The line and column at the beginning of a message; meaningless in a grammar that the user has not written.
_PLACE = r"^(at )?(?P<line>\d+)\(\d+\): "


@dataclass(frozen=True)
class Grammar:
    """A grammar that the whole text must match.

    kind: ``json``, ``regex`` or ``lark``. text: a JSON schema, a regular expression in the syntax of Rust's regex, or a
    grammar in llguidance's dialect of Lark. JSON may have any whitespace between its tokens unless the schema contains
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

    def try_to_prepare(self) -> bool:
        """Compiles it if that takes at most ``TRY_SECONDS`` and ``TRY_MEMORY``; whether it did. Raises what
        ``GrammarMatchers.start`` does."""
        return self.compiled.try_to_prepare()

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

    def start(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher for one generation.

        Raises InputError for a grammar that is wrong, or takes more than it may; UnavailableError without llguidance,
        and GumihoError for a tokenizer whose tokens have no spelling of their own.
        """
        if isinstance(grammar, PreparedGrammar):
            return grammar.compiled.start()
        return GrammarMatcher(*self.compiled(Grammar(grammar.kind, _checked(grammar))))

    def prepared(self, grammar: Grammar) -> PreparedGrammar:
        """A grammar for several texts. It is compiled by ``prepare``, or with the first text. Raises InputError for one
        that is too long or no JSON."""
        grammar = Grammar(grammar.kind, _checked(grammar))
        return PreparedGrammar(grammar.kind, grammar.text, _Compiled(self, grammar))

    def compiled(
        self, grammar: Grammar, opened: Callable[[GrammarProcess], None] = lambda process: None, trial: bool = False
    ) -> tuple[Vocabulary, GrammarProcess]:
        """grammar: checked. opened: called with the process before it compiles. trial: whether less may be taken for
        it. Raises what ``start`` does, and in a trial EndedError if it takes too much."""
        _require_library()
        process = self._vocabulary.processes.start()
        opened(process)
        try:
            process.compile(grammar.kind, grammar.text, trial)
        except EndedError:
            if trial:
                raise
            raise InputError(
                f"the {grammar.kind} grammar takes more than {COMPILE_SECONDS:g} s or {MEMORY >> 20} MiB to compile, "
                "or is chained or nested too deeply: simplify it"
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

    def try_to_prepare(self) -> bool:
        with self._compiling:
            try:
                self._found = self._found or self._matchers.compiled(self._grammar, self._add, trial=True)
            except EndedError:
                if self._closed:
                    raise InputError(_CLOSED) from None
            return self._found is not None

    def start(self) -> GrammarMatcher:
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
        raise InputError(
            f"the {grammar.kind} grammar has {len(grammar.text)} characters and may have {_MOST}: shorten it"
        )
    try:
        grammar.text.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"the {grammar.kind} grammar is not Unicode (it has a byte that is not UTF-8, or half a character): give "
            "UTF-8 text"
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
    said = brief(problem, "" if grammar.kind == "lark" else _PLACE)
    reason = brief(problem, _PLACE).removeprefix("failed to compile JSON schema: ")
    return GrammarError(
        f"the {grammar.kind} grammar is wrong ({said}): correct it", reason, int(place["line"]) if place else 0
    )
