"""Gumiho in the form that is trained (arXiv 2503.10135), and an EAGLE, which is one layer without heads. See
graphs/drafters/gumiho.py."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from runtime.errors import InputError

from ...checkpoints.checkpoint import Checkpoint, tensor_indices
from ...checkpoints.families import family
from .. import start
from ..batches import Anchors, Features
from ..model import Linear, Serial, SerialLayer
from ..store import Text

BLOCKS = 5  # residual blocks of a head after its first, as released
# What a drafter may hold besides, the target's own.
_UNTRAINED = frozenset(("embed_tokens.weight", "lm_head.weight", "token_map"))


class Gumiho(Serial):
    """An EAGLE if it is one layer without heads."""

    def __init__(self, config: LlamaConfig, heads: int) -> None:
        super().__init__(config)
        h = config.hidden_size
        self.family, self.heads, self.depths = family(config.num_hidden_layers, heads), heads, 2 + heads
        self.fc = nn.Linear(2 * h, h)
        self.layers = nn.ModuleList([SerialLayer(config, i > 0) for i in range(config.num_hidden_layers)])
        self.mlp = nn.ModuleList(
            [nn.ModuleList([Linear(h if block else 2 * h, h) for block in range(BLOCKS + 1)]) for _ in range(heads)]
        )

    def fuse(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """z(x, h). embedded, hidden: [..., H]."""
        return self.fc(torch.cat((embedded, hidden), -1))

    def about(self) -> dict[str, Any]:
        """See ``Drafter``."""
        return super().about() | {"bias": True}

    def pairs(self, first: Tensor, y1: Tensor, second: Tensor, y2: Tensor) -> Tensor:
        """What the heads read. first, second: embedded tokens drafted by y1 and y2; all [..., H] -> [..., 2H]."""
        return torch.cat((self.fuse(first, y1), self.fuse(second, y2)), -1)

    def head(self, i: int, x: Tensor) -> Tensor:
        """x: ``pairs`` -> [..., H]."""
        blocks: Any = self.mlp[i]
        x = F.silu(blocks[0].linear(x))
        for block in blocks[1:]:
            x = x + F.silu(block.linear(x))
        return x

    def forward(self, embedded: Tensor, hidden: Tensor, anchors: Anchors, headed: int) -> list[Tensor]:
        """What every depth predicts from the anchors: serial 1, serial 2, then each head for the first ``headed``
        spans.

        embedded: [B, T, H], of the text's tokens; hidden: [B, T, H], the target's -> [N, S, H] each; depth d predicts
        the hidden state d positions after the anchor.
        """
        y, caches = self.read_text(embedded, hidden)
        y1 = anchors.of(y)
        y2 = self.step(anchors.of(embedded, 2), y1, anchors, caches)
        few = anchors.first(headed)
        pairs = self.pairs(few.of(embedded, 2), y1[:headed], few.of(embedded, 3), y2[:headed])
        return [y1, y2, *(self.head(i, pairs) for i in range(self.heads))]

    def head_rows(self, first: Tensor, h1: Tensor, second: Tensor, h2: Tensor, count: int) -> Tensor:
        """See ``Drafter``."""
        pairs = self.pairs(first, h1, second, h2)
        return torch.stack([self.head(i, pairs) for i in range(count)])

    @torch.no_grad()
    def begin(self, target: Any, text: Text, features: Features, report: Callable[[str], None]) -> None:
        """Begins with the best linear prediction: ``fc`` and each head's first matrix by ridge regression, the serial
        layers small.

        The serial layers are the target's last ones, made small, so that they correct the linear prediction instead of
        burying it.
        """
        records = start.to_fit(text, self.depths, 2 * self.config.hidden_size)
        start.last_layers(self.serial, target, text.record(records[0]))
        report(f"fitting the first drafter on {len(records)} texts")
        weight, bias = start.fit(
            (torch.cat((x[1:], h[:-1]), -1), h[1:]) for x, h in start.rows(target, features, records)
        )
        self.fc.weight.copy_(weight)
        self.fc.bias.copy_(bias)
        if not self.heads:
            return

        def further() -> Iterator[tuple[Tensor, Tensor]]:
            for x, h in start.rows(target, features, records):
                y1 = self.fuse(x[1:-2], h[:-3])
                y2 = self.fuse(x[2:-1], y1)
                pairs, count = self.pairs(x[2:-1], y1, x[3:], y2), len(h) - 2 - self.heads
                yield pairs[:count], torch.cat([h[3 + i : 3 + i + count] for i in range(self.heads)], -1)

        weight, bias = start.fit(further())
        modules: Any = self.mlp
        for i, blocks in enumerate(modules):
            own = slice(i * self.config.hidden_size, (i + 1) * self.config.hidden_size)
            first, *rest = [block.linear for block in blocks]
            first.weight.copy_(weight[own])
            first.bias.copy_(bias[own])
            for linear in rest:
                nn.init.normal_(linear.weight, std=0.3 / self.config.hidden_size**0.5)
                nn.init.zeros_(linear.bias)

    def from_checkpoint(self, source: str) -> None:
        """Gives it the weights of one that exists. Raises GumihoError if their shapes differ."""
        checkpoint = Checkpoint(source, "drafter")
        wanted = self.state_dict()
        checkpoint.require(
            {name: tuple(t.shape) for name, t in wanted.items() if name in checkpoint or name != "fc.bias"}, _UNTRAINED
        )
        state = {name: checkpoint.read(name).float() for name in wanted if name in checkpoint}
        state.setdefault("fc.bias", torch.zeros_like(wanted["fc.bias"]))
        self.load_state_dict(state)


def shape_of(source: str) -> tuple[int, int]:
    """Serial layers and heads of a drafter that exists. Raises InputError if its heads are not of the released
    depth."""
    checkpoint = Checkpoint(source, "drafter")
    layers, blocks = tensor_indices(checkpoint, "layers.#."), tensor_indices(checkpoint, "mlp.#.#.")
    if not layers or {block for _, block in blocks} - set(range(BLOCKS + 1)):
        raise InputError(
            f"--init '{source}' has no serial layers, or heads of another depth than {BLOCKS + 1}: give another drafter"
        )
    return len(layers), len({head for head, _ in blocks})
