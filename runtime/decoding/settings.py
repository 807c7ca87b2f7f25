"""The settings of a generation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from math import inf, isfinite
from operator import index
from typing import Any, TypeAlias, TypedDict

import numpy as np

from ..errors import InputError
from .grammar import Grammar

# (all token ids so far, prompt included; logits float32 [vocabulary], which it changes in place)
Processor: TypeAlias = Callable[[Sequence[int], np.ndarray], object]
_STEPS = (
    "min_new_tokens",
    "logit_bias",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram",
    "banned",
    "processors",
    "grammar",
    "forced",
    "top_k",
    "top_p",
    "min_p",
)
# (token id, the text it completes) -> true to stop after it
Callback: TypeAlias = Callable[[int, str], object]


def _strings(given: str | Sequence[str]) -> tuple[str, ...]:
    given = (given,) if isinstance(given, str) else given
    if not all(isinstance(one, str) and one for one in given):
        raise TypeError
    "".join(given).encode()  # ValueError for what no text can hold
    return tuple(given)


def _name(given: str | None) -> str | None:
    if not (given is None or isinstance(given, str)):
        raise TypeError
    return given


def _ids(given: Sequence[int]) -> tuple[int, ...]:
    return tuple(index(one) for one in given)


# Accepts numbers of other libraries (numpy), and refuses other types at once.
_KINDS: tuple[tuple[str, Callable[[Any], object], str], ...] = (
    *((name, index, "a whole number") for name in ("max_new_tokens", "min_new_tokens", "no_repeat_ngram", "top_k")),
    *(
        (name, lambda given: None if given is None else index(given), "a whole number")
        for name in ("seed", "rows", "logprobs")
    ),
    *(
        (name, float, "a number")
        for name in (
            "max_seconds",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "temperature",
            "top_p",
            "min_p",
        )
    ),
    ("drafter", _name, "the name of a drafter"),
    ("stop", _strings, "a string or a list of strings of UTF-8 text, none of them empty"),
    *((name, _ids, "a list of token ids") for name in ("stop_token_ids", "banned")),
    (
        "logit_bias",
        lambda given: {index(i): float(bias) for i, bias in given.items()},
        "a mapping of token ids to numbers",
    ),
    ("forced", lambda given: {index(at): index(i) for at, i in given.items()}, "a mapping of indices to token ids"),
    ("processors", tuple, "a list of functions"),
)


class Options(TypedDict, total=False):
    """The keyword fields of ``Settings``, for type checkers."""

    min_new_tokens: int
    max_seconds: float
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    callback: Callback | None
    logit_bias: Mapping[int, float]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram: int
    banned: Sequence[int]
    processors: Sequence[Processor]
    grammar: Grammar | None
    forced: Mapping[int, int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    lookup: bool
    rows: int | None
    drafter: str | None
    tree: str
    accept: str
    trace: bool
    logprobs: int | None


@dataclass(frozen=True)
class Settings:
    """How a text is continued; the defaults decode greedily. Raises InputError for values that are not valid.

    Limits. max_new_tokens: exact. min_new_tokens: the text cannot end earlier. max_seconds: wall clock, checked between
    cycles. stop: one or several strings that end the text and are not part of it; a string that is a special token is
    matched by its id. stop_token_ids: end the text like the target's own end-of-text ids. callback: called with every
    token; a true result ends the text.

    Choice, in the order of the steps in ``sampling``. logit_bias: by token id. repetition_penalty: divides positive
    logits and multiplies negative ones, for tokens of prompt and text. presence_penalty, frequency_penalty: subtracted
    from the logits of tokens in the text, once and once per occurrence. no_repeat_ngram: length of token sequences that
    may not repeat, 0 for no limit. banned: token ids. processors: functions that change the logits; they must depend on
    their arguments only. grammar: the text matches it. forced: token ids by index among the new tokens. temperature: 0
    takes the most likely token. top_k: 0 keeps all tokens. top_p, min_p: probabilities, 0 to 1. seed: None draws a new
    one.

    Speculation. speculate: False for plain decoding. lookup: allow prompt lookup instead of a draft; used only if
    ``rows`` is None and the output is exact. rows: rows of each tree to verify, 2 or more; None lets the planner
    choose. drafter: one of the bundle's by name; None lets the one be taken that has been fastest. tree ``fta`` and
    accept ``typical`` change the output (``lossy``).

    Records. trace: cycles carry their trees. logprobs: record the target's log-probability of every token and of this
    many of the most likely alternatives; None records nothing.
    """

    max_new_tokens: int = 256
    speculate: bool = True
    min_new_tokens: int = 0
    max_seconds: float = inf
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    callback: Callback | None = None

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    banned: Sequence[int] = ()
    processors: Sequence[Processor] = ()
    grammar: Grammar | None = None
    forced: Mapping[int, int] = field(default_factory=dict)
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    lookup: bool = True
    rows: int | None = None
    drafter: str | None = None
    tree: str = "exact"
    accept: str = "exact"
    trace: bool = False
    logprobs: int | None = None

    @staticmethod
    def of(max_new_tokens: int, speculate: bool, options: Options) -> "Settings":
        """Settings from keyword arguments. Raises InputError for a name that is no setting, with the closest one."""
        names = [field.name for field in fields(Settings)]
        if unknown := next((name for name in options if name not in names), None):
            closest = get_close_matches(unknown, names, n=1)
            hint = f"did you mean '{closest[0]}'?" if closest else f"choose from {', '.join(names)}"
            raise InputError(f"there is no setting '{unknown}': {hint}")
        return Settings(max_new_tokens, speculate, **options)

    def __post_init__(self) -> None:
        for name, convert, kind in _KINDS:
            try:
                object.__setattr__(self, name, convert(getattr(self, name)))
            except (TypeError, ValueError, AttributeError):
                raise InputError(f"{name} is {getattr(self, name)!r}: give {kind}") from None
        if not (self.grammar is None or isinstance(self.grammar, Grammar)):
            raise InputError(f"grammar is {self.grammar!r}: give a Grammar, such as Grammar.json(schema)")
        for name in (
            "max_new_tokens",
            "min_new_tokens",
            "no_repeat_ngram",
            "top_k",
            "temperature",
            "max_seconds",
            "min_p",
        ):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} is {getattr(self, name)}: give 0 or more")
        if (odd := next((index for index in self.forced if index < 0), None)) is not None:
            raise InputError(f"forced names index {odd}: give 0 for the first new token, or more")
        for name, least in (("top_p", 0.0), ("min_p", -1.0)):
            if not least < getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}: give a number up to 1, such as 0.9")
        if not 0 < self.repetition_penalty < inf:
            raise InputError(f"repetition_penalty is {self.repetition_penalty}: give more than 0, such as 1.1")
        for name in ("temperature", "presence_penalty", "frequency_penalty"):
            if not isfinite(getattr(self, name)):
                raise InputError(f"{name} is {getattr(self, name)}: give a number")
        if (odd := next((token for token, bias in self.logit_bias.items() if not bias < inf), None)) is not None:
            raise InputError(
                f"logit_bias of token {odd} is {self.logit_bias[odd]}: give a number, or -inf to ban the token"
            )
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise InputError(f"seed is {self.seed}: give 0 to 2**64 - 1")
        if self.logprobs is not None and self.logprobs < 0:
            raise InputError(f"logprobs is {self.logprobs}: give the number of alternatives for each token, 0 or more")
        if self.rows is not None and self.rows < 2:
            raise InputError(f"rows is {self.rows}: give 2 or more, or speculate=False for plain decoding")
        for name, value, lossy in (("tree", self.tree, "fta"), ("accept", self.accept, "typical")):
            if value not in ("exact", lossy):
                raise InputError(f"{name} is {value!r}: give 'exact' or '{lossy}'")
        if (self.tree, self.accept) == ("fta", "typical"):
            raise InputError("tree 'fta' and accept 'typical' exclude each other: leave one of them out")
        # Medusa's rule uses only the target's distribution; it would bypass every other step.
        if self.accept == "typical":
            if self.logprobs is not None:
                raise InputError("accept 'typical' does not compute logprobs: leave one of the two out")
            defaults = {field.name: field.default for field in fields(self)}
            changed = (name for name in _STEPS if getattr(self, name) and getattr(self, name) != defaults[name])
            if name := next(changed, ""):
                raise InputError(f"accept 'typical' does not apply {name}: leave one of the two out")

    @property
    def lossy(self) -> bool:
        """Whether the output may differ from the target's."""
        return self.speculate and (self.tree, self.accept) != ("exact", "exact")

    @property
    def looks_up(self) -> bool:
        """Whether prompt lookup may replace a draft."""
        return self.lookup and self.speculate and self.rows is None and not self.lossy
