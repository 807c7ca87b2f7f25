"""Selects the tokens of one text, one after the other, and decides when it ends."""

import secrets
import threading
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Any

import numpy as np

from ..bundle.manifest import Manifest
from .grammar_matcher import GrammarMatcher
from .logprobs import TokenLogprobs
from .sampling import Sampler
from .settings import Settings
from .text.stream import TextStream


class TokenSelector:
    """ids: emitted so far. logprobs: one for each of them if the settings ask for log-probabilities. finish_reason: see
    ``Generation``. seed: None if nothing is drawn.

    A token depends only on the settings, the text so far and the target's logits, not on the pass that computed them.
    """

    def __init__(
        self,
        settings: Settings,
        prompt: Sequence[int],
        manifest: Manifest,
        tokenizer: Any = None,
        matcher: GrammarMatcher | None = None,
    ) -> None:
        """tokenizer: needed for stop strings and for a callback's text. Raises InputError for ids outside the
        vocabulary."""
        self.settings, self.prompt, self.ids = settings, list(prompt), list[int]()
        self.logprobs: list[TokenLogprobs] = []
        drawn = settings.seed if settings.seed is not None else secrets.randbits(63)
        self.seed = drawn if settings.temperature else None
        # Special tokens do not appear in the text, so they are matched by id.
        added = tokenizer.get_added_tokens_decoder().items() if settings.stop else ()
        special = {token.content: i for i, token in added if token.special and token.content in settings.stop}
        self._ends = frozenset((*manifest.eos_token_ids, *settings.stop_token_ids, *special.values()))
        strings = [s for s in settings.stop if s not in special]
        self.sampler = Sampler(settings, drawn, prompt, manifest.vocabulary, self._ends, matcher)
        self._matcher = matcher
        self.stream = (
            TextStream(tokenizer, prompt, strings) if tokenizer is not None and (strings or settings.callback) else None
        )
        # The last cache position may be filled, so prompt and new tokens come to at most capacity + 1.
        fitting = manifest.capacity + 1 - len(prompt)
        self._room = min(settings.max_new_tokens, fitting)
        self._full = "length" if settings.max_new_tokens <= fitting else "context"
        self.finish_reason: str | None = self._full if self._room < 1 else None
        self._deadline = inf
        self._cancelled = threading.Event()

    def begin(self) -> None:
        """Starts the clock of ``max_seconds``, unless it runs."""
        self._deadline = min(self._deadline, monotonic() + self.settings.max_seconds)

    @property
    def grammar_seconds(self) -> float:
        """Seconds that the text has waited for its grammar."""
        return self._matcher.seconds if self._matcher else 0.0

    def cancel(self) -> None:
        """Ends the text after the running cycle. Safe to call from any thread."""
        self._cancelled.set()

    def ended(self) -> bool:
        """Whether the text has ended, or was cancelled."""
        if self.finish_reason is None and self._cancelled.is_set():
            self.finish_reason = "cancelled"
        return self.finish_reason is not None

    def interrupted(self) -> bool:
        """Whether the text has ended, was cancelled, or its time is up; checked between cycles."""
        if not self.ended() and monotonic() >= self._deadline:
            self.finish_reason = "time"
        return self.finish_reason is not None

    def choose(self, most_likely: int, row: Callable[[], np.ndarray]) -> int:
        """The next token; ``add`` it.

        most_likely: the target's largest logit, the lowest id of equal ones. row: fetches the target's logits [V]; it
        is called only if they are needed.
        """
        if self.settings.logprobs is None:
            return most_likely if self.sampler.idle else self.sampler.choose(row())
        logits = row()
        token = most_likely if self.sampler.idle else self.sampler.choose(logits)
        self.logprobs.append(TokenLogprobs.of(logits, token, self.settings.logprobs))
        return token

    def add(self, token: int) -> int | None:
        """Emits a token. Returns it, or None if the text ends with it."""
        self.ids.append(token)
        self.sampler.accept(token)
        piece = self.stream.push(token) if self.stream else ""
        if self._stops(token, piece):
            self.finish_reason = "stop"
        elif len(self.ids) == self._room:
            self.finish_reason = self._full
        return token if self.finish_reason is None else None

    def _stops(self, token: int, piece: str) -> bool:
        enough = len(self.ids) >= self.settings.min_new_tokens
        # Always evaluated, since it also cuts the text off before the stop string.
        stop_string = enough and self.stream is not None and self.stream.stopped(piece)
        by_callback = self.settings.callback is not None and bool(self.settings.callback(token, piece))
        return stop_string or by_callback or token in self._ends or (self._matcher is not None and self._matcher.done)
