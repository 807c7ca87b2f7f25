"""One text in the making: chooses its tokens in turn and knows where it ends."""

import secrets
import threading
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import Any

import numpy as np

from ..bundle.manifest import Manifest
from ..text.stream import TextStream
from .grammar import GrammarMatcher
from .sampling import Sampler
from .settings import Settings


class TokenSelector:
    """ids: emitted so far. finish_reason: ``stop`` (an end of text, a stop string or token, the grammar's end, the callback),
    ``length`` (max_new_tokens), ``context`` (the cache is full), ``time``, ``cancelled``, or None while more follows. seed: None
    where nothing is drawn.

    The same settings give the same text, whatever passes its rows come from: nothing here depends on them.
    """

    def __init__(
        self,
        settings: Settings,
        prompt: Sequence[int],
        manifest: Manifest,
        tokenizer: Any = None,
        matcher: GrammarMatcher | None = None,
    ) -> None:
        """tokenizer: needed for stop strings, and for a callback's text. Raises GumihoError for token ids that are none."""
        self.settings, self.prompt, self.ids = settings, list(prompt), list[int]()
        drawn = settings.seed if settings.seed is not None else secrets.randbits(63)
        self.seed = drawn if settings.temperature else None
        # Special tokens are no part of the text, so they cannot be found in it.
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
        """The clock starts."""
        self._deadline = monotonic() + self.settings.max_seconds

    def cancel(self) -> None:
        """From any thread: the text ends behind the cycle that runs."""
        self._cancelled.set()

    def ended(self) -> bool:
        """Whether the text has ended, or was cancelled."""
        if self.finish_reason is None and self._cancelled.is_set():
            self.finish_reason = "cancelled"
        return self.finish_reason is not None

    def interrupted(self) -> bool:
        """Looked at between cycles: whether the text has ended, was cancelled, or its time is up."""
        if not self.ended() and monotonic() >= self._deadline:
            self.finish_reason = "time"
        return self.finish_reason is not None

    @property
    def takes_choice(self) -> bool:
        """Whether the next token is the target's most likely one, so that its logits need not be looked at."""
        return self.sampler.idle

    def choose(self, row: np.ndarray) -> int:
        """The next token by its logits [V]; ``add`` it."""
        return self.sampler.choose(row)

    def add(self, token: int) -> int | None:
        """Emits a token. Returns it, or None where the text ends with it."""
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
        # Looked at whatever else ends the text, since it also cuts the text off.
        found = enough and self.stream is not None and self.stream.stopped(piece)
        asked = self.settings.callback is not None and bool(self.settings.callback(token, piece))
        return found or asked or token in self._ends or (self._matcher is not None and self._matcher.done)
