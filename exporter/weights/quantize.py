"""Quantizes matrices to codes and scales (``graphs.quantization.Scheme``)."""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from graphs.dialects.quantization import FP8, Scheme, flip_top_bits

from .source import Location, Source, require_fp16

_SLICE_ELEMENTS = 1 << 18  # what quantizing makes of so many stays in a core's cache: half the time of four times as many
_STEPS = 7.0, 7.5, 8.0, 8.5  # that a block's largest number may be long; codes reach from -8 to 7


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
    if scheme.input_major:
        codes, scale = _quantize8(values.float(), dtype)
        return codes.T, scale
    blocks = values.float().unflatten(-1, (-1, scheme.block))
    codes, scale = (_quantize8 if scheme.bits == 8 else _quantize4)(blocks, dtype)
    return (codes if scheme.codes == torch.int8 else flip_top_bits(codes, scheme.bits)).view(scheme.codes), scale


def _quantize8(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two's complement codes, and scales by which a block's largest number is 127 long."""
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).to(dtype)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (blocks / scale.float()).round_().clamp_(-127, 127).to(torch.int8), scale[..., 0]


def _quantize4(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two's complement codes, two to a byte, and scales.

    A block's scale is the one of ``_STEPS`` with the smallest squared error: over a matrix a fifth less than with 7 steps
    alone, for trained weights as for Gaussian ones.
    """
    largest = blocks.abs().amax(-1, keepdim=True)
    scale, least = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    for steps in _STEPS:
        tried = (largest / steps).to(dtype).float()
        tried = torch.where(tried > 0, tried, 1.0)
        error = _codes(blocks, tried).mul_(tried).sub_(blocks).square_().sum(-1, keepdim=True)
        scale, least = torch.where(error < least, tried, scale), torch.minimum(error, least)
    codes = _codes(blocks, scale).to(torch.int8).view(torch.uint8)
    return codes[..., 0::2] & 15 | codes[..., 1::2] << 4, scale[..., 0].to(dtype)


def _codes(blocks: Tensor, scale: Tensor) -> Tensor:
    return (blocks / scale).round_().clamp_(-8, 7)


def quantized(source: Source, name: str, scheme: Scheme, dtype: torch.dtype) -> dict[str, Source]:
    """Codes and scales of a matrix, made in one pass over it: the codes' slices must be read before the scales'. Input-major codes are
    held whole, since their first row has a number of every slice."""
    shapes = scheme.shapes(source.shape)
    rows, made = max(1, _SLICE_ELEMENTS // source.shape[-1]), list[Tensor]()

    def parts() -> Iterator[Tensor]:
        # In one piece: small ones would lie between what is freed, and hold it.
        made[:], at = [torch.empty(shapes[1], dtype=dtype)], 0
        flat = made[0].view(-1)
        for values in source.slices():
            for part in values.split(rows):
                codes, scale = quantize(part, scheme, dtype)
                flat[at : at + scale.numel()] = scale.view(-1)
                at += scale.numel()
                yield codes
        if dtype == torch.float16:
            require_fp16(made[0], f"a scale of the quantized '{name}'")

    def codes() -> Iterator[Tensor]:
        if not scheme.input_major:
            yield from parts()
            return
        whole, at = torch.empty(shapes[0], dtype=scheme.codes), 0
        for part in parts():
            whole[:, at : at + part.shape[1]] = part
            at += part.shape[1]
        yield from whole.split(max(1, _SLICE_ELEMENTS // source.shape[0]))

    def scales() -> Iterator[Tensor]:
        if not made:  # the codes were packed in a run that was interrupted
            for _ in codes():
                pass
        yield from made
        made.clear()

    return {name: Source(shapes[0], codes, scheme.codes), scale_of(name): Source(shapes[1], scales, dtype)}


def recoded(place: Location, bundle: Path, bits: int) -> Source:
    """Packed codes, of so many bits, as the other type has them."""
    other = torch.int8 if place.dtype == torch.uint8 else torch.uint8
    rows = max(1, _SLICE_ELEMENTS // prod(place.shape[1:]))

    def slices() -> Iterator[Tensor]:
        for part in place.mapped(bundle).view(torch.uint8).split(rows):
            yield flip_top_bits(part, bits).view(other)

    return Source(place.shape, slices, other)
