"""What drafters with serial layers have in common: they read accepted tokens, then grow a tree one serial step after another."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .dialects.plain import Cache, Past, Plain
from .dialects.quantization import EMBEDDING, Schemes
from .layer import Embedding, Layer, Linear, LlamaShape, Rotary
from .tree import TreeConfig, grow


class Drafter(nn.Module):
    """The drafter of a pair; ``graphs.drafters`` has one for each family. Without a tree it only extends its caches.

    features: how many numbers of a row of the target it reads, the width of the target's output ``hidden``.
    """

    features: int
    token_ids: nn.Parameter | None

    def __init__(
        self, shape: LlamaShape, capacity: int, positions: int, tree: TreeConfig | None, layers: Sequence[Layer], ops: type[Plain],
        schemes: Schemes, trimmed: int | None,
    ) -> None:  # fmt: skip
        """shape: that of the serial layers. tree: None for the graph that only extends the caches. schemes: how its matrices are
        quantized, by parameter name. trimmed: size of the draft vocabulary, or None if the drafter may propose every token; lm_head has a
        row for each of its tokens, whose ids are ``token_ids``, int64 [trimmed].
        """
        super().__init__()
        self.capacity, self.tree, self.ops = capacity, tree, ops
        self.embed_tokens = Embedding(shape.vocabulary, shape.hidden, ops, schemes[EMBEDDING])
        self.rotary = Rotary(positions, shape.head_dim)
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]
        if tree:
            self.lm_head = Linear(shape.hidden, trimmed or shape.vocabulary, False, ops, schemes["lm_head.weight"])
            ids = nn.Parameter(torch.empty(trimmed, dtype=torch.int64), requires_grad=False) if trimmed else None
            self.register_parameter("token_ids", ids)

    def read(self, hidden: Tensor) -> Tensor:
        """What a serial step reads of the target's rows, instead of what the step before it returned. hidden: [n, features] -> [n, H]."""
        return hidden

    @abstractmethod
    def fuse(self, tokens: Tensor, hidden: Tensor) -> Any:
        """What the first layer takes. tokens: int64 [n]; hidden: [n, H], what ``read`` or the step before returned."""

    def log_probs(self, y: Tensor) -> Tensor:
        """Log-probabilities of the draft vocabulary. y: [n, H], of a step -> fp32 [n, V], or [n, trimmed]."""
        return self.lm_head(y).float().log_softmax(-1)

    def head_log_probs(self, first: Tensor, h1: Tensor, second: Tensor, h2: Tensor, count: int) -> Tensor:
        """``tree.Heads``."""
        raise NotImplementedError

    def forward(
        self, tokens: Tensor, hidden: Tensor, path: Tensor, count: Tensor, past_length: Tensor, caches: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Extends the caches with the newly accepted tokens, then grows the tree of the next cycle.

        tokens: int64 [A], the token after each accepted row; hidden: [R, features], the target's output; path: int64 [A], the
        accepted rows; count: int64 [1], how many of the A rows are not padding; past_length: int64 [1]; caches: key and value
        of the serial layers, layer by layer, each [1, kv heads, S, d]. Returns the outputs of ``tree.grow`` if it has a tree,
        then the keys and values that the dialect's ``attend`` returns.
        """
        row = torch.arange(tokens.shape[0], device=tokens.device)
        position = past_length + row
        attention_mask = self.ops.attention_mask(None, position, past_length, caches[0])
        x = self.fuse(tokens, self.read(self.ops.gather(hidden, path)))
        present: list[Tensor] = []
        pasts: list[Past] = []
        for layer, key, value in zip(self.layers, caches[0::2], caches[1::2], strict=True):
            rows = layer.project(x, self.rotary, position, key.dtype)
            attended, *written = self.ops.attend(rows, (key, value), past_length, attention_mask)
            x = layer.finish(x, attended)
            present += written
            pasts.append(Past((key, value), past_length, (written[0], written[1]), count))
        if self.tree is None:
            return tuple(present)

        length = past_length + count
        drafted: list[list[Cache]] = [[] for _ in self.layers]

        def step(tokens: Tensor, hidden: Tensor, visible: Tensor) -> Tensor:
            """A serial step. Its keys and values are not written to the cache, as they are only needed in this cycle."""
            x = self.fuse(tokens, hidden)
            position = (length + len(drafted[0])).expand(tokens.shape[0])
            for layer, past, uncached in zip(self.layers, pasts, drafted, strict=True):
                rows = layer.project(x, self.rotary, position, past.cache[0].dtype)
                attended, new = self.ops.attend_readonly(rows, past, uncached, visible)
                uncached.append(new)
                x = layer.finish(x, attended)
            return x

        last = count - 1
        pending, y = self.ops.gather(tokens, last), self.ops.gather(x, last)
        return *grow(self.tree, pending, y, self.log_probs, step, self.head_log_probs, self.token_ids, self.ops), *present
