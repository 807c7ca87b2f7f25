"""Files that are written whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .errors import GumihoError


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
