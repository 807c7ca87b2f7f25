"""ONNX Runtime's own operators, for its CPU provider."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.onnx import ops

from ..tracing import is_traced
from .plain import Cache, Plain, Reach, Rows, join_heads
from .standard import Standard


class Contrib(Standard):
    """ONNX Runtime's own GroupQueryAttention, for its CPU provider. Its cost grows with the length of the text instead
    of the cache capacity, and no rows are transposed. Caches are written in place as in ``Standard``. The operator
    treats rows over an empty cache as a causal prompt and ignores their depth and mask, so a tree needs at least one
    position before it.
    """

    opset = 23  # the newest that the last ONNX Runtime for Python 3.10 supports
    accuracy_level = 4
    joins_norms = True

    @staticmethod
    def attention_mask(reach: Reach) -> Any:
        """When traced, the mask as a bias, with zeros for past positions; None for causal rows."""
        if not is_traced():
            return Plain.attention_mask(reach)
        return None if reach.mask is None else Contrib._bias(reach.mask, reach.past_length, reach.cache.dtype)

    @staticmethod
    def _bias(mask: Tensor, past_length: Tensor, dtype: torch.dtype) -> Tensor:
        """A bias [1, 1, n, past_length + m] from a mask [n, m]. The declared shape lacks the past, whose length depends
        on data."""
        bias = torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)[None, None]
        zero = torch.zeros(1, dtype=torch.int64)
        pads = torch.cat((zero, zero, zero, past_length, zero, zero, zero, zero))
        return ops.symbolic("Pad", (bias, pads), {"mode": "constant"}, dtype=dtype, shape=bias.shape, version=23)

    @staticmethod
    def _grouped(
        rows: Rows, q: Tensor, k: Tensor, v: Tensor, cache: Cache, length: Tensor, bias: Tensor | None, rotary: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """GroupQueryAttention over q, k, v [n, width]. length: int64 [1], filled positions of the cache."""
        total = (length + q.shape[0]).to(torch.int32)
        inputs = [q[None], k[None], v[None], *cache, total - 1, total]
        tables: list[Tensor | None] = [rows.cos, rows.sin, rows.position[None]] if rotary else [None, None, None]
        out, keys, values = ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            [*inputs, *tables, bias],
            {"num_heads": rows.heads, "kv_num_heads": rows.kv_heads, "do_rotary": int(rotary), "rotary_interleaved": 0},
            dtypes=[q.dtype, cache[0].dtype, cache[1].dtype],
            shapes=[q[None].shape, cache[0].shape, cache[1].shape],
            version=1,
        )
        return out[0], keys, values

    @classmethod
    def residual(
        cls, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]
    ) -> Tensor:
        """When traced, a Gemm per head and block, because ONNX Runtime does not prepack three-dimensional weights."""
        if not is_traced():
            return super().residual(x, weights, scales, biases)
        return cls._by_head(x, weights, scales, biases)

    @classmethod
    def rotated(cls, rows: Rows) -> Rows:
        """When traced, the rows unchanged, because the operator rotates them."""
        return rows if is_traced() else super().rotated(rows)

    @classmethod
    def attend_rotated(
        cls, rows: Rows, cache: Cache, past_length: Tensor, attention_mask: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not is_traced():
            return super().attend_rotated(rows, cache, past_length, attention_mask)
        return cls._grouped(rows, rows.q, rows.k, rows.v, cache, past_length, attention_mask, rotary=True)

    @staticmethod
    def best(x: Tensor, k: int) -> Tensor:
        return Plain.top_k(x, k)[1]  # ONNX Runtime's CPU provider breaks ties as ONNX specifies

    @classmethod
    def _attend_uncached(
        cls, rows: Rows, cache: Cache, length: Tensor, uncached: list[Cache], mask: Tensor
    ) -> tuple[Tensor, Cache]:
        """When traced, attention over a copy of the cache's used part, to which the operator appends the rows."""
        if not is_traced():
            return super()._attend_uncached(rows, cache, length, uncached, mask)
        apart = super().rotated(rows)
        q, k, new = join_heads(apart.q), join_heads(apart.k), (apart.k, apart.v)
        zero, axis = torch.zeros(1, dtype=torch.int64), torch.full((1,), 2)
        earlier: list[Tensor] = []
        for i in (0, 1):
            used = ops.symbolic(
                "Slice", (cache[i], zero, length, axis), {}, dtype=k.dtype, shape=cache[i].shape, version=13
            )
            parts = [used, *(pair[i] for pair in uncached)]
            earlier.append(torch.cat(parts, dim=2) if uncached else used)
        past = length + sum(pair[0].shape[2] for pair in uncached)
        bias = cls._bias(mask, length, k.dtype)
        return cls._grouped(rows, q, k, rows.v, (earlier[0], earlier[1]), past, bias, rotary=False)[0], new
