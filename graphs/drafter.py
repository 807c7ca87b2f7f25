"""The Gumiho drafter (arXiv 2503.10135): serial Llama layers, then parallel MLP heads whose blocks are batched."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dialects.plain import Cache, Past, Plain
from .dialects.quantization import EMBEDDING, UNQUANTIZED, Schemes
from .layer import Embedding, Layer, Linear, LlamaShape, Rotary, matrix
from .tree import TreeConfig, grow


class Heads(nn.Module):
    """All heads at once: one GEMM for their first block, and a batched GEMM for each residual block.

    first: [n * H, 2H], the first weights of all n heads stacked. weight: [n, H, H] per residual block, stored input-major, or
    output-major if quantized.
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


class Drafter(nn.Module):
    """The drafter of a pair. Without a tree it only extends its caches.

    shape: that of the serial layers. tree: None for the graph that only extends the caches. blocks: residual blocks of a
    head, after its first block. schemes: how its matrices are quantized, by parameter name. trimmed: size of the draft vocabulary,
    or None if the drafter may propose every token; lm_head has a row for each of its tokens, whose ids are ``token_ids``, int64
    [trimmed].
    """

    token_ids: nn.Parameter | None

    def __init__(
        self, shape: LlamaShape, capacity: int, positions: int, tree: TreeConfig | None, fc_bias: bool, blocks: int = 5,
        ops: type[Plain] = Plain, schemes: Schemes = UNQUANTIZED, trimmed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.capacity, self.tree, self.ops = capacity, tree, ops
        self.embed_tokens = Embedding(shape.vocabulary, shape.hidden, ops, schemes[EMBEDDING])
        self.rotary = Rotary(positions, shape.head_dim)
        self.fc = Linear(2 * shape.hidden, shape.hidden, fc_bias, ops, schemes["fc.weight"])
        layers = [Layer(shape, ops, schemes.within(f"layers.{i}"), input_norm=i > 0) for i in range(shape.layers)]
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]
        if tree:
            self.lm_head = Linear(shape.hidden, trimmed or shape.vocabulary, False, ops, schemes["lm_head.weight"])
            ids = nn.Parameter(torch.empty(trimmed, dtype=torch.int64), requires_grad=False) if trimmed else None
            self.register_parameter("token_ids", ids)
            heads = tree.depth - tree.serial_steps
            if heads > 0:
                self.heads = Heads(heads, shape.hidden, blocks, ops, schemes.within("heads"))

    def fuse(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """z(x, h) = fc(concat(embed[x], h)). tokens: int64 [n], hidden: [n, H] -> [n, H]."""
        embedded = self.embed_tokens(tokens)
        return self.fc(torch.cat((embedded, hidden.to(embedded.dtype)), dim=-1))

    def log_probs(self, y: Tensor) -> Tensor:
        """Log-probabilities of the draft vocabulary. y: [n, H] -> fp32 [n, V], or [n, trimmed]."""
        return self.lm_head(y).float().log_softmax(-1)

    def forward(
        self, tokens: Tensor, hidden: Tensor, path: Tensor, count: Tensor, past_length: Tensor, caches: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Extends the caches with the newly accepted tokens, then grows the tree of the next cycle.

        tokens: int64 [A], the token after each accepted row; hidden: [R, H], the target's output; path: int64 [A], the
        accepted rows; count: int64 [1], how many of the A rows are not padding; past_length: int64 [1]; caches: key and value
        of the serial layers, layer by layer, each [1, kv heads, S, d]. Returns the outputs of ``tree.grow`` if it has a tree,
        then the keys and values that the dialect's ``attend`` returns.
        """
        row = torch.arange(tokens.shape[0], device=tokens.device)
        position = past_length + row
        attention_mask = self.ops.attention_mask(None, position, past_length, caches[0])
        x = self.fuse(tokens, self.ops.gather(hidden, path))
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

        def heads(first: Tensor, h1: Tensor, second: Tensor, h2: Tensor, count: int) -> Tensor:
            out = self.heads(torch.cat((self.fuse(first, h1), self.fuse(second, h2)), dim=-1))
            return self.log_probs(out.reshape(-1, out.shape[-1])).reshape(count, first.shape[0], -1)

        last = count - 1
        pending, y = self.ops.gather(tokens, last), self.ops.gather(x, last)
        return *grow(self.tree, pending, y, self.log_probs, step, heads, self.token_ids, self.ops), *present
