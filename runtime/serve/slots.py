"""Who decodes on which stream: a request gets the one whose cache begins like its prompt, or waits for one in a queue."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from typing import TypeVar

from ..model import Model
from .problems import Problem

_LEAST_KEPT = (
    0.5  # share of a slot's text that another text may leave of it without being told to the least recently used one instead
)
_LEAST_COPIED = 32  # tokens that are worth copying from another stream's caches
_T = TypeVar("_T")


class Slot:
    """A stream, and the thread that drives it."""

    def __init__(self, stream: Model) -> None:
        self.stream, self._thread = stream, ThreadPoolExecutor(1, "gumiho-stream")
        self._thread.submit(stream.warm_up)

    async def run(self, work: Callable[[], _T]) -> _T:
        """Work in the slot's thread, after what it has begun before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def after(self, call: Callable[[], object]) -> None:
        """Has the event loop call something once the thread has finished what it has begun."""
        loop = asyncio.get_running_loop()
        self._thread.submit(lambda: None).add_done_callback(lambda _: loop.call_soon_threadsafe(call))

    def close(self) -> None:
        self._thread.shutdown()


class Slots:
    """busy: slots in use. queued: requests that wait for one."""

    def __init__(self, streams: Sequence[Model], longest_queue: int) -> None:
        self._free = [Slot(stream) for stream in streams]  # the least recently used one first
        self._all, self._longest_queue = tuple(self._free), longest_queue
        self._waiting, self._admitted = deque[asyncio.Future[Slot]](), 0
        self._guided = asyncio.Semaphore(max(1, len(streams) - 1))

    @property
    def count(self) -> int:
        return len(self._all)

    @property
    def busy(self) -> int:
        return len(self._all) - len(self._free)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def admit(self, texts: int) -> Callable[[], None]:
        """Counts so many texts as decoded or waiting, until what is returned is called. Raises Problem if they do not fit."""
        if self._admitted + texts > len(self._all) + self._longest_queue:
            raise Problem(
                429, f"all {len(self._all)} streams are busy and the queue of {self._longest_queue} is full: try again later", code="queue_full",
                headers={"Retry-After": "1"},
            )  # fmt: skip
        self._admitted += texts

        def ended() -> None:
            self._admitted -= texts

        return ended

    @asynccontextmanager
    async def slot(self, prompt: Sequence[int], guided: bool) -> AsyncIterator[Slot]:
        """A slot for a prompt, when it is its turn. Freed once the slot's thread is idle. guided: whether the text follows a grammar: such
        texts leave one of several slots to others, since a grammar may take long for every token."""
        async with self._guided if guided else nullcontext():
            slot = self._best(prompt) if self._free and not self._waiting else await self._wait()
            try:
                await slot.run(lambda: self._adopt(slot, prompt))
                yield slot
            finally:
                slot.after(lambda: self._release(slot))

    def _best(self, prompt: Sequence[int]) -> Slot:
        """The slot that shares the longest beginning with a prompt, unless most of another conversation would be lost for it."""
        shared = {slot: slot.stream.decoder.shared(prompt) for slot in self._free}
        best = max(self._free, key=shared.__getitem__)
        if shared[best] < _LEAST_KEPT * max(1, min(len(prompt), len(best.stream.decoder.cached))):
            best = self._free[0]
        self._free.remove(best)
        return best

    def _adopt(self, slot: Slot, prompt: Sequence[int]) -> None:
        """Copies the rows of a prompt's beginning from another stream, if that holds more of it."""
        own = slot.stream.decoder.shared(prompt)
        others = [other.stream for other in self._all if other is not slot]
        most, best = max(((stream.decoder.shared(prompt), i) for i, stream in enumerate(others)), default=(0, 0))
        if most >= own + _LEAST_COPIED:
            slot.stream.adopt(others[best], prompt)

    async def _wait(self) -> Slot:
        waiting: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self._release(waiting.result())
            else:
                self._waiting.remove(waiting)
            raise

    def _release(self, slot: Slot) -> None:
        while self._waiting:
            if not (waiting := self._waiting.popleft()).done():
                waiting.set_result(slot)
                return
        self._free.append(slot)

    def close(self) -> None:
        for slot in self._all:
            slot.close()
