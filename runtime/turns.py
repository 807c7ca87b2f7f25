"""Turns of several streams at one set of engines: one pass after another, in the order in which they were wanted."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

_NEXT = -1  # the holder while the next thread wakes up
_RECENT = 1.0  # seconds after which a stream that has taken no turn counts as idle


class Turns:
    """A lock whose waiting threads get it in the order in which they came. ``threading.Lock`` has no order: a thread that releases it
    and takes it again in a loop, as decoding does, can keep it from all the others.

    holder: the thread that has it, None if nobody does.
    """

    def __init__(self) -> None:
        self.holder: int | None = None
        self._lock, self._waiting = threading.Lock(), deque[threading.Lock]()
        self._last = dict[int, float]()  # when each stream took its last turn

    def take(self, stream: int) -> None:
        """Waits for the turn. stream: the number of the stream that wants it."""
        with self._lock:
            self._last[stream] = monotonic()
            if self.holder is None:
                self.holder = threading.get_ident()
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        try:
            mine.acquire()
        except BaseException:  # Ctrl-C while it waits
            with self._lock:
                if mine in self._waiting:
                    self._waiting.remove(mine)
                    raise
                self.holder = threading.get_ident()  # it had just been given the turn
            self.give()
            raise
        self.holder = threading.get_ident()

    def give(self) -> None:
        """Ends this thread's turn, if it has it; the thread that waits longest is next."""
        with self._lock:
            if self.holder == threading.get_ident():
                self.holder = _NEXT if self._waiting else None
                if self._waiting:
                    self._waiting.popleft().release()

    @contextmanager
    def of(self, stream: int) -> Iterator[None]:
        """A turn of a stream."""
        try:
            self.take(stream)
            yield
        finally:
            self.give()

    def shared(self, stream: int) -> bool:
        """Whether another stream than this one has wanted a turn lately."""
        now = monotonic()
        return any(now - last < _RECENT for other, last in self._last.items() if other != stream)

    def yield_turn(self, stream: int) -> None:
        """Lets those that wait go first."""
        if self._waiting:
            self.give()
            self.take(stream)

    def forget(self, stream: int) -> None:
        """The stream is closed."""
        with self._lock:
            self._last.pop(stream, None)
