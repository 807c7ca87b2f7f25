"""ONNX Runtime's own operators, for its CPU provider."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.onnx import is_in_onnx_export, ops

from .plain import Cache, Plain, Rows, _join, _split
from .standard import Standard


class Contrib(Standard):
    """ONNX Runtime's own GroupQueryAttention, for its CPU provider: the cost of attention follows the length of the text
    instead of the cache's capacity, and no row is transposed. Caches are written in place as in ``Standard``. Rows over an
    empty cache are taken for a prompt in order, whatever their depth and mask: a tree needs one position before it.
    """

    opset = 23  # the last one that the ONNX Runtime of Python 3.10 knows
    accuracy_level = 4

    @staticmethod
    def attention_mask(mask: Tensor | None, rows: int, past_length: Tensor, cache: Tensor) -> Tensor | None:
        """When traced: the rows' part of the mask as a bias, behind zeros for the past; None for causal rows."""
        if not is_in_onnx_export():
            return Plain.attention_mask(mask, rows, past_length, cache)
        return None if mask is None else Contrib._bias(mask, past_length, cache.dtype)

    @staticmethod
    def _bias(mask: Tensor, past_length: Tensor, dtype: torch.dtype) -> Tensor:
        """[1, 1, n, past_length + m] from a mask [n, m]. The shape given here is short of the past: it is data."""
        bias = torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)[None, None]
        zero = torch.zeros(1, dtype=torch.int64)
        pads = torch.cat((zero, zero, zero, past_length, zero, zero, zero, zero))
        return ops.symbolic("Pad", (bias, pads), {"mode": "constant"}, dtype=dtype, shape=bias.shape, version=23)

    @staticmethod
    def _grouped(
        rows: Rows, q: Tensor, k: Tensor, v: Tensor, cache: Cache, length: Tensor, bias: Tensor | None, rotary: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """GroupQueryAttention over [n, width] rows. length: int64 [1], positions of the past."""
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
    def residual(cls, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        """When traced: a Gemm per head and block, since ONNX Runtime packs no weights of three dimensions."""
        if not is_in_onnx_export():
            return super().residual(x, weights, scales, biases)
        return cls._by_head(x, weights, scales, biases)

    @classmethod
    def attend(
        cls, rows: Rows, cache: Cache, past_length: Tensor, attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not is_in_onnx_export():
            return super().attend(rows, cache, past_length, attention_mask)
        return cls._grouped(rows, rows.q, rows.k, rows.v, cache, past_length, attention_mask, rotary=True)

    @staticmethod
    def best(x: Tensor, k: int) -> Tensor:
        return Plain.top_k(x, k)[1]  # ONNX Runtime's CPU provider keeps the promise

    @classmethod
    def _beside(cls, rows: Rows, cache: Cache, length: Tensor, beside: list[Cache], seen: Tensor) -> tuple[Tensor, Cache]:
        """When traced: attention over a copy of the cache's used part, which the operator itself extends by the rows."""
        if not is_in_onnx_export():
            return super()._beside(rows, cache, length, beside, seen)
        q, k = (_join(cls.rotary(_split(x, h), rows)) for x, h in ((rows.q, rows.heads), (rows.k, rows.kv_heads)))
        own = _split(k, rows.kv_heads), _split(rows.v, rows.kv_heads)
        zero, axis = torch.zeros(1, dtype=torch.int64), torch.full((1,), 2)
        before: list[Tensor] = []
        for i in (0, 1):
            used = ops.symbolic("Slice", (cache[i], zero, length, axis), {}, dtype=k.dtype, shape=cache[i].shape, version=13)
            parts = [used, *(pair[i] for pair in beside)]
            before.append(torch.cat(parts, dim=2) if beside else used)
        past = length + sum(pair[0].shape[2] for pair in beside)
        bias = cls._bias(seen, length, k.dtype)
        return cls._grouped(rows, q, k, rows.v, (before[0], before[1]), past, bias, rotary=False)[0], own
