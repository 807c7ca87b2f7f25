"""Bit-identical rows whatever the other rows are, for quantized targets on ONNX Runtime's CPU provider."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.onnx import is_in_onnx_export, ops

from .contrib import Contrib
from .plain import Plain
from .rounded import Rounded

BLOCK = 128  # positions summed in fp32: ONNX Runtime's products sum so many terms in one order, however many rows they have
# The last positions before a row never belong to a block, so that the ancestors that a row has among a tree's rows do not either.
_RECENT = 64
_FEWEST = 2  # blocks: a row with only one counts its positions as recent, which is faster (docs/decisions.md)


@dataclass(frozen=True)
class Seen:
    """What the rows of a pass attend to, n rows over S = blocks * BLOCK positions. Biases are 0, or so low that nothing is left.

    any_settled: bool [1], whether some row has a settled block. settled_bias: fp32 [blocks, n, 1]. begin: int64 [1], the first
    position that is in no block settled for all rows. recent_bias: fp32 [n, m], of the m positions from there to the last row.
    """

    any_settled: Tensor
    settled_bias: Tensor
    begin: Tensor
    recent_bias: Tensor


def _symbolic(kind: str, inputs: tuple[Tensor, ...], dtype: torch.dtype, shape: list[Any], **attributes: float) -> Tensor:
    """An operator whose output's true shape depends on data; ``exporter.trace`` drops the declared one."""
    version = 1 if "::" in kind else 15
    return ops.symbolic(kind, inputs, {**attributes}, dtype=dtype, shape=shape, version=version)


class Exact(Rounded):
    """For quantized targets on ONNX Runtime's CPU provider: a row is bit-identical whatever the other rows of the pass are, and
    wherever its ancestors are among them.

    Quantized products round their input rows to int8. Another order of summation can flip such a rounding, and a few layers
    later the difference can change the token. The products of blocks sum every row in the same order if blocks have up to 32
    codes of 4 bits or 64 of 8 bits (docs/decisions.md). Those of whole rows sum integers, where the order does not matter.

    Attention settles blocks of 128 positions that end 64 positions before a row or earlier, if the row has two of them or more: each is
    one softmax and one sum in fp32, in an order that nothing else in the pass changes. To the row it is then one more position, whose
    exponential is the block's sum of exponentials and whose value is the block's result. Exponentials are fp32, each the same wherever
    it stands. Those of blocks and of the recent positions, whose order depends on the other rows, are summed in double precision:
    rounding the sum hides the order.
    """

    block = BLOCK

    @staticmethod
    def attention_mask(mask: Tensor | None, position: Tensor, past_length: Tensor, cache: Tensor) -> Any:
        """When traced: ``Seen``."""
        if not is_in_onnx_export():
            return Plain.attention_mask(mask, position, past_length, cache)
        rows = position.shape[0]
        lowest = torch.finfo(torch.float32).min
        settled = torch.div((position - _RECENT).clamp(min=0), BLOCK, rounding_mode="floor")  # blocks, of each row
        settled = torch.where(settled < _FEWEST, 0, settled)
        begin = settled.amin(0, keepdim=True) * BLOCK
        count = cache.shape[2] // BLOCK
        # Not cache.shape[2], which the tracer takes from any layer's cache, and layers are repeated after tracing.
        positions = _symbolic("Shape", (cache,), torch.int64, [1], start=2, end=3)
        blocks = _range(torch.zeros(1, dtype=torch.int64), positions // BLOCK, count)
        row_mask = torch.ones(rows, rows, dtype=torch.bool).tril() if mask is None else mask
        bias = Contrib._bias(row_mask, past_length - begin, torch.float32)[0, 0]
        recent = _range(begin, past_length + rows, rows)
        in_block = _symbolic("Less", (recent[None], (settled * BLOCK)[:, None]), torch.bool, [rows, rows])
        return Seen(
            settled.amax(0, keepdim=True) > 0,
            torch.where(_symbolic("Less", (blocks[:, None], settled[None]), torch.bool, [count, rows]), 0.0, lowest)[..., None],
            begin,
            torch.where(in_block, lowest, bias),
        )

    @staticmethod
    def _attention(q: Tensor, keys: Tensor, values: Tensor, seen: Any, used: Tensor) -> Tensor:
        """The declared shapes lack the past, whose length is data."""
        _, heads, n, d = q.shape
        kv_heads, axis = keys.shape[1], torch.full((1,), 2)
        recent_keys, recent_values = (
            _symbolic("Slice", (cache, seen.begin, used, axis), cache.dtype, [1, kv_heads, n, d]) for cache in (keys, values)
        )
        grouped, repeats = q.reshape(1, kv_heads, -1, d), heads // kv_heads
        if repeats == 1:
            grouped, repeats = torch.cat((grouped, grouped), dim=2), 2  # the kernel for a single row sums in another order
        scores = _products(grouped, recent_keys, [1, kv_heads, grouped.shape[2], n]) + torch.cat([seen.recent_bias] * repeats)
        recent = recent_values.double()
        exponentials = (scores - scores.amax(-1, keepdim=True)).exp().double()
        out = _either(
            seen.any_settled,
            Exact._with_blocks(grouped, keys, values, scores, recent, torch.cat([seen.settled_bias] * repeats, dim=1)),
            exponentials @ recent / exponentials.sum(-1, keepdim=True),
        ).to(q.dtype)
        return (out[:, :, :n] if heads == kv_heads else out).reshape(1, heads, -1, d)

    @staticmethod
    def _with_blocks(
        q: Tensor, keys: Tensor, values: Tensor, recent_scores: Tensor, recent: Tensor, settled_bias: Tensor
    ) -> Tensor:
        """q: [1, kv heads, n', d], n' rows for each head of keys; recent_scores: [1, kv heads, n', m]; recent: fp64 values
        [1, kv heads, m, d]; settled_bias: [blocks, n', 1] -> fp64 [1, kv heads, n', d]."""
        _, kv_heads, rows, d = q.shape
        blocks = keys.shape[2] // BLOCK
        shape = torch.tensor([kv_heads, -1, BLOCK, d])
        k, v = (_symbolic("Reshape", (x, shape), x.dtype, [kv_heads, blocks, BLOCK, d]) for x in (keys, values))
        scores = _products(q.transpose(0, 1), k, [kv_heads, blocks, rows, BLOCK])
        shares = scores.softmax(-1)
        largest = scores.amax(-1, keepdim=True) + settled_bias
        reference = torch.maximum(largest.amax(1)[None], recent_scores.amax(-1, keepdim=True))
        # A block's largest share is 1 divided by the sum of its exponentials.
        of_blocks = (largest - reference.transpose(0, 1)).exp() / shares.amax(-1, keepdim=True)
        of_recent = (recent_scores - reference).exp().double()
        total = of_blocks.double().sum(1) + of_recent.sum(-1, keepdim=True)
        return (((shares @ v) * of_blocks).double().sum(1) + of_recent @ recent) / total


def _products(q: Tensor, keys: Tensor, shape: list[Any]) -> Tensor:
    """q @ keys.T / sqrt(d)."""
    return _symbolic("com.microsoft::FusedMatMul", (q, keys), q.dtype, shape, transB=1, alpha=q.shape[-1] ** -0.5)


def _range(begin: Tensor, end: Tensor, length: Any) -> Tensor:
    one = torch.ones((), dtype=torch.int64)
    return _symbolic("Range", (begin.reshape(()), end.reshape(()), one), torch.int64, [length])


def _either(condition: Tensor, then: Tensor, otherwise: Tensor) -> Tensor:
    """One of two values, of which only that one is computed (``exporter.branches``). condition: bool [1]."""
    return _symbolic("gumiho::Either", (condition, then, otherwise), then.dtype, list(then.shape))
