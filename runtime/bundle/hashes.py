"""Records sizes and hashes of files, and compares files with their records."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ..errors import unreadable
from .records import Bounds, OneOf, Pattern

_SAMPLE, _STRIDE = 64 << 10, 16 << 20  # bytes
_READ_WHOLE = 256 << 20  # bytes hashed when a bundle is opened, in at most a second
Count = Annotated[int, Bounds(0, 1 << 40)]
Hash = Annotated[str, Pattern("[0-9a-f]{64}", "a SHA-256 in hexadecimal")]


@dataclass(frozen=True)
class File:
    """A file of a bundle or of compiled engines.

    size: bytes. sample: see ``sample_hash``. sha256: of the whole file, "" for a checkpoint's file that was linked
    without reading it.
    """

    size: Count
    sample: Hash
    sha256: Hash | Annotated[str, OneOf(("",))]

    @staticmethod
    def of(path: Path, sha256: str | None = None) -> "File":
        """Describes a file on disk. sha256: its hash, if already computed."""
        return File(path.stat().st_size, sample_hash(path), file_hash(path) if sha256 is None else sha256)


def first_damaged(root: Path, files: Mapping[str, File], quick: bool) -> str | None:
    """The first file whose size or hash differs from its record, None if all agree. quick: see ``Bundle.verify``.
    Raises UnavailableError for a file that this user may not read."""
    bytes_left = _READ_WHOLE
    for name, expected in sorted(files.items(), key=lambda item: item[1].size):
        bytes_left -= expected.size
        whole = bool(expected.sha256) and (bytes_left >= 0 or not quick)
        try:
            if not (root / name).is_file() or (root / name).stat().st_size != expected.size:
                return name  # reading a pipe or a device might never end
            actual = file_hash(root / name) if whole else sample_hash(root / name)
        except PermissionError as error:
            raise unreadable(root / name, error) from None
        except OSError:
            return name
        if actual != (expected.sha256 if whole else expected.sample):
            return name
    return None


def sample_hash(path: Path) -> str:
    """The sha256 of 64 KiB of every 16 MiB and of the last 64 KiB; for 140 GB this takes a second or two.

    It distinguishes checkpoints and detects files that were cut off, zeroed or copied in part, but not a few changed
    bytes.
    """
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        for start in (*range(0, size, _STRIDE), max(0, size - _SAMPLE)):
            file.seek(start)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """The sha256 of the whole file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _slow_hash(file)


def _slow_hash(file: Any) -> str:
    digest = hashlib.sha256()  # Python 3.10 has no file_digest
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
