"""Folders that one process at a time writes, and that are replaced as a whole."""

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import GumihoError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


@contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Holds the lock of ``path``, a file or folder that need not exist yet, and puts back what a killed ``replace_folder`` left.

    The lock is a file ``.NAME.lock`` beside it. The system releases the lock when the process ends, however it ends, so a file
    that was left behind locks nothing. Raises GumihoError(busy) if somebody else holds the lock, another thread of this process
    included, and OSError if no file can be written there. A file system without locks (some network ones) is used unlocked, with
    a warning on standard error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.with_name(f".{path.name}.lock")
    held = _acquire(name, busy)
    try:
        with suppress(OSError):  # the next to write there would meet the same error, and say more of it
            _recover(path)
        yield
    finally:
        with suppress(OSError):
            name.unlink()  # while it is held: see ``_acquire``
        os.close(held)


def _acquire(name: Path, busy: str) -> int:
    """A descriptor of the file ``name``, which is locked by it."""
    while True:
        held = os.open(name, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            if not _flock(held, name):
                raise GumihoError(busy)
            # The one who held it before may have removed the file between our opening and locking it. Then another process can
            # create and lock a new one, so a lock counts only if its file is still the one that has the name.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(held), os.stat(name)):
                    return held
        except BaseException:
            os.close(held)
            raise
        os.close(held)


def _flock(held: int, name: Path) -> bool:
    """Whether the lock was free."""
    try:
        if fcntl is None:
            raise OSError("this system has none")
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        print(
            f"warning: '{name.parent}' cannot be locked ({error.strerror or error}): let no other command write there meanwhile",
            file=sys.stderr,
        )
    return True


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _recover(folder: Path) -> None:
    old = _old(folder)
    if not old.is_dir():
        return
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.rename(folder)


def replace_folder(new: Path, folder: Path) -> None:
    """Gives the folder ``new`` the name ``folder``, where another folder may be; that one is then deleted.

    Hold the lock of ``folder``. On Linux the two folders change names in one step, so that at every moment one of them, whole, has
    the name. Elsewhere there is a moment at which none has; what stops the process then is put right by the next ``locked``.
    Raises OSError; then ``folder`` is as it was.
    """
    if not folder.exists():
        new.rename(folder)
        return
    if _exchanged(new, folder):
        shutil.rmtree(new, ignore_errors=True)
        return
    old = _old(folder)
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    try:
        new.rename(folder)
    finally:
        _recover(folder)


def _exchanged(one: Path, other: Path) -> bool:
    """Whether two names could be exchanged: False where the system or the file system cannot."""
    try:
        call = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):  # another system, or an older C library
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)
