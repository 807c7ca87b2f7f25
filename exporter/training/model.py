"""Drafters in the form that is trained: batches of whole texts in place of a cycle's few rows. See graphs/drafter.py
for that."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from graphs.tree import Step

from .batches import Anchors, Features
from .store import Text

Cache = tuple[Tensor, Tensor]  # keys and values, [B, kv heads, n, d]


class Attention(nn.Module):
    """The projections of a layer's attention. inputs: the width of the rows that it reads."""

    def __init__(self, config: LlamaConfig, inputs: int) -> None:
        super().__init__()
        h, d, bias = config.hidden_size, config.head_dim, bool(config.attention_bias)
        self.head_dim = d
        self.q_proj = nn.Linear(inputs, config.num_attention_heads * d, bias=bias)
        self.k_proj = nn.Linear(inputs, config.num_key_value_heads * d, bias=bias)
        self.v_proj = nn.Linear(inputs, config.num_key_value_heads * d, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * d, h, bias=bias)


class _Mlp(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        h, inner, bias = config.hidden_size, config.intermediate_size, bool(config.mlp_bias)
        self.gate_proj, self.up_proj = nn.Linear(h, inner, bias=bias), nn.Linear(h, inner, bias=bias)
        self.down_proj = nn.Linear(inner, h, bias=bias)


class Norm(nn.Module):
    """nn.RMSNorm mixes no precisions in its fast form."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps: float = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class SerialLayer(nn.Module):
    """A Llama layer; the first of a drafter has no ``input_layernorm``. Its attention takes keys from wherever the
    caller has them."""

    def __init__(self, config: LlamaConfig, input_norm: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config, config.hidden_size), _Mlp(config)
        self.input_layernorm = Norm(config) if input_norm else None
        self.post_attention_layernorm = Norm(config)

    def read(self, x: Any) -> Tensor:
        """What the attention reads. x: what ``Serial.fuse`` returned, or the layer before."""
        return self.input_layernorm(x) if self.input_layernorm is not None else x

    def project(self, x: Any, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x: see ``read``, of [B, n, H] -> queries [B, heads, n, d], keys and values [B, kv heads, n, d]."""
        attention, read = self.self_attn, self.read(x)
        q, k, v = (
            linear(read).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *(table.to(q.dtype) for table in rotary))
        return q, k, v

    def finish(self, x: Any, q: Tensor, cache: Cache, mask: Tensor | None) -> Tensor:
        """x: [B, n, H]; mask: bool [B or 1, 1, n, keys], causal without one."""
        attended = F.scaled_dot_product_attention(q, *cache, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        x = x + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(y)) * self.mlp.up_proj(y))


class Linear(nn.Module):
    """A matrix with a bias under the name that it has in the blocks of released heads."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)


class Drafter(nn.Module, ABC):
    """What is trained. Parameters are named as in the released checkpoints, but for ``stored_as``.

    config: a Llama of the target's sizes. heads: parallel ones. levels: serial ones, at most. depths: how many
    positions ahead it is trained to draft. taps: see ``graphs.target.Target``. file: its name as released.
    """

    family: str
    heads, levels = 0, 64
    taps: tuple[int, ...] = ()
    depths: int
    file = "model.safetensors"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def begin(self, target: Any, text: Text, features: Features, report: Callable[[str], None]) -> None:
        """Gives it the weights that training begins with. target: transformers' model. All processes call it if that is
        split over them."""

    @abstractmethod
    def forward(self, embedded: Tensor, read: Tensor, anchors: Anchors, headed: int) -> list[Tensor]:
        """What every depth predicts from the anchors; parallel heads predict for the first ``headed`` spans only.

        embedded: [B, T, H], of the text's tokens; read: [B, T, K], what the drafter reads of the target -> [N, S, H]
        each; depth d predicts the hidden state d positions after the anchor.
        """

    def read_text(self, embedded: Tensor, read: Tensor) -> Any:
        """What ``grow_from`` needs of texts: without layers what the drafter reads of the target. For the parameters
        see ``forward``."""
        return read

    @abstractmethod
    def grow_from(self, seen: Any, place: int, pending: Tensor, embed: Tensor) -> tuple[Tensor, Step]:
        """What level 1 is drafted from, [1, ...], and the serial step behind it, both for ``graphs.tree.grow``. seen:
        of ``read_text``; pending: the token after ``place``, int64 [1]; embed: the target's embedding [V, H]."""

    def head_rows(self, first: Tensor, h1: Tensor, second: Tensor, h2: Tensor, count: int) -> Tensor:
        """What ``count`` parallel heads predict: [count, P, H]. first, second: embedded tokens; see
        ``graphs.tree.Heads``."""
        raise NotImplementedError

    def predicted(self, y: Tensor) -> Tensor:
        """What ``lm_head`` is multiplied with. y: what drafts a level -> [..., H]."""
        return y

    def besides(self, ids: Tensor | None, embed: Tensor, lm_head: Tensor) -> dict[str, Tensor]:
        """What a checkpoint holds besides the parameters. ids: the draft vocabulary, None for all tokens; embed,
        lm_head: the target's."""
        return {} if ids is None else {"token_map": ids.cpu()}

    def about(self) -> dict[str, Any]:
        """config.json."""
        keep = (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "rms_norm_eps",
            "max_position_embeddings",
            "rope_parameters",
            "attention_bias",
            "mlp_bias",
        )
        kind = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "torch_dtype": "float16",
        }
        return kind | {name: getattr(self.config, name) for name in keep}

    def stored_as(self, name: str) -> str:
        """A parameter's name in the released checkpoints."""
        return name


class Serial(Drafter):
    """Serial layers, whose first step reads what the target has read, and each further one what the step before has
    drafted.

    config: of the layers. ahead: see ``graphs.drafter.Drafter``.
    """

    ahead = 0
    layers: nn.ModuleList

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        rotary = LlamaRotaryEmbedding(config)
        self.inverse: Tensor
        self.register_buffer("inverse", rotary.inv_freq, persistent=False)
        self.scaling: float = rotary.attention_scaling

    def features(self, read: Tensor) -> Tensor:
        """What the first step has in place of another step's result. read: [..., K], what the drafter reads of the
        target -> [..., H]."""
        return read

    @abstractmethod
    def fuse(self, embedded: Tensor, hidden: Tensor) -> Any:
        """What the first layer takes. embedded: a token's; hidden: ``features``, or what the step before returned; both
        [..., H]."""

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [B, n, d]. positions: int64 [B, n]."""
        angle = positions[..., None].float() * self.inverse.float()
        angle = torch.cat((angle, angle), -1)
        return angle.cos() * self.scaling, angle.sin() * self.scaling

    def read_text(self, embedded: Tensor, read: Tensor) -> tuple[Tensor, list[Cache]]:
        """See ``Drafter``. Serial step 1 of every position p, which reads (x of p + 1, h of p): y [B, n, H] and the
        layers' caches."""
        return self.extend(embedded[:, 1:], read[:, :-1])

    def extend(self, embedded: Tensor, read: Tensor) -> tuple[Tensor, list[Cache]]:
        """embedded: [B, n, H], read: [B, n, K], row by row what ``fuse`` takes -> y [B, n, H] and the layers'
        caches."""
        x = self.fuse(embedded, self.features(read))
        rotary = self.rotary(torch.arange(embedded.shape[1], device=embedded.device)[None])
        caches: list[Cache] = []
        for layer in self.serial:
            q, k, v = layer.project(x, rotary)
            caches.append((k, v))
            x = layer.finish(x, q, (k, v), None)
        return x, caches

    def step(
        self,
        embedded: Tensor,
        hidden: Tensor,
        anchors: Anchors,
        caches: list[Cache],
        beside: list[list[Cache]] | None = None,
    ) -> Tensor:
        """A further serial step from every anchor: its row sees the caches up to the anchor, the anchor's rows of
        earlier such steps, and itself.

        embedded: [N, S, H], the drafted token; hidden: [N, S, H], what drafted it; beside: keys and values of those
        steps, layer by layer, to which it adds its own -> [N, S, H].
        """
        beside = [[] for _ in caches] if beside is None else beside
        x, (records, span), earlier = self.fuse(embedded, hidden), embedded.shape[:2], len(beside[0])
        rotary = self.rotary(anchors.place + 1 + earlier)
        keys = torch.arange(caches[0][0].shape[2], device=embedded.device)
        own = torch.eye(span, dtype=torch.bool, device=embedded.device).expand(records, -1, -1)
        mask = torch.cat((keys <= anchors.place[..., None], *[own] * (earlier + 1)), -1)[:, None]
        for layer, cached, rows in zip(self.serial, caches, beside, strict=True):
            q, k, v = layer.project(x, rotary)
            rows.append((k, v))
            cache = tuple(torch.cat((cached[i][anchors.record], *(row[i] for row in rows)), 2) for i in (0, 1))
            x = layer.finish(x, q, cache, mask)  # type: ignore[arg-type]
        return x

    @property
    def serial(self) -> list[SerialLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def grow_from(
        self, seen: tuple[Tensor, list[Cache]], place: int, pending: Tensor, embed: Tensor
    ) -> tuple[Tensor, Step]:
        """See ``Drafter``."""
        y, caches = seen
        length, beside = place + 1 + self.ahead, [list[Cache]() for _ in caches]

        def step(tokens: Tensor, hidden: Tensor, slots: Tensor) -> Tensor:
            x, count = self.fuse(embed[tokens].float()[None], hidden[None]), len(tokens)
            rotary = self.rotary(torch.full((1, count), length + len(beside[0]), device=tokens.device))
            visible = torch.cat((torch.ones(count, length, dtype=torch.bool, device=tokens.device), slots), 1)[
                None, None
            ]
            for layer, cache, own in zip(self.serial, caches, beside, strict=True):
                q, k, v = layer.project(x, rotary)
                own.append((k, v))
                keys, values = (torch.cat((cache[i][:, :, :length], *(rows[i] for rows in own)), 2) for i in (0, 1))
                x = layer.finish(x, q, (keys, values), visible)
            return x[0]

        return y[0, length - 1 : length], step
