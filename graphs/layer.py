"""The decoder layer of targets and drafters, and the shape of a model. Both are Llama's, with flags for other
architectures."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dialects.plain import Plain, Rows
from .dialects.quantization import JOINED, Scheme, Schemes


@dataclass(frozen=True)
class LlamaShape:
    """The sizes in a Llama configuration, in elements. ``eps`` is the epsilon of the norms.

    qkv_bias, o_bias, mlp_bias: which projections have a bias. qk_norm: whether the heads of queries and keys are normed
    before they are rotated, as in Qwen3 (arXiv 2505.09388).
    """

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def matrix(
    shape: tuple[int, ...], scheme: Scheme | None
) -> tuple[nn.Parameter, nn.Parameter | None, nn.Parameter | None]:
    """Parameters of matrices [..., N, K]: codes, scales and zero points (None without) if the scheme fits the shape;
    else the values, None and None."""
    if scheme is None or not scheme.fits(shape[-1]):
        return nn.Parameter(torch.empty(shape)), None, None

    def integers(shape: tuple[int, ...]) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=scheme.codes), requires_grad=False)

    codes, scales = scheme.shapes(shape)
    return (
        integers(codes),
        nn.Parameter(torch.empty(scales)),
        integers(scheme.zeros_shape(shape)) if scheme.zeros else None,
    )


class Linear(nn.Module):
    """A linear layer. ``weight``, ``scale`` and ``zero`` are the parameters of ``matrix``; ``scale`` is None if it is
    not quantized."""

    def __init__(self, inputs: int, outputs: int, bias: bool, ops: type[Plain], scheme: Scheme | None) -> None:
        super().__init__()
        self.ops = ops
        self.weight, self.scale, self.zero = matrix((outputs, inputs), scheme)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its inputs."""
        return self.weight.dtype if self.scale is None else self.scale.dtype

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, inputs] -> [n, outputs]."""
        return self.ops.linear(x, self.weight, self.scale, self.bias, self.zero)


def _project(
    module: nn.Module, whole: str, inputs: int, widths: Sequence[int], bias: bool, ops: type[Plain], schemes: Schemes
) -> None:
    """Adds linear layers to a module: the joined layer ``whole`` of ``JOINED`` if the schemes join its parts, else each
    part. widths: outputs of each part."""
    parts, outputs = ((whole,), [sum(widths)]) if schemes.joins(whole, inputs) else (JOINED[whole], widths)
    for part, width in zip(parts, outputs, strict=True):
        module.add_module(part, Linear(inputs, width, bias, ops, schemes[f"{part}.weight"]))


def _projected(module: nn.Module, whole: str, x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
    """The outputs of the layers that ``_project`` added, x [n, inputs] -> [n, width] for each part, and then that of a
    joined layer."""
    if hasattr(module, whole):
        joined = module.get_submodule(whole)(x)
        return *joined.split(widths, dim=-1), joined
    return [module.get_submodule(part)(x) for part in JOINED[whole]]


class Embedding(nn.Module):
    """An embedding table. ``weight`` and ``scale`` are the parameters of ``matrix``."""

    def __init__(self, vocabulary: int, hidden: int, ops: type[Plain], scheme: Scheme | None) -> None:
        super().__init__()
        self.vocabulary, self.hidden, self.ops = vocabulary, hidden, ops
        self.weight, self.scale, _ = matrix((vocabulary, hidden), scheme)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [n] -> [n, hidden]."""
        return self.ops.embedding(tokens, self.weight, self.scale, self.hidden)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float, ops: type[Plain]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.ops = eps, ops

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] -> [..., size]."""
        return self.ops.rms_norm(x, self.weight, self.eps)


class Rotary(nn.Module):
    """Precomputed rotary tables, so that all backends use the same values. cos, sin: [positions, head dim / 2]."""

    def __init__(self, positions: int, head_dim: int) -> None:
        super().__init__()
        self.cos = nn.Parameter(torch.empty(positions, head_dim // 2))
        self.sin = nn.Parameter(torch.empty(positions, head_dim // 2))


class Attention(nn.Module):
    """The projections of an attention block. The caller does the attention itself (``Plain.attend``)."""

    def __init__(self, shape: LlamaShape, ops: type[Plain], schemes: Schemes, inputs: int | None = None) -> None:
        """inputs: the width of the rows that it reads, H by default."""
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.widths = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        _project(self, "qkv_proj", inputs or shape.hidden, self.widths, shape.qkv_bias, ops, schemes)
        self.o_proj = Linear(shape.heads * shape.head_dim, shape.hidden, shape.o_bias, ops, schemes["o_proj.weight"])
        self.q_norm, self.k_norm = (Norm(shape.head_dim, shape.eps, ops) if shape.qk_norm else None for _ in range(2))

    def forward(self, x: Tensor, rotary: Rotary, position: Tensor, dtype: torch.dtype) -> Rows:
        """x: [n, H], position: int64 [n], dtype: of the caches."""
        q, k, v, *joined = _projected(self, "qkv_proj", x, self.widths)
        if self.q_norm and self.k_norm:
            q, k, joined = self._normed(q, self.q_norm), self._normed(k, self.k_norm), []
        q, k, v, *joined = (y.to(dtype) for y in (q, k, v, *joined))
        return Rows(q, k, v, self.heads, self.kv_heads, position, rotary.cos, rotary.sin, *joined)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        """Each head of x [n, heads * head dim] normed."""
        return norm(x.reshape(-1, x.shape[1] // self.head_dim, self.head_dim)).reshape(-1, x.shape[1])


class MLP(nn.Module):
    def __init__(self, shape: LlamaShape, ops: type[Plain], schemes: Schemes) -> None:
        super().__init__()
        self.widths = [shape.intermediate] * 2
        _project(self, "gate_up_proj", shape.hidden, self.widths, shape.mlp_bias, ops, schemes)
        self.down_proj = Linear(shape.intermediate, shape.hidden, shape.mlp_bias, ops, schemes["down_proj.weight"])

    def forward(self, x: Tensor) -> Tensor:
        gate, up, *_ = _projected(self, "gate_up_proj", x, self.widths)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """A decoder layer in two halves; the caller does the attention between them. Parameters are named as in
    checkpoints."""

    def __init__(self, shape: LlamaShape, ops: type[Plain], schemes: Schemes, input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps, ops) if input_norm else nn.Identity()
        self.self_attn = Attention(shape, ops, schemes.within("self_attn"))
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps, ops)
        self.mlp = MLP(shape, ops, schemes.within("mlp"))

    def project(self, x: Tensor, rotary: Rotary, position: Tensor, dtype: torch.dtype) -> Rows:
        """x: [n, H], position: int64 [n], dtype: of the caches."""
        return self.self_attn(self.input_layernorm(x), rotary, position, dtype)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """x: [n, H], attended: [n, heads * head dim] -> [n, H]."""
        x = x + self.self_attn.o_proj(attended.to(x.dtype))
        return x + self.mlp(self.post_attention_layernorm(x))
