"""Writes a folder completely or not at all, one process at a time. Imports nothing slow, to handle interruptions
early."""

import ctypes
import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.bundle.locks import locked
from runtime.bundle.manifest import MANIFEST
from runtime.errors import InputError, UnavailableError, reason, remedy

from .weights.notes import NOTES

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>
_FINGERPRINT = f"{NOTES}/same"  # identifies the export that an unfinished folder belongs to


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Within this context SIGINT and SIGTERM raise KeyboardInterrupt.

    Libraries may swallow that exception or raise another one instead. So the function that it yields raises
    KeyboardInterrupt again after a signal, and every other exception that leaves the block after a signal becomes
    KeyboardInterrupt.
    """
    received: list[int] = []

    def interrupt(number: int, _: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if received:
            raise KeyboardInterrupt

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}  # only the main thread may set them
    for number in handlers:
        signal.signal(number, interrupt)
    try:
        yield check
    except Exception:
        check()
        raise
    finally:
        for number, previous in handlers.items():
            signal.signal(number, previous or signal.SIG_DFL)


def is_bundle(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def unfinished(out: Path) -> Path:
    """The folder in which ``out`` is written until it is complete. Raises InputError for an ``out`` without a name."""
    if out.name in ("", ".."):
        raise InputError(f"'{out}' has no name of its own to write the bundle under: name another folder with --out")
    return out.with_name(f".{out.name}.partial")


@contextmanager
def staged(
    out: Path, overwrite: bool, replaceable: Callable[[Path], bool] = is_bundle, fingerprint: str = ""
) -> Iterator[Path]:
    """Yields a folder next to ``out``, which gets the name ``out`` if the block succeeds and is deleted if it fails.

    replaceable: whether an existing folder may be replaced. fingerprint: identifies the export. If it is given, an
    interruption, a full disk or a kill leaves the packed weights, and the next run with the same fingerprint continues
    with them. Raises InputError if ``out`` exists and may not be replaced, UnavailableError if writing fails, and
    GumihoError while another process writes ``out``.
    """
    partial, resume = unfinished(out), False
    busy = f"another export is writing '{out}': wait for it, or name another folder with --out"
    with interruptible() as check:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with locked(out.with_name(f".{out.name}.lock"), busy, remove=True):
                _recover(out)
                _require_replaceable(out, overwrite, replaceable)
                try:
                    _prepare(partial, fingerprint)
                    try:
                        yield partial
                    except Exception:
                        check()  # a library may have turned an interruption into this exception
                        raise
                    check()
                    _finish(partial, out)
                except (OSError, KeyboardInterrupt):
                    resume = resumable(out)
                    raise
                finally:
                    if not resume:
                        shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            raise _failed(out, error, resume) from None


def _failed(out: Path, error: OSError, resume: bool = False) -> UnavailableError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    way = remedy(error, "" if resume and full else "name another folder with --out")
    again = f", and run the command again: it continues from '{unfinished(out)}'" if resume else ""
    return UnavailableError(f"writing '{out}' failed ({reason(error)}): {way}{again}")


def require_place(out: Path, overwrite: bool, replaceable: Callable[[Path], bool] = is_bundle) -> None:
    """Raises what ``staged`` would for an ``out`` that exists or has no place, without writing anything."""
    _require_replaceable(out, overwrite, replaceable)
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise _failed(out, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise _failed(out, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def resumable(out: Path) -> bool:
    """Whether there is an unfinished export from which the same command continues."""
    return (unfinished(out) / _FINGERPRINT).is_file()


def _require_replaceable(out: Path, overwrite: bool, replaceable: Callable[[Path], bool]) -> None:
    if out.exists() and not overwrite:
        raise InputError(f"'{out}' exists: name another folder with --out, or replace it with --overwrite")
    if out.exists() and not replaceable(out) and (not out.is_dir() or any(out.iterdir())):
        raise InputError(
            f"'{out}' was not written by this command, so it is not replaced: name another folder with --out"
        )


def _finish(partial: Path, out: Path) -> None:
    """Gives a finished folder its name. An interruption after that is ignored."""
    finished = partial.stat()
    shutil.rmtree(partial / NOTES, ignore_errors=True)
    try:
        replace_folder(partial, out)
    except KeyboardInterrupt:
        if not (out.exists() and os.path.samestat(finished, out.stat())):
            raise


def _prepare(partial: Path, fingerprint: str) -> None:
    """Makes an empty folder, or one with only the weights of an earlier run with the same fingerprint."""
    note = partial / _FINGERPRINT
    if fingerprint and note.is_file() and note.read_text("utf-8") == fingerprint:
        for path in partial.iterdir():
            if path.name not in (NOTES, "weights"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if fingerprint:
        note.parent.mkdir()
        note.write_text(fingerprint, "utf-8")


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _recover(folder: Path) -> None:
    """Restores or deletes the old folder that a killed ``replace_folder`` left."""
    old = _old(folder)
    if not old.is_dir():
        return
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.rename(folder)


def replace_folder(new: Path, folder: Path) -> None:
    """Renames the folder ``new`` to ``folder``. If ``folder`` exists, it is replaced and deleted.

    On Linux the two folders exchange their names in one step, so a complete folder has the name at any time. Elsewhere
    no folder has it for a moment; if the process is killed then, the next ``staged`` restores the old one. Raises
    OSError and then leaves ``folder`` unchanged.
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
    """Exchanges two names. Returns False if the system or the file system does not support it."""
    try:
        call = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):  # another system, or an older C library
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)
