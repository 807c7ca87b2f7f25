"""Products whose rows do not depend on one another to the last bit, for quantized targets on ONNX Runtime's CPU provider."""

import torch
from torch import Tensor
from torch.onnx import is_in_onnx_export, ops

from .contrib import Contrib
from .plain import Plain
from .standard import Standard


class Exact(Standard):
    """For quantized targets on ONNX Runtime's CPU provider: a row's numbers are the same to the last bit whatever other rows there
    are, and wherever its ancestors lie among them.

    The products round the rows they multiply to int8, and a rounding turns over on differences as small as another order of
    summation makes; a few layers on, these decide between tokens. The products themselves add up each row alike, in blocks of up to
    32 codes of 4 bits or 64 of 8 (docs/decisions.md), and those of whole rows in whole numbers, where there is no order; attention,
    whose order follows the places of the rows, adds up in double precision, where that order is lost when the sum is rounded.
    """

    accuracy_level = 4

    @staticmethod
    def _whole(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """When traced: each row is rounded to 127 steps of its largest number. ONNX Runtime's fast products are of unsigned bytes
        with signed ones."""
        if not is_in_onnx_export():
            return Plain._whole(x, weight, scale)
        largest = x.abs().amax(-1, keepdim=True)
        # Rounded by cutting off what is behind the point. A row of zeros is not a number here, and zeros again once it is scaled.
        steps = (x * (127 / largest) + 128.5).to(torch.uint8)
        inputs = (steps, weight, torch.tensor(1 / 127), scale, torch.tensor(128, dtype=torch.uint8))
        shape = [x.shape[0], weight.shape[1]]
        made = ops.symbolic("com.microsoft::MatMulIntegerToFloat", inputs, {}, dtype=x.dtype, shape=shape, version=1)
        return made * largest

    @staticmethod
    def attention_mask(mask: Tensor | None, rows: int, past_length: Tensor, cache: Tensor) -> Tensor | None:
        """When traced: the rows' part of the mask as a bias in double precision, behind zeros for the past."""
        if not is_in_onnx_export():
            return Plain.attention_mask(mask, rows, past_length, cache)
        own = torch.ones(rows, rows, dtype=torch.bool).tril() if mask is None else mask
        return Contrib._bias(own, past_length, torch.float64)[0, 0]

    @staticmethod
    def _attention(q: Tensor, keys: Tensor, values: Tensor, attention_mask: Tensor | None, used: Tensor) -> Tensor:
        """The shapes given here are short of the past: it is data."""
        assert attention_mask is not None
        _, heads, n, d = q.shape
        kv_heads = keys.shape[1]
        zero, axis = torch.zeros(1, dtype=torch.int64), torch.full((1,), 2)
        k, v = (
            ops.symbolic("Slice", (cache, zero, used, axis), {}, dtype=cache.dtype, shape=[1, kv_heads, n, d], version=13)
            for cache in (keys, values)
        )
        grouped = (q * d**-0.5).reshape(1, kv_heads, -1, d)
        if heads == kv_heads:
            grouped = torch.cat((grouped, grouped), dim=2)  # the kernel for a single row adds up in another order
        shape = [1, kv_heads, grouped.shape[2], n]
        scores = ops.symbolic("com.microsoft::FusedMatMul", (grouped, k), {"transB": 1}, dtype=q.dtype, shape=shape, version=1)
        if heads == kv_heads:
            scores = scores[:, :, :n]
        weights = (scores.double() + torch.cat([attention_mask] * (heads // kv_heads))).softmax(-1)
        return (weights @ v.double()).to(q.dtype).reshape(1, heads, -1, d)
