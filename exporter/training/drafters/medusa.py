"""Medusa in the form that is trained (arXiv 2401.10774). See graphs/drafters/medusa.py for the heads."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from graphs.tree import Step

from ...checkpoints.families import MEDUSA
from ..batches import Anchors, Features
from ..model import Drafter, Linear
from ..store import Text


class Medusa(Drafter):
    """Heads of one block, as released. Their lm_heads are the target's and not trained, so the checkpoint has none:
    TGI's version 2."""

    family, file = MEDUSA, "medusa_lm_head.safetensors"

    def __init__(self, config: LlamaConfig, heads: int) -> None:
        super().__init__(config)
        self.heads = self.depths = heads
        self.blocks = nn.ModuleList([Linear(config.hidden_size, config.hidden_size) for _ in range(heads)])

    @torch.no_grad()
    def begin(self, target: Any, text: Text, features: Features, report: Callable[[str], None]) -> None:
        """Every head begins as the target's own prediction of the next token, as in the official code."""
        for parameter in self.parameters():
            parameter.zero_()

    def _head(self, i: int, x: Tensor) -> Tensor:
        block: Any = self.blocks[i]
        return x + F.silu(block.linear(x))

    def forward(self, embedded: Tensor, read: Tensor, anchors: Anchors, headed: int) -> list[Tensor]:
        """See ``Drafter``. All heads predict for all spans."""
        rows = anchors.of(read)
        return [self._head(i, rows) for i in range(self.heads)]

    def grow_from(self, seen: Tensor, place: int, pending: Tensor, embed: Tensor) -> tuple[Tensor, Step]:
        """See ``Drafter``."""
        return seen[0, place : place + 1], _no_step

    def head_rows(self, first: Tensor, h1: Tensor, second: Tensor, h2: Tensor, count: int) -> Tensor:
        """See ``Drafter``."""
        return torch.stack([self._head(i, h1) for i in range(count)])

    def about(self) -> dict[str, Any]:
        """See ``Drafter``."""
        return {"medusa_num_heads": self.heads, "medusa_num_layers": 1, "version": "2"}

    def stored_as(self, name: str) -> str:
        """See ``Drafter``."""
        _, head, part = name.split(".", 2)
        return f"{head}.0.{part}"


def _no_step(tokens: Tensor, hidden: Tensor, visible: Tensor) -> Tensor:
    raise NotImplementedError
