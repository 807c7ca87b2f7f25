"""EAGLE-3 in the form that is trained (arXiv 2503.01840, section 3). See graphs/drafters/eagle3.py for the layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from ...checkpoints.drafters.eagle3 import official_taps
from ...checkpoints.families import EAGLE_3
from ..batches import Anchors, Features
from ..model import Attention, Cache, Norm, Serial, SerialLayer
from ..parallel import whole
from ..store import Text

DEPTHS = 5  # as many as 8 rows are worth; the official code has 7
_NOISE = 0.1  # of what has no counterpart in the target, by the size of a matrix that keeps the size of rows

Pair = tuple[Tensor, Tensor]  # embedded tokens and features, each [..., H]


def usual_taps(layers: int) -> tuple[int, ...]:
    """Those of the official code. Of fewer than seven layers they are not apart: then the last ones."""
    taps = official_taps(layers)
    return taps if len({*taps}) == 3 and min(taps) >= 0 else tuple(range(max(0, layers - 3), layers))


class WideLayer(SerialLayer):
    """Its attention reads the embedded token beside the features, and it adds to the features."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, input_norm=True)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.hidden_norm = Norm(config)

    def read(self, x: Pair) -> Tensor:
        """See ``SerialLayer``."""
        assert self.input_layernorm is not None
        return torch.cat((self.input_layernorm(x[0]), self.hidden_norm(x[1])), -1)

    def finish(self, x: Pair, q: Tensor, cache: Cache, mask: Tensor | None) -> Tensor:
        """See ``SerialLayer``."""
        return super().finish(x[1], q, cache, mask)


class Eagle3(Serial):
    """``lm_head`` is the target's, and not trained.

    Every step after the first reads what the step before returned, as in drafting (training-time test, section 3.2), so
    that the features need not be near the target's.
    """

    family, depths = EAGLE_3, DEPTHS

    def __init__(self, config: LlamaConfig, taps: tuple[int, ...]) -> None:
        super().__init__(config)
        self.taps = taps
        self.fc = nn.Linear(len(taps) * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([WideLayer(config)])
        self.norm = Norm(config)

    def features(self, read: Tensor) -> Tensor:
        """See ``Serial``."""
        return self.fc(read)

    def fuse(self, embedded: Tensor, hidden: Tensor) -> Pair:
        """See ``Serial``."""
        return embedded, hidden

    def predicted(self, y: Tensor) -> Tensor:
        """See ``Drafter``."""
        return self.norm(y)

    def forward(self, embedded: Tensor, read: Tensor, anchors: Anchors, headed: int) -> list[Tensor]:
        """What every depth predicts from the anchors, as ``Drafter.forward``; headed: of no meaning here.

        embedded: [B, T, H], of the text's tokens; read: [B, T, taps * H], the target's.
        """
        y, caches = self.read_text(embedded, read)
        outs, beside = [anchors.of(y)], list[list[Cache]]([[]])
        for depth in range(2, self.depths + 1):
            outs.append(self.step(anchors.of(embedded, depth), outs[-1], anchors, caches, beside))
        return [self.predicted(out) for out in outs]

    def stored_as(self, name: str) -> str:
        """See ``Drafter``: SafeAILab's layout."""
        return name.replace("layers.0.", "midlayer.")

    def besides(self, ids: Tensor | None, embed: Tensor, lm_head: Tensor) -> dict[str, Tensor]:
        """See ``Drafter``."""
        rows = lm_head if ids is None else lm_head[ids]
        found = {"lm_head.weight": rows.detach().to("cpu", torch.float16)}
        if ids is None:
            return found
        ids, vocabulary = ids.cpu(), torch.arange(self.config.vocab_size)
        return found | {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(vocabulary, ids)}

    def about(self) -> dict[str, Any]:
        """See ``Drafter``."""
        return super().about() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "tie_word_embeddings": False,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.taps)},
        }

    @torch.no_grad()
    def begin(self, target: Any, text: Text, features: Features, report: Callable[[str], None]) -> None:
        """Begins with the target's last layer over its last tap, and its final norm. What reads the embedded token is
        small and random."""
        own, last, size = self.state_dict(), target.model.layers[-1].state_dict(), self.config.hidden_size
        for value in own.values():
            if value.ndim == 2:
                nn.init.normal_(value, std=_NOISE / value.shape[1] ** 0.5)
        own["fc.weight"][:, -size:] += torch.eye(size, device=own["fc.weight"].device)
        own["norm.weight"].copy_(whole(target.model.norm.weight))
        for name, value in own.items():
            part = name.removeprefix("layers.0.")
            its = {"hidden_norm.weight": "input_layernorm.weight", "input_layernorm.weight": None}.get(part, part)
            if its in last:
                found = whole(last[its]).float()
                (value if value.shape == found.shape else value[:, size:]).copy_(found)
            elif part.endswith("bias"):  # Qwen2 has some of Llama's
                value.zero_()
