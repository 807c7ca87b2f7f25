"""How quantized matrices are stored, and how their codes are converted back to numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
INTEGER_CODES = torch.int8, torch.uint8


@dataclass(frozen=True)
class Scheme:
    """How matrices [..., N, K] are quantized: as codes and scales, w = scale * code, or scale * (code - zero) with zero
    points.

    block: how many values of a row share a scale; 0 if the whole row does. codes: dtype of the codes.

    - torch.float8_e4m3fn, block 0: codes [..., N, K], scales [..., N].
    - torch.int8 or torch.uint8, block 0, for integer products: codes [K, N], input-major, scales [N]. uint8 codes are
      offset by 128.
    - torch.int8 or torch.uint8 with a block: scales [..., N, K / block]; 8-bit codes [..., N, K / block, block], or
      4-bit codes
      [..., N, K / block, block / 2], two per byte, the first in the low bits. int8 codes are two's complement, for
      DequantizeLinear; uint8 codes are offset by half their range, for MatMulNBits.

    zeros: whether each block of 4-bit codes has a zero point, as ``pack_zeros`` stores them, in the codes'
    representation.
    """

    block: int
    codes: torch.dtype
    bits: int = 4
    zeros: bool = False

    @property
    def input_major(self) -> bool:
        return not self.block and self.codes in INTEGER_CODES

    def fits(self, inputs: int) -> bool:
        """Whether rows of ``inputs`` values consist of at least two whole blocks; other matrices are not quantized.

        MIGraphX refuses a single block per row.
        """
        return not self.block or (inputs > self.block and inputs % self.block == 0)

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of codes and scales for matrices of ``shape``."""
        if not self.block:
            return shape[::-1] if self.input_major else shape, shape[:-1]
        blocks = (*shape[:-1], shape[-1] // self.block)
        return (*blocks, self.block * self.bits // 8), blocks

    def zeros_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the zero points for matrices of ``shape``: two per byte, each row in whole bytes."""
        return *shape[:-1], -(-shape[-1] // self.block // 2)


EMBEDDING = "embed_tokens.weight"
# Matrices with the same inputs, which can be joined: the joined name -> the names of the parts.
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class Schemes:
    """How the matrices of a module are quantized, by parameter name.

    default: scheme of the matrices that ``own`` does not name, except the embedding; None: not quantized. joined:
    whether the matrices of ``JOINED`` are joined if their schemes are equal.
    """

    default: Scheme | None = None
    own: Mapping[str, Scheme | None] = field(default_factory=dict)
    joined: bool = False

    def of(self, name: str, inputs: int) -> Scheme | None:
        """The scheme of the matrix ``name`` with rows of ``inputs`` values; None if it is not quantized."""
        scheme = self[name]
        return scheme if scheme is not None and scheme.fits(inputs) else None

    def __getitem__(self, name: str) -> Scheme | None:
        """The scheme chosen for a matrix, whether or not it fits."""
        name = first_part(name)
        return self.own.get(name, None if name == EMBEDDING else self.default)

    def within(self, module: str) -> "Schemes":
        """The schemes of a submodule, by its own parameter names."""
        prefix = f"{module}."
        own = {n.removeprefix(prefix): s for n, s in self.own.items() if n.startswith(prefix)}
        return Schemes(self.default, own, self.joined)

    def joins(self, whole: str, inputs: int) -> bool:
        """Whether the parts of ``whole``, matrices with rows of ``inputs`` values, are joined."""
        first, *others = (self.of(f"{part}.weight", inputs) for part in JOINED[whole])
        return self.joined and first is not None and all(other == first for other in others)


UNQUANTIZED = Schemes()


def first_part(name: str) -> str:
    """The name of the first part of a joined matrix; the name itself if the matrix is not joined."""
    for whole, parts in JOINED.items():
        name = name.replace(f"{whole}.", f"{parts[0]}.")
    return name


def bits_of(codes: Tensor, inputs: int) -> int:
    """Bits per code of a matrix whose rows have ``inputs`` values."""
    return 8 if codes.dtype == FP8 or input_major(codes) else 8 * codes.shape[-2] * codes.shape[-1] // inputs


def input_major(codes: Tensor) -> bool:
    """Whether codes are an input-major matrix [K, N] for integer products."""
    return codes.dtype in INTEGER_CODES and codes.ndim == 2


def centered(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """8-bit codes as numbers around zero."""
    return codes.to(dtype) - 128 if codes.dtype == torch.uint8 else codes.to(dtype)


def flip_top_bits(codes: Tensor, bits: int) -> Tensor:
    """Converts two's complement codes to offset codes and back, by flipping the top bit of each. Returns uint8."""
    return codes.view(torch.uint8) ^ (0x80 if bits == 8 else 0x88)


def pack_zeros(zeros: Tensor) -> Tensor:
    """Zero points, uint8 [..., N, blocks] from 0 to 15, two per byte, the first in the low bits: [..., N, ceil(blocks /
    2)]."""
    return pack(torch.nn.functional.pad(zeros, (0, zeros.shape[-1] % 2)))


def dequantize(codes: Tensor, scale: Tensor, bits: int = 4, zero: Tensor | None = None) -> Tensor:
    """The values [..., N, K] of ``Scheme`` codes, scales and zero points, in the scales' dtype. bits: per code, for
    codes in blocks."""
    if codes.dtype == FP8:
        return codes.to(scale.dtype) * scale[..., None]
    if input_major(codes):
        return centered(codes.T, scale.dtype) * scale[:, None]
    offset = flip_top_bits(codes, bits) if codes.dtype == torch.int8 else codes
    unpacked = offset if bits == 8 else unpack(offset)
    middle: Tensor | int = 2 ** (bits - 1)
    if zero is not None:
        offset = flip_top_bits(zero, 4) if zero.dtype == torch.int8 else zero
        middle = unpack(offset)[..., : scale.shape[-1], None].to(scale.dtype)
    return ((unpacked.to(scale.dtype) - middle) * scale[..., None]).flatten(-2)


def pack(numbers: Tensor) -> Tensor:
    """Numbers of 4 bits, uint8 [..., 2 n], two per byte, the first in the low bits: [..., n]."""
    return numbers[..., 0::2] | numbers[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """The two numbers of 4 bits in every byte of [..., n], the low one first: [..., 2 n]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
