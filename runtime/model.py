"""A loaded bundle: text in and text out, or token ids in and cycles out."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tokenizers.decoders import DecodeStream

from .backends import Engine, backend, require
from .bundle import Bundle, Form
from .decoder import Cycle, Decoder
from .devices import Device
from .engines import find_engines
from .errors import GumihoError
from .stats import Stats


class Generation:
    """One running generation: an iterator over pieces of text, or over cycles through ``cycles()``.

    stats: counts and times so far. ids: token ids emitted so far.
    """

    def __init__(self, model: "Model", prompt: Sequence[int], max_new_tokens: int, speculate: bool) -> None:
        self.stats = Stats()
        self.ids: list[int] = []
        self._model, self._prompt = model, list(prompt)
        self._cycles = model._start(self, prompt, max_new_tokens, speculate)

    @property
    def finish_reason(self) -> str | None:
        """``stop``, ``length`` or ``context``; None while it runs."""
        return self.stats.finish_reason

    def cycles(self) -> Iterator[Cycle]:
        """The steps of the generation, each with the token ids it emitted."""
        while (cycle := self._model._advance(self, self._cycles)) is not None:
            self.ids += cycle.tokens
            yield cycle

    def __iter__(self) -> Iterator[str]:
        """Pieces of text; never part of a character, and special tokens left out."""
        tokenizer = self._model.bundle.tokenizer
        # The prompt goes first, since some tokenizers drop the space in front of a text's first word.
        stream, text = DecodeStream(ids=self._prompt, skip_special_tokens=True), ""
        for cycle in self.cycles():
            piece = "".join(stream.step(tokenizer, token) or "" for token in cycle.tokens)
            if piece:
                text += piece
                yield piece
        # What the stream holds back (bytes that end in the middle of a character) shows as the tokenizer shows it.
        shown = tokenizer.decode(self._prompt, skip_special_tokens=True) + text
        whole = tokenizer.decode([*self._prompt, *self.ids], skip_special_tokens=True)
        if whole.startswith(shown) and len(whole) > len(shown):
            yield whole[len(shown) :]


class Model:
    """A bundle with its engines loaded and its buffers allocated.

    Safe to use from any thread, one generation at a time: starting another one ends the one before it. For several streams
    at once load the bundle once for each.
    """

    def __init__(self, bundle: Bundle, form: Form, engines: Mapping[str, Engine], device: Device) -> None:
        """``load`` makes one from a bundle on disk."""
        self.bundle = bundle
        self.decoder = Decoder(bundle.manifest, form, engines, device)
        self._lock = threading.Lock()
        self._current: Generation | None = None
        self._closed = False

    def encode(self, text: str) -> list[int]:
        """Token ids as the target's tokenizer gives them, special tokens included."""
        return list(self.bundle.tokenizer.encode(text).ids)

    def generate(self, prompt: str | Sequence[int], max_new_tokens: int = 256, speculate: bool = True) -> Generation:
        """Greedy generation. prompt: text, or token ids; speculate: False for plain decoding on the same engine.

        Raises GumihoError for a prompt that is empty or longer than the bundle's capacity, and for a negative
        max_new_tokens. The output is the same with and without speculation.
        """
        if max_new_tokens < 0:
            raise GumihoError(f"max_new_tokens is {max_new_tokens}: give 0 or more")
        ids = self.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        return Generation(self, ids, max_new_tokens, speculate)

    def _start(self, generation: Generation, prompt: Sequence[int], max_new_tokens: int, speculate: bool) -> Iterator[Cycle]:
        with self._lock:
            self._require_open()
            self.decoder.check(prompt)
            self._current = generation
            return self.decoder.generate(prompt, max_new_tokens, speculate, generation.stats)

    def _advance(self, generation: Generation, cycles: Iterator[Cycle]) -> Cycle | None:
        with self._lock:
            self._require_open()
            if generation.finish_reason is None and generation is not self._current:
                raise GumihoError("another generation was started on this model: load the bundle once for each stream")
            return next(cycles, None)

    def _require_open(self) -> None:
        if self._closed:
            raise GumihoError("the model is closed: load the bundle again")

    def close(self) -> None:
        """Frees engines and buffers; waits for a running cycle. Closing twice is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.decoder.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(bundle: str | Path, backend_name: str = "", device: str = "", threads: int = 0) -> Model:
    """Loads a bundle with the engines compiled for a backend.

    backend_name: "" for the bundle's first; device: which of the backend's, "" for the first; threads: of engines on the
    processor, 0 for one per physical core. Raises GumihoError where the bundle is damaged, the backend cannot run here, or no
    current engines are there for it, naming the command that makes them.
    """
    opened = Bundle(bundle)
    if threads < 0:
        raise GumihoError(f"threads is {threads}: give 0 for one per physical core, or more")
    name = backend_name or opened.manifest.default
    require(name)
    form, made = opened.manifest.form(name), backend(name, device, threads)
    engines, memory = made.open(opened, find_engines(opened, made))
    try:
        return Model(opened, form, engines, memory)
    except GumihoError:
        for engine in engines.values():
            engine.close()
        memory.close()
        raise
