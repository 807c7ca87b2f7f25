"""What the target is given to write: openings of turns, prompts of the user's, documents to summarize (Magpie, arXiv
2406.08464)."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InputError

from .store import ANSWER, GREEDY

_MARKS = ("gumihofirst", "gumihosecond", "gumihothird")
_MOST_QUESTION = 192  # tokens; a question that goes on is no question
_LEAST_QUESTION = 3
_AHEAD = 64  # prompts looked through for one that fits

# How user turns begin. An instruction model left to itself mostly writes one kind of request, so half of them get a
# first word.
BEGINNINGS = (
    "Write a function",
    "Write a Python function that",
    "Complete this function:\n\ndef",
    "def",
    "Fix the bug in this code:\n",
    "Write a program",
    "Who",
    "When",
    "Where",
    "What is",
    "What was",
    "Which",
    "Why",
    "How",
    "How many",
    "How much",
    "Is it",
    "Can you",
    "Explain",
    "Describe",
    "Give",
    "List",
    "Name",
    "Compare",
    "Write",
    "Write a story",
    "Write an email",
    "Write a letter",
    "Create",
    "Generate",
    "Suggest",
    "Rewrite",
    "Edit the following sentence",
    "Translate",
    "Classify",
    "Convert",
    "Imagine",
    "Solve this problem:",
    "If",
    "A",
    "In",
    "There are",
    "Calculate",
    "Find",
    "Write a news article about",
    "Write a long report about",
)
_SUMMARIES = (
    "Summarize: ",
    "Summarize the following text:\n\n",
    "Give me the main points of this text:\n\n",
    "TL;DR: ",
)


@dataclass(frozen=True)
class Template:
    """A chat template in pieces of token ids: what comes before a user turn, after it, and between an answer and the
    next user turn.

    Without a template the target writes plain text: ``opening`` is how a text begins, and there is nothing after it.
    """

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    between: tuple[int, ...]
    ends: frozenset[int]  # tokens that end a turn
    stop: str  # text that ends a user turn, if no single token does

    @property
    def chat(self) -> bool:
        return bool(self.closing)


def template(tokenizer: Any, ends: Sequence[int]) -> Template:
    """The pieces of a tokenizer's chat template. ends: the target's end tokens. Raises InputError if the template
    cannot be cut."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    if not getattr(tokenizer, "chat_template", None):
        begin = tokenizer.bos_token_id
        opening = (begin,) if begin is not None else tuple(ends[:1])
        if not opening:
            raise InputError(
                "the target has neither a chat template nor a token that begins a text: give text with --data"
            )
        return Template(opening, (), (), frozenset(ends), "")
    first, second, third = _MARKS
    turns = [{"role": r, "content": c} for r, c in (("user", first), ("assistant", second), ("user", third))]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        alone = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what comes up
        raise InputError(f"the target's chat template fails ({error}): give text with --data") from None
    if first not in text or second not in text or third not in text or not alone.startswith(text[: text.index(first)]):
        raise InputError("the target's chat template drops or reorders turns: give text with --data")
    opening, closing = alone.split(first, 1)
    between = text.split(second, 1)[1].split(third, 1)[0]
    head = next((i for i in ids(closing) if i in ends), None)
    # An end token that the answer itself closes with is sampled, and not repeated.
    rest = ids(between)
    if rest and rest[0] in ends:
        rest = rest[1:]
    return Template(
        ids(opening), ids(closing), rest, frozenset(ends), "" if head is not None else closing.strip().split("\n")[0]
    )


@dataclass
class Conversation:
    """A record that is being written. ``ids`` may run ahead of what the target has read: those tokens are given, not
    chosen.

    limit: positions. turns: user turns left to write after this one. given: user turns that are given, in order.
    greedy: whether answers are the target's first choices. source: number of the prompt, -1 for none.
    """

    pieces: Template
    limit: int
    turns: int
    temperature: float
    given: deque[tuple[int, ...]] = field(default_factory=deque)
    source: int = -1
    ids: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    read: int = 0
    asking: bool = True
    begun: int = 0

    def __post_init__(self) -> None:
        self._force(self.pieces.opening)
        self._ask()

    def _force(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.flags += [0] * len(ids)

    def _ask(self) -> None:
        """Begins a user turn: a given one is closed at once, and the answer begins."""
        self.asking, self.begun = self.pieces.chat, len(self.ids)
        if self.given:
            self._force(self.given.popleft())
            if self.source >= 0 or len(self.ids) - self.begun > _MOST_QUESTION:
                self._answer()

    def _answer(self) -> None:
        self._force(self.pieces.closing)
        self.asking, self.begun = False, len(self.ids)

    @property
    def choosing(self) -> bool:
        """Whether the target has read all there is, and the next token is its own."""
        return self.read == len(self.ids)

    @property
    def heat(self) -> float:
        """The temperature of the next token."""
        return 1.0 if self.asking else self.temperature

    def add(self, token: int, decode: Callable[[Sequence[int]], str]) -> bool:
        """Takes the target's token. decode: ids -> text. Returns whether the conversation is over."""
        pieces = self.pieces
        if self.asking:
            if token in pieces.ends or self._stopped(token, decode):
                if len(self.ids) - self.begun < _LEAST_QUESTION:
                    self.ids.clear()
                    self.flags.clear()
                    return True
                self._answer()
            else:
                self.ids.append(token)
                self.flags.append(0)
                if len(self.ids) - self.begun > _MOST_QUESTION:
                    self._answer()
        else:
            self.ids.append(token)
            self.flags.append(int(ANSWER | GREEDY) if self.temperature == 0 else int(ANSWER))
            if token in pieces.ends or self._loops():
                if not self.turns or token not in pieces.ends:
                    return True
                self.turns -= 1
                self._force(pieces.between)
                self._ask()
        return len(self.ids) >= self.limit

    def _stopped(self, token: int, decode: Callable[[Sequence[int]], str]) -> bool:
        stop = self.pieces.stop
        if not stop:
            return False
        tail = decode([*self.ids[self.begun :][-15:], token])
        if stop not in tail:
            return False
        while len(self.ids) > self.begun and stop[0] in decode(self.ids[-1:]):
            self.ids.pop()
            self.flags.pop()
        return True

    def _loops(self) -> bool:
        """Whether the answer repeats itself, as small models do at temperature 0: 96 tokens of a period up to 32."""
        written = len(self.ids) - self.begun
        if written < 96 or written % 16:
            return False
        tail = self.ids[-96:]
        return any(tail[p:] == tail[:-p] for p in range(1, 33))

    def record(self) -> NDArray[np.uint32]:
        """uint32 [n], nothing if no answer was written."""
        ids = np.array(self.ids[: self.limit], np.uint32) | np.array(self.flags[: self.limit], np.uint32)
        return ids if (ids & ANSWER).any() else ids[:0]

    def answers(self) -> list[int]:
        """The last answer's ids without what ends it."""
        return [i for i in self.ids[self.begun :] if i not in self.pieces.ends]


class Script:
    """Which conversations are written: the user's prompts first, then the target's own, drawn by ``seed`` and
    number."""

    def __init__(
        self,
        pieces: Template,
        tokenizer: Any,
        seed: int,
        number: int,
        prompts: Sequence[tuple[int, Sequence[str]]] = (),
        own: bool = True,
    ) -> None:
        """number: of the next conversation. prompts: number and user turns of each. own: whether the target writes its
        own as well."""
        self.own = own
        self.pieces, self.tokenizer, self.seed, self.number = pieces, tokenizer, seed, number
        self.prompts = deque(prompts)
        self.documents: deque[str] = deque(maxlen=64)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids))

    def next(self, limit: int, widest: int) -> Conversation | None:
        """The next conversation, None if there are no more.

        limit: positions of the record; widest: of the longest records, the only ones with room to summarize a document.
        """
        fitting = self._fitting(limit, limit == widest)
        if fitting is None and not self.own:
            return None
        self.number += 1
        rng = random.Random(self.seed * 1_000_003 + self.number)
        temperature = rng.choice((0.0, 0.0, 0.7, 1.0))
        if fitting:
            source, given = fitting
            return Conversation(self.pieces, limit, len(given) - 1, temperature, given, source)
        if not self.pieces.chat:
            return Conversation(self.pieces, limit, 0, rng.choice((0.7, 1.0, 1.0)))
        if limit == widest and self.documents and rng.random() < 0.5:
            document = " ".join(rng.choice(self.documents) for _ in range(rng.choice((1, 2, 3, 4))))
            request = self.encode(rng.choice(_SUMMARIES) + document)[: limit - 224]
            return Conversation(self.pieces, limit, 0, temperature, deque([request]))
        beginning = rng.choice(BEGINNINGS) if rng.random() < 0.5 else ""
        turns_left = 0 if limit < widest // 2 else 3
        return Conversation(self.pieces, limit, turns_left, temperature, deque([self.encode(beginning)]))

    def _fitting(self, limit: int, longest: bool) -> tuple[int, deque[tuple[int, ...]]] | None:
        """The next prompt whose turns leave half of the positions to the answers; the longest records take any."""
        for _ in range(min(len(self.prompts), _AHEAD)):
            source, turns = self.prompts.popleft()
            given = deque(map(self.encode, turns))
            if longest or sum(map(len, given)) <= limit // 2:
                return source, given
            self.prompts.append((source, turns))
        return None

    def over(self, conversation: Conversation) -> None:
        """Keeps a long answer as a document for a later conversation."""
        document = conversation.answers()
        if not conversation.asking and len(document) >= 128:
            self.documents.append(self.decode(document))
