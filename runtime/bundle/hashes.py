"""Sizes, samples and hashes of files, and whether files still have them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from .records import Bounds, OneOf, Pattern

_SAMPLE, _STRIDE = 64 << 10, 16 << 20  # bytes
_READ_WHOLE = 256 << 20  # bytes that are hashed when a bundle is opened, which takes a second at most
Count = Annotated[int, Bounds(0, 1 << 40)]
Hash = Annotated[str, Pattern("[0-9a-f]{64}", "a SHA-256 in hexadecimal")]


@dataclass(frozen=True)
class File:
    """A file of a bundle or of compiled engines.

    size: bytes. sample: see ``sample_hash``. sha256: of all of it, "" for a checkpoint's file that was linked and not read.
    """

    size: Count
    sample: Hash
    sha256: Hash | Annotated[str, OneOf(("",))]

    @staticmethod
    def of(path: Path, sha256: str | None = None) -> "File":
        """Describes a file on disk. sha256: where it is known already."""
        return File(path.stat().st_size, sample_hash(path), file_hash(path) if sha256 is None else sha256)


def first_damaged(root: Path, files: Mapping[str, File], quick: bool) -> str | None:
    """The first file whose hash differs from the one on record, None where all agree. quick: see ``Bundle.verify``."""
    left = _READ_WHOLE
    for name, expected in sorted(files.items(), key=lambda item: item[1].size):
        left -= expected.size
        whole = bool(expected.sha256) and (left >= 0 or not quick)
        try:
            if not (root / name).is_file() or (root / name).stat().st_size != expected.size:
                return name  # a pipe or a device could be read forever
            found = file_hash(root / name) if whole else sample_hash(root / name)
        except OSError:
            return name
        if found != (expected.sha256 if whole else expected.sample):
            return name
    return None


def sample_hash(path: Path) -> str:
    """The sha256 of 64 KiB out of every 16 MiB and of the last 64 KiB, which 140 GB give away in a second or two.

    It tells checkpoints apart and shows what was cut off, zeroed or copied by half, but not a few bytes that changed.
    """
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        for start in (*range(0, size, _STRIDE), max(0, size - _SAMPLE)):
            file.seek(start)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _slow_hash(file)


def _slow_hash(file: Any) -> str:
    digest = hashlib.sha256()  # Python 3.10 has no file_digest
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
