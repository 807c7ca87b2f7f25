"""Bit-identical rows whatever the other rows are, for quantized targets on ONNX Runtime's CPU provider."""

import torch
from torch import Tensor
from torch.onnx import is_in_onnx_export, ops

from .contrib import Contrib
from .plain import Plain
from .standard import Standard


class Exact(Standard):
    """For quantized targets on ONNX Runtime's CPU provider: a row is bit-identical whatever the other rows of the pass are, and
    wherever its ancestors are among them.

    Quantized products round their input rows to int8. Another order of summation can flip such a rounding, and a few layers
    later the difference can change the token. The products of blocks sum every row in the same order if blocks have up to 32
    codes of 4 bits or 64 of 8 bits (docs/decisions.md). Those of whole rows sum integers, where the order does not matter.
    Attention sums in an order that depends on the positions of the rows, so it is computed in double precision: rounding the
    sum hides the order.
    """

    accuracy_level = 4

    @staticmethod
    def _whole(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """When traced: each row is quantized to 127 steps of its largest magnitude, as unsigned bytes: ONNX Runtime's fast
        kernels multiply unsigned by signed bytes."""
        if not is_in_onnx_export():
            return Plain._whole(x, weight, scale)
        largest = x.abs().amax(-1, keepdim=True)
        # The cast truncates, so adding 0.5 rounds. A row of zeros is NaN here, and zeros again once it is scaled.
        steps = (x * (127 / largest) + 128.5).to(torch.uint8)
        inputs = (steps, weight, torch.tensor(1 / 127), scale, torch.tensor(128, dtype=torch.uint8))
        shape = [x.shape[0], weight.shape[1]]
        product = ops.symbolic("com.microsoft::MatMulIntegerToFloat", inputs, {}, dtype=x.dtype, shape=shape, version=1)
        return product * largest

    @staticmethod
    def attention_mask(mask: Tensor | None, rows: int, past_length: Tensor, cache: Tensor) -> Tensor | None:
        """When traced: the mask as a bias in double precision, with zeros for the past before the rows' part."""
        if not is_in_onnx_export():
            return Plain.attention_mask(mask, rows, past_length, cache)
        row_mask = torch.ones(rows, rows, dtype=torch.bool).tril() if mask is None else mask
        return Contrib._bias(row_mask, past_length, torch.float64)[0, 0]

    @staticmethod
    def _attention(q: Tensor, keys: Tensor, values: Tensor, attention_mask: Tensor | None, used: Tensor) -> Tensor:
        """The declared shapes lack the past, whose length is data."""
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
            grouped = torch.cat((grouped, grouped), dim=2)  # the kernel for a single row sums in another order
        shape = [1, kv_heads, grouped.shape[2], n]
        scores = ops.symbolic("com.microsoft::FusedMatMul", (grouped, k), {"transB": 1}, dtype=q.dtype, shape=shape, version=1)
        if heads == kv_heads:
            scores = scores[:, :, :n]
        weights = (scores.double() + torch.cat([attention_mask] * (heads // kv_heads))).softmax(-1)
        return (weights @ v.double()).to(q.dtype).reshape(1, heads, -1, d)
