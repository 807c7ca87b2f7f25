"""Files that are written whole or not at all, and read only if they are files."""

import io
import os
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np

from .errors import GumihoError


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
    content = io.BytesIO(read_regular(path, most + (1 << 20)))
    try:
        with zipfile.ZipFile(content) as archive:
            # A small file can unpack to any size.
            size = sum(part.file_size for part in archive.infolist())
            if size > most or any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise OSError(f"it unpacks to {size} bytes, or is compressed, which is not how it is written")
            if damaged := archive.testzip():
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
    """A file beside ``path`` that takes its place when the block ends well, and vanishes when it does not.

    Raises GumihoError where it cannot be written.
    """
    partial = ""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            partial = file.name
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise GumihoError(
            f"'{path}' cannot be written ({error.strerror or error}): free some space, or name another file"
        ) from None
    finally:
        with suppress(OSError):
            os.unlink(partial)
