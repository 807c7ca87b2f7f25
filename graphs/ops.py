"""The tensor operations that backends spell differently, each once per dialect.

A dialect is a class of static methods. Run eagerly, every dialect computes the same plain torch expression (the
reference that golden runs are recorded with); traced, it emits the operators its backends know.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.onnx import is_in_onnx_export, ops


class Standard:
    """Opset 24 of the default ONNX domain (ONNX Runtime, TensorRT): normalization, rotary embedding and attention are
    single operators, and caches are written in place when input and output are bound to one address.
    """

    opset = 24

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last axis (arXiv 1910.07467), summed in fp32. x: [rows, H] -> [rows, H]."""
        if is_in_onnx_export():
            return ops.symbolic(
                "RMSNormalization",
                (x, weight),
                {"axis": -1, "epsilon": eps, "stash_type": 1},
                dtype=x.dtype,
                shape=x.shape,
                version=23,
            )
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    @staticmethod
    def rotary(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> Tensor:
        """Rotary embedding, halves rotated as Llama's checkpoints expect (arXiv 2104.09864).

        x: [1, heads, rows, head dim]; cos, sin: [positions, head dim / 2]; position: int64 [rows].
        """
        if is_in_onnx_export():
            return ops.symbolic(
                "RotaryEmbedding",
                (x, cos, sin, position[None]),
                {"interleaved": 0},
                dtype=x.dtype,
                shape=x.shape,
                version=23,
            )
        first, second = x.float().chunk(2, dim=-1)
        c, s = cos[position].float(), sin[position].float()
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)

    @staticmethod
    def attend(
        q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor, past_length: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Writes the rows' keys and values behind ``past_length`` and attends to the cache.

        q: [1, heads, rows, d]; k, v: [1, kv heads, rows, d]; past_k, past_v: [1, kv heads, S, d]; past_length: int64 [1];
        mask: bool [rows, S]. Returns the attended rows [1, heads, rows, d] and both caches.
        """
        if is_in_onnx_export():
            keys, values = (
                ops.symbolic(
                    "TensorScatter", (past, new, past_length), {"axis": -2}, dtype=past.dtype, shape=past.shape, version=24
                )
                for past, new in ((past_k, k), (past_v, v))
            )
            out = ops.symbolic("Attention", (q, keys, values, mask), {}, dtype=q.dtype, shape=q.shape, version=24)
            return out, keys, values
        written = past_length + torch.arange(k.shape[2], device=k.device)
        keys, values = past_k.index_copy(2, written, k), past_v.index_copy(2, written, v)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return out, keys, values

    @staticmethod
    def peek(
        q: Tensor, cache: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], cache_mask: Tensor, new_mask: Tensor
    ) -> Tensor:
        """Attends to a cache and to rows beside it that are not written down.

        q: [1, heads, rows, d]; cache: keys and values [1, kv heads, S, d]; new: keys and values [1, kv heads, n, d];
        cache_mask: bool [S]; new_mask: bool [rows, n]. Returns [1, heads, rows, d].
        """
        _, heads, rows, d = q.shape
        kv_heads, capacity = cache[0].shape[1], cache[0].shape[2]
        grouped = (q * d**-0.5).reshape(kv_heads, heads // kv_heads * rows, d)
        lowest = torch.finfo(q.dtype).min

        def scores(keys: Tensor, mask: Tensor) -> Tensor:
            raw = (grouped @ keys[0].transpose(1, 2)).reshape(kv_heads, -1, rows, keys.shape[2])
            return torch.where(mask, raw, lowest)

        both = torch.cat((scores(cache[0], cache_mask), scores(new[0], new_mask)), dim=-1)
        weights = both.float().softmax(-1).to(q.dtype).reshape(kv_heads, heads // kv_heads * rows, -1)
        out = weights[..., :capacity] @ cache[1][0] + weights[..., capacity:] @ new[1][0]
        return out.reshape(1, heads, rows, d)

    @staticmethod
    def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest of the last axis in descending order, of equal values the one with the lower index first."""
        if is_in_onnx_export():
            return torch.topk(x, k, dim=-1)
        values, indices = x.sort(dim=-1, descending=True, stable=True)
        return values[..., :k], indices[..., :k]
