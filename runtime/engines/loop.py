"""One loop owns the engines: streams queue what they want of them, and it schedules, runs and hands back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # not every installation has ONNX Runtime
    from ..backends.onnxruntime_lanes import Lanes, Pass

_PATIENCE = 0.005  # seconds; longer than a cycle takes outside its passes
_SHARE = 0.25  # of the last pass, if that is less: waiting must cost less than it can save
# rows; a pass takes the rows of one prompt only, since two would delay the other streams for longer and gain little
_MANY = 32
_RECENT = 1.0  # seconds after which a stream that has wanted nothing counts as idle
_T = TypeVar("_T")


class Work:
    """What a stream wants of the engines, once.

    call: does it, given whether other streams want the engines too. part: a pass that can be run together with those of
    other streams, in place of ``call``. With neither, the waiting thread gets the engines for itself. result, error:
    what came of it.
    """

    __slots__ = "call", "done", "error", "part", "ready", "result", "stream", "thread"

    def __init__(self, stream: int, call: Callable[[bool], Any] | None, part: Pass | None) -> None:
        self.stream, self.call, self.part, self.thread = stream, call, part, get_ident()
        self.done, self.result, self.error = False, None, None  # type: bool, Any, BaseException | None
        self.ready = threading.Lock()
        self.ready.acquire()

    @property
    def exclusive(self) -> bool:
        return self.call is None and self.part is None


class EngineLoop:
    """Does what streams want of the engines, one thing after the other, in the order in which they came.

    Passes of the target wait for other work, such as drafts, whose streams can then share the next pass. They also wait
    a moment for streams that are about to come again.

    Without threads of its own (``start``), the thread of a stream does its work itself when it is due.
    """

    def __init__(self, lanes: Lanes | None = None) -> None:
        """lanes: runs passes of several streams, if anything does; as many at once as it has threads for."""
        self._lanes = lanes
        self._most, self._workers = (lanes.count, lanes.at_once) if lanes else (1, 1)
        self._threads = frozenset[int]()
        self._lock = threading.RLock()  # reentrant, since garbage that is collected meanwhile may call ``stop``
        self._changed = threading.Condition(self._lock)
        self._queue = deque[Work]()
        self._running, self._holder, self._stopped = 0, None, False  # type: int, int | None, bool
        self._last = dict[int, float]()  # when each stream last wanted something
        self._expected = dict[int, float]()  # when a stream was served, until it comes again
        self._pass_seconds = 0.0  # of the last pass

    # --- for streams --------------------------------------------------------------------------------------------------

    @property
    def mine(self) -> bool:
        """Whether this thread has the engines."""
        return (thread := get_ident()) == self._holder or thread in self._threads

    def run(self, stream: int, call: Callable[[bool], _T], part: Pass | None = None) -> _T:
        """Has work done, and returns what ``call`` returns, or None for a pass that was run with others'. See
        ``Work``."""
        if self.mine:
            return call(False)
        if not self._threads:
            try:
                self._last[stream] = monotonic()
                self._take()
                return call(self.contended(stream))
            finally:
                self._give()
        work = Work(stream, None if part else call, part)
        with self._lock:
            self._last[stream] = monotonic()
            self._expected.pop(stream, None)
            self._queue.append(work)
            self._changed.notify_all()
        self._wait(work)
        if work.error:
            error, work.error = work.error, None  # no cycle, which would keep what its frames hold
            raise error
        return work.result

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """This thread has the engines for itself while the context is open."""
        try:
            self._take()
            yield
        finally:
            self._give()

    def _take(self) -> None:
        with self._lock:
            if free := self._holder is None and not self._running and not self._queue:
                self._holder = get_ident()
            else:
                self._queue.append(work := Work(-1, None, None))
                self._admit()
        if not free:
            self._wait(work)

    def _give(self) -> None:
        """Does nothing if this thread does not have the engines, since it was interrupted while it waited."""
        with self._lock:
            if self._holder == get_ident():
                self._holder = None
                self._admit()

    def _wait(self, work: Work) -> None:
        try:
            work.ready.acquire()
        except BaseException:  # Ctrl-C while it waits
            with self._lock:
                waits = work in self._queue
                if waits:
                    self._queue.remove(work)
                    self._admit()
            if not (waits or work.done):
                work.ready.acquire()  # the engines use the stream's buffers
            raise

    def contended(self, stream: int) -> bool:
        """Whether other streams than this one have wanted something lately."""
        return len(self._last) > 1 and any(other != stream for other in self._active())

    def _active(self) -> list[int]:
        now = monotonic()
        return [stream for stream, last in list(self._last.items()) if now - last < _RECENT]

    def forget(self, stream: int) -> None:
        """The stream has come to the end of a text, or is closed."""
        with self._lock:
            self._last.pop(stream, None)
            self._expected.pop(stream, None)
            self._changed.notify_all()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """From now on, threads of the loop do all work: always the same one, or two where two passes run at once."""
        with self._lock:
            if not self._threads and not self._stopped:
                threads = [
                    threading.Thread(target=self._loop, name="gumiho-engines", daemon=True)
                    for _ in range(self._workers)
                ]
                for thread in threads:
                    thread.start()
                self._threads = frozenset(thread.ident for thread in threads if thread.ident)

    def stop(self) -> None:
        """Ends the threads. Nothing may wait."""
        with self._lock:
            self._threads, self._stopped = frozenset(), True
            self._changed.notify_all()

    def _loop(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Returns False when the loop has been stopped."""
        if not (batch := self._schedule()):
            return False
        started, first = monotonic(), batch[0]
        try:
            if self._lanes and first.part:
                self._lanes.run([work.part for work in batch if work.part], self.contended(first.stream))
            elif first.call:
                first.result = first.call(self.contended(first.stream))
        except BaseException as error:
            first.error = error
        self._hand_back(batch, monotonic() - started)
        return True

    def _schedule(self) -> list[Work]:
        """Waits for what is to be run next: a pass of several streams, or one other thing."""
        with self._lock:
            while not self._stopped:
                batch, seconds = self._choose()
                if batch:
                    for work in batch:
                        self._queue.remove(work)
                    self._running += 1
                    return batch
                self._changed.wait(seconds)
        return []

    def _choose(self) -> tuple[list[Work], float | None]:
        """What is to be run now, or nothing, and for how many seconds."""
        due = list(takewhile(lambda work: not work.exclusive, self._queue)) if self._holder is None else []
        if other := next((work for work in due if not work.part), None):
            return [other], None
        most = min(self._most, -(-len(self._active()) // self._workers))
        patience = min(_PATIENCE, _SHARE * self._pass_seconds)
        left = max(self._expected.values(), default=0.0) + patience - monotonic()
        if not due or (len(due) < most and left > 0):
            return [], left if due else None
        batch, many = list[Work](), 0
        for work in due:
            many += (rows := work.part.rows if work.part else 0) > _MANY
            if len(batch) < max(1, most) and (rows <= _MANY or many <= 1):
                batch.append(work)
        return batch, None

    def _hand_back(self, batch: list[Work], seconds: float) -> None:
        with self._lock:
            self._running -= 1
            if batch[0].error:  # the others' passes may not have been run
                self._queue.extendleft(reversed(batch[1:]))
                del batch[1:]
            elif batch[0].part:
                self._pass_seconds = seconds
            now = monotonic()
            for work in batch:
                work.done = True
                self._expected[work.stream] = now
                work.ready.release()
            self._admit()

    def _admit(self) -> None:
        """Gives the engines to the thread that is due to have them for itself, if nobody has them. To be called after
        any change."""
        if self._holder is None and not self._running and self._queue and self._queue[0].exclusive:
            work = self._queue.popleft()
            self._holder, work.done = work.thread, True
            work.ready.release()
        if self._threads:
            self._changed.notify_all()
