"""How quantized matrices are stored, and the numbers that their codes stand for."""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Scheme:
    """How matrices [..., N, K] are quantized: as codes and scales, w = scale * code.

    codes: torch.float8_e4m3fn are numbers of their own, [..., N, K], with a scale a row, [..., N]. All others have a scale a
    block, [..., N, K / block], and are of 8 bits, [..., N, K / block, block], or of 4, [..., N, K / block, block / 2]: two to a
    byte, the first in the low bits. torch.int8 says that they are two's complement, as ONNX has them, torch.uint8 that each is
    half its range more than it means, as MatMulNBits wants them. block: numbers of a row that share a scale; 0 for whole rows,
    as fp8 has them, and as int8 has them where products are of whole numbers: these codes are input-major, [K, N].
    """

    block: int
    codes: torch.dtype
    bits: int = 4

    @property
    def input_major(self) -> bool:
        return not self.block and self.codes == torch.int8

    def fits(self, inputs: int) -> bool:
        """Whether rows of so many numbers are whole blocks, and several: MIGraphX refuses scales of which a row has one. Matrices
        of others are not quantized."""
        return not self.block or (inputs > self.block and inputs % self.block == 0)

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of codes and scales."""
        if not self.block:
            return shape[::-1] if self.input_major else shape, shape[:-1]
        blocks = (*shape[:-1], shape[-1] // self.block)
        return (*blocks, self.block * self.bits // 8), blocks


def bits_of(codes: Tensor, inputs: int) -> int:
    """Of a code, where a row has so many."""
    return 8 if codes.dtype == FP8 or input_major(codes) else 8 * codes.shape[-2] * codes.shape[-1] // inputs


def input_major(codes: Tensor) -> bool:
    """Whether they are a matrix [K, N] of whole numbers."""
    return codes.dtype == torch.int8 and codes.ndim == 2


def turned(codes: Tensor, bits: int) -> Tensor:
    """Codes of either kind, of so many bits, as bytes of the other: the top bit of each is turned."""
    return codes.view(torch.uint8) ^ (0x80 if bits == 8 else 0x88)


def dequantize(codes: Tensor, scale: Tensor, bits: int = 4) -> Tensor:
    """The numbers that ``Scheme`` codes and scales stand for, [..., N, K] of the scales' dtype. bits: of codes other than fp8."""
    if codes.dtype == FP8:
        return codes.to(scale.dtype) * scale[..., None]
    if input_major(codes):
        return codes.T.to(scale.dtype) * scale[:, None]
    moved = turned(codes, bits) if codes.dtype == torch.int8 else codes
    whole = moved if bits == 8 else torch.stack((moved & 15, moved >> 4), dim=-1).flatten(-2)
    return ((whole.to(scale.dtype) - 2 ** (bits - 1)) * scale[..., None]).flatten(-2)
