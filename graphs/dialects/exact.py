"""Rows whose bits do not depend on the other rows of a pass, for quantized targets on ONNX Runtime's CPU provider."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.onnx import ops

from ..tracing import is_traced
from .contrib import Contrib
from .plain import Plain, Reach
from .rounded import Rounded

BLOCK = 128  # the number of positions of a cache is a multiple of it
_COLUMNS = 16  # the most that ONNX Runtime's fp32 products have where they add 1,024 terms, a panel, in order


@dataclass(frozen=True)
class Seen:
    """The positions that the n rows of a pass attend to, out of S.

    bias: fp32 [n', S], 0, or so low that the exponential is 0; n' = repeats * n, repeated for the query heads of a kv
    head. ones: fp32 [S, 1].
    """

    bias: Tensor
    ones: Tensor


def _symbolic(
    kind: str, inputs: tuple[Tensor, ...], dtype: torch.dtype, shape: list[Any], **attributes: float
) -> Tensor:
    """An operator whose output's true shape depends on data; ``exporter.tracing.trace`` drops the declared one."""
    version = 1 if "::" in kind else 15
    return ops.symbolic(kind, inputs, {**attributes}, dtype=dtype, shape=shape, version=version)


class Exact(Rounded):
    """For quantized targets on ONNX Runtime's CPU provider. A row's bits depend neither on the other rows of its pass
    nor on the places of its ancestors among them.

    Quantized products round their input rows to int8. Another order of summation can flip such a rounding, and a few
    layers later the difference can change the token. The products of blocks sum every row in the same order if blocks
    have up to 32 codes of 4 bits or 64 of 8 bits (docs/decisions.md). Those of whole rows sum integers, where the order
    does not matter.

    Attention's sums over positions are fp32 products with up to 16 columns. These add the terms of a panel, 1,024
    positions, in order, and then the panels' sums in order. Exponentials do not depend on their place, and the other
    rows of the pass are zeros between a row's own terms, which change nothing.

    Only a border between panels could, since a tree's rows are not written at their positions: the runtime verifies no
    row that is written in another panel than plain decoding would write it in (``TargetPasses.in_order``).
    """

    block = BLOCK

    @staticmethod
    def value_part(head_dim: int) -> int:
        return next(columns for columns in range(_COLUMNS, 0, -1) if head_dim % columns == 0)

    @staticmethod
    def attention_mask(reach: Reach) -> Any:
        """When traced, a ``Seen``."""
        if not is_traced():
            return Plain.attention_mask(reach)
        mask, rows, past_length, cache = reach.mask, reach.rows, reach.past_length, reach.cache
        lowest = torch.finfo(torch.float32).min
        zero = torch.zeros(1, dtype=torch.int64)
        # Not cache.shape[2]: the tracer could take it from any layer's cache, and layers are repeated after tracing.
        positions = _symbolic("Shape", (cache,), torch.int64, [1], start=2, end=3)
        row_mask = torch.ones(rows, rows, dtype=torch.bool).tril() if mask is None else mask
        unused = torch.cat((zero, zero, zero, positions - past_length - rows))
        bias = Contrib._bias(row_mask, past_length, torch.float32)[0, 0]
        bias = _symbolic("Pad", (bias, unused, torch.tensor(lowest)), torch.float32, [rows, cache.shape[2]])
        # Here once a pass instead of in every layer.
        shape = torch.cat((positions, torch.ones(1, dtype=torch.int64)))
        ones = _symbolic("Expand", (torch.ones(1), shape), torch.float32, [cache.shape[2], 1])
        return Seen(torch.cat([bias] * reach.queries, dim=0), ones)

    @staticmethod
    def _attention(q: Tensor, keys: Tensor, values: Tensor, seen: Any, used: Tensor) -> Tensor:
        """values: [1, kv heads * parts, S, d / parts]. The declared shapes lack the past, whose length depends on
        data."""
        (_, heads, n, d), kv_heads = q.shape, keys.shape[1]
        grouped = q.reshape(1, kv_heads, -1, d)
        scores = _scores(grouped, keys, seen.bias)
        exponentials = (scores - scores.amax(-1, keepdim=True)).exp()[:, :, None]
        out = _sum(exponentials, values) / _product(exponentials, seen.ones)
        out = out.reshape(kv_heads, -1, heads // kv_heads, n, values.shape[3])
        return out.permute(3, 0, 2, 1, 4).reshape(n, heads * d)


def _scores(q: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
    """q @ keys.T / sqrt(d) + bias: [1, kv heads, n', S]. q: [1, kv heads, n', d], n' rows for each kv head; keys: [1,
    kv heads, S, d]."""
    inputs, shape = (q, keys), [*q.shape[:3], keys.shape[2]]
    return _symbolic("com.microsoft::FusedMatMul", inputs, q.dtype, shape, transB=1, alpha=q.shape[-1] ** -0.5) + bias


def _sum(exponentials: Tensor, values: Tensor) -> Tensor:
    """exponentials: [1, kv heads, 1, n', m]; values: [1, kv heads * parts, m, d / parts] -> [1, kv heads, parts, n', d
    / parts]."""
    kv_heads, positions = exponentials.shape[1], exponentials.shape[4]
    parts, columns = values.shape[1] // kv_heads, values.shape[3]
    shape = [1, kv_heads, parts, positions, columns]
    split = _symbolic("Reshape", (values, torch.tensor([1, kv_heads, parts, -1, columns])), values.dtype, shape)
    return _product(exponentials, split)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """2 * x @ y. Without the factor, ONNX Runtime has a kernel for single rows that adds in another order."""
    shape = [*x.shape[:2], *(y.shape[2:3] if y.dim() > 2 else [1]), x.shape[3], y.shape[-1]]
    return _symbolic("com.microsoft::FusedMatMul", (x, y), x.dtype, shape, alpha=2.0)
