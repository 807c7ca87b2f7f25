"""The EAGLE-3 drafter (arXiv 2503.01840): a layer of doubled input width, which reads three layers of the target."""

import torch
from torch import Tensor

from ..dialects.plain import Plain, Rows
from ..dialects.quantization import UNQUANTIZED, Schemes
from ..drafter import Drafter
from ..layer import Attention, Layer, Linear, LlamaShape, Norm, Rotary
from ..tree import TreeConfig

Pair = tuple[Tensor, Tensor]  # embedded tokens and features, each [n, H]


class WideLayer(Layer):
    """A decoder layer whose attention reads two concatenated rows, each normed separately. The residual is added to the
    second row.

    normed: whether the residual is added to the normed row (``norm_before_residual`` of speculators' checkpoints).
    """

    def __init__(self, shape: LlamaShape, normed: bool, ops: type[Plain], schemes: Schemes) -> None:
        super().__init__(shape, ops, schemes)
        self.self_attn = Attention(shape, ops, schemes.within("self_attn"), inputs=2 * shape.hidden)
        self.hidden_norm = Norm(shape.hidden, shape.eps, ops)
        self.normed = normed

    def project(self, x: Pair, rotary: Rotary, position: Tensor, dtype: torch.dtype) -> Rows:  # type: ignore[override]
        """See ``Layer``."""
        wide = torch.cat((self.input_layernorm(x[0]), self.hidden_norm(x[1])), dim=-1)
        return self.self_attn(wide, rotary, position, dtype)

    def finish(self, x: Pair, attended: Tensor) -> Tensor:  # type: ignore[override]
        """See ``Layer``."""
        return super().finish(self.hidden_norm(x[1]) if self.normed else x[1], attended)


class Eagle3(Drafter):
    """The layers after the first are Llama's. A step's output is fed back without a norm, and normed before
    ``lm_head``.

    features: numbers of the target's row, the concatenation of all taps. normed: see ``WideLayer``. For the other
    parameters see ``Drafter``.
    """

    def __init__(
        self,
        shape: LlamaShape,
        capacity: int,
        positions: int,
        tree: TreeConfig | None,
        features: int,
        fc_bias: bool,
        normed: bool,
        ops: type[Plain] = Plain,
        schemes: Schemes = UNQUANTIZED,
        trimmed: int | None = None,
    ) -> None:
        layers = [
            Layer(shape, ops, own) if i else WideLayer(shape, normed, ops, own)
            for i, own in enumerate(schemes.within(f"layers.{i}") for i in range(shape.layers))
        ]
        super().__init__(shape, capacity, positions, tree, layers, ops, schemes, trimmed)
        self.features = features
        self.fc = Linear(features, shape.hidden, fc_bias, ops, schemes["fc.weight"])
        if tree:
            self.norm = Norm(shape.hidden, shape.eps, ops)

    def read(self, hidden: Tensor) -> Tensor:
        """See ``Drafter``."""
        return self.fc(hidden.to(self.layers[0].input_layernorm.weight.dtype))  # type: ignore[arg-type]

    def fuse(self, tokens: Tensor, hidden: Tensor) -> Pair:
        """See ``Drafter``."""
        return self.embed_tokens(tokens), hidden

    def logits(self, y: Tensor) -> Tensor:
        """See ``Drafter``."""
        return super().logits(self.norm(y))
