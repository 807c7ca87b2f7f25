"""What may be asked of a generation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from math import inf, isfinite
from operator import index
from typing import Any, TypeAlias, TypedDict

import numpy as np

from ..errors import GumihoError
from .grammar import Grammar

# (all token ids so far, the prompt's included; logits float32 [vocabulary], to be changed in place)
Processor: TypeAlias = Callable[[Sequence[int], np.ndarray], object]
_STEPS = ("min_new_tokens", "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram",
          "banned", "processors", "grammar", "forced", "top_k", "top_p", "min_p")  # fmt: skip
# (token id, the text it completes); true to stop behind it
Callback: TypeAlias = Callable[[int, str], object]


def _strings(given: str | Sequence[str]) -> tuple[str, ...]:
    given = (given,) if isinstance(given, str) else given
    if not all(isinstance(one, str) and one for one in given):
        raise TypeError
    return tuple(given)


def _ids(given: Sequence[int]) -> tuple[int, ...]:
    return tuple(index(one) for one in given)


# Numbers of other libraries are taken for what they are, and what is none is told at once.
_KINDS: tuple[tuple[str, Callable[[Any], object], str], ...] = (
    *((name, index, "a whole number") for name in ("max_new_tokens", "min_new_tokens", "no_repeat_ngram", "top_k")),
    *((name, lambda given: None if given is None else index(given), "a whole number") for name in ("seed", "rows")),
    *((name, float, "a number") for name in ("max_seconds", "repetition_penalty", "presence_penalty", "frequency_penalty",
                                             "temperature", "top_p", "min_p")),
    ("stop", _strings, "a string or several, none of them empty"),
    *((name, _ids, "a list of token ids") for name in ("stop_token_ids", "banned")),
    ("logit_bias", lambda given: {index(i): float(bias) for i, bias in given.items()}, "numbers by token id"),
    ("forced", lambda given: {index(at): index(i) for at, i in given.items()}, "token ids by index"),
    ("processors", tuple, "a list of functions"),
)  # fmt: skip


class Options(TypedDict, total=False):
    """The fields of ``Settings`` that are given by keyword, for type checkers."""

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
    tree: str
    accept: str
    trace: bool


@dataclass(frozen=True)
class Settings:
    """How a text is continued; the defaults are greedy decoding. Raises GumihoError for values that mean nothing.

    Limits. max_new_tokens: exact. min_new_tokens: so many come before the text may end. max_seconds: of wall clock, looked at
    between cycles. stop: a string that ends the text and is not part of it, or several; one that is a special token counts as its id.
    stop_token_ids: that end the text as its own end-of-text ids do. callback: is given every token as it is chosen.

    Choice, in the order of the steps (``sampling``): logit_bias: by token id. repetition_penalty: divides positive and
    multiplies negative logits of tokens in prompt or text. presence_penalty, frequency_penalty: taken off the logits of tokens
    in the text, once and as often as they are there. no_repeat_ngram: length of token runs that may not come twice, 0 for any.
    banned: token ids. processors: change the logits, by them and the text alone. grammar: what the text must be. forced: token
    ids, by index among the new tokens. temperature: 0 for the most likely token. top_k: 0 for all. top_p, min_p: as shares of 1.
    seed: None for a fresh one.

    Ways. speculate: False for plain decoding. lookup: whether what followed the same tokens earlier may be verified instead of a draft;
    it is where rows are planned and the output is exact. rows: of each tree to verify, 2 and more; None for as many as pay, by what was
    measured and counted (``planner``). tree ``fta`` and accept ``typical`` change the output (``lossy``). trace: cycles
    carry their trees.
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
    tree: str = "exact"
    accept: str = "exact"
    trace: bool = False

    @staticmethod
    def of(max_new_tokens: int, speculate: bool, options: Options) -> "Settings":
        """Settings from keyword arguments. Raises GumihoError for a name that is no setting, with the closest one."""
        names = [field.name for field in fields(Settings)]
        if unknown := next((name for name in options if name not in names), None):
            closest = get_close_matches(unknown, names, n=1)
            hint = f"did you mean '{closest[0]}'?" if closest else f"choose from {', '.join(names)}"
            raise GumihoError(f"there is no setting '{unknown}': {hint}")
        return Settings(max_new_tokens, speculate, **options)

    def __post_init__(self) -> None:
        for name, convert, kind in _KINDS:
            try:
                object.__setattr__(self, name, convert(getattr(self, name)))
            except (TypeError, ValueError, AttributeError):
                raise GumihoError(f"{name} is {getattr(self, name)!r}: give {kind}") from None
        if not (self.grammar is None or isinstance(self.grammar, Grammar)):
            raise GumihoError(f"grammar is {self.grammar!r}: give a Grammar, such as Grammar.json(schema)")
        for name in ("max_new_tokens", "min_new_tokens", "no_repeat_ngram", "top_k", "temperature", "max_seconds", "min_p"):
            if not getattr(self, name) >= 0:
                raise GumihoError(f"{name} is {getattr(self, name)}: give 0 or more")
        if (odd := next((index for index in self.forced if index < 0), None)) is not None:
            raise GumihoError(f"forced names index {odd}: give 0 for the first new token, or more")
        for name, least in (("top_p", 0.0), ("min_p", -1.0)):
            if not least < getattr(self, name) <= 1:
                raise GumihoError(f"{name} is {getattr(self, name)}: give a share of 1, such as 0.9")
        if not 0 < self.repetition_penalty < inf:
            raise GumihoError(f"repetition_penalty is {self.repetition_penalty}: give more than 0, such as 1.1")
        for name in ("temperature", "presence_penalty", "frequency_penalty"):
            if not isfinite(getattr(self, name)):
                raise GumihoError(f"{name} is {getattr(self, name)}: give a number")
        if (odd := next((token for token, bias in self.logit_bias.items() if not bias < inf), None)) is not None:
            raise GumihoError(f"logit_bias of token {odd} is {self.logit_bias[odd]}: give a number, or -inf to ban the token")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise GumihoError(f"seed is {self.seed}: give 0 to 2**64 - 1")
        if self.rows is not None and self.rows < 2:
            raise GumihoError(f"rows is {self.rows}: give 2 or more, or speculate=False for plain decoding")
        for name, value, known in (("tree", self.tree, "fta"), ("accept", self.accept, "typical")):
            if value not in ("exact", known):
                raise GumihoError(f"{name} is {value!r}: give 'exact' or '{known}'")
        if (self.tree, self.accept) == ("fta", "typical"):
            raise GumihoError("tree 'fta' and accept 'typical' are two rules for the same choice: leave one of them out")
        # Medusa's rule looks at the distribution alone: whatever else is asked of a token it would pass by.
        if self.accept == "typical":
            defaults = {field.name: field.default for field in fields(self)}
            asked = (name for name in _STEPS if getattr(self, name) and getattr(self, name) != defaults[name])
            if name := next(asked, ""):
                raise GumihoError(f"accept 'typical' knows nothing of {name}: leave one of the two out")

    @property
    def lossy(self) -> bool:
        """Whether the output may differ from the target's."""
        return self.speculate and (self.tree, self.accept) != ("exact", "exact")

    @property
    def looks_up(self) -> bool:
        """Whether lookups may take the drafter's turn."""
        return self.lookup and self.speculate and self.rows is None and not self.lossy
