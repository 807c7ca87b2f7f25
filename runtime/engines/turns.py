"""Turns of several streams at one set of engines: one pass after another, in the order in which they were wanted."""

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

_NEXT = -1  # the holder while the next thread wakes up
_RECENT = 1.0  # seconds after which a stream that has taken no turn counts as idle


class Place:
    """A thread's place in the queue. wanted: see ``Turns.take``. taken: another thread does it. done: it is done."""

    __slots__ = "done", "lock", "stream", "taken", "wanted"

    def __init__(self, stream: int, wanted: Any) -> None:
        self.stream, self.wanted, self.taken, self.done = stream, wanted, False, False
        self.lock = threading.Lock()
        self.lock.acquire()


class Takeable:
    """What a stream takes and gives back."""

    @abstractmethod
    def take(self, stream: int) -> object:
        """Waits for the turn of a stream."""

    @abstractmethod
    def give(self) -> None:
        """Ends this thread's turn, if it has it."""

    @contextmanager
    def of(self, stream: int) -> Iterator[None]:
        """A turn of a stream."""
        try:
            self.take(stream)
            yield
        finally:
            self.give()


class Turns(Takeable):
    """A lock whose waiting threads get it in the order in which they came. ``threading.Lock`` has no order: a thread that releases it
    and takes it again in a loop, as decoding does, can keep it from all the others.

    A thread may say what it wants a turn for. The one that has the turn can then do it together with its own (``claim``), which ends the
    other's wait. A turn for anything else comes before that, as it does for a draft, after which that stream's pass can be shared too.

    holder: the thread that has the turn, None if nobody does.
    """

    def __init__(self) -> None:
        self.holder: int | None = None
        self._lock, self._waiting = threading.Lock(), deque[Place]()
        self._arrived = threading.Condition(self._lock)
        self._last = dict[int, float]()  # when each stream took its last turn
        self._expected = dict[int, float]()  # when what a stream wanted was done, until it comes again

    @property
    def wanted(self) -> bool:
        """Whether a thread waits for the turn."""
        return bool(self._waiting)

    @property
    def mine(self) -> bool:
        """Whether this thread has the turn."""
        return self.holder == threading.get_ident()

    def take(self, stream: int, wanted: Any = None) -> bool:
        """Waits for the turn. stream: the number of the stream that wants it. wanted: what for, if another thread may do it. Returns
        False if another one did it; then this thread does not have the turn."""
        with self._lock:
            self._last[stream] = monotonic()
            self._expected.pop(stream, None)
            if self.holder is None:
                self.holder = threading.get_ident()
                return True
            place = Place(stream, wanted)
            self._waiting.append(place)
            self._arrived.notify_all()
        try:
            place.lock.acquire()
        except BaseException:  # Ctrl-C while it waits
            with self._lock:
                if place in self._waiting:
                    self._waiting.remove(place)
                    raise
                if not place.taken:
                    self.holder = threading.get_ident()  # it had just been given the turn
            if place.taken:
                if not place.done:
                    place.lock.acquire()  # another thread uses its buffers
            else:
                self.give()
            raise
        if place.taken:
            return False
        self.holder = threading.get_ident()
        return True

    def give(self) -> None:
        """Ends this thread's turn, if it has it; the thread that waits longest is next."""
        with self._lock:
            if self.mine:
                self.holder = _NEXT if self._waiting else None
                if self._waiting:
                    self._waiting.popleft().lock.release()

    def claim(
        self, most: int, patience: float, fits: Callable[[Sequence[Any]], bool] = lambda wanted: True
    ) -> list[Place] | None:
        """What other threads want, in the order in which they came, for the thread that has the turn to do; ``did`` ends their wait. None
        if a thread wants its turn for something else: then give it, and wait for another one.

        most: at most so many. patience: seconds after a stream's last turn in which it is waited for: it may be about to come again. fits:
        whether what threads want can be done together.
        """
        with self._lock:
            while len(wanted := self._wanted()) < most:
                if len(wanted) < len(self._waiting):
                    return None
                left = max(self._expected.values(), default=0.0) + patience - monotonic()
                if left <= 0 or not self._arrived.wait(left):
                    break
            claimed: list[Place] = []
            for place in wanted:
                if len(claimed) < most and fits([*(one.wanted for one in claimed), place.wanted]):
                    claimed.append(place)
            for place in claimed:
                place.taken = True
                self._waiting.remove(place)
        return claimed

    def _wanted(self) -> list[Place]:
        return [place for place in self._waiting if place.wanted is not None]

    def did(self, stream: int, claimed: Sequence[Place]) -> None:
        """What was claimed is done, along with what the stream wanted that has the turn."""
        with self._lock:
            now = monotonic()
            for place in claimed:
                place.done = True
                self._expected[place.stream] = now
                place.lock.release()
            self._expected[stream] = now

    def expect(self, stream: int) -> None:
        """What the stream wanted is done, and it will come again."""
        with self._lock:
            self._expected[stream] = monotonic()

    def active(self, stream: int) -> int:
        """How many other streams than this one have wanted a turn lately."""
        now = monotonic()
        return sum(now - last < _RECENT for other, last in list(self._last.items()) if other != stream)

    def join(self, stream: int) -> None:
        """The stream will want a turn at once."""
        self._last[stream] = monotonic()

    def forget(self, stream: int) -> None:
        """The stream will want no turn for now."""
        with self._lock:
            self._last.pop(stream, None)
            self._expected.pop(stream, None)
            self._arrived.notify_all()
