"""A small model as drafter (speculative sampling, arXiv 2302.01318). It reads tokens, but not the target's rows."""

import torch
from torch import Tensor

from ..dialects.plain import Plain
from ..dialects.quantization import UNQUANTIZED, Schemes
from ..drafter import Drafter
from ..layer import Layer, LlamaShape, Norm
from ..token_digits import DIGITS, tokens_of
from ..tree import TreeConfig


class Small(Drafter):
    """As in a target, a row is at the position of its token. A pass reads the tokens of the accepted rows, then the
    pending token, which the next pass reads again. So it also reads the first token of a text. A token beyond its
    vocabulary is read as token 0. For the parameters see ``Drafter``.
    """

    features, ahead = DIGITS, 1

    def __init__(
        self,
        shape: LlamaShape,
        capacity: int,
        positions: int,
        tree: TreeConfig | None,
        ops: type[Plain] = Plain,
        schemes: Schemes = UNQUANTIZED,
        trimmed: int | None = None,
    ) -> None:
        layers = [Layer(shape, ops, schemes.within(f"layers.{i}")) for i in range(shape.layers)]
        super().__init__(shape, capacity, positions, tree, layers, ops, schemes, trimmed)
        self.vocabulary = shape.vocabulary
        if tree:
            self.norm = Norm(shape.hidden, shape.eps, ops)

    def accepted(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """See ``Drafter``. The digits are each row's own token, that is, the token after the previous row."""
        return self.fuse(torch.cat((tokens_of(rows[:1]), tokens)), rows)

    def fuse(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """See ``Drafter``."""
        return self.embed_tokens(torch.where(tokens < self.vocabulary, tokens, 0))

    def logits(self, y: Tensor) -> Tensor:
        """See ``Drafter``."""
        return super().logits(self.norm(y))
