"""Named tensors -> aligned weight files, streamed a slice at a time; equal tensors are stored once."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 4096


@dataclass(frozen=True)
class Source:
    """Where a parameter's values come from. ``slices()`` yields them in storage order, whatever their stored dtype."""

    shape: tuple[int, ...]
    slices: Callable[[], Iterator[Tensor]]
    exact: bool = False  # keeps fp32 whatever the bundle's dtype: the rotary tables

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self.exact else dtype

    def nbytes(self, dtype: torch.dtype) -> int:
        return prod(self.shape) * self.dtype(dtype).itemsize


@dataclass(frozen=True)
class Location:
    """Where a parameter lies: ``file`` relative to the bundle, ``offset`` and ``length`` in bytes."""

    file: str
    offset: int
    length: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def mapped(self, bundle: Path) -> Tensor:
        """The values, mapped from the file (copy on write), not read."""
        array = np.memmap(bundle / self.file, np.uint8, "c", self.offset, (self.length,))
        return torch.from_numpy(array).view(self.dtype).reshape(self.shape)


class Packer:
    """Writes weight files and remembers by content what is already there, across files."""

    def __init__(self, bundle: Path, dtype: torch.dtype, progress: Callable[[int], object]) -> None:
        """progress is told the bytes of every slice that has been dealt with."""
        self.bundle, self.dtype, self.progress = bundle, dtype, progress
        self._known: dict[bytes, Location] = {}
        self.hashes: dict[str, tuple[int, str]] = {}  # file -> bytes, sha256

    def pack(self, file: str, sources: dict[str, Source]) -> dict[str, Location]:
        """Writes one file. Returns where each parameter lies, which may be an earlier file."""
        path = self.bundle / file
        path.parent.mkdir(parents=True, exist_ok=True)
        locations: dict[str, Location] = {}
        whole = hashlib.sha256()
        with path.open("wb") as out:
            for name, source in sources.items():
                start, digest, ahead = out.tell(), hashlib.sha256(), whole.copy()
                for values in source.slices():
                    data = memoryview(values.to(source.dtype(self.dtype)).contiguous().view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
                    digest.update(data)
                    ahead.update(data)
                    out.write(data)
                    self.progress(len(data))
                length = out.tell() - start
                known = self._known.get(digest.digest())
                if known and (known.dtype, known.length) == (source.dtype(self.dtype), length):
                    out.seek(start)
                    out.truncate()
                    locations[name] = Location(known.file, known.offset, length, known.dtype, source.shape)
                    continue
                padding = bytes(-out.tell() % ALIGNMENT)
                out.write(padding)
                ahead.update(padding)
                whole = ahead
                locations[name] = Location(file, start, length, source.dtype(self.dtype), source.shape)
                self._known[digest.digest()] = locations[name]
        self.hashes[file] = path.stat().st_size, whole.hexdigest()
        return locations
