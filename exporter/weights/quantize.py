"""Quantizes matrices to codes and scales (``graphs.dialects.quantization.Scheme``)."""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from graphs.dialects.quantization import FP8, Scheme, dequantize, flip_top_bits

from .source import Location, Source, require_fp16

_SLICE_ELEMENTS = 1 << 18  # the temporaries of so many fit into a core's cache; four times as many take twice as long
_STEPS = 7.0, 7.5, 8.0, 8.5  # candidates for the largest magnitude of a block, in steps; codes are -8 to 7


def scale_of(weight: str) -> str:
    """The name of the scales of a quantized matrix."""
    return weight.replace("weight", "scale")


def zero_of(weight: str) -> str:
    """The name of the zero points of a quantized matrix."""
    return weight.replace("weight", "zero")


def quantize(values: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales (of ``dtype``) for matrices [..., N, K], in the layout of ``Scheme``.

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
    codes, scale = (_quantize8 if scheme.bits == 8 else _quantize4)(blocks, dtype)
    return (codes if scheme.codes == torch.int8 else flip_top_bits(codes, scheme.bits)).view(scheme.codes), scale


def _quantize8(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two's complement codes, and scales that map the largest magnitude of a block to 127."""
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).to(dtype)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (blocks / scale.float()).round_().clamp_(-127, 127).to(torch.int8), scale[..., 0]


def _quantize4(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two's complement codes, two per byte, and scales.

    Each block uses the candidate of ``_STEPS`` with the smallest squared error. Over a matrix this is a fifth less than with 7
    steps for all blocks, both for trained and for Gaussian weights.
    """
    largest = blocks.abs().amax(-1, keepdim=True)
    scale, least = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    for steps in _STEPS:
        candidate = (largest / steps).to(dtype).float()
        candidate = torch.where(candidate > 0, candidate, 1.0)
        error = _codes(blocks, candidate).mul_(candidate).sub_(blocks).square_().sum(-1, keepdim=True)
        scale, least = torch.where(error < least, candidate, scale), torch.minimum(error, least)
    codes = _codes(blocks, scale).to(torch.int8).view(torch.uint8)
    return codes[..., 0::2] & 15 | codes[..., 1::2] << 4, scale[..., 0].to(dtype)


def _codes(blocks: Tensor, scale: Tensor) -> Tensor:
    return (blocks / scale).round_().clamp_(-8, 7)


def quantized(
    source: Source, name: str, scheme: Scheme, dtype: torch.dtype, errors: dict[str, tuple[float, float]] | None = None
) -> dict[str, Source]:
    """Sources of the codes and scales of a matrix, computed in one pass: the codes must be read before the scales.

    errors: gets the largest error of the matrix and its largest magnitude, once all slices are quantized. 8-bit codes only.
    Input-major codes are held in memory as a whole, because each of their rows needs values of every slice.
    """
    shapes = scheme.shapes(source.shape)
    rows, scale_slices = max(1, _SLICE_ELEMENTS // source.shape[-1]), list[Tensor]()

    def parts() -> Iterator[Tensor]:
        # One tensor for all scales: small ones between freed large blocks would fragment the heap.
        scale_slices[:], filled = [torch.empty(shapes[1], dtype=dtype)], 0
        flat, worst, largest = scale_slices[0].view(-1), 0.0, 0.0
        for values in source.slices():
            for part in values.split(rows):
                codes, scale = quantize(part, scheme, dtype)
                flat[filled : filled + scale.numel()] = scale.view(-1)
                filled += scale.numel()
                if errors is not None:
                    off = dequantize(codes, scale, scheme.bits).float() - part
                    worst, largest = max(worst, float(off.abs().max())), max(largest, float(part.abs().max()))
                yield codes
        if errors is not None:
            errors[name] = worst, largest
        if dtype == torch.float16:
            require_fp16(scale_slices[0], f"a scale of the quantized '{name}'")

    def codes() -> Iterator[Tensor]:
        if not scheme.input_major:
            yield from parts()
            return
        whole, filled = torch.empty(shapes[0], dtype=scheme.codes), 0
        for part in parts():
            whole[:, filled : filled + part.shape[1]] = part
            filled += part.shape[1]
        yield from whole.split(max(1, _SLICE_ELEMENTS // source.shape[0]))

    def scales() -> Iterator[Tensor]:
        if not scale_slices:  # an interrupted run has packed the codes
            for _ in codes():
                pass
        yield from scale_slices
        scale_slices.clear()

    return {name: Source(shapes[0], codes, scheme.codes), scale_of(name): Source(shapes[1], scales, dtype)}


def carried(source: Source, name: str, scheme: Scheme, dtype: torch.dtype) -> dict[str, Source]:
    """Sources of the codes, scales and zero points that a checkpoint holds, which is read anew for each. scheme: that of the codes."""
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
