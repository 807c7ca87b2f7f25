"""Primitives of opset 18, for MIGraphX and old releases of TensorRT."""

from typing import Any

import torch
from torch import Tensor

from .plain import Cache, Past, Plain, Reach, Rows


class Basic(Plain):
    """Only primitives of opset 18, for backends that support nothing newer. Caches are read, never written: a pass
    returns the keys and values of its rows, traced or not, and its caller appends those of the accepted rows.
    """

    opset = 18
    appends = True

    @staticmethod
    def attention_mask(reach: Reach) -> Any:
        """Which rows each row attends to, bool [n, n]. It also attends to all cache positions below ``past_length``."""
        if reach.mask is not None:
            return reach.mask
        return torch.ones(reach.rows, reach.rows, dtype=torch.bool, device=reach.cache.device).tril()

    @classmethod
    def attend(
        cls, rows: Rows, cache: Cache, past_length: Tensor, attention_mask: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, (k, v) = cls._attend_uncached(rows, cache, past_length, [], attention_mask)
        return out, k, v

    @classmethod
    def attend_readonly(cls, rows: Rows, past: Past, uncached: list[Cache], mask: Tensor) -> tuple[Tensor, Cache]:
        n, written = rows.q.shape[0], past.written[0].shape[2]
        accepted = (torch.arange(written, device=mask.device) < past.count)[None].expand(n, written)
        mask = torch.cat((accepted, mask), dim=1)
        return cls._attend_uncached(rows, past.cache, past.length, [past.written, *uncached], mask)
