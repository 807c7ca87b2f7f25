"""Who decodes on which stream: a request gets the one whose cache begins like its prompt, or waits for one in a
queue."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from ..api.stream import Stream
from .problems import Problem

# share of a slot's text that another text may leave of it without being told to the least recently used one instead
_LEAST_KEPT = 0.5
_LEAST_COPIED = 32  # tokens that are worth copying from another stream's caches
_T = TypeVar("_T")


class Slot:
    """A stream, and the thread of its work outside the engines."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self._thread = stream, ThreadPoolExecutor(1, "gumiho-stream")

    async def run(self, work: Callable[[], _T]) -> _T:
        """Work in the slot's thread, after what it has begun before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def after(self, call: Callable[[], object]) -> None:
        """Has the event loop call something once the thread has finished what it has begun."""
        loop = asyncio.get_running_loop()
        self._thread.submit(lambda: None).add_done_callback(lambda _: loop.call_soon_threadsafe(call))

    def close(self) -> None:
        self._thread.shutdown()


class Lease:
    """A text's right to a slot. It may end before the text does, for another text, and begin again on any slot."""

    def __init__(self, slots: "Slots", guided: bool) -> None:
        self._slots, self._guided = slots, guided
        self._slot: Slot | None = None

    @property
    def stream(self) -> Stream:
        assert self._slot
        return self._slot.stream

    async def run(self, work: Callable[[], _T]) -> _T:
        """See ``Slot.run``."""
        assert self._slot
        return await self._slot.run(work)

    async def begin(self, text: Sequence[int], again: bool = False) -> None:
        """Waits for a slot. again: behind all that have not had one."""
        slot = self._slot = await self._slots.take(_Waiting(text, self._guided, again))
        await slot.run(lambda: self._slots.adopt(slot, text))

    def end(self) -> None:
        if slot := self._slot:
            self._slot = None
            slot.after(lambda: self._slots.give(slot, self._guided))


@dataclass(eq=False)
class _Waiting:
    text: Sequence[int]
    guided: bool
    again: bool
    slot: asyncio.Future[Slot] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Slots:
    """busy: slots in use. queued: requests that wait for one.

    Texts with a grammar leave one of several slots to others, since a grammar may take long for every token.
    """

    def __init__(self, streams: Sequence[Stream], longest_queue: int) -> None:
        self._free = [Slot(stream) for stream in streams]  # the least recently used one first
        self._all, self._longest_queue = tuple(self._free), longest_queue
        self._waiting, self._admitted = list[_Waiting](), 0
        self._guided = max(1, len(streams) - 1)  # so many more may begin

    @property
    def count(self) -> int:
        return len(self._all)

    @property
    def busy(self) -> int:
        return len(self._all) - len(self._free)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def wanted(self) -> bool:
        """Whether a text waits that has had no slot yet."""
        return any(not waiting.again for waiting in self._waiting)

    def admit(self, texts: int) -> Callable[[], None]:
        """Counts so many texts as decoded or waiting, until what is returned is called. Raises Problem if they do not
        fit."""
        if self._admitted + texts > len(self._all) + self._longest_queue:
            raise Problem(
                429,
                f"all {len(self._all)} streams are busy and the queue of {self._longest_queue} is full: try again "
                "later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self._admitted += texts

        def ended() -> None:
            self._admitted -= texts

        return ended

    @asynccontextmanager
    async def lease(self, prompt: Sequence[int], guided: bool) -> AsyncIterator[Lease]:
        """A slot for a text, once one is free for it. Its slot is freed once its thread is idle. guided: whether it
        follows a grammar."""
        lease = Lease(self, guided)
        try:
            await lease.begin(prompt)
            yield lease
        finally:
            lease.end()

    async def take(self, waiting: _Waiting) -> Slot:
        self._waiting.append(waiting)
        self._grant()
        try:
            return await waiting.slot
        except asyncio.CancelledError:
            if waiting.slot.cancelled():
                self._waiting.remove(waiting)
            else:
                self.give(waiting.slot.result(), waiting.guided)
            raise

    def give(self, slot: Slot, guided: bool) -> None:
        self._free.append(slot)
        self._guided += guided
        self._grant()

    def _grant(self) -> None:
        """Gives the free slots to those who wait, the first ones first."""
        for waiting in sorted(self._waiting, key=lambda one: one.again):
            if self._free and not waiting.slot.done() and (self._guided or not waiting.guided):
                self._waiting.remove(waiting)
                self._guided -= waiting.guided
                waiting.slot.set_result(self._best(waiting.text))

    def _best(self, text: Sequence[int]) -> Slot:
        """The free slot that shares the longest beginning with a text, unless most of another conversation would be
        lost for it."""
        shared = {slot: slot.stream.decoder.cached_prefix(text) for slot in self._free}
        best = max(self._free, key=shared.__getitem__)
        if shared[best] < _LEAST_KEPT * max(1, min(len(text), len(best.stream.decoder.cached))):
            best = self._free[0]
        self._free.remove(best)
        return best

    def adopt(self, slot: Slot, text: Sequence[int]) -> None:
        """Copies the rows of a text's beginning from another stream, if that holds more of it."""
        own = slot.stream.decoder.cached_prefix(text)
        others = [other.stream for other in self._all if other is not slot]
        most, best = max(((stream.decoder.cached_prefix(text), i) for i, stream in enumerate(others)), default=(0, 0))
        if most >= own + _LEAST_COPIED:
            slot.stream.adopt(others[best], text)

    def close(self) -> None:
        for slot in self._all:
            slot.close()
