"""Files that are written whole or not at all, and read only if they are files."""

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

from ..errors import GumihoError

HEADERS = 1 << 20  # bytes that an archive may have besides what its arrays hold


def read_regular(path: Path, most: int) -> bytes:
    """All of a regular file of at most ``most`` bytes; a pipe or a device would keep the reader waiting.

    Raises OSError for anything else.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no regular file")
        if found.st_size > most:
            raise OSError(f"it has {found.st_size} bytes, expected {most} at most")
        return file.read(most)


def read_arrays(path: Path, most: int) -> dict[str, np.ndarray]:
    """What ``numpy.savez`` wrote: arrays of numbers and text, of at most ``most`` bytes in all. Raises OSError for anything else."""
    return unpacked(read_regular(path, most + HEADERS), most)


def unpacked(archive: bytes | memoryview, most: int) -> dict[str, np.ndarray]:
    """``read_arrays`` of a file's content."""
    content = io.BytesIO(archive)
    try:
        with zipfile.ZipFile(content) as parts:
            # A small file can unpack to any size.
            size = sum(part.file_size for part in parts.infolist())
            if size > most + HEADERS or any(part.compress_type != zipfile.ZIP_STORED for part in parts.infolist()):
                raise OSError(f"it unpacks to {size} bytes, or is compressed, which is not how it is written")
            if damaged := parts.testzip():
                raise OSError(f"its part {damaged} is damaged")
        content.seek(0)
        with np.load(content, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except OSError:
        raise
    except Exception as error:  # damage leads numpy and zipfile to raise all kinds of things
        raise OSError(f"it is no archive of arrays ({type(error).__name__}: {' '.join(str(error).split())[:200]})") from None


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of ``path`` when the block ends well, and vanishes when it does not.

    Where ``path`` is a link, the file it leads to is replaced and the link stays. Raises GumihoError where that is no regular
    file, and where it cannot be written.
    """
    place, partial = regular(path), None
    try:
        partial = place.with_name(f".{secrets.token_hex(8)}.partial")
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            partial.chmod(stat.S_IMODE(place.stat().st_mode))
        os.replace(partial, place)
    except OSError as error:
        raise GumihoError(
            f"'{path}' cannot be written ({error.strerror or error}): free some space, or name another file"
        ) from None
    finally:
        if partial:
            with suppress(OSError):
                partial.unlink()


def regular(path: Path) -> Path:
    """Where ``path`` leads, links followed: a regular file, or nothing yet. Raises GumihoError for anything else, such as a folder,
    a pipe or a device, which a file must not replace."""
    try:
        place = Path(os.path.realpath(path))
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(place.stat().st_mode):
                raise GumihoError(f"'{path}' cannot be written (it is {_kind(place)} and no file): name another file")
        return place
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise GumihoError(f"'{path}' cannot be written ({reason}): name another file") from None


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a folder"
    return "a pipe" if path.is_fifo() else "a socket" if path.is_socket() else "a device"
