"""Named tensors -> aligned weight files, quantized on the way, streamed a slice at a time; equal tensors are stored once."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from graphs.ops import FP8, Scheme

ALIGNMENT = 4096
_SLICE_ELEMENTS = 1 << 20
_STEPS = 7.0, 7.5, 8.0, 8.5  # that a block's largest number may be long; codes reach from -8 to 7


@dataclass(frozen=True)
class Source:
    """Where a parameter's values come from. ``slices()`` yields them in storage order, whatever their stored dtype.

    fixed: what they are kept in, whatever the bundle's dtype: fp32 for the rotary tables, bytes for codes.
    """

    shape: tuple[int, ...]
    slices: Callable[[], Iterator[Tensor]]
    fixed: torch.dtype | None = None

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.fixed or dtype

    def whole(self) -> Tensor:
        """All values at once, in their stored dtype."""
        return torch.cat([part.reshape(-1) for part in self.slices()]).reshape(self.shape)

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


def scale_of(weight: str) -> str:
    """The name of the scales that belong to a matrix' codes."""
    return weight.replace("weight", "scale")


def quantize(values: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of dtype, as ``Scheme`` has them, for matrices [..., N, K]. Scales are positive, as TensorRT wants them."""
    if scheme.codes == FP8:
        most = torch.finfo(FP8).max
        scale = (values.float().abs().amax(-1, keepdim=True) / most).to(dtype)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        return (values.float() / scale.float()).clamp_(-most, most).to(FP8), scale[..., 0]
    return _quantize4(values, scheme, dtype)


def _quantize4(values: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """4-bit codes and scales.

    A block's scale is the one of ``_STEPS`` with the smallest squared error: over a matrix a fifth less than with 7 steps
    alone, for trained weights as for Gaussian ones.
    """
    blocks = values.float().unflatten(-1, (-1, scheme.block))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale, least = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    for steps in _STEPS:
        tried = (largest / steps).to(dtype).float()
        tried = torch.where(tried > 0, tried, 1.0)
        error = (_codes(blocks, tried) * tried - blocks).square().sum(-1, keepdim=True)
        scale, least = torch.where(error < least, tried, scale), torch.minimum(error, least)
    codes = _codes(blocks, scale).to(torch.int8).view(torch.uint8)
    packed = codes[..., 0::2] & 15 | codes[..., 1::2] << 4
    return (packed if scheme.codes == torch.int8 else packed ^ 0x88).view(scheme.codes), scale[..., 0].to(dtype)


def _codes(blocks: Tensor, scale: Tensor) -> Tensor:
    return (blocks / scale).round_().clamp_(-8, 7)


def quantized(source: Source, name: str, scheme: Scheme, dtype: torch.dtype) -> dict[str, Source]:
    """Codes and scales of a matrix, made in one pass over it: the codes' slices must be read before the scales'."""
    shapes = scheme.shapes(source.shape)
    rows, made = max(1, _SLICE_ELEMENTS // source.shape[-1]), deque[Tensor]()

    def codes() -> Iterator[Tensor]:
        made.clear()
        for values in source.slices():
            for part in values.split(rows):
                codes, scale = quantize(part, scheme, dtype)
                made.append(scale)
                yield codes

    def scales() -> Iterator[Tensor]:
        while made:
            yield made.popleft()

    return {name: Source(shapes[0], codes, scheme.codes), scale_of(name): Source(shapes[1], scales, dtype)}


def recoded(place: Location, bundle: Path) -> Source:
    """Packed 4-bit codes as the other type has them: the top bit of each is turned."""
    other = torch.int8 if place.dtype == torch.uint8 else torch.uint8
    rows = max(1, _SLICE_ELEMENTS // prod(place.shape[1:]))

    def slices() -> Iterator[Tensor]:
        for part in place.mapped(bundle).view(torch.uint8).split(rows):
            yield (part ^ 0x88).view(other)

    return Source(place.shape, slices, other)


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
