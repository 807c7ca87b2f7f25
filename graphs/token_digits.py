"""Token ids as digits that every dtype of rows represents exactly, including fp16 and bf16."""

import torch
from torch import Tensor

DIGITS = 3
_BASE = 256.0  # bfloat16 represents all integers up to this


def digits_of(tokens: Tensor) -> Tensor:
    """tokens: int64 [n], below 2 ** 24 -> fp32 [n, DIGITS], the highest digit first. Every step is exact."""
    rest = tokens.float()
    high = (rest / _BASE**2).floor()
    rest = rest - high * _BASE**2
    middle = (rest / _BASE).floor()
    return torch.stack((high, middle, rest - middle * _BASE), dim=-1)


def tokens_of(digits: Tensor) -> Tensor:
    """The inverse of ``digits_of``. digits: [n, DIGITS]; any numbers give some token -> int64 [n], from 0 to 2 ** 24 -
    1."""
    high, middle, low = digits.float().unbind(-1)
    return ((high * _BASE + middle) * _BASE + low).clamp(0.0, _BASE**DIGITS - 1).floor().to(torch.int64)
