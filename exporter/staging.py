"""A folder that is written whole or not at all, by one process at a time. Imports nothing heavy: interruptions come any time."""

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
from runtime.errors import GumihoError

from .weights.notes import NOTES

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>
_SAME = f"{NOTES}/same"  # what is to be written


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Within it SIGINT and SIGTERM raise KeyboardInterrupt, and so does what it yields, once either came: a library that was
    interrupted may have swallowed the first one. An exception that leaves the block after a signal is an interruption too.
    """
    caught: list[int] = []

    def interrupt(number: int, _: object) -> None:
        caught.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if caught:
            raise KeyboardInterrupt

    ours = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is not threading.main_thread():
        ours = {}  # signals are the main thread's
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield check
    except Exception:
        check()
        raise
    finally:
        for number, previous in ours.items():
            signal.signal(number, previous or signal.SIG_DFL)


def is_bundle(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def unfinished(out: Path) -> Path:
    """Where a bundle lies until it is whole. Raises GumihoError for a folder that nothing can lie beside."""
    if out.name in ("", ".."):
        raise GumihoError(f"'{out}' has no name of its own to put the bundle under: name another folder with --out")
    return out.with_name(f".{out.name}.partial")


@contextmanager
def staged(out: Path, overwrite: bool, known: Callable[[Path], bool] = is_bundle, same: str = "") -> Iterator[Path]:
    """A folder beside ``out`` that becomes it when the block ends well, and vanishes when it does not.

    known: whether a folder that is there is of the kind that may be replaced. same: says what is being written; where it is
    given, weights that were packed before an interruption, a full disk or a kill stay, and the next run that says the same finds
    them. Raises GumihoError where ``out`` exists and may not go, and while another process is writing it.
    """
    partial, kept = unfinished(out), False
    busy = f"another export is writing '{out}': wait for it, or name another folder with --out"
    with interruptible() as check:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with locked(out.with_name(f".{out.name}.lock"), busy, remove=True):
                _recover(out)
                _require_replaceable(out, overwrite, known)
                try:
                    _prepare(partial, same)
                    try:
                        yield partial
                    except Exception:
                        check()  # a library may have made something else of it
                        raise
                    check()
                    _finish(partial, out)
                except (OSError, KeyboardInterrupt):
                    kept = resumable(out)
                    raise
                finally:
                    if not kept:
                        shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            way = "name another folder with --out"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                way = f"free some space{', or ' + way if not kept else ''}"
            again = f", and run the command again: it goes on from '{partial}'" if kept else ""
            raise GumihoError(f"writing '{out}' failed ({error.strerror or error}): {way}{again}") from None


def resumable(out: Path) -> bool:
    """Whether an unfinished export is there that the same command goes on with."""
    return (unfinished(out) / _SAME).is_file()


def _require_replaceable(out: Path, overwrite: bool, known: Callable[[Path], bool]) -> None:
    if out.exists() and not overwrite:
        raise GumihoError(f"'{out}' exists: name another folder with --out, or replace it with --overwrite")
    if out.exists() and not known(out) and (not out.is_dir() or any(out.iterdir())):
        raise GumihoError(f"'{out}' is not what this command wrote, so it is not replaced: name another folder with --out")


def _finish(partial: Path, out: Path) -> None:
    """Gives a finished folder its name. An interruption comes too late once it has it."""
    made = partial.stat()
    shutil.rmtree(partial / NOTES, ignore_errors=True)
    try:
        replace_folder(partial, out)
    except KeyboardInterrupt:
        if not (out.exists() and os.path.samestat(made, out.stat())):
            raise


def _prepare(partial: Path, same: str) -> None:
    """An empty folder, but for the weights of an earlier run that was to write the same."""
    note = partial / _SAME
    if same and note.is_file() and note.read_text("utf-8") == same:
        for found in partial.iterdir():
            if found.name not in (NOTES, "weights"):
                shutil.rmtree(found) if found.is_dir() else found.unlink()
        return
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if same:
        note.parent.mkdir()
        note.write_text(same, "utf-8")


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _recover(folder: Path) -> None:
    """Puts back what a killed ``replace_folder`` left."""
    old = _old(folder)
    if not old.is_dir():
        return
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.rename(folder)


def replace_folder(new: Path, folder: Path) -> None:
    """Gives the folder ``new`` the name ``folder``, where another folder may be; that one is then deleted.

    On Linux the two folders change names in one step, so that at every moment one of them, whole, has the name. Elsewhere there is
    a moment at which none has; if the process is killed then, the next ``staged`` puts it right. Raises OSError; then ``folder`` is
    as it was.
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
