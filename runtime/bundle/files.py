"""Writes files completely or not at all, and reads only regular files."""

import errno
import io
import os
import secrets
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np

from ..errors import InputError, UnavailableError, reason, remedy

HEADERS = 1 << 20  # bytes that an archive may have in addition to its arrays
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def read_regular(path: Path, most: int) -> bytes:
    """The content of a regular file of at most ``most`` bytes.

    Raises OSError for a larger file and for anything else, such as a pipe or a device, which could block the reader.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        if status.st_size > most:
            raise OSError(f"it has {status.st_size} bytes, expected {most} at most")
        return file.read(most)


def read_arrays(path: Path, most: int) -> dict[str, np.ndarray]:
    """The arrays by name of a file written by ``numpy.savez``: numbers and text, at most ``most`` bytes in total.

    Raises OSError for anything else.
    """
    return unpacked(read_regular(path, most + HEADERS), most)


def unpacked(archive: bytes | memoryview, most: int) -> dict[str, np.ndarray]:
    """Like ``read_arrays``, from a file's content."""
    content = io.BytesIO(archive)
    try:
        with zipfile.ZipFile(content) as parts:
            # A small compressed file can unpack to any size.
            size = sum(part.file_size for part in parts.infolist())
            if size > most + HEADERS or any(part.compress_type != zipfile.ZIP_STORED for part in parts.infolist()):
                raise OSError(f"it unpacks to {size} bytes or is compressed, and neither is how it was written")
            if damaged := parts.testzip():
                raise OSError(f"its part {damaged} is damaged")
        content.seek(0)
        with np.load(content, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except OSError:
        raise
    except Exception as error:  # numpy and zipfile raise many kinds of exceptions for damaged files
        raise OSError(
            f"it is not an archive of arrays ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        ) from None


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file that replaces ``path`` if the block succeeds, and is removed if it does not.

    If ``path`` is a link, its target is replaced and the link stays. Raises InputError if ``path`` is not a regular
    file or cannot be written, and UnavailableError if the disk is full.
    """
    target, partial = regular(path), None
    try:
        partial = target.with_name(f".{secrets.token_hex(8)}.partial")
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            partial.chmod(stat.S_IMODE(target.stat().st_mode))
        os.replace(partial, target)
    except OSError as error:
        kind = UnavailableError if error.errno in _NO_SPACE else InputError
        raise kind(f"'{path}' cannot be written ({reason(error)}): {remedy(error, 'name another file')}") from None
    finally:
        if partial:
            with suppress(OSError):
                partial.unlink()


def regular(path: Path) -> Path:
    """The path with links resolved, if it is a regular file or does not exist yet.

    Raises InputError for anything else that a file must not replace, such as a folder, a pipe or a device.
    """
    try:
        target = Path(os.path.realpath(path))
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(target.stat().st_mode):
                raise InputError(f"'{path}' cannot be written (it is {_kind(target)}, not a file): name another file")
        return target
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"'{path}' cannot be written ({reason}): name another file") from None


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a folder"
    return "a pipe" if path.is_fifo() else "a socket" if path.is_socket() else "a device"
