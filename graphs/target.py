"""Llama as one pass over R rows and a cache: prefill, verification and plain decoding are the same graph."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layer import Layer, LlamaShape, Norm, Rotary
from .ops import Standard


def visible(mask: Tensor, past_length: Tensor, capacity: int) -> Tensor:
    """What each row sees of the cache once the rows are written behind ``past_length``.

    mask: bool [R, R] (row attends to row); past_length: int64 [1]. Returns bool [R, capacity]: every position below
    ``past_length``, and of the rows those the mask names.
    """
    column = torch.arange(capacity, device=mask.device)
    row = column - past_length
    own = (row >= 0) & (row < mask.shape[1])
    return (row < 0) | (own & mask.index_select(1, torch.where(own, row, 0)))


class Target(nn.Module):
    """The target of a pair. Parameter names are those of Llama checkpoints, without their leading ``model.``."""

    def __init__(self, shape: LlamaShape, capacity: int, positions: int, ops: type[Standard] = Standard) -> None:
        super().__init__()
        self.capacity, self.ops = capacity, ops
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.rotary = Rotary(positions, shape.head_dim, ops)
        self.layers: Sequence[Layer] = nn.ModuleList([Layer(shape, ops) for _ in range(shape.layers)])  # type: ignore[assignment]
        self.norm = Norm(shape, ops)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(
        self, tokens: Tensor, depth: Tensor, mask: Tensor, past_length: Tensor, caches: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """One pass.

        tokens, depth: int64 [R]; mask: bool [R, R]; past_length: int64 [1]; caches: key and value of every layer in turn,
        [1, kv heads, S, d]. Row r sits at position ``past_length + depth[r]``. Returns ``choice`` int64 [R] (argmax, ties
        to the lowest id), ``logits`` [R, V], ``hidden`` [R, H] after the final norm, and the caches.
        """
        position = past_length + depth
        seen = visible(mask, past_length, self.capacity)
        x = F.embedding(tokens, self.embed_tokens.weight)
        present: list[Tensor] = []
        for layer, key, value in zip(self.layers, caches[0::2], caches[1::2], strict=True):
            q, k, v = layer.project(x, self.rotary, position)
            attended, *written = self.ops.attend(q, k, v, key, value, past_length, seen)
            x = layer.finish(x, attended)
            present += written
        hidden = self.norm(x)
        logits = self.lm_head(hidden)
        return logits.argmax(-1), logits, hidden, *present
