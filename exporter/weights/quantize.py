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
        return codes.T, scale
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
    shapes = scheme.shapes(source.shape)
    small = {scale_of(name): (shapes[1], dtype)}
    if scheme.zeros:
        small[zero_of(name)] = scheme.zeros_shape(source.shape), scheme.codes
    rows, kept = max(1, _SLICE_ELEMENTS // source.shape[-1]), dict[str, Tensor]()

    def quantized_part(part: Tensor) -> tuple[tuple[Tensor, ...], float, float]:
        """With its largest error and magnitude, if they are wanted."""
        found = quantize(part, scheme, dtype, importance)
        if errors is None:
            return found, 0.0, 0.0
        off = dequantize(found[0], found[1], scheme.bits).float() - part
        return found, float(off.abs().max()), float(part.abs().max())

    def parts() -> Iterator[Tensor]:
        # One tensor for all of a kind: small ones between freed large blocks would fragment the heap.
        kept.update({part: torch.empty(shape, dtype=own) for part, (shape, own) in small.items()})
        filled, worst, largest = dict.fromkeys(small, 0), 0.0, 0.0
        for (codes, *others), error, magnitude in ahead(
            quantized_part, (p for v in source.slices() for p in v.split(rows))
        ):
            for key, found in zip(small, others, strict=True):
                kept[key].view(-1)[filled[key] : filled[key] + found.numel()] = found.reshape(-1)
                filled[key] += found.numel()
            worst, largest = max(worst, error), max(largest, magnitude)
            yield codes
        if errors is not None:
            errors[name] = worst, largest
        if dtype == torch.float16:
            require_fp16(kept[scale_of(name)], f"a scale of the quantized '{name}'")

    def codes() -> Iterator[Tensor]:
        if not scheme.input_major:
            yield from parts()
            return
        whole, filled = torch.empty(shapes[0], dtype=scheme.codes), 0
        for part in parts():
            whole[:, filled : filled + part.shape[1]] = part
            filled += part.shape[1]
        yield from whole.split(max(1, _SLICE_ELEMENTS // source.shape[0]))

    def read(key: str) -> Iterator[Tensor]:
        if key not in kept:  # an interrupted run has packed what comes before
            for _ in codes():
                pass
        yield kept.pop(key)

    rest = {key: Source(shape, partial(read, key), own) for key, (shape, own) in small.items()}
    return {name: Source(shapes[0], codes, scheme.codes), **rest}


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
