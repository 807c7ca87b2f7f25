"""A loaded bundle: text in and text out, or token ids in and cycles out."""

import asyncio
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..decoding.checks import check, check_settings
from ..decoding.cycle import Cycle
from ..decoding.decoder import Decoder
from ..decoding.grammar import GrammarMatchers
from ..decoding.settings import Options, Settings
from ..decoding.text.encode import encode, token_ids
from ..decoding.token_selector import TokenSelector
from ..engines.decoders import Decoders
from ..engines.devices import Host
from ..engines.loaded import Loaded
from ..engines.memory_check import require_stream
from ..errors import InputError, MisuseError
from .generation import BUSY, Generation
from .session import Session

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..decoding.text.chat_template import ChatTemplate

_log = logging.getLogger("gumiho.model")
_PATIENCE = 0.25  # seconds to wait for a cycle of a stream whose rows are to be copied


class Model:
    """A bundle with its engines loaded and its buffers allocated: one stream of text, and as many more as ``stream`` makes.

    Safe to use from any thread. A stream runs one generation at a time: starting another one ends the previous one. Those of different
    streams take turns, cycle by cycle, and none changes the output of another.

    thread: where texts for asyncio are computed, always the same one (see ``warm_up``).
    """

    def __init__(self, loaded: Loaded, owner: "Model | None" = None) -> None:
        """Use ``load`` to open a bundle on disk, and ``stream`` for another stream. owner: the first stream, which owns the engines."""
        self.bundle, self._loaded = loaded.bundle, loaded
        self._number, teams = next(loaded.numbers), loaded.teams

        def others(number: int = self._number) -> bool:  # does not hold the model: nothing would free both at once
            teams.yield_turn(number)
            return teams.shared(number)

        self.decoders = Decoders(loaded, self._number, others)
        self.thread: Executor = ThreadPoolExecutor(1, "gumiho-async")
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that has the lock
        # Weak, since a generation holds the model; a strong reference would delay freeing both.
        self._current: Callable[[], Generation | None] = lambda: None
        self._kept: tuple[Model, ...] = ()  # streams that nobody else holds
        self._closed = False
        # Of all streams, the owner first. Weak, or none would be freed before all are.
        self._family: list[weakref.ref[Model]] = owner._family if owner else []
        self._family.append(weakref.ref(self))

    def __repr__(self) -> str:
        return f"<Model of {self.bundle.path}, {self.capacity} positions, {self.vocabulary_size} tokens{', closed' * self._closed}>"

    def warm_up(self) -> None:
        """Makes every call to the engines once, so that the next text need not wait for an accelerator to set them up; on the CPU there is
        nothing to do. Ends a running generation. ``load`` does it for the first stream. ONNX Runtime records calls for CUDA anew in every
        thread: there, do it in the thread that decodes, if that is another one.
        """
        if not isinstance(self._loaded.device, Host):
            with self.exclusive() as decoder:
                decoder.clear()
                decoder.warm_up()

    def stream(self) -> "Model":
        """Another stream over the same engines and weights, with caches of its own; a model like this one. Closing it frees its caches,
        on a GPU once all streams are closed. Raises UnavailableError if memory does not hold its caches."""
        with self._held():
            if self._loaded.backend:
                require_stream(self.bundle, self._loaded.backend)
        return Model(self._loaded, self)

    @property
    def streams(self) -> tuple["Model", ...]:
        """All open streams over these engines, the one that ``load`` returned first."""
        return tuple(stream for one in self._family if (stream := one()) is not None and not stream._closed)

    def adopt(self, other: "Model", prompt: Sequence[int]) -> bool:
        """Copies the rows of a prompt's beginning from another stream's caches, so that ``start(resume=True)`` need not read it again.
        Returns False, and does nothing, if that stream reads a prompt itself just now."""
        try:
            with other._held(patience=_PATIENCE):
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

        Raises InputError if the text holds lone surrogates, DamageError if the tokenizer fails or belongs to another model.
        """
        return encode(self.bundle, text, special)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens. Raises InputError for ids outside the vocabulary."""
        if outside := next((token for token in ids if not 0 <= token < self.vocabulary_size), None):
            raise InputError(f"there is no token {outside}: ids go from 0 to {self.vocabulary_size - 1}")
        return str(self.bundle.tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None, special_tokens: bool = False,
    ) -> list[int]:  # fmt: skip
        """The token ids of a conversation, up to where the answer begins. messages: mappings with ``role`` and ``content``; a content may be
        a list of parts, ``{"type": "text", "text": ...}``, which are joined by newlines if the template does not take them. tools: functions
        for templates that know tools, in the form of OpenAI's API. variables: of the template, such as Qwen3's ``enable_thinking``.
        special_tokens: whether special tokens that are spelled out in all this, such as ``<|im_end|>``, keep their meaning. Otherwise they are
        text like any other, except in the assistant's messages.

        Raises InputError if the target has no chat template, or if its template refuses the conversation.
        """
        if self.chat_template is None:
            raise InputError(f"bundle {self.bundle.path} has no chat template (its target had none): give a prompt instead")
        messages, tokenizer = self.chat_template.joined(messages), None
        if special_tokens:
            text = self.chat_template.render(messages, tools=tools, variables=variables)
        else:
            tokens = self._loaded.special_tokens
            text, tokenizer = tokens.unmarked(self.chat_template.render(messages, True, tools, variables, tokens.marked))
        return encode(self.bundle, text, special=False, tokenizer=tokenizer)

    def generate(
        self, prompt: str | Sequence[int], max_new_tokens: int = 256, speculate: bool = True, **options: "Unpack[Options]"
    ) -> Generation:
        """Continues a prompt: text, or token ids. The output is the same with and without speculation.

        options: see ``Settings``. Raises InputError if the prompt is empty or longer than the bundle's capacity, or if a setting is
        not valid.
        """
        return self.start(prompt, Settings.of(max_new_tokens, speculate, options))

    async def agenerate(
        self, prompt: str | Sequence[int], max_new_tokens: int = 256, speculate: bool = True, **options: "Unpack[Options]"
    ) -> AsyncIterator[str]:
        """``generate`` for asyncio: pieces of text, computed in another thread. Closing the iterator cancels the generation, and so does
        cancelling the task that waits for it."""
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

    def _start(self, generation: Generation, selector: TokenSelector, resume: bool) -> Iterator[Cycle]:
        with self._held(turn=False):
            self._current = weakref.ref(generation)
            decoder = self.decoders.choose(selector.settings)
            generation.drafter = self.decoders.drafter
            return decoder.generate(selector, generation.stats, resume)

    def _advance(self, generation: Generation, cycles: Iterator[Cycle]) -> Cycle | None:
        with self._held(turn=not self._loaded.shares):
            if generation.broken:
                raise MisuseError("this generation was broken off by an error: start it again")
            if generation.finish_reason is None and generation is not self._current():
                raise MisuseError("another generation was started on this stream: use model.stream() to run several at once")
            try:
                if cycle := next(cycles, None):
                    generation.ids += cycle.tokens
                    generation.logprobs += cycle.logprobs
                    if cycle.finish_reason:
                        self._loaded.teams.forget(self._number)
                        if generation.settings.speculate:
                            drawn = generation.settings.temperature > 0
                            self._loaded.choices[drawn].record(generation.drafter, generation.stats)
                        _log.debug("generation ended: %s", generation.stats.summary())
                return cycle
            except BaseException as error:
                generation.broken = True
                if isinstance(error, KeyboardInterrupt):
                    generation.stats.finish_reason = "cancelled"
                raise

    @contextmanager
    def exclusive(self) -> Iterator[Decoder]:
        """The decoder, between two cycles; no other thread and no other stream can use the engines while the context is open."""
        with self._held():
            self.decoder.device.enter()
            yield self.decoder

    @contextmanager
    def _held(self, turn: bool = True, closed: bool = False, patience: float = -1) -> Iterator[None]:
        """Locks the stream for this thread. turn: the engines too, when its turn has come. closed: allow a closed model. patience:
        seconds after which a stream that another thread still holds raises MisuseError, -1 to wait."""
        teams = self._loaded.teams
        if self._holder == threading.get_ident() or teams.mine or not self._lock.acquire(timeout=patience):
            raise MisuseError(BUSY)
        try:
            if not closed:
                self._require_open()
            self._holder = threading.get_ident()
            if turn:
                teams.take(self._number)
            yield
        finally:
            teams.give()
            self._holder = None
            self._lock.release()

    def _require_open(self) -> None:
        if self._closed or self._loaded.closed:
            raise MisuseError("the model is closed: load the bundle again")

    def close(self) -> None:
        """Frees buffers, and with those of the model that ``load`` returned the engines and all streams; waits for a running cycle.
        Closing twice is fine."""
        owner = self._family[0]() is self
        for stream in self.streams if owner else ():
            if stream is not self:
                stream.close()
        with self._held(closed=True):
            if not self._closed:
                self._closed, self._kept = True, ()
                self._loaded.closed = owner
                self.decoders.close(engines=owner)
                self.thread.shutdown(wait=False)
                self._loaded.teams.forget(self._number)
                _log.debug("closed %s", self.bundle.path)

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
