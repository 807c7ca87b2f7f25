"""Tensors that are read on demand, and their locations in weight files."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from graphs.dialects.quantization import EMBEDDING
from runtime.errors import InputError


@dataclass(frozen=True)
class Stored:
    """A contiguous tensor in a checkpoint's file. offset: in bytes."""

    file: Path
    offset: int
    dtype: torch.dtype


CODED_BLOCK = 32  # numbers that share a scale in the codes of checkpoints
Part: TypeAlias = tuple[Tensor, Tensor, Tensor | None]  # codes, scales, zero points


@dataclass(frozen=True)
class Coded:
    """A matrix that a checkpoint holds as codes in blocks of 32, which a bundle can keep code for code.

    bits: per code. zeros: whether the blocks have zero points. scales: dtype of the scales. parts: reads codes, scales
    and zero points of consecutive rows, as ``Scheme`` has them for codes of dtype uint8; the scales in ``scales``.
    """

    bits: int
    zeros: bool
    scales: torch.dtype
    parts: Callable[[], Iterator[Part]]


@dataclass(frozen=True)
class Source:
    """Reads the values of a parameter on demand. ``slices()`` yields them in storage order, in their stored dtype.

    fixed: the packed dtype if it does not depend on the bundle's, as for rotary tables (fp32) and codes; else None.
    stored: the checkpoint's file that contains exactly these values, if there is one. coded: the codes that the values
    were made from, if the checkpoint holds codes.
    """

    shape: tuple[int, ...]
    slices: Callable[[], Iterator[Tensor]]
    fixed: torch.dtype | None = None
    stored: Stored | None = None
    coded: Coded | None = None

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The packed dtype in a bundle of ``dtype``."""
        return self.fixed or dtype

    def whole(self) -> Tensor:
        """All values at once, in their stored dtype."""
        return torch.cat([part.reshape(-1) for part in self.slices()]).reshape(self.shape)

    def rows(self, ids: Tensor) -> "Source":
        """Rows of a matrix [N, K], in their stored dtype. ids: int64 [n], ascending."""

        def slices() -> Iterator[Tensor]:
            start = 0
            for part in self.slices():
                selected = ids[(ids >= start) & (ids < start + len(part))] - start
                start += len(part)
                if len(selected):
                    yield part[selected]

        return Source((len(ids), *self.shape[1:]), slices)

    def linkable(self, dtype: torch.dtype) -> bool:
        """Whether a bundle of ``dtype`` can read the values from the checkpoint's file."""
        stored = self.stored
        # Old files have headers of any length, and not every processor can read unaligned numbers.
        return stored is not None and stored.dtype == self.dtype(dtype) and stored.offset % stored.dtype.itemsize == 0

    def nbytes(self, dtype: torch.dtype) -> int:
        """Packed size in a bundle of ``dtype``."""
        return prod(self.shape) * self.dtype(dtype).itemsize


def is_matrix(name: str, source: Source) -> bool:
    """Whether a parameter is a factor of a matrix product, so that it can be quantized."""
    return len(source.shape) > 1 and "weight" in name and name != EMBEDDING


@dataclass(frozen=True)
class Location:
    """The location of a packed parameter: ``file`` relative to the bundle, ``offset`` and ``length`` in bytes."""

    file: str
    offset: int
    length: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def mapped(self, bundle: Path) -> Tensor:
        """The values, mapped from the file (copy on write) without reading them."""
        array = np.memmap(bundle / self.file, np.uint8, "c", self.offset, (self.length,))
        return torch.from_numpy(array).view(self.dtype).reshape(self.shape)


def is_finite(values: Tensor) -> bool:
    """Whether no number is NaN or infinite. values: fp16, bf16, fp32 or fp64, of any shape."""
    # Takes a tenth of the time of hashing; torch.isfinite takes several times as long as hashing.
    return values.numel() == 0 or all(math.isfinite(float(extreme)) for extreme in values.aminmax())


def require_fp16(converted: Tensor, name: str) -> None:
    """Raises InputError if conversion to fp16 made values infinite. name: the tensor, for the message."""
    if not is_finite(converted):
        raise InputError(f"{name} holds a value too large for fp16, more than 65504: use bf16 or fp32, see --dtype")


def _bytes(values: Tensor, dtype: torch.dtype) -> memoryview:
    return memoryview(values.to(dtype).contiguous().view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
