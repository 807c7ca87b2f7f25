"""One stream of text over a loaded bundle: text in and text out, or token ids in and cycles out."""

import asyncio
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from ..decoding.checks import check, check_settings
from ..decoding.cycle import Cycle
from ..decoding.decoder import Decoder
from ..decoding.grammar import GrammarMatchers
from ..decoding.settings import Options, Settings
from ..decoding.text.encode import encode, token_ids
from ..decoding.token_selector import TokenSelector
from ..engines.decoders import Decoders
from ..engines.devices import Host
from ..engines.loaded import LoadedBundle
from ..errors import InputError, MisuseError
from .generation import BUSY, Generation
from .session import Session

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..decoding.text.chat_template import ChatTemplate

_log = logging.getLogger("gumiho.model")
_TIMEOUT = 0.25  # seconds to wait for a cycle of a stream whose rows are to be copied
_END = Cycle((), 0, (), None)
_S = TypeVar("_S", bound="Stream")


class Stream:
    """A stream of text, with caches of its own over the engines that all streams of a model share.

    Safe to use from any thread. A stream runs one generation at a time: starting another one ends the previous one.
    Those of different streams run at once, and none changes the output of another.
    """

    def __init__(self, loaded: LoadedBundle, first: "Stream | None" = None) -> None:
        """Use ``Model.stream``. first: the model, which is the first stream; None for the model itself."""
        self.bundle, self._loaded = loaded.bundle, loaded
        self._number = next(loaded.numbers)
        self.decoders = Decoders(loaded, self._number)
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that has the lock
        # Weak, since a generation holds the stream; a strong reference would delay freeing both.
        self._current: Callable[[], Generation | None] = lambda: None
        self._closed = False
        # Of all streams, the model first. Weak, or none would be freed before all are.
        self._family: list[weakref.ref[Stream]] = first._family if first else []
        self._family.append(weakref.ref(self))

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {self.bundle.path}, {self.capacity} positions, {self.vocabulary_size} "
            f"tokens{', closed' * self._closed}>"
        )

    def warm_up(self) -> None:
        """Makes every call to the engines once, so that the next text need not wait for an accelerator to set them up;
        on the CPU there is nothing to do. Ends a running generation. ``load`` does it for all its streams.
        """
        if not isinstance(self._loaded.device, Host):
            with self._locked():
                self._loaded.loop.run(self._number, lambda _: self._warm_up())

    def _warm_up(self) -> None:
        self.decoder.device.enter()
        self.decoder.clear()
        self.decoder.warm_up()

    def stream(self) -> "Stream":
        """Another stream over the same engines and weights. Closing it frees its caches, on a GPU once all streams are
        closed. Raises UnavailableError if memory does not hold its caches."""
        with self._locked(), self._loaded.loop.exclusive():
            self._loaded.require_stream()
        self._use_thread()
        return Stream(self._loaded, self)

    @property
    def streams(self) -> "tuple[Stream, ...]":
        """All open streams over these engines, the model first."""
        return tuple(stream for one in self._family if (stream := one()) is not None and not stream._closed)

    def adopt(self, other: "Stream", prompt: Sequence[int]) -> bool:
        """Copies the rows of a prompt's beginning from another stream's caches, so that ``start(resume=True)`` need not
        read it again. Returns False, and does nothing, if that stream reads a prompt itself just now."""
        try:
            with other._locked(timeout=_TIMEOUT), self._loaded.loop.exclusive():
                other.decoder.device.enter()
                saved, drafter = other.decoder.saved(prompt), other.decoders.drafter
        except MisuseError:
            return False
        with self.exclusive():
            self.decoders.use(drafter).restore(*saved)
        return True

    @property
    def decoder(self) -> Decoder:
        """The decoder of the last text."""
        return self.decoders.current

    @property
    def capacity(self) -> int:
        """Positions that prompt and text may take together."""
        return self.bundle.manifest.capacity

    @property
    def vocabulary_size(self) -> int:
        return self.bundle.manifest.vocabulary

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The token ids that end a text."""
        return self.bundle.manifest.eos_token_ids

    @property
    def chat_template(self) -> "ChatTemplate | None":
        """The target's chat template, None if it has none."""
        return self._loaded.chat_template

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text. special: add the tokenizer's special tokens, such as a beginning-of-text id.

        Raises InputError if the text holds lone surrogates, DamageError if the tokenizer fails or belongs to another
        model.
        """
        return encode(self.bundle, text, special)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens. Raises InputError for ids outside the vocabulary."""
        if outside := next((token for token in ids if not 0 <= token < self.vocabulary_size), None):
            raise InputError(f"there is no token {outside}: ids go from 0 to {self.vocabulary_size - 1}")
        return str(self.bundle.tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        special_tokens: bool = False,
    ) -> list[int]:
        """The token ids of a conversation, up to where the answer begins. messages: mappings with ``role`` and
        ``content``; a content may be a list of parts, ``{"type": "text", "text": ...}``, which are joined by newlines
        if the template does not take them. tools: functions for templates that know tools, in the form of OpenAI's API.
        variables: of the template, such as Qwen3's ``enable_thinking``. special_tokens: whether special tokens that are
        spelled out in all this, such as ``<|im_end|>``, keep their meaning. Otherwise they are text like any other,
        except in the assistant's messages.

        Raises InputError if the target has no chat template, or if its template refuses the conversation.
        """
        if self.chat_template is None:
            raise InputError(
                f"bundle {self.bundle.path} has no chat template (its target had none): give a prompt instead"
            )
        messages, tokenizer = self.chat_template.joined(messages), None
        if special_tokens:
            text = self.chat_template.render(messages, tools=tools, variables=variables)
        else:
            tokens = self._loaded.special_tokens
            text, tokenizer = tokens.unmarked(
                self.chat_template.render(messages, True, tools, variables, tokens.marked)
            )
        return encode(self.bundle, text, special=False, tokenizer=tokenizer)

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 256,
        speculate: bool = True,
        **options: "Unpack[Options]",
    ) -> Generation:
        """Continues a prompt: text, or token ids. The output is the same with and without speculation.

        options: see ``Settings``. Raises InputError if the prompt is empty or longer than the bundle's capacity, or if
        a setting is not valid.
        """
        return self.start(prompt, Settings.of(max_new_tokens, speculate, options))

    async def agenerate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 256,
        speculate: bool = True,
        **options: "Unpack[Options]",
    ) -> AsyncIterator[str]:
        """``generate`` for asyncio: pieces of text, computed in other threads. Closing the iterator cancels the
        generation, and so does cancelling the task that waits for it."""
        generation = await asyncio.to_thread(self.start, prompt, Settings.of(max_new_tokens, speculate, options))
        async with aclosing(aiter(generation)) as pieces:
            async for piece in pieces:
                yield piece

    def start(self, prompt: str | Sequence[int], settings: Settings, resume: bool = False) -> Generation:
        """``generate`` with ready-made settings. resume: reuse the cached rows of the longest common prefix."""
        self._require_open()
        ids = self.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)
        check(self.bundle.manifest, ids)
        check_settings(self.bundle.manifest, settings)
        return Generation(self, self.selector(ids, settings), resume)

    def selector(self, prompt: Sequence[int], settings: Settings) -> TokenSelector:
        """A new token selector for a prompt."""
        # Stop strings need a tokenizer; a callback works without one.
        needed = settings.stop or (settings.callback and self.bundle.has_tokenizer)
        matcher = self._loaded.matchers.start(settings.grammar) if settings.grammar else None
        return TokenSelector(settings, prompt, self.bundle.manifest, self.bundle.tokenizer if needed else None, matcher)

    @property
    def matchers(self) -> GrammarMatchers:
        """For grammars that several texts follow; all streams share them."""
        return self._loaded.matchers

    def session(self, saved: str | Path | None = None) -> Session:
        """A session: a text over several turns. saved: a file from ``Session.save`` to continue from."""
        session = Session(self)
        if saved is not None:
            session.restore(saved)
        return session

    def _start(self, generation: Generation, selector: TokenSelector, resume: bool) -> Iterator[Cycle | None]:
        with self._locked():
            self._current = weakref.ref(generation)
            decoder = self.decoders.choose(selector.settings)
            generation.drafter = self.decoders.drafter
            return decoder.generate(selector, generation.stats, resume)

    def _advance(self, generation: Generation, steps: Iterator[Cycle | None]) -> Cycle | None:
        """The next cycle of a generation, None after the last one. steps: of its decoder."""
        with self._locked():
            if generation.broken:
                raise MisuseError("this generation was broken off by an error: start it again")
            if generation.finish_reason is None and generation is not self._current():
                raise MisuseError(
                    "another generation was started on this stream: use model.stream() to run several at once"
                )
            begun, cycle = False, None

            def step(_: bool = False) -> Cycle | None:
                nonlocal begun
                begun, self.decoder.contended = True, self._loaded.loop.contended(self._number)
                return next(steps, _END)

            try:
                while cycle is None:
                    # Where streams' passes are joined, each pass waits in the queue; a cycle's other work does not.
                    cycle = step() if self._loaded.joins_passes else self._loaded.loop.run(self._number, step)
            except BaseException as error:
                generation.broken = begun
                if begun and isinstance(error, KeyboardInterrupt):
                    generation.stats.finish_reason = "cancelled"
                raise
            return None if cycle is _END else self._count(generation, cycle)

    def _count(self, generation: Generation, cycle: Cycle) -> Cycle:
        generation.ids += cycle.tokens
        generation.logprobs += cycle.logprobs
        if cycle.finish_reason:
            self._loaded.loop.forget(self._number)
            if generation.settings.speculate:
                drawn = generation.settings.temperature > 0
                self._loaded.choices[drawn].record(generation.drafter, generation.stats)
            _log.debug("generation ended: %s", generation.stats.summary())
        return cycle

    @contextmanager
    def exclusive(self) -> Iterator[Decoder]:
        """The decoder, between two cycles; no other thread and no other stream can use the engines while the context is
        open."""
        with self._locked(), self._loaded.loop.exclusive():
            self.decoder.device.enter()
            yield self.decoder

    @contextmanager
    def _locked(self, closed: bool = False, timeout: float = -1) -> Iterator[None]:
        """Locks the stream for this thread. closed: allow a closed stream. timeout: seconds after which a stream that
        another thread still holds raises MisuseError, -1 to wait."""
        if self._holder == get_ident() or self._loaded.loop.mine or not self._lock.acquire(timeout=timeout):
            raise MisuseError(BUSY)
        try:
            if not closed:
                self._require_open()
            self._holder = get_ident()
            yield
        finally:
            self._holder = None
            self._lock.release()

    def _use_thread(self) -> None:
        self._loaded.use_thread()

    def _require_open(self) -> None:
        if self._closed or self._loaded.closed:
            raise MisuseError("the model is closed: load the bundle again")

    def close(self) -> None:
        """Frees buffers; waits for a running cycle. Closing twice is fine."""
        with self._locked(closed=True), self._loaded.loop.exclusive():
            if not self._closed:
                self._closed = True
                self._free()
                self._loaded.loop.forget(self._number)
                _log.debug("closed %s", self.bundle.path)

    def _free(self) -> None:
        self.decoders.close()

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
