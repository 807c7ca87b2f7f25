"""Opset 24 of the default ONNX domain, with fused attention and caches in place, for TensorRT and ONNX Runtime CUDA."""

from typing import Any

import torch
from torch import Tensor
from torch.onnx import ops

from ..tracing import is_traced
from .plain import Cache, Plain, Rows, join_heads


class Standard(Plain):
    """Opset 24 of the default ONNX domain. Normalization, rotary embedding and attention are single operators; caches
    are written in place if input and output are bound to the same address; only the number of rows may be dynamic.
    """

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not is_traced():
            return Plain.rms_norm(x, weight, eps)
        return ops.symbolic(
            "RMSNormalization",
            (x, weight),
            {"axis": -1, "epsilon": eps, "stash_type": 1},
            dtype=x.dtype,
            shape=x.shape,
            version=23,
        )

    @staticmethod
    def rotary(x: Tensor, rows: Rows) -> Tensor:
        if not is_traced():
            return Plain.rotary(x, rows)
        inputs = (x.float(), rows.cos, rows.sin, rows.position[None])
        out = ops.symbolic(
            "RotaryEmbedding", inputs, {"interleaved": 0}, dtype=torch.float32, shape=x.shape, version=23
        )
        return out.to(x.dtype)

    @classmethod
    def attend_rotated(
        cls, rows: Rows, cache: Cache, past_length: Tensor, attention_mask: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not is_traced():
            return super().attend_rotated(rows, cache, past_length, attention_mask)
        keys, values = (
            ops.symbolic(
                "TensorScatter", (past, new, past_length), {"axis": -2}, dtype=past.dtype, shape=past.shape, version=24
            )
            for past, new in zip(cache, (rows.k, rows.v), strict=True)
        )
        return cls._attention(rows.q, keys, values, attention_mask, past_length + rows.q.shape[2]), keys, values

    @staticmethod
    def _attention(q: Tensor, keys: Tensor, values: Tensor, attention_mask: Any, used: Tensor) -> Tensor:
        """The attended rows, [n, heads * d]. q: [1, heads, n, d]; keys, values: the caches, rows included; used: int64
        [1], their filled positions."""
        # Scaled here, because TensorRT would scale both queries and keys by the square root, which reads the whole
        # cache.
        inputs = (q * q.shape[-1] ** -0.5, keys, values, None if attention_mask is None else attention_mask[None, None])
        return join_heads(ops.symbolic("Attention", inputs, {"scale": 1.0}, dtype=q.dtype, shape=q.shape, version=24))
