"""The Medusa drafter (arXiv 2401.10774): each head predicts the token at its distance, from the target's last row
only."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..dialects.plain import Plain
from ..dialects.quantization import UNQUANTIZED, Schemes
from ..drafter import Drafter
from ..layer import Linear, LlamaShape
from ..tree import TreeConfig


class Block(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, hidden: int, bias: bool, ops: type[Plain], schemes: Schemes) -> None:
        super().__init__()
        self.linear = Linear(hidden, hidden, bias, ops, schemes["linear.weight"])

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, H] -> [n, H]."""
        x = x.to(self.linear.dtype)
        return x + F.silu(self.linear(x))


class Medusa(Drafter):
    """It has no layers, hence no caches, and reads no tokens. All nodes of a level therefore have the same child
    tokens.

    blocks: of each head. bias: whether the blocks have a bias. own_heads: whether each head has its own lm_head instead
    of the target's. For the other parameters see ``Drafter``.
    """

    def __init__(
        self,
        shape: LlamaShape,
        capacity: int,
        positions: int,
        tree: TreeConfig | None,
        blocks: int,
        bias: bool,
        own_heads: bool,
        ops: type[Plain] = Plain,
        schemes: Schemes = UNQUANTIZED,
        trimmed: int | None = None,
    ) -> None:
        super().__init__(
            shape, capacity, positions, tree, (), ops, schemes, trimmed, embeds=False, one_head=not own_heads
        )
        self.features = shape.hidden
        heads = range(tree.depth if tree else 0)
        self.heads = nn.ModuleList(
            nn.Sequential(*(Block(shape.hidden, bias, ops, schemes.within(f"heads.{i}.{j}")) for j in range(blocks)))
            for i in heads
        )
        if own_heads:
            tokens = trimmed or shape.vocabulary
            self.lm_heads = nn.ModuleList(
                Linear(shape.hidden, tokens, False, ops, schemes[f"lm_heads.{i}.weight"]) for i in heads
            )

    def fuse(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """See ``Drafter``."""
        return hidden

    def head_logits(self, first: Tensor, h1: Tensor, second: Tensor, h2: Tensor, count: int) -> Tensor:
        """See ``Drafter``. h1: [1, H]."""
        rows = [head(h1) for head in self.heads[:count]]
        if hasattr(self, "lm_heads"):
            logits = torch.cat([lm_head(row) for lm_head, row in zip(self.lm_heads, rows, strict=False)])
        else:
            logits = self.lm_head(torch.cat(rows))
        return logits.float()[:, None]
