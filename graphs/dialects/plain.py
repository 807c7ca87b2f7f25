"""The tensor operations that backends spell differently, and their spelling in plain operators.

A dialect is a class of static methods. Run eagerly, every dialect computes the torch expressions of ``Plain``, so
golden runs do not depend on the dialect. Traced, a dialect emits the operators that its backends support. Rows are [n,
heads * head dim] throughout.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.onnx import ops

from ..tracing import is_traced
from .quantization import FP8, bits_of, centered, dequantize, input_major

Cache = tuple[Tensor, Tensor]  # keys and values, each [1, kv heads, S, head dim]
_SLICE_ELEMENTS = 16 << 20


@dataclass(frozen=True)
class Rows:
    """Queries, keys and values of the rows of a pass, not yet rotated, and the positions of the rows.

    q: [n, heads * head dim]; k, v: [n, kv heads * head dim]; position: int64 [n]; cos, sin: [positions, head dim / 2];
    joined: q, k and v side by side, if one product computed them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    heads: int
    kv_heads: int
    position: Tensor
    cos: Tensor
    sin: Tensor
    joined: Tensor | None = None


@dataclass(frozen=True)
class Reach:
    """What the n rows of a pass attend to, once they are written at ``past_length``.

    mask: bool [n, n] (row attends to row), None for causal rows; rows: n; past_length: int64 [1]; cache: any cache of
    the pass. queries: query heads per kv head.
    """

    mask: Tensor | None
    rows: int
    past_length: Tensor
    cache: Tensor
    queries: int = 1


@dataclass(frozen=True)
class Past:
    """A cache before and after a call of ``attend``.

    cache: the cache before; length: int64 [1], its filled positions then; written: the keys and values that ``attend``
    returned; count: int64 [1], how many rows of that pass are not padding.
    """

    cache: Cache
    length: Tensor
    written: Cache
    count: Tensor


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[n, heads * d] -> [1, heads, n, d]."""
    return x.reshape(1, x.shape[0], heads, -1).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """[1, heads, n, d] -> [n, heads * d]; x of the latter shape is returned unchanged."""
    return x if x.dim() == 2 else x.transpose(1, 2).reshape(x.shape[2], -1)


class Plain:
    """The reference that every dialect computes when run eagerly."""

    opset = 24
    block: int | None = None  # if given, caches have any multiple of this many positions instead of the capacity
    appends = False  # whether a pass returns only the keys and values of its rows
    # An attribute of MatMulNBits: 4 rounds activations to int8, 0 leaves the choice to the backend. For 8-bit codes,
    # ONNX Runtime's CPU provider has kernels for 4 only; with any other value it unpacks the matrix in every pass.
    accuracy_level = 0
    joins_norms = False  # whether norms are joined with the additions before them

    @classmethod
    def linear(
        cls, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, zero: Tensor | None = None
    ) -> Tensor:
        """x @ weight.T + bias. x: [n, K]; weight: [N, K], or ``Scheme`` codes if there is a scale, with zero points or
        without; bias: [N] -> [n, N].

        When traced, fp8 and two's complement codes are read by DequantizeLinear, others by MatMulNBits.
        """
        if scale is None:
            return F.linear(x, weight, bias)
        outputs, inputs = scale.shape[0], x.shape[1]
        if input_major(weight):
            product = cls._whole(x, weight, scale)
            return product if bias is None else product + bias
        block = 0 if weight.dtype == FP8 else inputs // weight.shape[1]
        bits = bits_of(weight, inputs)
        if not is_traced():
            rows = max(1, _SLICE_ELEMENTS // inputs)
            zeros = itertools.repeat(None) if zero is None else zero.split(rows)
            slices = zip(weight.split(rows), scale.split(rows), zeros, strict=False)
            out = torch.cat([x @ dequantize(codes, own, bits, middle).T for codes, own, middle in slices], dim=-1)
        elif weight.dtype != torch.uint8:
            values = ops.symbolic(
                "DequantizeLinear",
                (weight, scale) if zero is None else (weight, scale, zero),
                {"axis": 1, "block_size": block} if block else {"axis": 0},
                dtype=scale.dtype,
                shape=[outputs, inputs],
                version=21,
            )
            out = F.linear(x, values)
        else:
            out = ops.symbolic(
                "com.microsoft::MatMulNBits",
                (x, weight, scale) if zero is None else (x, weight, scale, zero),
                {"K": inputs, "N": outputs, "bits": bits, "block_size": block, "accuracy_level": cls.accuracy_level},
                dtype=x.dtype,
                shape=[x.shape[0], outputs],
                version=1,
            )
        return out if bias is None else out + bias

    @staticmethod
    def embedding(tokens: Tensor, weight: Tensor, scale: Tensor | None, hidden: int) -> Tensor:
        """Rows of a table. tokens: int64 [n]; weight: [V, hidden], or ``Scheme`` codes in blocks if there is a scale ->
        [n, hidden].

        Codes are read by GatherBlockQuantized, which only ONNX Runtime has.
        """
        if scale is None:
            return F.embedding(tokens, weight)
        bits = bits_of(weight, hidden)
        if not is_traced():
            return dequantize(weight[tokens], scale[tokens], bits)
        return ops.symbolic(
            "com.microsoft::GatherBlockQuantized",
            (weight, tokens, scale),
            {"gather_axis": 0, "quantize_axis": 1, "block_size": hidden // scale.shape[1], "bits": bits},
            dtype=scale.dtype,
            shape=[tokens.shape[0], hidden],
            version=1,
        )

    @staticmethod
    def _whole(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """x @ weight * scale. x: [n, K]; weight: input-major codes [K, N]; scale: [N] -> [n, N]."""
        columns = max(1, _SLICE_ELEMENTS // weight.shape[0])
        return torch.cat([x @ centered(part, x.dtype) for part in weight.split(columns, dim=1)], dim=-1) * scale

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last axis (arXiv 1910.07467), summed in fp32. x: [..., H] -> [..., H]."""
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    @staticmethod
    def rotary(x: Tensor, rows: Rows) -> Tensor:
        """Rotary embedding, halves rotated as Llama's checkpoints expect (arXiv 2104.09864). x: [1, heads, n, d]."""
        half = x.shape[-1] // 2
        first, second = x.float()[..., :half], x.float()[..., half:]
        c, s = (Plain.gather(table, rows.position).float() for table in (rows.cos, rows.sin))
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)

    @staticmethod
    def attention_mask(reach: Reach) -> Any:
        """The attention mask of a pass, as ``attend`` takes it. Here bool [n, S]: every position below
        ``past_length``, and those rows that the mask allows."""
        mask, past_length, cache, rows = reach.mask, reach.past_length, reach.cache, reach.rows
        row = torch.arange(cache.shape[2], device=cache.device) - past_length
        if mask is None:
            return row[None, :] <= torch.arange(rows, device=cache.device)[:, None]
        of_rows = (row >= 0) & (row < rows)
        return (row < 0) | (of_rows & mask.index_select(1, torch.where(of_rows, row, 0)))

    @classmethod
    def attend(
        cls, rows: Rows, cache: Cache, past_length: Tensor, attention_mask: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Writes the rows' keys and values at ``past_length`` and attends to the cache.

        Returns the attended rows [n, heads * d] and both caches, or only the rows' keys and values if the dialect
        ``appends``.
        """
        return cls.attend_rotated(cls.rotated(rows), cache, past_length, attention_mask)

    @classmethod
    def rotated(cls, rows: Rows) -> Rows:
        """The first part of ``attend``, in which rows are independent: splits the heads, [1, heads, n, d], and rotates
        queries and keys."""
        q, k = split_heads(rows.q, rows.heads), split_heads(rows.k, rows.kv_heads)
        return replace(rows, q=cls.rotary(q, rows), k=cls.rotary(k, rows), v=cls._values(rows.v, rows.kv_heads))

    @classmethod
    def _values(cls, v: Tensor, kv_heads: int) -> Tensor:
        """[n, kv heads * d] -> [1, kv heads, n, d], or as they are cached when traced."""
        width = v.shape[1]
        return split_heads(v, width // cls.value_part(width // kv_heads) if is_traced() else kv_heads)

    @staticmethod
    def value_part(head_dim: int) -> int:
        """The columns of a part of the values as they are cached, [1, kv heads * d / part, S, part]."""
        return head_dim

    @classmethod
    def attend_rotated(
        cls, rows: Rows, cache: Cache, past_length: Tensor, attention_mask: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The second part of ``attend``. rows: what ``rotated`` returns."""
        written = past_length + torch.arange(rows.k.shape[2], device=rows.k.device)
        keys, values = cache[0].index_copy(2, written, rows.k), cache[1].index_copy(2, written, rows.v)
        out = F.scaled_dot_product_attention(rows.q, keys, values, attn_mask=attention_mask, enable_gqa=True)
        return join_heads(out), keys, values

    @classmethod
    def attend_readonly(cls, rows: Rows, past: Past, uncached: list[Cache], mask: Tensor) -> tuple[Tensor, Cache]:
        """Attends to a cache as ``attend`` left it, and to rows that are not written to the cache.

        uncached: the keys and values that earlier calls returned; mask: bool [n, m], which of these rows and then of
        ``rows``, m in all, each row attends to. Returns the attended rows [n, heads * d], and their keys and values for
        later calls.
        """
        return cls._attend_uncached(rows, past.written, past.length + past.count, uncached, mask)

    @classmethod
    def _attend_uncached(
        cls, rows: Rows, cache: Cache, length: Tensor, uncached: list[Cache], mask: Tensor
    ) -> tuple[Tensor, Cache]:
        """``attend_readonly`` over the first ``length`` (int64 [1]) positions of a cache."""
        apart = cls.rotated(rows)
        q, new = apart.q, (apart.k, apart.v)
        keys, values = (torch.cat([pair[i] for pair in [*uncached, new]], dim=2) for i in (0, 1))
        _, heads, n, d = q.shape
        capacity = cache[0].shape[2]
        grouped = (q * d**-0.5).reshape(rows.kv_heads, -1, d)
        lowest = torch.finfo(q.dtype).min

        def scores(keys: Tensor, mask: Tensor) -> Tensor:
            raw = (grouped @ keys[0].transpose(1, 2)).reshape(rows.kv_heads, -1, n, keys.shape[2])
            return torch.where(mask, raw, lowest)

        filled = torch.arange(capacity, device=q.device) < length
        all_scores = torch.cat((scores(cache[0], filled), scores(keys, mask)), dim=-1)
        weights = all_scores.float().softmax(-1).to(q.dtype).reshape(rows.kv_heads, grouped.shape[1], -1)
        out = weights[..., :capacity] @ cache[1][0] + weights[..., capacity:] @ values[0]
        return join_heads(out.reshape(1, heads, n, d)), new

    @classmethod
    def residual(
        cls, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]
    ) -> Tensor:
        """The residual blocks of several heads, batched: x + SiLU(x @ weight + bias), block after block.

        x: [heads, P, H]; weights: [heads, H, H] each, input-major, or output-major ``Scheme`` codes if there are
        scales, which are multiplied head by head; biases: [heads, 1, H] each. Returns [heads, P, H].
        """
        if scales:
            return cls._by_head(x, weights, scales, biases)
        for weight, bias in zip(weights, biases, strict=True):
            x = x + F.silu(x @ weight + bias)
        return x

    @classmethod
    def _by_head(
        cls, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]
    ) -> Tensor:
        """``residual`` with a product per head and block. Without scales, only when traced."""

        def part(stacked: Tensor, i: int) -> Tensor:
            """``stacked[i]``, which ``exporter.tracing.trace`` turns into a separate parameter over the same bytes."""
            if not is_traced():
                return stacked[i]
            shape = stacked.shape[1:]
            return ops.symbolic("gumiho::Part", (stacked,), {"index": i}, dtype=stacked.dtype, shape=shape, version=1)

        outputs = []
        for i in range(x.shape[0]):
            head = x[i]
            for j, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                if scales:
                    out = cls.linear(head, part(weight, i), part(scales[j], i), part(bias, i))
                else:
                    inputs = (head, part(weight, i), part(bias, i))
                    out = ops.symbolic("Gemm", inputs, {}, dtype=x.dtype, shape=head.shape, version=13)
                head = head + F.silu(out)
            outputs.append(head)
        return torch.stack(outputs)

    @staticmethod
    def gather(x: Tensor, index: Tensor) -> Tensor:
        """Entries of the first axis. index: int64 [n] -> [n, *x.shape[1:]]."""
        if is_traced():  # emitted explicitly, because the tracer would reshape the index first
            shape = [index.shape[0], *x.shape[1:]]
            return ops.symbolic("Gather", (x, index), {"axis": 0}, dtype=x.dtype, shape=shape, version=13)
        return x.index_select(0, index)

    @staticmethod
    def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Values and indices of the k largest along the last axis, in descending order; ties go to the lower index."""
        if is_traced():
            return torch.topk(x, k, dim=-1)  # ONNX specifies the order of ties, torch does not
        values, indices = x.sort(dim=-1, descending=True, stable=True)
        return values[..., :k], indices[..., :k]

    @staticmethod
    def best(x: Tensor, k: int) -> Tensor:
        """Indices [k] of the k largest of x [n], in ``top_k``'s order, on every backend.

        ONNX specifies the order of ties, but not every backend follows it. When traced, all pairs of values are
        compared.
        """
        if not is_traced():
            return x.sort(descending=True, stable=True)[1][:k]
        index = torch.arange(x.shape[0])
        # One row per value that may rank higher, so that the sum keeps its axis: MIGraphX 2.15 (ROCm 7.2.4) fails to
        # compile a sum that is squeezed and broadcast along another axis.
        ahead = (x[:, None] > x[None, :]) | ((x[:, None] == x[None, :]) & (index[:, None] < index[None, :]))
        rank = ahead.to(torch.float32).sum(0, keepdim=True)
        at_rank = rank == torch.arange(k, dtype=torch.float32)[:, None]
        return torch.where(at_rank, index.to(torch.float32), 0.0).sum(1).to(torch.int64)
