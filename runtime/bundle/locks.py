"""A file lock for one writer at a time. The operating system releases it when its holder ends, even if it is killed."""

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
    """Holds the lock of a file, which is created if it does not exist; an existing file that nobody holds is not
    locked.

    busy: the message if another process or thread holds the lock, which also says what to do. wait: called once with
    ``busy`` before waiting for the lock; if None, GumihoError is raised instead. remove: remove the file at the end.
    Raises OSError if the file cannot be created. On a file system without locks (some network ones) a warning on
    standard error is printed and nothing is locked.
    """
    descriptor = _acquire(file, busy, wait)
    try:
        yield
    finally:
        if remove:
            with suppress(OSError):
                file.unlink()  # while the lock is held: see ``_acquire``
        os.close(descriptor)


def _acquire(file: Path, busy: str, wait: Callable[[str], object] | None) -> int:
    """A descriptor that holds the lock."""
    while True:
        descriptor = os.open(
            file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0), 0o666
        )
        try:
            _lock(descriptor, file, busy, wait)
            # The previous holder may have removed the file after it was opened here. Another process can then create
            # and lock a new file of the same name, so the lock counts only if the name still belongs to the locked
            # file.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, file: Path, busy: str, wait: Callable[[str], object] | None) -> None:
    try:
        if fcntl is None:
            raise OSError("this system has no locks")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait is None:
                raise GumihoError(busy) from None
            wait(busy)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        reason = error.strerror or error
        print(
            f"warning: '{file.parent}' cannot be locked ({reason}): make sure that nothing else writes there",
            file=sys.stderr,
        )
