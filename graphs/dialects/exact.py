"""Rows whose bits do not depend on the other rows of a pass, for quantized targets on ONNX Runtime's CPU provider."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.onnx import ops

from ..tracing import either, is_traced
from .contrib import Contrib
from .plain import Plain
from .rounded import Rounded

BLOCK = 128  # positions that are settled together
# The last positions before a row never belong to one of its blocks. So the row's ancestors within a tree do not either.
_RECENT = 64
_FEWEST = 2  # settled blocks of a row that has any; a single one would only cost time (docs/decisions.md)
_COLUMNS = 32  # columns of recent values per product
# ONNX Runtime reads this many numbers of the right operand, of 16 columns or more, before it writes sums.
_PACKED = 128 * 128


def _terms(columns: int) -> int:
    """The number of terms that ONNX Runtime's fp32 products with this many columns sum in order, for any number of
    rows."""
    return _PACKED // max(16, 1 << (columns - 1).bit_length())


# Rows of a pass. Its recent positions must not exceed the terms that are summed in order.
MOST_ROWS = _terms(_COLUMNS) - (_FEWEST * BLOCK + _RECENT - 1)


@dataclass(frozen=True)
class Seen:
    """The positions that the n rows of a pass attend to, out of S = blocks * BLOCK. A bias is 0, or so low that the
    exponential is 0.

    few: bool [1], whether products sum all positions up to the last row in order. any_settled: bool [1], whether some
    row has a settled block. begin: int64 [1], the first position after the blocks that are settled for all rows.

    Biases are repeated for the query heads of a kv head, n' = repeats * n. bias: fp32 [n', S], only if ``few``;
    settled_bias: fp32 [blocks, n', 1], and recent_bias: fp32 [n', m], for the m positions from ``begin`` to the last
    row, only if not.
    """

    few: Tensor
    any_settled: Tensor
    begin: Tensor
    bias: Tensor
    settled_bias: Tensor
    recent_bias: Tensor


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

    Attention sums positions in blocks of 128. A block is settled for a row if it ends at least 64 positions before the
    row and the row has at least two such blocks. A settled block is one softmax and one sum in fp32, in an order that
    nothing else in the pass changes. For the row it then counts as one more position, whose exponential is the block's
    sum of exponentials and whose value is the block's result.

    The remaining, recent positions are one sum in fp32, short enough for its terms to be added in order. The other rows
    of the pass are zeros between them and change nothing. A row's blocks are added in order too, by a product of its
    own. Exponentials are fp32 and do not depend on their place. The order in which they are summed does depend on the
    other rows, so these sums are computed in double precision; rounding them hides the order.
    """

    block = BLOCK

    @staticmethod
    def attention_mask(
        mask: Tensor | None, position: Tensor, past_length: Tensor, cache: Tensor, queries: int = 1
    ) -> Any:
        """When traced, a ``Seen``."""
        if not is_traced():
            return Plain.attention_mask(mask, position, past_length, cache)
        rows = position.shape[0]
        lowest = torch.finfo(torch.float32).min
        settled = torch.div((position - _RECENT).clamp(min=0), BLOCK, rounding_mode="floor")  # number of blocks, by row
        settled = torch.where(settled < _FEWEST, 0, settled)
        begin = settled.amin(0, keepdim=True) * BLOCK
        count = cache.shape[2] // BLOCK
        # Not cache.shape[2]: the tracer could take it from any layer's cache, and layers are repeated after tracing.
        positions = _symbolic("Shape", (cache,), torch.int64, [1], start=2, end=3)
        blocks = _range(torch.zeros(1, dtype=torch.int64), positions // BLOCK, count)
        row_mask = torch.ones(rows, rows, dtype=torch.bool).tril() if mask is None else mask
        bias, recent_bias = (Contrib._bias(row_mask, past_length - at, torch.float32)[0, 0] for at in (0, begin))
        zero = torch.zeros(1, dtype=torch.int64)
        unused = torch.cat((zero, zero, zero, positions - past_length - rows))
        recent = _range(begin, past_length + rows, rows)
        in_block = _symbolic("Less", (recent[None], (settled * BLOCK)[:, None]), torch.bool, [rows, rows])
        is_settled = _symbolic("Less", (blocks[:, None], settled[None]), torch.bool, [count, rows])
        few = past_length + rows <= _terms(cache.shape[3])
        # Here once a pass instead of in every layer; what a layer does not need is not computed.
        padded = _symbolic("Pad", (bias, unused, torch.tensor(lowest)), torch.float32, [rows, cache.shape[2]])
        settled_bias = torch.where(is_settled, 0.0, lowest)[..., None]
        of_heads = [
            torch.cat([part] * _repeats(queries), dim=-2)
            for part in (padded, settled_bias, torch.where(in_block, lowest, recent_bias))
        ]
        none = [_symbolic("Identity", (torch.zeros([1] * x.dim()),), x.dtype, list(x.shape)) for x in of_heads]
        biases = either(few, [of_heads[0], *none[1:]], [none[0], *of_heads[1:]])
        return Seen(few, settled.amax(0, keepdim=True) > 0, begin, *biases)

    @staticmethod
    def _attention(q: Tensor, keys: Tensor, values: Tensor, seen: Any, used: Tensor) -> Tensor:
        """The declared shapes lack the past, whose length depends on data."""
        _, heads, n, d = q.shape
        kv_heads = keys.shape[1]
        grouped = q.reshape(1, kv_heads, -1, d)
        if heads == kv_heads:
            grouped = torch.cat([grouped] * _repeats(1), dim=2)

        def recent(cache: Tensor, first: int, last: int) -> Tensor:
            """The recent positions' columns from ``first`` up to ``last``."""
            begin, end = (torch.cat((at, torch.tensor([column]))) for at, column in ((seen.begin, first), (used, last)))
            shape = [1, kv_heads, n, last - first]
            return _symbolic("Slice", (cache, begin, end, torch.tensor([2, 3])), cache.dtype, shape)

        scores = _scores(grouped, recent(keys, 0, d), seen.recent_bias)
        columns = [recent(values, first, min(d, first + _COLUMNS)) for first in range(0, d, _COLUMNS)]
        of_recent = either(
            seen.any_settled,
            [_with_blocks(grouped, keys, values, scores, columns, seen.settled_bias)],
            [_at_once(scores, columns)],
        )
        (out,) = either(seen.few, [_at_once(_scores(grouped, keys, seen.bias), [values])], of_recent)
        return (out[:, :, :n] if heads == kv_heads else out).reshape(1, heads, -1, d)


def _with_blocks(
    q: Tensor, keys: Tensor, values: Tensor, recent_scores: Tensor, recent: list[Tensor], settled_bias: Tensor
) -> Tensor:
    """Attention to blocks and recent positions. q: [1, kv heads, n', d], n' rows for each kv head; recent_scores: [1,
    kv heads, n', m]; recent: the values of recent positions, split by columns; settled_bias: [blocks, n', 1] -> [1, kv
    heads, n', d]."""
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
    of_recent = (recent_scores - reference).exp()
    total = of_blocks.double().sum(1) + of_recent.double().sum(-1, keepdim=True)
    return (_sum_of_blocks(of_blocks, shares @ v) + _sum(of_recent, recent)) / total.to(q.dtype)


def _sum_of_blocks(weights: Tensor, results: Tensor) -> Tensor:
    """weights: [kv heads, blocks, n', 1]; results: [kv heads, blocks, n', d] -> [1, kv heads, n', d]. One product per
    row, which adds the blocks in order. Its left operand is given transposed: the kernel for a single row that is not
    adds in another order."""
    kv_heads, _, rows, d = results.shape
    by_row = weights.transpose(1, 2), results.transpose(1, 2)
    summed = _symbolic("com.microsoft::FusedMatMul", by_row, results.dtype, [kv_heads, rows, 1, d], transA=1)
    return summed.reshape(1, kv_heads, -1, d)


def _repeats(queries: int) -> int:
    """How often a kv head meets the rows of a pass, if it has so many query heads. Twice at least: the kernel for a
    single row sums in another order."""
    return max(2, queries)


def _scores(q: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
    """q: [1, kv heads, n', d]; keys: [1, kv heads, m, d]; bias: [n', m] -> [1, kv heads, n', m]."""
    return _products(q, keys, [*q.shape[:3], bias.shape[1]]) + bias


def _at_once(scores: Tensor, values: list[Tensor]) -> Tensor:
    """Attention to all positions. scores: [1, kv heads, n', m]; values: split by columns."""
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return _sum(exponentials, values) / exponentials.double().sum(-1, keepdim=True).to(scores.dtype)


def _sum(shares: Tensor, values: list[Tensor]) -> Tensor:
    parts = [shares @ columns for columns in values]
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


def _products(q: Tensor, keys: Tensor, shape: list[Any]) -> Tensor:
    """q @ keys.T / sqrt(d)."""
    return _symbolic("com.microsoft::FusedMatMul", (q, keys), q.dtype, shape, transB=1, alpha=q.shape[-1] ** -0.5)


def _range(begin: Tensor, end: Tensor, length: Any) -> Tensor:
    one = torch.ones((), dtype=torch.int64)
    return _symbolic("Range", (begin.reshape(()), end.reshape(()), one), torch.int64, [length])
