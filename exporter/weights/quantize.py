"""Quantizes matrices to codes, scales and zero points (``graphs.dialects.quantization.Scheme``)."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from graphs.dialects.quantization import FP8, Scheme, Schemes, dequantize, flip_top_bits, pack_zeros

from . import four_bits
from .ahead import ahead
from .source import Location, Source, require_fp16

_SLICE_ELEMENTS = 1 << 18  # of a worker's slice
Rounding: TypeAlias = dict[str, tuple[float, float]]  # largest error and largest magnitude of matrices, by name


def scale_of(weight: str) -> str:
    """The name of the scales of a quantized matrix."""
    return weight.replace("weight", "scale")


def zero_of(weight: str) -> str:
    """The name of the zero points of a quantized matrix."""
    return weight.replace("weight", "zero")


def weight_of(codes: str) -> str:
    """The name of the quantized matrix that has these codes or zero points."""
    return codes.replace("zero", "weight")


def quantize(
    values: Tensor, scheme: Scheme, dtype: torch.dtype, importance: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Codes and scales (of ``dtype``) for matrices [..., N, K], in the layout of ``Scheme``, and the zero points if it
    has them.

    importance: how much the squared error of each column counts, fp32 [K]; it matters to codes with zero points only.

    Scales are positive, as TensorRT requires.
    """
    if scheme.codes == FP8:
        largest = torch.finfo(FP8).max
        scale = (values.float().abs().amax(-1, keepdim=True) / largest).to(dtype)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        return (values.float() / scale.float()).clamp_(-largest, largest).to(FP8), scale[..., 0]
    if scheme.input_major:
        codes, scale = _quantize8(values.float(), dtype)
        return (flip_top_bits(codes, 8) if scheme.codes == torch.uint8 else codes).T, scale
    blocks = values.float().unflatten(-1, (-1, scheme.block))
    if scheme.bits == 4 and scheme.zeros:
        columns = None if importance is None else importance.unflatten(-1, (-1, scheme.block))
        found, scale, zeros = four_bits.with_zeros(blocks, columns, dtype)
        codes, zero = (
            flip_top_bits(part, 4).view(torch.int8) if scheme.codes == torch.int8 else part
            for part in (found, pack_zeros(zeros))
        )
        return codes, scale, zero
    if scheme.bits == 4:
        codes, scale = four_bits.symmetric(blocks, dtype)
        return (flip_top_bits(codes, 4).view(torch.int8) if scheme.codes == torch.int8 else codes), scale
    codes, scale = _quantize8(blocks, dtype)
    return (codes if scheme.codes == torch.int8 else flip_top_bits(codes, 8)), scale


def _quantize8(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two's complement codes, and scales that map the largest magnitude of a block to 127."""
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).to(dtype)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (blocks / scale.float()).round_().clamp_(-127, 127).to(torch.int8), scale[..., 0]


def quantized(
    source: Source,
    name: str,
    scheme: Scheme,
    dtype: torch.dtype,
    importance: Tensor | None = None,
    errors: Rounding | None = None,
) -> dict[str, Source]:
    """Sources of the codes, scales and zero points of a matrix, computed in one pass: the codes must be read first.

    importance: see ``quantize``. errors: gets the largest error of the matrix and its largest magnitude, once all
    slices are quantized; for 8-bit codes only. Input-major codes are held in memory as a whole, because each of their
    rows needs values of every slice.
    """
    one = _Quantization(source, name, scheme, dtype, importance, errors)
    rest = {key: Source(shape, partial(one.read, key), own) for key, (shape, own) in one.small.items()}
    return {name: Source(scheme.shapes(source.shape)[0], one.codes, scheme.codes), **rest}


class _Quantization:
    """A matrix that is quantized slice by slice. small: shape and type of its scales and zero points."""

    def __init__(
        self,
        source: Source,
        name: str,
        scheme: Scheme,
        dtype: torch.dtype,
        importance: Tensor | None,
        errors: Rounding | None,
    ) -> None:
        self._source, self._name, self._scheme, self._dtype = source, name, scheme, dtype
        self._importance, self._errors = importance, errors
        self.small = {scale_of(name): (scheme.shapes(source.shape)[1], dtype)}
        if scheme.zeros:
            self.small[zero_of(name)] = scheme.zeros_shape(source.shape), scheme.codes
        self._kept = dict[str, Tensor]()

    def _part(self, part: Tensor) -> tuple[tuple[Tensor, ...], float, float]:
        """With its largest error and magnitude, if they are wanted."""
        found = quantize(part, self._scheme, self._dtype, self._importance)
        if self._errors is None:
            return found, 0.0, 0.0
        off = dequantize(found[0], found[1], self._scheme.bits).float() - part
        return found, float(off.abs().max()), float(part.abs().max())

    def _parts(self) -> Iterator[Tensor]:
        """The codes of all slices. Keeps their scales and zero points."""
        # One tensor for all of a kind: small ones between freed large blocks would fragment the heap.
        kept = self._kept = {key: torch.empty(shape, dtype=own) for key, (shape, own) in self.small.items()}
        filled, worst, largest = dict.fromkeys(kept, 0), 0.0, 0.0
        rows = max(1, _SLICE_ELEMENTS // self._source.shape[-1])
        slices = (part for values in self._source.slices() for part in values.split(rows))
        for (codes, *others), error, magnitude in ahead(self._part, slices):
            for key, found in zip(kept, others, strict=True):
                kept[key].view(-1)[filled[key] : filled[key] + found.numel()] = found.reshape(-1)
                filled[key] += found.numel()
            worst, largest = max(worst, error), max(largest, magnitude)
            yield codes
        if self._errors is not None:
            self._errors[self._name] = worst, largest
        if self._dtype == torch.float16:
            require_fp16(kept[scale_of(self._name)], f"a scale of the quantized '{self._name}'")

    def codes(self) -> Iterator[Tensor]:
        if not self._scheme.input_major:
            yield from self._parts()
            return
        whole, filled = torch.empty(self._scheme.shapes(self._source.shape)[0], dtype=self._scheme.codes), 0
        for part in self._parts():
            whole[:, filled : filled + part.shape[1]] = part
            filled += part.shape[1]
        yield from whole.split(max(1, _SLICE_ELEMENTS // self._source.shape[0]))

    def read(self, key: str) -> Iterator[Tensor]:
        """The scales or zero points, of which nothing is kept once they are read."""
        if key not in self._kept:  # an interrupted run has packed what comes before
            for _ in self.codes():
                pass
        yield self._kept.pop(key)


def carried(source: Source, name: str, scheme: Scheme, dtype: torch.dtype) -> dict[str, Source]:
    """Sources of the codes, scales and zero points that a checkpoint holds, which is read anew for each. scheme: that
    of the codes."""
    coded = source.coded
    assert coded is not None

    def codes(part: int) -> Iterator[Tensor]:
        for values in coded.parts():
            offset = values[part]
            assert offset is not None
            yield offset if scheme.codes == torch.uint8 else flip_top_bits(offset, scheme.bits).view(torch.int8)

    shapes = scheme.shapes(source.shape)
    found = {
        name: Source(shapes[0], lambda: codes(0), scheme.codes),
        scale_of(name): Source(shapes[1], lambda: (scale for _, scale, _ in coded.parts()), dtype),
    }
    if scheme.zeros:
        found[zero_of(name)] = Source(scheme.zeros_shape(source.shape), lambda: codes(2), scheme.codes)
    return found


def recoded(location: Location, bundle: Path, bits: int) -> Source:
    """Packed codes converted to the other dtype, int8 or uint8. bits: per code."""
    dtype = torch.int8 if location.dtype == torch.uint8 else torch.uint8
    rows = max(1, _SLICE_ELEMENTS // prod(location.shape[1:]))

    def slices() -> Iterator[Tensor]:
        for part in location.mapped(bundle).view(torch.uint8).split(rows):
            yield flip_top_bits(part, bits).view(dtype)

    return Source(location.shape, slices, dtype)


def signed(names: Mapping[str, torch.dtype], others: Sequence[Schemes]) -> dict[str, int]:
    """The unsigned codes and zero points that are signed in one of several schemes, and their bits. names: dtypes of
    parameters."""
    return {
        name: scheme.bits
        for name, dtype in names.items()
        for schemes in others
        if dtype == torch.uint8 and (scheme := schemes[weight_of(name)]) and scheme.codes == torch.int8
    }
