"""The Gumiho drafter (arXiv 2503.10135): serial Llama layers, then parallel MLP heads whose blocks are batched. The
drafter of EAGLE-1 and EAGLE-2 is one such layer without heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..dialects.plain import Plain
from ..dialects.quantization import UNQUANTIZED, Schemes
from ..drafter import Drafter
from ..layer import Layer, Linear, LlamaShape, matrix
from ..tree import TreeConfig


class Heads(nn.Module):
    """All heads at once: one GEMM for their first block, and a batched GEMM for each residual block.

    first: [n * H, 2H], the first weights of all n heads stacked. weight: [n, H, H] per residual block, stored
    input-major, or output-major if quantized.
    """

    def __init__(self, heads: int, hidden: int, blocks: int, ops: type[Plain], schemes: Schemes) -> None:
        super().__init__()
        self.count, self.ops = heads, ops
        self.first = Linear(2 * hidden, heads * hidden, True, ops, schemes["first.weight"])
        matrices = [matrix((heads, hidden, hidden), schemes["weight.0"]) for _ in range(blocks)]  # all in one scheme
        self.weight = nn.ParameterList([weight for weight, *_ in matrices])
        self.scale = nn.ParameterList([scale for _, scale, _ in matrices if scale is not None])
        self.bias = nn.ParameterList([torch.empty(heads, 1, hidden) for _ in range(blocks)])

    def forward(self, pairs: Tensor) -> Tensor:
        """pairs: [P, 2H] -> [heads, P, H]."""
        x = F.silu(self.first(pairs)).reshape(pairs.shape[0], self.count, -1).transpose(0, 1)
        return self.ops.residual(x, list(self.weight), list(self.scale), list(self.bias))


class Gumiho(Drafter):
    """fc_bias: whether ``fc`` has a bias. blocks: residual blocks of a head, after its first block. For the other
    parameters see ``Drafter``."""

    def __init__(
        self,
        shape: LlamaShape,
        capacity: int,
        positions: int,
        tree: TreeConfig | None,
        fc_bias: bool,
        blocks: int = 5,
        ops: type[Plain] = Plain,
        schemes: Schemes = UNQUANTIZED,
        trimmed: int | None = None,
    ) -> None:
        layers = [Layer(shape, ops, schemes.within(f"layers.{i}"), input_norm=i > 0) for i in range(shape.layers)]
        super().__init__(shape, capacity, positions, tree, layers, ops, schemes, trimmed)
        self.features = shape.hidden
        self.fc = Linear(2 * shape.hidden, shape.hidden, fc_bias, ops, schemes["fc.weight"])
        heads = tree.depth - tree.serial_steps if tree else 0
        if heads > 0:
            self.heads = Heads(heads, shape.hidden, blocks, ops, schemes.within("heads"))

    def fuse(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """z(x, h) = fc(concat(embed[x], h)). tokens: int64 [n], hidden: [n, H] -> [n, H]."""
        embedded = self.embed_tokens(tokens)
        return self.fc(torch.cat((embedded, hidden.to(embedded.dtype)), dim=-1))

    def head_logits(self, first: Tensor, h1: Tensor, second: Tensor, h2: Tensor, count: int) -> Tensor:
        """See ``Drafter``."""
        out = self.heads(torch.cat((self.fuse(first, h1), self.fuse(second, h2)), dim=-1))
        return self.logits(out.reshape(-1, out.shape[-1])).reshape(count, first.shape[0], -1)
