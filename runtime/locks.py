"""One writer at a time: a lock that the operating system gives back when its holder ends, however it ends."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import GumihoError

try:
    import fcntl
except ImportError:  # no POSIX: writers still work in folders of their own, but none waits for another
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(file: Path, busy: str, wait: Callable[[str], object] | None = None) -> Iterator[None]:
    """Holds the lock of a file, which is made where it is not there and stays afterwards.

    busy: what to say where another process holds it, a sentence with the way out. wait: is told ``busy``, once, and the call waits;
    without it GumihoError is raised. Raises OSError where the file cannot be made.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        if fcntl:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if wait is None:
                    raise GumihoError(busy) from None
                wait(busy)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
