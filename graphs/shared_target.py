"""The target's pass over rows of several streams. Matrix products run over all rows; each stream attends to its own
cache."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.onnx import ops

from .dialects.plain import Rows, join_heads
from .target import Target
from .tracing import either, is_traced

LANES = 4  # streams that a pass may have


class SharedTarget(Target):
    """A target whose passes take rows of up to LANES streams. A lane is a stream's place in a pass: its rows, their
    mask and its caches.

    The first lane is never empty, and the second only if all others are. A pass with one lane skips the others, so a
    single stream loses little. Run eagerly, no lane may be empty.
    """

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        depth: Tensor,
        counts: Tensor,
        wanted: Tensor,
        masks: list[Tensor],
        past_lengths: list[Tensor],
        caches: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """One pass.

        tokens, depth: int64 [R], lane by lane; counts: int64 [LANES], rows of each lane; wanted: as in ``Target``;
        masks: bool [n, n] of each lane; past_lengths: int64 [1] of each lane; caches: layer by layer, key and value of
        each lane, [1, kv heads, S, d]. Returns what ``Target`` returns, the written keys and values in the order of
        ``caches``.
        """
        depths = _split(depth, counts, masks)
        positions = [length + own for length, own in zip(past_lengths, depths, strict=True)]
        position, filled = _join(positions, depth.shape[0]), [count > 0 for count in counts.split(1)]
        width = 2 * len(masks)
        seen = [
            self.ops.attention_mask(self.reach(mask, mask.shape[0], length, cache))
            for mask, length, cache in zip(masks, past_lengths, caches[0:width:2], strict=True)
        ]
        x = self.embed_tokens(tokens)
        present, entering = list[Tensor](), [x]
        for layer, at in zip(self.layers, range(0, len(caches), width), strict=True):
            rows = self.ops.rotated(layer.project(x, self.rotary, position, caches[0].dtype))
            own = caches[at : at + width]
            parts = zip(*(_split(y, counts, masks) for y in (rows.q, rows.k, rows.v)), positions, strict=True)
            lanes: list[Sequence[Tensor]] = []
            for i, part in enumerate(parts):
                cache = own[2 * i], own[2 * i + 1]
                lane = self.ops.attend_rotated(_rows(rows, *part), cache, past_lengths[i], seen[i])
                # An empty lane returns its queries, of which there are none, and its caches.
                lanes.append(lane if i < 2 else either(filled[i], lane, (join_heads(part[0]), *cache)))
            several = [_join([lane[0] for lane in lanes], x.shape[0]), *(cache for lane in lanes for cache in lane[1:])]
            first = _rows(rows, *(_first(y, masks[0]) for y in (rows.q, rows.k, rows.v, position)))
            alone = self.ops.attend_rotated(first, (own[0], own[1]), past_lengths[0], seen[0])
            attended, *written = either(filled[1], several, [*alone, *own[2:]])
            x = layer.finish(x, attended)
            entering.append(x)
            present += written
        return *self.outputs(tokens, entering, wanted, caches[0].dtype), *present


def _rows(rows: Rows, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Rows:
    return replace(rows, q=q, k=k, v=v, position=position)


def _split(x: Tensor, counts: Tensor, masks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Splits rows by lane, of which each has as many as its mask. x: [R], or [..., R, width]. counts: int64 [LANES]."""
    if not is_traced():
        return x.split(counts.tolist(), _axis(x))
    shapes: list[Any] = [_shape(x, mask.shape[0]) for mask in masks]
    return ops.symbolic_multi_out(
        "Split", [x, counts], {"axis": _axis(x)}, dtypes=[x.dtype] * len(masks), shapes=shapes, version=18
    )


def _join(parts: Sequence[Tensor], rows: Any) -> Tensor:
    """Joins the rows of all lanes along their first axis. rows: how many there are."""
    if not is_traced():
        return torch.cat(list(parts))
    shape = [rows, *parts[0].shape[1:]]
    return ops.symbolic("Concat", parts, {"axis": 0}, dtype=parts[0].dtype, shape=shape, version=13)


def _first(x: Tensor, mask: Tensor) -> Tensor:
    """The rows of the first lane, if the others have none."""
    if not is_traced():
        return x.narrow(_axis(x), 0, mask.shape[0])
    return ops.symbolic("Identity", (x,), {}, dtype=x.dtype, shape=_shape(x, mask.shape[0]), version=13)


def _axis(x: Tensor) -> int:
    """The axis of the rows."""
    return max(0, x.dim() - 2)


def _shape(x: Tensor, rows: Any) -> list[Any]:
    return [rows if axis == _axis(x) else size for axis, size in enumerate(x.shape)]
