"""The Hydra and Hydra++ drafters (arXiv 2402.05109): heads that read the target's last row and all tokens on their
path."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..dialects.plain import Past, Plain
from ..dialects.quantization import UNQUANTIZED, Schemes
from ..drafter import Drafter
from ..layer import Layer, Linear, LlamaShape, Norm
from ..tree import Step, TreeConfig
from .medusa import Block


class Head(nn.Module):
    """Head ``i`` reads i + 2 concatenated rows: one made from the target's row, and the embeddings of the pending token
    and of i drafted tokens."""

    def __init__(
        self, i: int, shape: LlamaShape, blocks: int, tokens: int | None, ops: type[Plain], schemes: Schemes
    ) -> None:
        super().__init__()
        width, hidden = (i + 2) * shape.hidden, shape.hidden
        self.linear = Linear(width, hidden, True, ops, schemes["linear.weight"])
        self.res_connection = Linear(width, hidden, True, ops, schemes["res_connection.weight"])
        self.blocks = nn.ModuleList(Block(hidden, True, ops, schemes.within(f"blocks.{j}")) for j in range(blocks))
        if tokens:
            self.lm_head = Linear(hidden, tokens, True, ops, schemes["lm_head.weight"])

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, (i + 2) H] -> [n, H]."""
        y = self.res_connection(x) + F.silu(self.linear(x))
        for block in self.blocks:
            y = block(y)
        return y


class Hydra(Drafter):
    """A serial step appends an embedding to a node's row; the row's width tells which head reads it. Without layers the
    drafter has no caches.

    shape: has one layer for Hydra++, which reads the target's rows through a decoder layer, else none. blocks: of each
    head, after its first one. own_heads: whether each head has its own lm_head, with a bias, instead of the target's.
    For the other parameters see ``Drafter``.
    """

    def __init__(
        self,
        shape: LlamaShape,
        capacity: int,
        positions: int,
        tree: TreeConfig | None,
        blocks: int,
        own_heads: bool,
        ops: type[Plain] = Plain,
        schemes: Schemes = UNQUANTIZED,
        trimmed: int | None = None,
    ) -> None:
        layers = [Layer(shape, ops, schemes.within(f"layers.{i}")) for i in range(shape.layers)]
        super().__init__(
            shape,
            capacity,
            positions,
            tree,
            layers,
            ops,
            schemes,
            trimmed,
            embeds=tree is not None,
            one_head=not own_heads,
        )
        self.features = shape.hidden
        if tree:
            tokens = (trimmed or shape.vocabulary) if own_heads else None
            self.heads = nn.ModuleList(
                Head(i, shape, blocks, tokens, ops, schemes.within(f"heads.{i}")) for i in range(tree.depth)
            )
            if layers:
                self.norm = Norm(shape.hidden, shape.eps, ops)

    def fuse(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """See ``Drafter``."""
        return hidden.to(self.layers[0].input_layernorm.weight.dtype) if self.layers else hidden  # type: ignore[arg-type]

    def begin(self, pending: Tensor, row: Tensor) -> Tensor:
        """See ``Drafter``."""
        return self._append(self.norm(row) if self.layers else row, pending)

    def _append(self, rows: Tensor, tokens: Tensor) -> Tensor:
        embedded = self.embed_tokens(tokens)
        return torch.cat((rows.to(embedded.dtype), embedded), dim=-1)

    def serial_step(self, length: Tensor, pasts: list[Past]) -> Step:
        """See ``Drafter``."""
        return lambda tokens, hidden, visible: self._append(hidden, tokens)

    def logits(self, y: Tensor) -> Tensor:
        """See ``Drafter``. y: [n, (i + 2) H], read by head i."""
        head: Head = self.heads[y.shape[-1] // self.features - 2]  # type: ignore[assignment]
        lm_head = self.lm_head if hasattr(self, "lm_head") else head.lm_head
        return lm_head(head(y)).float()
