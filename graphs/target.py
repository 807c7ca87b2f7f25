"""A Llama, or another target that ``LlamaShape`` describes, as one pass over R rows and a cache.

Prefill, verification and plain decoding use the same graph.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from .dialects.plain import Plain, Reach
from .dialects.quantization import EMBEDDING, UNQUANTIZED, Schemes
from .features import NORMED, Features
from .layer import Embedding, Layer, Linear, LlamaShape, Norm, Rotary
from .token_digits import digits_of

_LARGEST_SUM = 3e38  # just below the largest fp32
_LARGEST_HALF = 65504.0  # of fp16


def choose(logits: Tensor, hidden: Tensor) -> Tensor:
    """The token with the largest logit, ties to the lowest id; -1 for rows with a NaN or an infinity.

    logits: [W, V]; hidden: [W, H], the rows that the logits were computed from. Returns int64 [W].
    """
    # A NaN or infinity makes the sum NaN or infinite, and no compiler may simplify the comparison. The sum is in fp32,
    # because finite fp16 logits can have an infinite sum. It includes ``hidden``, because products that quantize rows
    # can lose a NaN.
    finite = (logits.float().sum(-1) + hidden.float().sum(-1)).abs() < _LARGEST_SUM
    return torch.where(finite, logits.argmax(-1), -1)


class Target(nn.Module):
    """The target of a pair. Parameter names are those of checkpoints, without their leading ``model.``.

    schemes: how its matrices are quantized, by parameter name. returns: the contents of the rows of ``hidden``.
    """

    def __init__(
        self,
        shape: LlamaShape,
        capacity: int,
        positions: int,
        ops: type[Plain] = Plain,
        schemes: Schemes = UNQUANTIZED,
        returns: Features = NORMED,
    ) -> None:
        super().__init__()
        self.capacity, self.ops, self.returns = capacity, ops, returns
        self.reach = partial(Reach, queries=shape.heads // shape.kv_heads)
        self.embed_tokens = Embedding(shape.vocabulary, shape.hidden, ops, schemes[EMBEDDING])
        self.rotary = Rotary(positions, shape.head_dim)
        layers = [Layer(shape, ops, schemes.within(f"layers.{i}")) for i in range(shape.layers)]
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.norm = Norm(shape.hidden, shape.eps, ops)
        self.lm_head = Linear(shape.hidden, shape.vocabulary, False, ops, schemes["lm_head.weight"])

    def forward(
        self,
        tokens: Tensor,
        depth: Tensor,
        mask: Tensor,
        wanted: Tensor | None,
        past_length: Tensor,
        caches: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """One pass.

        tokens, depth: int64 [R]; mask: bool [R, R]; wanted: int64 [W], the rows to choose tokens for, None for all;
        past_length: int64 [1]; caches: key and value, layer by layer, each [1, kv heads, S, d]. Row r is at position
        ``past_length + depth[r]``. Returns ``choice`` int64 [W] (see ``choose``) and ``logits`` [W, V] of the wanted
        rows, ``hidden`` [R, features], and the keys and values that the dialect's ``attend`` returns.
        """
        position = past_length + depth
        attention_mask = self.ops.attention_mask(self.reach(mask, depth.shape[0], past_length, caches[0]))
        x = self.embed_tokens(tokens)
        present, entering = list[Tensor](), [x]
        for layer, key, value in zip(self.layers, caches[0::2], caches[1::2], strict=True):
            rows = layer.project(x, self.rotary, position, key.dtype)
            attended, *written = self.ops.attend(rows, (key, value), past_length, attention_mask)
            x = layer.finish(x, attended)
            entering.append(x)
            present += written
        return *self.outputs(tokens, entering, wanted, caches[0].dtype), *present

    def outputs(
        self, tokens: Tensor, entering: Sequence[Tensor], wanted: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``choice``, ``logits`` and ``hidden``. entering: each layer's input, [R, H], then the last layer's output."""
        normed = self.norm(entering[-1])
        read = normed if wanted is None else self.ops.gather(normed, wanted)
        logits = self.lm_head(read).to(dtype)
        return choose(logits, read), logits, self.hidden(tokens, entering, normed, dtype)

    def hidden(self, tokens: Tensor, entering: Sequence[Tensor], normed: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows that drafters read, [R, features]. normed: [R, H], after the final norm."""
        returns = self.returns
        parts = [*([normed] if returns.normed else ()), *(entering[tap] for tap in returns.taps)]
        if not parts:
            return digits_of(tokens).to(dtype)
        rows = torch.cat(parts, dim=-1) if returns.taps else normed
        hidden = rows.to(dtype)
        if returns.taps and rows.dtype == torch.bfloat16 and dtype == torch.float16:
            hidden = hidden.clamp(-_LARGEST_HALF, _LARGEST_HALF)  # rows that are not normed may exceed it
        return torch.cat((hidden, digits_of(tokens).to(dtype)), dim=-1) if returns.digits else hidden
