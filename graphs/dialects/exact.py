"""Rows whose bits do not depend on the other rows of a pass, for quantized targets on ONNX Runtime's CPU provider."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.onnx import ops

from ..tracing import either, is_traced
from .contrib import Contrib
from .plain import Plain, Reach
from .rounded import Rounded

BLOCK = 128  # the number of positions of a cache is a multiple of it
_COLUMNS = 16  # the most that ONNX Runtime's fp32 products have where a panel has so many terms:
_PANEL = 1024
MOST_ROWS = 193  # of a tree


@dataclass(frozen=True)
class Seen:
    """The positions that the n rows of a pass attend to, out of S. A bias is 0, or so low that the exponential is 0.

    crosses: bool [1], whether some row is at a border between panels. begin: int64 [1], the first position of the
    border's sum, which ends at the last of m positions, that of the last row. They are for such passes only, as are the
    last three.

    Biases are repeated for the query heads of a kv head, n' = repeats * n. bias: fp32 [n', S]; panel_bias: fp32 [n',
    S / BLOCK, 1], by block, of the sum of panels; border_bias: fp32 [n', 1], of the sum of the border. ones: fp32 [S,
    1]; border_ones: fp32 [m, 1].
    """

    crosses: Tensor
    begin: Tensor
    bias: Tensor
    ones: Tensor
    panel_bias: Tensor
    border_bias: Tensor
    border_ones: Tensor


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

    Only a border between panels that separates a row from an ancestor in its tree would change the order, since a
    branch has other places in another tree. So if that can happen at a row's position, in any tree, the row has two
    sums: one of panels up to some blocks before the border, and one of the rest, which is short enough to be added in
    order.
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
        mask, position, past_length, cache = reach.mask, reach.position, reach.past_length, reach.cache
        tree_rows = reach.tree_rows
        rows, lowest = position.shape[0], torch.finfo(torch.float32).min
        zero = torch.zeros(1, dtype=torch.int64)
        # Not cache.shape[2]: the tracer could take it from any layer's cache, and layers are repeated after tracing.
        positions = _symbolic("Shape", (cache,), torch.int64, [1], start=2, end=3)
        row_mask = torch.ones(rows, rows, dtype=torch.bool).tril() if mask is None else mask
        unused = torch.cat((zero, zero, zero, positions - past_length - rows))
        bias = Contrib._bias(row_mask, past_length, torch.float32)[0, 0]
        bias = _symbolic("Pad", (bias, unused, torch.tensor(lowest)), torch.float32, [rows, cache.shape[2]])

        # The last border that a row of this pass, or one ahead of it in a tree, could have reached.
        assert mask is None or tree_rows > 1
        reached = position.amax(0, keepdim=True) + tree_rows - 1
        border = torch.div(reached, _PANEL, rounding_mode="floor") * _PANEL
        near = (position + tree_rows > border) & (position < border + tree_rows - 1) & (border > 0)
        crosses, begin = near.to(torch.int64).amax(0, keepdim=True) > 0, border - _before_border(tree_rows)
        end, count = positions // BLOCK, cache.shape[2] // BLOCK
        blocks = _symbolic("Range", (zero[0], end.reshape(()), torch.ones_like(zero[0])), torch.int64, [count])
        behind = _symbolic("Less", (begin, (blocks + 1) * BLOCK), torch.bool, [count])
        panel_bias = torch.where(near[:, None] & behind, lowest, 0.0)[..., None]
        border_bias = torch.where(near, 0.0, lowest)[:, None]
        bias, panel_bias, border_bias = (torch.cat([x] * reach.queries, dim=0) for x in (bias, panel_bias, border_bias))
        # Here once a pass instead of in every layer.
        shape = torch.cat((positions, torch.ones(1, dtype=torch.int64)))
        ones = _symbolic("Expand", (torch.ones(1), shape), torch.float32, [cache.shape[2], 1])
        border_ones = _part(ones, begin, past_length + rows, 0, rows)
        return Seen(crosses, begin, bias, ones, panel_bias, border_bias, border_ones)

    @staticmethod
    def _attention(q: Tensor, keys: Tensor, values: Tensor, seen: Any, used: Tensor) -> Tensor:
        """values: [1, kv heads * parts, S, d / parts]. The declared shapes lack the past, whose length depends on
        data."""
        (_, heads, n, d), kv_heads = q.shape, keys.shape[1]
        grouped = q.reshape(1, kv_heads, -1, d)
        (out,) = either(
            seen.crosses, [_in_two(grouped, keys, values, seen, used)], [_at_once(grouped, keys, values, seen)]
        )
        out = out.reshape(kv_heads, -1, heads // kv_heads, n, values.shape[3])
        return out.permute(3, 0, 2, 1, 4).reshape(n, heads * d)


def _before_border(tree_rows: int) -> int:
    """Positions before a border that belong to its sum: whole blocks, as far back as a tree can begin whose rows are at
    the border."""
    return -(-2 * (tree_rows - 1) // BLOCK) * BLOCK


def _at_once(q: Tensor, keys: Tensor, values: Tensor, seen: Seen) -> Tensor:
    """Attention in one sum. q: [1, kv heads, n', d], n' rows for each kv head; keys: [1, kv heads, S, d] -> [1, kv
    heads, parts, n', d / parts]."""
    scores = _scores(q, keys, seen.bias)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()[:, :, None]
    return _sum(exponentials, values) / _product(exponentials, seen.ones)


def _in_two(q: Tensor, keys: Tensor, values: Tensor, seen: Seen, used: Tensor) -> Tensor:
    """``_at_once`` where rows may be at a border: for these a sum of panels and one of the border, for others the
    latter is 0."""
    scores, count = _scores(q, keys, seen.bias), seen.border_ones.shape[0]
    border = _part(scores, seen.begin, used, 3, count)
    largest = scores.amax(-1, keepdim=True)
    _, kv_heads, rows, positions = scores.shape
    # The bias is by block and subtracted with the largest score, so that it costs no pass over the scores.
    shape = [1, kv_heads, rows, positions // BLOCK, BLOCK]
    blocks = _symbolic("Reshape", (scores, torch.tensor([0, kv_heads, 0, -1, BLOCK])), scores.dtype, shape)
    of_blocks = (blocks - (largest[..., None] - seen.panel_bias)).exp()
    of_panels = _symbolic("Reshape", (of_blocks, torch.tensor([0, kv_heads, 0, -1])), scores.dtype, list(scores.shape))
    of_panels, of_border = of_panels[:, :, None], (border - (largest - seen.border_bias)).exp()[:, :, None]
    total = _product(of_panels, seen.ones) + _product(of_border, seen.border_ones)
    return (_sum(of_panels, values) + _sum(of_border, _part(values, seen.begin, used, 2, count))) / total


def _scores(q: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
    """q @ keys.T / sqrt(d) + bias: [1, kv heads, n', S]."""
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


def _part(x: Tensor, begin: Tensor, end: Tensor, axis: int, count: Any) -> Tensor:
    """The positions from ``begin`` up to ``end``, along an axis. count: how many are declared."""
    shape = [*x.shape[:axis], count, *x.shape[axis + 1 :]]
    return _symbolic("Slice", (x, begin, end, torch.tensor([axis])), x.dtype, shape)
