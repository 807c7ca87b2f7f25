"""A loaded bundle: text in and text out, or token ids in and cycles out."""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import index
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from .backends import Backend, Engine, backend, close, require
from .backends.processor import physical_cores
from .bundle.manifest import Form
from .bundle.reader import Bundle
from .decoding.cycle import Cycle
from .decoding.decoder import Decoder, check, check_settings
from .decoding.grammar import GrammarMatchers
from .decoding.prices import Costs
from .decoding.settings import Options, Settings
from .decoding.token_selector import TokenSelector
from .devices import Device
from .engines.memory_check import require as require_memory
from .engines.store import find_engines
from .errors import GumihoError, InputError, MisuseError
from .generation import BUSY, Generation
from .session import Session
from .text.encode import encode

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .text.chat_template import ChatTemplate

_log = logging.getLogger("gumiho.model")
_MAX_THREADS_PER_CPU = 4  # more only wait for each other, and some thousands never finish


def _token_ids(prompt: Sequence[int]) -> list[int]:
    try:
        if isinstance(prompt, bytes):
            raise TypeError
        return [index(token) for token in prompt]
    except TypeError:
        raise InputError("the prompt is neither text nor a list of token ids: give one of the two") from None


class Model:
    """A bundle with its engines loaded and its buffers allocated.

    Safe to use from any thread. It runs one generation at a time: starting another one ends the previous one. For several
    streams at once, load the bundle once for each.
    """

    def __init__(
        self, bundle: Bundle, form: Form, engines: Mapping[str, Engine], device: Device, costs: Costs | None = None
    ) -> None:
        """Use ``load`` to open a bundle on disk. costs: measured prices of the passes, if any."""
        self.bundle = bundle
        self.decoder = Decoder(bundle.manifest, form, engines, device, costs)
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that has the lock
        # Weak, since a generation holds the model; a strong reference would delay freeing both.
        self._current: Callable[[], Generation | None] = lambda: None
        self._closed = False

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Model of {self.bundle.path}, {self.capacity} positions, {self.vocabulary_size} tokens{state}>"

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

    @cached_property
    def chat_template(self) -> "ChatTemplate | None":
        """The target's chat template, None if it has none."""
        from .text.chat_template import ChatTemplate  # imports jinja2, which only conversations need

        return ChatTemplate.of(self.bundle.path)

    @cached_property
    def _matchers(self) -> GrammarMatchers:
        manifest = self.bundle.manifest
        return GrammarMatchers(self.bundle.tokenizer.to_str(), manifest.vocabulary, manifest.eos_token_ids)

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

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The token ids of a conversation, up to where the answer begins. messages: mappings with ``role`` and ``content``.

        Raises InputError if the target has no chat template, or if its template refuses the conversation.
        """
        if self.chat_template is None:
            raise InputError(f"bundle {self.bundle.path} has no chat template (its target had none): give a prompt instead")
        return self.encode(self.chat_template.render(messages), special=False)

    def generate(
        self, prompt: str | Sequence[int], max_new_tokens: int = 256, speculate: bool = True, **options: "Unpack[Options]"
    ) -> Generation:
        """Continues a prompt: text, or token ids. The output is the same with and without speculation.

        options: see ``Settings``. Raises InputError if the prompt is empty or longer than the bundle's capacity, or if a setting is
        not valid.
        """
        return self.start(prompt, Settings.of(max_new_tokens, speculate, options))

    def start(self, prompt: str | Sequence[int], settings: Settings, resume: bool = False) -> Generation:
        """``generate`` with ready-made settings. resume: reuse the cached rows of the longest common prefix."""
        self._require_open()
        ids = self.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        check(self.bundle.manifest, ids)
        check_settings(self.bundle.manifest, settings)
        return Generation(self, self.selector(ids, settings), resume)

    def selector(self, prompt: Sequence[int], settings: Settings) -> TokenSelector:
        """A new token selector for a prompt."""
        # Stop strings need a tokenizer; a callback works without one.
        needed = settings.stop or (settings.callback and self.bundle.has_tokenizer)
        matcher = self._matchers.start(settings.grammar) if settings.grammar else None
        return TokenSelector(settings, prompt, self.bundle.manifest, self.bundle.tokenizer if needed else None, matcher)

    def session(self, saved: str | Path | None = None) -> Session:
        """A session: a text over several turns. saved: a file from ``Session.save`` to continue from."""
        session = Session(self)
        if saved is not None:
            session.restore(saved)
        return session

    def _start(self, generation: Generation, selector: TokenSelector, resume: bool) -> Iterator[Cycle]:
        with self._held():
            self._current = weakref.ref(generation)
            return self.decoder.generate(selector, generation.stats, resume)

    def _advance(self, generation: Generation, cycles: Iterator[Cycle]) -> Cycle | None:
        with self._held():
            if generation.broken:
                raise MisuseError("this generation was broken off by an error: start it again")
            if generation.finish_reason is None and generation is not self._current():
                raise MisuseError("another generation was started on this model: load the bundle once for each stream")
            try:
                if cycle := next(cycles, None):
                    generation.ids += cycle.tokens
                    generation.logprobs += cycle.logprobs
                    if cycle.finish_reason:
                        _log.debug("generation ended: %s", generation.stats.summary())
                return cycle
            except BaseException as error:
                generation.broken = True
                if isinstance(error, KeyboardInterrupt):
                    generation.stats.finish_reason = "cancelled"
                raise

    @contextmanager
    def exclusive(self) -> Iterator[Decoder]:
        """The decoder, between two cycles; no other thread can use the model while the context is open."""
        with self._held():
            self.decoder.device.enter()
            yield self.decoder

    @contextmanager
    def _held(self, closed: bool = False) -> Iterator[None]:
        """Locks the model for this thread. closed: allow a closed model."""
        if self._holder == threading.get_ident():
            raise MisuseError(BUSY)
        with self._lock:
            if not closed:
                self._require_open()
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    def _require_open(self) -> None:
        if self._closed:
            raise MisuseError("the model is closed: load the bundle again")

    def close(self) -> None:
        """Frees engines and buffers; waits for a running cycle. Closing twice is fine."""
        with self._held(closed=True):
            if not self._closed:
                self._closed = True
                self.decoder.close()
                _log.debug("closed %s", self.bundle.path)

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(bundle: str | Path, backend_name: str = "", device: str = "", threads: int = 0) -> Model:
    """Loads a bundle with the engines compiled for a backend.

    backend_name: "" for the bundle's first one. device: one of the backend's devices, "" for its first. threads: CPU threads of the
    engines, 0 for as many as compiling found fastest. Raises DamageError if the bundle is damaged, InputError if it has no graphs for
    the backend, and UnavailableError if the backend cannot run here or has no current engines; the message names the command that
    compiles them.
    """
    started, opened = perf_counter(), Bundle(bundle)
    most = _MAX_THREADS_PER_CPU * (os.cpu_count() or 1)
    if not hasattr(threads, "__index__") or not 0 <= (threads := index(threads)) <= most:
        raise InputError(f"threads is {threads!r}: give 0 for as many as compiling found fastest, or 1 to {most}")
    name = backend_name or opened.manifest.default
    require(name)
    opened.manifest.form(name)
    chosen = backend(name, device)
    if threads and not chosen.THREADS:
        raise InputError(f"threads is {threads}, and engines of {name} do not compute with CPU threads: leave it out")
    opened.verify(quick=True)
    form, engines, memory, costs = _open(opened, chosen, threads)
    try:
        model = Model(opened, form, engines, memory, costs)
        _log.info(
            "loaded %s for %s in %.2f s, with %s prices",
            opened.path,
            name,
            perf_counter() - started,
            "measured" if costs else "no",
        )
        return model
    except BaseException:
        close(engines, memory)
        raise


def _open(bundle: Bundle, backend: Backend, threads: int) -> tuple[Form, Mapping[str, Engine], Device, Costs | None]:
    """Opens the current engines: the form they were compiled from, the engines, their device and the measured costs."""
    while True:
        folder = find_engines(bundle, backend)
        try:
            form, costs = backend.form(bundle, folder), Costs.load(folder, bundle.manifest.rows)
            require_memory(bundle, backend)
            measured = costs.threads_on(physical_cores()) if costs else 0
            return form, *backend.open(bundle, folder, threads or measured), costs
        except GumihoError:
            if folder.exists():
                raise  # otherwise a compile has just replaced them
