"""The base class of drafters. A drafter reads the accepted tokens, then grows a tree."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .dialects.plain import Cache, Past, Plain, Reach
from .dialects.quantization import EMBEDDING, Schemes
from .layer import Embedding, Layer, Linear, LlamaShape, Rotary
from .tree import Step, TreeConfig, grow


class Drafter(nn.Module):
    """The drafter of a pair; ``graphs.drafters`` has one for each family. Without a tree it only extends its caches.

    features: how many numbers of a target's row it reads. columns: where these are in the rows of the target's output
    ``hidden``; () for all. width: numbers of such a row, 0 for ``features``. drafted: size of the draft vocabulary.
    ahead: rows that a pass reads after the accepted ones; the next pass computes their keys and values again.
    """

    features: int
    columns: tuple[slice, ...] = ()
    width = 0
    ahead = 0
    token_ids: nn.Parameter | None

    def __init__(
        self,
        shape: LlamaShape,
        capacity: int,
        positions: int,
        tree: TreeConfig | None,
        layers: Sequence[Layer],
        ops: type[Plain],
        schemes: Schemes,
        trimmed: int | None,
        embeds: bool = True,
        one_head: bool = True,
    ) -> None:
        """shape: that of the layers. tree: None for the graph that only extends the caches. schemes: how its matrices
        are quantized, by parameter name. trimmed: size of the draft vocabulary, None if the drafter may propose every
        token. lm_head then has only these rows, and ``token_ids``, int64 [trimmed], their ids. embeds: whether it reads
        tokens. one_head: whether all levels use one lm_head.
        """
        super().__init__()
        self.capacity, self.tree, self.ops = capacity, tree, ops
        self.drafted = trimmed or shape.vocabulary
        if embeds:
            self.embed_tokens = Embedding(shape.vocabulary, shape.hidden, ops, schemes[EMBEDDING])
        if layers:
            self.rotary = Rotary(positions, shape.head_dim)
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]
        if tree:
            if one_head:
                self.lm_head = Linear(shape.hidden, trimmed or shape.vocabulary, False, ops, schemes["lm_head.weight"])
            ids = nn.Parameter(torch.empty(trimmed, dtype=torch.int64), requires_grad=False) if trimmed else None
            self.register_parameter("token_ids", ids)

    def read(self, hidden: Tensor) -> Tensor:
        """A serial step's input from the target's rows, in place of the previous step's output. hidden: [n, features]
        -> [n, H]."""
        return hidden

    def accepted(self, tokens: Tensor, rows: Tensor) -> Any:
        """The first layer's input for the accepted rows. tokens: int64 [A]; rows: [A, features] -> A + ``ahead``
        rows."""
        return self.fuse(tokens, self.read(rows))

    def begin(self, pending: Tensor, row: Tensor) -> Tensor:
        """The row that level 1 is drafted from. pending: int64 [1]; row: [1, H], the last layer's output for it."""
        return row

    @abstractmethod
    def fuse(self, tokens: Tensor, hidden: Tensor) -> Any:
        """The first layer's input. tokens: int64 [n]; hidden: [n, H], from ``read`` or the previous step."""

    @property
    def noisy(self) -> bool:
        """Whether it takes noise: it does if it has a tree, except the tree of the official code."""
        return self.tree is not None and not self.tree.reference

    def logits(self, y: Tensor) -> Tensor:
        """Logits of the draft vocabulary. y: [n, H], a step's output -> fp32 [n, V], or [n, trimmed]."""
        return self.lm_head(y).float()

    def head_logits(self, first: Tensor, h1: Tensor, second: Tensor, h2: Tensor, count: int) -> Tensor:
        """Like ``tree.Heads``, but returns logits, fp32."""
        raise NotImplementedError

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        path: Tensor,
        count: Tensor,
        past_length: Tensor,
        caches: list[Tensor],
        noise: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Extends the caches with the newly accepted tokens, then grows the tree of the next cycle.

        tokens: int64 [A], the token after each accepted row; hidden: [R, width], the target's output; path: int64 [A],
        the accepted rows; count: int64 [1], how many of the A rows are not padding; past_length: int64 [1]; caches: key
        and value of the serial layers, layer by layer, each [1, kv heads, S, d]; noise: fp32 [tree.depth, V], added to
        the logits of each level. Returns the outputs of ``tree.grow`` if it has a tree, then the keys and values that
        the dialect's ``attend`` returns.
        """
        row = torch.arange(tokens.shape[0] + self.ahead, device=tokens.device)
        position, read = past_length + row, count + self.ahead
        attention_mask = (
            self.ops.attention_mask(Reach(None, row.shape[0], past_length, caches[0])) if self.layers else None
        )
        read_rows = self.ops.gather(hidden, path)
        if self.columns:
            read_rows = torch.cat([read_rows[:, columns] for columns in self.columns], dim=-1)
        x = self.accepted(tokens, read_rows)
        present: list[Tensor] = []
        pasts: list[Past] = []
        for layer, key, value in zip(self.layers, caches[0::2], caches[1::2], strict=True):
            rows = layer.project(x, self.rotary, position, key.dtype)
            attended, *written = self.ops.attend(rows, (key, value), past_length, attention_mask)
            x = layer.finish(x, attended)
            present += [new[:, :, : tokens.shape[0]] for new in written] if self.ops.appends and self.ahead else written
            pasts.append(Past((key, value), past_length, (written[0], written[1]), read))
        if self.tree is None:
            return tuple(present)

        pending, last = self.ops.gather(tokens, count - 1), self.ops.gather(x, read - 1)
        y, step = self.begin(pending, last), self.serial_step(past_length + read, pasts)

        def log_probs(y: Tensor, level: int) -> Tensor:
            logits = self.logits(y)
            return (logits if noise is None else logits + noise[level - 1]).log_softmax(-1)

        def heads(first: Tensor, h1: Tensor, second: Tensor, h2: Tensor, count: int) -> Tensor:
            logits, level = self.head_logits(first, h1, second, h2, count), self.tree.serial_steps  # type: ignore[union-attr]
            return (logits if noise is None else logits + noise[level : level + count, None]).log_softmax(-1)

        return *grow(self.tree, pending, y, log_probs, step, heads, self.token_ids, self.ops), *present

    def serial_step(self, length: Tensor, pasts: list[Past]) -> Step:
        """The function for serial steps. Their keys and values are not written to the caches, since only this cycle
        needs them. length: int64 [1], the number of positions that the layers have read."""
        drafted: list[list[Cache]] = [[] for _ in self.layers]

        def step(tokens: Tensor, hidden: Tensor, visible: Tensor) -> Tensor:
            x = self.fuse(tokens, hidden)
            position = (length + len(drafted[0])).expand(tokens.shape[0])
            for layer, past, uncached in zip(self.layers, pasts, drafted, strict=True):
                rows = layer.project(x, self.rotary, position, past.cache[0].dtype)
                attended, new = self.ops.attend_readonly(rows, past, uncached, visible)
                uncached.append(new)
                x = layer.finish(x, attended)
            return x

        return step
