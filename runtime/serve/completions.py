"""Texts for one request: each choice on a stream of its own, as parts of an answer."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter

from tokenizers.decoders import DecodeStream

from ..api.generation import Generation
from ..api.model import Model
from ..cli.trace_page import source
from ..decoding.checks import check, check_settings
from ..decoding.cycle import Cycle
from ..decoding.settings import Settings
from ..decoding.stats import Stats
from .answers import Part, Usage
from .metrics import Metrics
from .slots import Slots, Turn

_TOGETHER_SECONDS = (
    0.03  # of text that is sent at once, after the first: every part wakes threads that take the cores from passes
)
_GRAMMAR_SECONDS = 0.5  # that a text may wait for its grammar on a slot that others want
_AHEAD = 4  # parts that decoding may be ahead of what the client has been sent


@dataclass
class Request:
    """The texts that a request asks for: prompts of token ids, and the settings of each choice of each prompt.

    usage, stats: so far.
    """

    prompts: Sequence[Sequence[int]]
    settings: Sequence[Settings]
    begun: float = field(default_factory=perf_counter)
    usage: Usage = field(default_factory=Usage)
    stats: Stats = field(default_factory=lambda: Stats(texts=0))

    @property
    def choices(self) -> int:
        return len(self.prompts) * len(self.settings)


class Completions:
    """Decodes requests on the streams of a model."""

    def __init__(self, model: Model, slots: Slots, metrics: Metrics) -> None:
        self._model, self._slots, self._metrics = model, slots, metrics

    def check(self, request: Request) -> None:
        """Raises InputError if the request cannot be decoded. Compiles its grammar, which may take long."""
        for prompt in request.prompts:
            check(self._model.bundle.manifest, prompt)
        for settings in request.settings[:1]:
            check_settings(self._model.bundle.manifest, settings)
            self._model.selector(request.prompts[0], settings)  # its grammar and token ids

    async def run(self, request: Request) -> AsyncIterator[tuple[int, Part]]:
        """Parts of all choices, each with its index, as they come. Closing the iterator ends all of them within a cycle."""
        texts = [
            self._text(request, prompt, settings, first=choice == 0)
            for prompt in request.prompts
            for choice, settings in enumerate(request.settings)
        ]
        async with aclosing(_alone(texts[0]) if len(texts) == 1 else _merged(texts)) as parts:
            async for found in parts:
                yield found

    async def _text(
        self, request: Request, prompt: Sequence[int], settings: Settings, first: bool
    ) -> AsyncGenerator[Part, None]:
        """One choice. first: of its prompt, whose tokens are counted once."""
        async with self._slots.turn(prompt, settings.grammar is not None) as turn:
            generation = await turn.run(lambda: turn.stream.start(prompt, settings, resume=True))
            began: float | None = None
            try:
                async with aclosing(self._parts(turn, generation, settings)) as parts:
                    async for part in parts:
                        began = began or perf_counter()
                        yield part
            finally:
                generation.cancel()  # if it has not ended; the slot is freed once its thread is idle
                stats = generation.stats
                request.usage.prompt += len(prompt) if first else 0
                request.usage.cached += stats.cached_tokens if first else 0
                request.usage.completion += stats.tokens
                request.stats.add(stats)
                self._metrics.count(stats, request.begun, began)

    async def _parts(self, turn: Turn, generation: Generation, settings: Settings) -> AsyncGenerator[Part, None]:
        """The next part is decoded while one is sent."""
        cycles: list[Cycle] = []
        pieces = generation.pieces(cycles.append)
        tokens = DecodeStream(ids=generation.prompt, skip_special_tokens=True) if settings.trace else None
        listed, fair = 0, _Fair(generation)

        def step() -> tuple[Part, bool]:
            """The next part, and whether it is the last. In the slot's thread."""
            nonlocal listed
            text, begun, last = "", perf_counter(), True
            for piece in pieces:
                text += piece
                if not sent or perf_counter() - begun > _TOGETHER_SECONDS:
                    last = False
                    break
            logprobs = generation.logprobs[listed:]
            listed += len(logprobs)
            sources = None if tokens is None else self._sources(tokens, cycles, generation.drafter)
            cycles.clear()
            return Part(text, logprobs, sources, generation.finish_reason if last else None), last

        async def next_part() -> tuple[Part, bool]:
            if self._slots.wanted and fair.used_up:
                turn.end()
                await turn.begin([*generation.prompt, *generation.ids], again=True)
                await turn.run(lambda: generation.move(turn.stream))
                fair.begin()
            return await turn.run(step)

        sent = False
        coming = asyncio.ensure_future(next_part())
        try:
            last = False
            while not last:
                part, last = await coming
                sent = True
                if not last:
                    coming = asyncio.ensure_future(next_part())
                yield part
        finally:
            coming.cancel()

    def _sources(self, tokens: DecodeStream, cycles: Sequence[Cycle], drafter: str) -> list[tuple[str, str]]:
        """What drafted each token of some cycles. drafter: the generation's."""
        bundle = self._model.bundle
        tokenizer, steps = bundle.tokenizer, bundle.manifest.serial_steps(drafter)
        return [
            (tokens.step(tokenizer, token) or "", source(cycle, i, steps))
            for cycle in cycles
            for i, token in enumerate(cycle.tokens)
        ]


class _Fair:
    """What a text's grammar may take of a slot before others have their turn: as long as it took to read the text there, so that no text
    is only ever read again."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._begun = 0.0, 0

    def begin(self) -> None:
        """On another slot."""
        self._begun = self._generation.grammar_seconds, self._generation.stats.prefill_ns

    @property
    def used_up(self) -> bool:
        seconds, prefill_ns = self._begun
        read = (self._generation.stats.prefill_ns - prefill_ns) / 1e9
        return self._generation.grammar_seconds - seconds > max(_GRAMMAR_SECONDS, read)


async def _alone(text: AsyncGenerator[Part, None]) -> AsyncGenerator[tuple[int, Part], None]:
    async with aclosing(text):
        async for part in text:
            yield 0, part


async def _merged(texts: Sequence[AsyncGenerator[Part, None]]) -> AsyncGenerator[tuple[int, Part], None]:
    """The parts of several texts as they come, each with its text's index. An error of one ends all."""
    parts: asyncio.Queue[tuple[int, Part] | BaseException | None] = asyncio.Queue(_AHEAD)

    async def follow(index: int, text: AsyncGenerator[Part, None]) -> None:
        try:
            async with aclosing(text):
                async for part in text:
                    await parts.put((index, part))
            await parts.put(None)
        except Exception as error:
            await parts.put(error)

    tasks = [asyncio.ensure_future(follow(index, text)) for index, text in enumerate(texts)]
    try:
        left = len(tasks)
        while left:
            found = await parts.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
