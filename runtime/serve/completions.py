"""Decodes the texts of a request, each choice on its own stream, into parts of a response."""

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
from .slots import Lease, Slots

# Text decoded within this time is sent together, except a choice's first part: each part wakes threads that take cores
# from passes.
_TOGETHER_SECONDS = 0.03
_GRAMMAR_SECONDS = 0.5  # that a text may hold a slot waiting for its grammar while other texts want the slot
_AHEAD = 4  # parts that may be decoded but not yet sent


@dataclass
class Request:
    """The texts of a request. prompts: token ids. settings: of each choice, the same for all prompts. usage, stats: so
    far.
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
        """Yields parts of all choices with the choice's index, as they are decoded. Closing the iterator ends all
        choices within a cycle."""
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
        """Decodes one choice. first: whether it is its prompt's first choice; the prompt's tokens are counted once."""
        async with self._slots.lease(prompt, settings.grammar is not None) as lease:
            generation = await lease.run(lambda: lease.stream.start(prompt, settings, resume=True))
            began: float | None = None
            try:
                async with aclosing(self._parts(lease, generation, settings)) as parts:
                    async for part in parts:
                        began = began or perf_counter()
                        yield part
            finally:
                generation.cancel()  # no effect if it has ended; the slot is freed once its thread is idle
                stats = generation.stats
                request.usage.prompt += len(prompt) if first else 0
                request.usage.cached += stats.cached_tokens if first else 0
                request.usage.completion += stats.tokens
                request.stats.add(stats)
                self._metrics.count(stats, request.begun, began)

    async def _parts(self, lease: Lease, generation: Generation, settings: Settings) -> AsyncGenerator[Part, None]:
        """Yields a choice's parts. The next part is decoded while one is sent."""
        cycles: list[Cycle] = []
        pieces = generation.pieces(cycles.append)
        tokens = DecodeStream(ids=generation.prompt, skip_special_tokens=True) if settings.trace else None
        listed, fair = 0, _Fair(generation)

        def step() -> tuple[Part, bool]:
            """The next part, and whether it is the last. Runs in the slot's thread."""
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
                lease.end()
                await lease.begin([*generation.prompt, *generation.ids], again=True)
                await lease.run(lambda: generation.move(lease.stream))
                fair.begin()
            return await lease.run(step)

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
        """The text of each token of some cycles and the part that drafted it. drafter: the generation's."""
        bundle = self._model.bundle
        tokenizer, steps = bundle.tokenizer, bundle.manifest.serial_steps(drafter)
        return [
            (tokens.step(tokenizer, token) or "", source(cycle, i, steps))
            for cycle in cycles
            for i, token in enumerate(cycle.tokens)
        ]


class _Fair:
    """Decides when a text whose grammar is slow must give its slot to others: after as much grammar time as reading the
    text on this slot took. So every text makes progress between reads."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._begun = 0.0, 0

    def begin(self) -> None:
        """Starts counting anew, on another slot."""
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
    """Yields the parts of several texts as they come, with the text's index. An error in one ends all."""
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
