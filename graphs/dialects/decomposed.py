"""``Standard`` with attention as primitive operators."""

import torch
from torch import Tensor

from .plain import join_heads
from .standard import Standard


class Decomposed(Standard):
    """``Standard`` with attention as primitive operators, for devices whose fused attention fails to build or is
    wrong."""

    @staticmethod
    def _attention(q: Tensor, keys: Tensor, values: Tensor, attention_mask: Tensor | None, used: Tensor) -> Tensor:
        assert attention_mask is not None
        _, heads, n, d = q.shape
        kv_heads = keys.shape[1]
        grouped = (q * d**-0.5).reshape(kv_heads, -1, d)
        scores = (grouped @ keys[0].transpose(1, 2)).reshape(kv_heads, -1, n, keys.shape[2])
        weights = torch.where(attention_mask, scores, torch.finfo(q.dtype).min).float().softmax(-1).to(q.dtype)
        return join_heads((weights.reshape(kv_heads, grouped.shape[1], -1) @ values[0]).reshape(1, heads, n, d))
