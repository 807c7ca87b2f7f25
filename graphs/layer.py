"""The Llama decoder layer that target and drafter share, and the shape that describes a model."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ops import Plain, Rows


@dataclass(frozen=True)
class LlamaShape:
    """What a Llama configuration says of shapes. Sizes are in elements, ``eps`` is the norms' epsilon."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    attention_bias: bool = False
    mlp_bias: bool = False


class Norm(nn.Module):
    def __init__(self, shape: LlamaShape, ops: type[Plain]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.hidden))
        self.eps, self.ops = shape.eps, ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class Rotary(nn.Module):
    """Precomputed tables, so that no backend computes its own. cos, sin: [positions, head dim / 2]."""

    def __init__(self, positions: int, head_dim: int) -> None:
        super().__init__()
        self.cos = nn.Parameter(torch.empty(positions, head_dim // 2))
        self.sin = nn.Parameter(torch.empty(positions, head_dim // 2))


class Attention(nn.Module):
    """Only the projections: which rows and caches attend to each other is the caller's business."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        bias = shape.attention_bias
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=bias)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=bias)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=bias)

    def forward(self, x: Tensor, rotary: Rotary, position: Tensor) -> Rows:
        """x: [n, H], position: int64 [n]."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return Rows(q, k, v, self.heads, self.kv_heads, position, rotary.cos, rotary.sin)


class MLP(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer in two halves, with the attention itself between them. Parameter names are the checkpoints'."""

    def __init__(self, shape: LlamaShape, ops: type[Plain], input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape, ops) if input_norm else nn.Identity()
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape, ops)
        self.mlp = MLP(shape)

    def project(self, x: Tensor, rotary: Rotary, position: Tensor) -> Rows:
        """x: [n, H], position: int64 [n]."""
        return self.self_attn(self.input_layernorm(x), rotary, position)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """x: [n, H], attended: [n, heads * head dim] -> [n, H]."""
        x = x + self.self_attn.o_proj(attended)
        return x + self.mlp(self.post_attention_layernorm(x))
