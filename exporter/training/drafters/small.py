"""A small model in the form that is trained: the target's first layers, distilled. See graphs/drafters/small.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from ...checkpoints.families import SMALL
from .. import start
from ..batches import Anchors, Features
from ..model import Cache, Norm, Serial, SerialLayer
from ..parallel import whole
from ..store import Text


class Small(Serial):
    """Embedding and lm_head are the target's, and not trained. With the text's own tokens before it, what it predicts
    at one depth is what it predicts at each, so it is trained for one."""

    family, depths, ahead = SMALL, 1, 1

    def __init__(self, config: LlamaConfig, tied: bool) -> None:
        """tied: whether the target's lm_head is its embedding."""
        super().__init__(config)
        self.tied = tied
        self.layers = nn.ModuleList([SerialLayer(config, input_norm=True) for _ in range(config.num_hidden_layers)])
        self.norm = Norm(config)

    @torch.no_grad()
    def begin(self, target: Any, text: Text, features: Features, report: Callable[[str], None]) -> None:
        """Begins with the target's first layers and its final norm."""
        start.first_layers(self.serial, target, text.record(0))
        self.norm.weight.copy_(whole(target.model.norm.weight))

    def fuse(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """See ``Serial``."""
        return embedded

    def predicted(self, y: Tensor) -> Tensor:
        """See ``Drafter``."""
        return self.norm(y)

    def forward(self, embedded: Tensor, read: Tensor, anchors: Anchors, headed: int) -> list[Tensor]:
        """See ``Drafter``."""
        return [self.predicted(anchors.of(self.read_text(embedded, read)[0], self.ahead))]

    def read_text(self, embedded: Tensor, read: Tensor) -> tuple[Tensor, list[Cache]]:
        """See ``Serial``."""
        return self.extend(embedded, read)

    def besides(self, ids: Tensor | None, embed: Tensor, lm_head: Tensor) -> dict[str, Tensor]:
        """See ``Drafter``."""
        own = {"model.embed_tokens.weight": embed} | ({} if self.tied else {"lm_head.weight": lm_head})
        return {name: t.detach().to("cpu", torch.float16) for name, t in own.items()} | super().besides(
            ids, embed, lm_head
        )

    def about(self) -> dict[str, Any]:
        """See ``Drafter``."""
        return super().about() | {"tie_word_embeddings": self.tied}

    def stored_as(self, name: str) -> str:
        """See ``Drafter``."""
        return f"model.{name}"
