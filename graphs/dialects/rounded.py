"""Products with quantized weights that ONNX Runtime's CPU provider computes fast, because it rounds their inputs to
int8."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.onnx import ops

from ..tracing import is_traced
from .plain import Plain, Rows, split_heads
from .standard import Standard


class Rounded(Standard):
    """For quantized models on ONNX Runtime's CPU provider whose rows may depend on each other, such as drafters of odd
    head sizes."""

    accuracy_level = 4
    joins_norms = True

    @classmethod
    def rotated(cls, rows: Rows) -> Rows:
        """When traced, queries and keys that one product computed are transposed and rotated together: such a pass is
        short enough for the number of its nodes to matter."""
        if rows.joined is None or not is_traced():
            return super().rotated(rows)
        rotating, d = rows.heads + rows.kv_heads, rows.q.shape[1] // rows.heads
        both, v = rows.joined.split((rotating * d, rows.kv_heads * d), dim=-1)
        q, k = cls.rotary(split_heads(both, rotating), rows).split((rows.heads, rows.kv_heads), dim=1)
        return replace(rows, q=q, k=k, v=cls._values(v, rows.kv_heads))

    @staticmethod
    def _whole(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """When traced, each row is quantized to 127 steps of its largest magnitude, as unsigned bytes: ONNX Runtime's
        fast kernels multiply unsigned by signed bytes, or on x86 before VNNI, where sums of these could overflow,
        unsigned ones by each other."""
        if not is_traced():
            return Plain._whole(x, weight, scale)
        largest = x.abs().amax(-1, keepdim=True)
        step, middle = torch.tensor(1 / 127), torch.tensor(128, dtype=torch.uint8)
        # A row of zeros becomes NaN here, and zeros again when it is scaled.
        steps = ops.symbolic(
            "QuantizeLinear", (x / largest, step, middle), {}, dtype=torch.uint8, shape=x.shape, version=21
        )
        inputs = (steps, weight, step, scale, middle, *([middle] if weight.dtype == torch.uint8 else []))
        shape = [x.shape[0], weight.shape[1]]
        product = ops.symbolic("com.microsoft::MatMulIntegerToFloat", inputs, {}, dtype=x.dtype, shape=shape, version=1)
        return product * largest
