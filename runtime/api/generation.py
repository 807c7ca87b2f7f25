"""One running generation: pieces of text, or cycles."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import AbstractContextManager
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any, Protocol

from ..bundle.reader import Bundle
from ..decoding.cycle import Cycle
from ..decoding.logprobs import TokenLogprobs
from ..decoding.settings import Settings
from ..decoding.stats import Stats
from ..decoding.text.stream import TextStream
from ..decoding.token_selector import TokenSelector
from ..errors import MisuseError

BUSY = "the model is in the middle of a cycle: do this between two pieces, or cancel() the generation"


class _Model(Protocol):
    """The part of a model that a generation uses."""

    bundle: Bundle

    def _use_thread(self) -> None: ...
    def _start(self, generation: "Generation", selector: TokenSelector, resume: bool) -> Iterator[Cycle | None]: ...
    def _advance(self, generation: "Generation", steps: Iterator[Cycle | None]) -> Cycle | None: ...


class Generation:
    """One running generation: an iterator over pieces of text, or over cycles through ``cycles()``.

    stats: counts and times so far. ids: token ids emitted so far. logprobs: one for each of them if the settings ask
    for log-probabilities. drafter: its name, "" if the bundle has one at most.
    """

    def __init__(self, model: _Model, selector: TokenSelector, resume: bool) -> None:
        self.stats = Stats()
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.drafter = ""
        self.broken = False  # an error came out of it, and it cannot go on
        self._pieces_lock = threading.RLock()
        self._model, self._selector = model, selector
        self._steps = model._start(self, selector, resume)

    def __repr__(self) -> str:
        return f"<Generation, {len(self.ids)} tokens, {self.finish_reason or 'running'}>"

    @property
    def text(self) -> str:
        """The text so far, without stop strings and special tokens, whether it was read as pieces or as cycles."""
        if self._selector.stream:  # only this stream knows where a stop string cuts the text off
            return self._selector.stream.text
        stream = self._read_again()
        return stream.take() + (stream.rest() if self.finish_reason else "")

    def _read_again(self) -> TextStream:
        """A new stream over the ids so far."""
        stream = TextStream(self._model.bundle.tokenizer, self.prompt)
        for token in self.ids:
            stream.push(token)
        return stream

    @property
    def settings(self) -> Settings:
        return self._selector.settings

    @property
    def prompt(self) -> list[int]:
        """The prompt's token ids."""
        return self._selector.prompt

    @property
    def finish_reason(self) -> str | None:
        """``stop`` (an end of text, a stop string or token, the grammar's end, the callback), ``length``
        (max_new_tokens), ``context`` (the cache is full), ``time``, ``cancelled``; None while it runs."""
        return self.stats.finish_reason

    def cancel(self) -> None:
        """Ends the generation after the running cycle. Safe to call from any thread."""
        self._selector.cancel()

    @property
    def grammar_seconds(self) -> float:
        """Seconds that the text has waited for its grammar."""
        return self._selector.grammar_seconds

    def move(self, stream: _Model) -> None:
        """Goes on on another stream over the same engines, which reads what its caches lack of the text so far. Between
        two cycles."""
        self._model, self._steps = stream, stream._start(self, self._selector, True)

    def cycles(self) -> Iterator[Cycle]:
        """The cycles of the generation, the prefill first, each with the token ids it emitted.

        Threads may share it; each cycle goes to one of them.
        """
        return iter(lambda: self._model._advance(self, self._steps), None)

    def __iter__(self) -> Iterator[str]:
        """Pieces of text without special tokens; none ends inside a character or a stop string. Threads may share
        it."""
        return self.pieces()

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        """``__iter__`` for asyncio. The text is computed in other threads; leaving the loop cancels the generation,
        which ends after the running cycle."""
        self._model._use_thread()
        pieces = iter(self)
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            self.cancel()

    def pieces(self, watch: Callable[[Cycle], object] | None = None) -> Iterator[str]:
        """Pieces of text as ``__iter__`` gives them; ``watch`` is called with every cycle."""
        return _Pieces(self._pieces(watch), self._pieces_lock)

    def _pieces(self, watch: Callable[[Cycle], object] | None) -> Generator[str, None, None]:
        selecting = self._selector.stream  # takes every token already, for stop strings
        stream = selecting or self._read_again()
        if not selecting:
            stream.take()  # the text of cycles that were read earlier
        for cycle in self.cycles():
            if watch:
                watch(cycle)
            for token in () if selecting else cycle.tokens:
                stream.push(token)
            if piece := stream.take():
                yield piece
        if piece := stream.rest():
            yield piece


class _Pieces(Iterator[str]):
    """A generator that several threads may share."""

    def __init__(self, source: Generator[str, None, None], lock: AbstractContextManager[Any]) -> None:
        """lock: reentrant; held while the source runs."""
        self._source, self._lock = source, lock

    def __next__(self) -> str:
        with self._lock:
            if getgeneratorstate(self._source) == GEN_RUNNING:  # this thread holds the lock, so it called itself
                raise MisuseError(BUSY)
            return next(self._source)
