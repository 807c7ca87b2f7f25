"""Primitives of opset 18, for MIGraphX and old releases of TensorRT."""

import torch
from torch import Tensor

from .plain import Cache, Past, Plain, Rows


class Basic(Plain):
    """Primitives of opset 18 alone, for backends that know nothing newer. Caches are read, never written: a pass returns
    its rows' keys and values, traced or not, and whoever runs it appends those that are accepted.
    """

    opset = 18
    appends = True

    @staticmethod
    def attention_mask(mask: Tensor | None, rows: int, past_length: Tensor, cache: Tensor) -> Tensor | None:
        """Which of the rows each row sees, bool [n, n]; of the cache it sees what lies below ``past_length``."""
        return torch.ones(rows, rows, dtype=torch.bool, device=cache.device).tril() if mask is None else mask

    @classmethod
    def attend(
        cls, rows: Rows, cache: Cache, past_length: Tensor, attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert attention_mask is not None
        out, (k, v) = cls._beside(rows, cache, past_length, [], attention_mask)
        return out, k, v

    @classmethod
    def attend_readonly(cls, rows: Rows, past: Past, beside: list[Cache], seen: Tensor) -> tuple[Tensor, Cache]:
        n, pending = rows.q.shape[0], past.written[0].shape[2]
        counts = (torch.arange(pending, device=seen.device) < past.count)[None].expand(n, pending)
        return cls._beside(rows, past.cache, past.length, [past.written, *beside], torch.cat((counts, seen), dim=1))
