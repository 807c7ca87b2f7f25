"""A tensor that is not read yet, and where a packed one lies."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from runtime.errors import GumihoError


@dataclass(frozen=True)
class Stored:
    """Where a file keeps a tensor, number behind number: ``offset`` in bytes."""

    file: Path
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Source:
    """Where a parameter's values come from. ``slices()`` yields them in storage order, whatever their stored dtype.

    fixed: what they are kept in, whatever the bundle's dtype: fp32 for the rotary tables, bytes for codes. stored: where they lie
    already, if they do in one piece.
    """

    shape: tuple[int, ...]
    slices: Callable[[], Iterator[Tensor]]
    fixed: torch.dtype | None = None
    stored: Stored | None = None

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.fixed or dtype

    def whole(self) -> Tensor:
        """All values at once, in their stored dtype."""
        return torch.cat([part.reshape(-1) for part in self.slices()]).reshape(self.shape)

    def linkable(self, dtype: torch.dtype) -> bool:
        """Whether the values lie in a file as a bundle wants them."""
        stored = self.stored
        # Old files have headers of any length, and not every processor reads numbers at odd addresses.
        return stored is not None and stored.dtype == self.dtype(dtype) and stored.offset % stored.dtype.itemsize == 0

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


def is_finite(values: Tensor) -> bool:
    """Whether no number is NaN or infinite. values: fp16, bf16, fp32 or fp64, of any shape."""
    # A tenth of what hashing them takes; torch.isfinite takes several times as long as hashing.
    return values.numel() == 0 or all(math.isfinite(float(end)) for end in values.aminmax())


def require_fp16(converted: Tensor, what: str) -> None:
    """Raises GumihoError where finite values became infinite by conversion to fp16. what: whose they are, for the error."""
    if not is_finite(converted):
        raise GumihoError(
            f"{what} holds a value too large for fp16, whose largest is 65504: keep it in bf16 or fp32, see --dtype"
        )


def _bytes(values: Tensor, dtype: torch.dtype) -> memoryview:
    return memoryview(values.to(dtype).contiguous().view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
