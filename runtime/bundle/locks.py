"""One writer at a time: a lock that the operating system gives back when its holder ends, however it ends."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import GumihoError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(file: Path, busy: str, wait: Callable[[str], object] | None = None, remove: bool = False) -> Iterator[None]:
    """Holds the lock of a file, which is made if it is not there; that it is there locks nothing.

    busy: what to say if another process, or another thread, holds it, a sentence with the way out. wait: is told ``busy``, once, and
    the call waits; without it GumihoError is raised. remove: remove the file at the end. Raises OSError if the file cannot be made.
    A file system without locks (some network ones) is used unlocked, with a warning on standard error.
    """
    held = _acquire(file, busy, wait)
    try:
        yield
    finally:
        if remove:
            with suppress(OSError):
                file.unlink()  # while it is held: see ``_acquire``
        os.close(held)


def _acquire(file: Path, busy: str, wait: Callable[[str], object] | None) -> int:
    """A descriptor that holds the lock."""
    while True:
        held = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            _lock(held, file, busy, wait)
            # The one who held it before may have removed the file after it was opened here. Then somebody else can make a new one
            # and lock that, so a lock counts only while its file has the name.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(held), os.stat(file)):
                    return held
        except BaseException:
            os.close(held)
            raise
        os.close(held)


def _lock(held: int, file: Path, busy: str, wait: Callable[[str], object] | None) -> None:
    try:
        if fcntl is None:
            raise OSError("this system has no locks")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait is None:
                raise GumihoError(busy) from None
            wait(busy)
            fcntl.flock(held, fcntl.LOCK_EX)
    except OSError as error:
        said = error.strerror or error
        print(f"warning: '{file.parent}' cannot be locked ({said}): let nothing else write there meanwhile", file=sys.stderr)
