"""Codes of 4 bits: for each block the scale, and the zero point, that leave little squared error.

With codes q, a scale s and columns that count c, the error sum(c (x - s q)^2) is s^2 sum(c q^2) - 2 s sum(c q x) +
sum(c x^2), so two sums tell which scale is better, and the best one for these codes: sum(c q x) / sum(c q^2). They are
sums down the columns of a matrix whose columns are blocks, because torch and numpy need several times as long for rows
of 32 numbers.
"""

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

_CHUNK = 2048  # blocks whose temporaries fit into a core's cache
_STEPS = 7.0, 7.5, 8.0, 8.5  # candidates for the largest magnitude of a block, in steps; codes are -8 to 7
# with zero points, candidates for the range of a block, in steps; codes are 0 to 15
_RANGES = 13.0, 14.0, 15.0, 16.0, 17.0

_TINY = np.float32(1e-45)  # instead of 0, by which nothing is divided
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


@torch.inference_mode()
def symmetric(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes from 0 to 15, two per byte, with 8 as zero point, and scales.

    blocks: fp32 [..., block]. Each uses the candidate of ``_STEPS`` with the smallest squared error. Over a matrix this
    is a fifth less than with 7 steps for all blocks, both for trained and for Gaussian weights.
    """
    flat, (codes, scales, _) = blocks.flatten(0, -2), _results(blocks, dtype)
    for own in (chunk := _Chunks(flat, _CHUNK)):
        largest = np.maximum(chunk.high, -chunk.low)
        scale, least = largest, np.full_like(largest, np.inf)
        for steps in _STEPS:
            tried = _positive(np.divide(largest, steps, dtype=np.float32), np.float32(1), dtype)
            products, squares = chunk.sums(tried, -8)
            error = tried * (tried * squares - 2 * products)
            scale, least = np.where(error < least, tried, scale), np.minimum(error, least)
        chunk.write(codes[own], scale, -8)
        scales[own] = torch.from_numpy(scale)
    return codes.unflatten(0, blocks.shape[:-1]), scales.unflatten(0, blocks.shape[:-1])


@torch.inference_mode()
def with_zeros(blocks: Tensor, columns: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes from 0 to 15, two per byte, scales, and zero points uint8 [..., blocks].

    blocks: fp32 [..., blocks, block]. columns: their importance, fp32 [blocks, block]; None if all count alike.

    Zero points are integers, so a value of 0 stays 0. Each candidate of ``_RANGES`` gives a scale and a zero point, and
    its codes the scale with the smallest squared error for them; the best of these is improved once more for its own
    codes. That leaves four fifths of the squared error of ``symmetric`` for Gaussian weights, as much as with an offset
    of any value instead of an integer (docs/quality.md).
    """
    flat, (codes, scales, zeros), in_row = blocks.flatten(0, -2), _results(blocks, dtype), blocks.shape[-2]
    rows, steps = max(1, _CHUNK // in_row), np.array(_RANGES, np.float32)
    importance = None if columns is None else columns.T.repeat(1, rows).numpy()
    for own in (chunk := _Chunks(flat, rows * in_row, importance)):
        span = _positive(chunk.high - chunk.low, np.float32(1), torch.float32)
        tried = np.empty((3, len(steps), len(span)), np.float32)  # zero points and the two sums
        np.minimum(np.rint(chunk.low / span * -steps[:, None]), 15, out=tried[0])
        for i, middle in enumerate(tried[0]):
            tried[1:, i] = chunk.sums(span / steps[i], -middle)
        gain = np.square(tried[1]) / np.maximum(tried[2], _TINY)
        best = torch.from_numpy(gain).max(0, keepdim=True).indices  # argmax takes several times as long
        zero, *sums = torch.from_numpy(tried).gather(1, best.expand(3, 1, -1))[:, 0].numpy()
        scale = _positive(span / steps[best[0].numpy()], np.float32(1), dtype)
        scale = _refined((sums[0], sums[1]), scale, dtype)
        scale = _refined(chunk.sums(scale, -zero), scale, dtype)
        chunk.write(codes[own], scale, -zero)
        scales[own], zeros[own] = torch.from_numpy(scale), torch.from_numpy(zero)
    shape = blocks.shape[:-1]
    return codes.unflatten(0, shape), scales.unflatten(0, shape), zeros.unflatten(0, shape)


def _results(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """For codes, scales and zero points of all blocks in turn."""
    count = blocks[..., 0].numel()
    codes = torch.empty(count, blocks.shape[-1] // 2, dtype=torch.uint8)
    return codes, torch.empty(count, dtype=dtype), torch.empty(count, dtype=torch.uint8)


def _positive(scale: Floats, other: Floats | np.float32, dtype: torch.dtype) -> Floats:
    """Scales rounded to ``dtype``, as fp32; ``other`` where they are not positive, as for blocks of zeros, or
    infinite."""
    rounded = scale if dtype == torch.float32 else torch.from_numpy(scale).to(dtype).float().numpy()
    return np.where((rounded > 0) & (rounded < np.inf), rounded, other)


def _refined(sums: tuple[Floats, Floats], scale: Floats, dtype: torch.dtype) -> Floats:
    """The scales with the smallest error for the codes of ``_Chunks.sums``; those given where no column counts."""
    products, squares = sums
    return _positive(np.divide(products, np.maximum(squares, _TINY), dtype=np.float32), scale, dtype)


class _Chunks:
    """Reads blocks as columns, some at a time, into the same memory. low, high: the least and the largest number of
    each, 0 included, [n]."""

    def __init__(self, blocks: Tensor, most: int, importance: Floats | None = None) -> None:
        """blocks: fp32 [all, block]. most: n at most. importance: [block, most]."""
        self._blocks, self._most, self._all_importance = blocks, most, importance
        self._memory = torch.empty(3, blocks.shape[1] * min(most, len(blocks)))

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, len(self._blocks), self._most):
            read = self._blocks[start : start + self._most].T
            self._values, self._codes, weighted = (part[: read.numel()].view(read.shape) for part in self._memory)
            self._values.copy_(read)
            self._weighted = weighted.numpy()
            self._importance = None if self._all_importance is None else self._all_importance[:, : read.shape[1]]
            self.low: Floats = self._values.amin(0).clamp_max_(0).numpy()
            self.high: Floats = self._values.amax(0).clamp_min_(0).numpy()
            yield slice(start, start + self._most)

    def _rounded(self, scale: Floats, low: Floats | int) -> Tensor:
        """Codes from ``low`` to ``low + 15``, fp32 [block, n]; they are valid until the next call."""
        codes = torch.div(self._values, torch.from_numpy(scale), out=self._codes).round_()
        if isinstance(low, int):
            return codes.clamp_(low, low + 15)
        # np.clip takes six times as long.
        return torch.clamp(codes, torch.from_numpy(low), torch.from_numpy(low + 15), out=codes)

    def sums(self, scale: Floats, low: Floats | int) -> tuple[Floats, Floats]:
        """Of the codes times the values, and of the codes' squares, as much as each column counts: [n]."""
        codes = self._rounded(scale, low).numpy()
        weighted = codes if self._importance is None else np.multiply(codes, self._importance, out=self._weighted)
        return _products(weighted, self._values.numpy()), _products(weighted, codes)

    def write(self, packed: Tensor, scale: Floats, low: Floats | int) -> None:
        """Writes the codes above ``low``, two per byte, the first in the low bits: uint8 [n, block / 2]."""
        codes = self._rounded(scale, low).numpy()
        np.subtract(codes, low, out=codes)
        # As floats and transposed by numpy: torch takes three times as long for bytes.
        both = codes[0::2] + 16 * codes[1::2]
        np.copyto(packed.numpy(), both.astype(np.uint8).T)


def _products(a: Floats, b: Floats) -> Floats:
    """The sum of each column of a * b, in one pass over both, unlike torch's."""
    found: Floats = np.einsum("kn,kn->n", a, b)
    return found
