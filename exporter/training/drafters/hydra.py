"""Hydra in the form that is trained (arXiv 2402.05109). See graphs/drafters/hydra.py for the heads."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from graphs.tree import Step

from ...checkpoints.families import HYDRA
from .. import start
from ..batches import Anchors, Features
from ..model import Drafter
from ..store import Text


class _First(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear, self.res_connection = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)


class Hydra(Drafter):
    """Heads of one layer, in the layout of kind ``mlp``. Their lm_heads are the target's, without a bias, and not
    trained."""

    family, file = HYDRA, "hydra_lm_head.pt"

    def __init__(self, config: LlamaConfig, heads: int) -> None:
        super().__init__(config)
        self.levels = self.depths = heads
        h = config.hidden_size
        self.mlp = nn.ModuleList([nn.ModuleList([_First((i + 2) * h, h)]) for i in range(heads)])

    @torch.no_grad()
    def begin(self, target: Any, text: Text, features: Features, report: Callable[[str], None]) -> None:
        """Every head begins with the best linear prediction, and next to nothing beside it."""
        records = start.to_fit(text, self.depths, (1 + self.levels) * self.config.hidden_size)
        report(f"fitting the first drafter on {len(records)} texts")
        for i, ((first,),) in enumerate(zip(self._heads(), strict=True)):
            weight, bias = start.fit(self._pairs(i, start.rows(target, features, records)))
            first.res_connection.weight.copy_(weight)
            first.res_connection.bias.copy_(bias)
            nn.init.normal_(first.linear.weight, std=0.1 / weight.shape[1] ** 0.5)
            nn.init.zeros_(first.linear.bias)

    def _heads(self) -> Any:
        return self.mlp

    @staticmethod
    def _pairs(i: int, rows: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """What head i reads of each text, and the hidden states that it predicts."""
        for x, h in rows:
            count = len(h) - 1 - i
            yield torch.cat((h[:count], *(x[1 + j : 1 + j + count] for j in range(i + 1))), -1), h[1 + i :]

    def predicted(self, y: Tensor) -> Tensor:
        """See ``Drafter``. y: [..., (i + 2) H], read by head i."""
        (first,) = self._heads()[y.shape[-1] // self.config.hidden_size - 2]
        return first.res_connection(y) + F.silu(first.linear(y))

    def forward(self, embedded: Tensor, read: Tensor, anchors: Anchors, headed: int) -> list[Tensor]:
        """See ``Drafter``. headed: of no meaning here."""
        path, outs = anchors.of(read), []
        for i in range(self.levels):
            path = torch.cat((path, anchors.of(embedded, 1 + i)), -1)
            outs.append(self.predicted(path))
        return outs

    def grow_from(self, seen: Tensor, place: int, pending: Tensor, embed: Tensor) -> tuple[Tensor, Step]:
        """See ``Drafter``."""

        def append(rows: Tensor, tokens: Tensor) -> Tensor:
            return torch.cat((rows, embed[tokens].float()), -1)

        return append(seen[0, place : place + 1], pending), lambda tokens, hidden, visible: append(hidden, tokens)

    def besides(self, ids: Tensor | None, embed: Tensor, lm_head: Tensor) -> dict[str, Tensor]:
        """See ``Drafter``."""
        weight, bias = lm_head.detach().to("cpu", torch.float16), torch.zeros(len(lm_head), dtype=torch.float16)
        heads = {
            f"hydra_lm_head.{i}.{name}": t
            for i in range(self.levels)
            for name, t in (("weight", weight), ("bias", bias))
        }
        return heads | super().besides(ids, embed, lm_head)

    def about(self) -> dict[str, Any]:
        """See ``Drafter``."""
        return {
            "hydra_num_heads": self.levels,
            "hydra_num_layers": 1,
            "hydra_head_arch": "mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
        }

    def stored_as(self, name: str) -> str:
        """See ``Drafter``."""
        return f"hydra_{name}"
