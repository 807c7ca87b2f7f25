"""The tensor operations that backends spell differently, each once per dialect.

A dialect is a class of static methods. Run eagerly, every dialect computes ``Plain``'s torch expressions, with which golden
runs are recorded; traced, it emits the operators its backends know. Rows are [n, heads * head dim] throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.onnx import is_in_onnx_export, ops

Cache = tuple[Tensor, Tensor]  # keys and values, each [1, kv heads, S, head dim]
_SLICE_ELEMENTS = 16 << 20


FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Scheme:
    """How matrices [..., N, K] are quantized: as codes and scales, w = scale * code.

    codes: torch.float8_e4m3fn are numbers of their own, [..., N, K], with a scale a row, [..., N]. All others have a scale a
    block, [..., N, K / block], and are of 8 bits, [..., N, K / block, block], or of 4, [..., N, K / block, block / 2]: two to a
    byte, the first in the low bits. torch.int8 says that they are two's complement, as ONNX has them, torch.uint8 that each is
    half its range more than it means, as MatMulNBits wants them. block: numbers of a row that share a scale; 0 for whole rows,
    as fp8 has them, and as int8 has them where products are of whole numbers: these codes are input-major, [K, N].
    """

    block: int
    codes: torch.dtype
    bits: int = 4

    @property
    def input_major(self) -> bool:
        return not self.block and self.codes == torch.int8

    def fits(self, inputs: int) -> bool:
        """Whether rows of so many numbers are whole blocks, and several: MIGraphX refuses scales of which a row has one. Matrices
        of others are not quantized."""
        return not self.block or (inputs > self.block and inputs % self.block == 0)

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of codes and scales."""
        if not self.block:
            return shape[::-1] if self.input_major else shape, shape[:-1]
        blocks = (*shape[:-1], shape[-1] // self.block)
        return (*blocks, self.block * self.bits // 8), blocks


def bits_of(codes: Tensor, inputs: int) -> int:
    """Of a code, where a row has so many."""
    return 8 if codes.dtype == FP8 or input_major(codes) else 8 * codes.shape[-2] * codes.shape[-1] // inputs


def input_major(codes: Tensor) -> bool:
    """Whether they are a matrix [K, N] of whole numbers."""
    return codes.dtype == torch.int8 and codes.ndim == 2


def turned(codes: Tensor, bits: int) -> Tensor:
    """Codes of either kind, of so many bits, as bytes of the other: the top bit of each is turned."""
    return codes.view(torch.uint8) ^ (0x80 if bits == 8 else 0x88)


def dequantize(codes: Tensor, scale: Tensor, bits: int = 4) -> Tensor:
    """The numbers that ``Scheme`` codes and scales stand for, [..., N, K] of the scales' dtype. bits: of codes other than fp8."""
    if codes.dtype == FP8:
        return codes.to(scale.dtype) * scale[..., None]
    if input_major(codes):
        return codes.T.to(scale.dtype) * scale[:, None]
    moved = turned(codes, bits) if codes.dtype == torch.int8 else codes
    whole = moved if bits == 8 else torch.stack((moved & 15, moved >> 4), dim=-1).flatten(-2)
    return ((whole.to(scale.dtype) - 2 ** (bits - 1)) * scale[..., None]).flatten(-2)


@dataclass(frozen=True)
class Rows:
    """Queries, keys and values of the rows of a pass, not yet rotated, and where the rows sit.

    q: [n, heads * head dim]; k, v: [n, kv heads * head dim]; position: int64 [n]; cos, sin: [positions, head dim / 2].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    heads: int
    kv_heads: int
    position: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Past:
    """A cache behind a pass that ``attend`` has made.

    cache: as it was; length: int64 [1], its filled positions; written: what ``attend`` returned for it; count: int64 [1], how
    many of the rows of that pass count.
    """

    cache: Cache
    length: Tensor
    written: Cache
    count: Tensor


def _split(x: Tensor, heads: int) -> Tensor:
    """[n, heads * d] -> [1, heads, n, d]."""
    return x.reshape(1, x.shape[0], heads, -1).transpose(1, 2)


def _join(x: Tensor) -> Tensor:
    """[1, heads, n, d] -> [n, heads * d]."""
    return x.transpose(1, 2).reshape(x.shape[2], -1)


class Plain:
    """The reference every dialect computes when run eagerly."""

    opset = 24
    appends = False  # a pass returns its rows' keys and values alone
    # Of MatMulNBits: 4 has it round what it multiplies to int8, 0 says nothing. ONNX Runtime's CPU provider has kernels of 8 bits
    # for 4 alone, and unpacks the matrix in every pass for any other.
    accuracy_level = 0

    @classmethod
    def linear(cls, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias. x: [n, K]; weight: [N, K], or ``Scheme`` codes where there is a scale; bias: [N] -> [n, N].

        When traced, codes are spelled as they are kept: fp8 and two's complement by DequantizeLinear, others by MatMulNBits.
        """
        if scale is None:
            return F.linear(x, weight, bias)
        outputs, inputs = scale.shape[0], x.shape[1]
        if input_major(weight):
            made = cls._whole(x, weight, scale)
            return made if bias is None else made + bias
        block = 0 if weight.dtype == FP8 else inputs // weight.shape[1]
        bits = bits_of(weight, inputs)
        if not is_in_onnx_export():
            rows = max(1, _SLICE_ELEMENTS // inputs)
            slices = zip(weight.split(rows), scale.split(rows), strict=True)
            out = torch.cat([x @ dequantize(*part, bits).T for part in slices], dim=-1)
        elif weight.dtype != torch.uint8:
            numbers = ops.symbolic(
                "DequantizeLinear",
                (weight, scale),
                {"axis": 1, "block_size": block} if block else {"axis": 0},
                dtype=scale.dtype,
                shape=[outputs, inputs],
                version=21,
            )
            out = F.linear(x, numbers)
        else:
            out = ops.symbolic(
                "com.microsoft::MatMulNBits",
                (x, weight, scale),
                {"K": inputs, "N": outputs, "bits": bits, "block_size": block, "accuracy_level": cls.accuracy_level},
                dtype=x.dtype,
                shape=[x.shape[0], outputs],
                version=1,
            )
        return out if bias is None else out + bias

    @staticmethod
    def _whole(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """x @ weight * scale. x: [n, K]; weight: input-major codes [K, N]; scale: [N] -> [n, N]."""
        columns = max(1, _SLICE_ELEMENTS // weight.shape[0])
        return torch.cat([x @ part.to(x.dtype) for part in weight.split(columns, dim=1)], dim=-1) * scale

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last axis (arXiv 1910.07467), summed in fp32. x: [n, H] -> [n, H]."""
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
    def sight(mask: Tensor | None, rows: int, past_length: Tensor, cache: Tensor) -> Tensor | None:
        """What each row sees once the rows are written behind ``past_length``, in the form that ``attend`` takes.

        mask: bool [n, n] (row attends to row), None for causal rows; past_length: int64 [1]; cache: any cache of the pass.
        Here bool [n, S]: every position below ``past_length``, and of the rows those the mask names.
        """
        row = torch.arange(cache.shape[2], device=cache.device) - past_length
        if mask is None:
            return row[None, :] <= torch.arange(rows, device=cache.device)[:, None]
        own = (row >= 0) & (row < rows)
        return (row < 0) | (own & mask.index_select(1, torch.where(own, row, 0)))

    @classmethod
    def attend(cls, rows: Rows, cache: Cache, past_length: Tensor, sight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Writes the rows' keys and values behind ``past_length`` and attends to the cache.

        Returns the attended rows [n, heads * d] and both caches, or where the dialect appends, the rows' part of them alone.
        """
        k, v = cls.rotary(_split(rows.k, rows.kv_heads), rows), _split(rows.v, rows.kv_heads)
        written = past_length + torch.arange(k.shape[2], device=k.device)
        keys, values = cache[0].index_copy(2, written, k), cache[1].index_copy(2, written, v)
        q = cls.rotary(_split(rows.q, rows.heads), rows)
        return _join(F.scaled_dot_product_attention(q, keys, values, attn_mask=sight, enable_gqa=True)), keys, values

    @classmethod
    def peek(cls, rows: Rows, past: Past, beside: list[Cache], seen: Tensor) -> tuple[Tensor, Cache]:
        """Attends to a cache, as ``attend`` left it, and to rows beside it that are never written down.

        beside: what earlier calls returned for their rows; seen: bool [n, m], which of those m rows and of its own, in this
        order, each row sees. Returns the attended rows [n, heads * d], and the rows' own keys and values for calls to come.
        """
        return cls._beside(rows, past.written, past.length + past.count, beside, seen)

    @classmethod
    def _beside(cls, rows: Rows, cache: Cache, length: Tensor, beside: list[Cache], seen: Tensor) -> tuple[Tensor, Cache]:
        """``peek`` at the first ``length`` (int64 [1]) positions of a cache."""
        own = cls.rotary(_split(rows.k, rows.kv_heads), rows), _split(rows.v, rows.kv_heads)
        keys, values = (torch.cat([pair[i] for pair in [*beside, own]], dim=2) for i in (0, 1))
        q = cls.rotary(_split(rows.q, rows.heads), rows)
        _, heads, n, d = q.shape
        capacity = cache[0].shape[2]
        grouped = (q * d**-0.5).reshape(rows.kv_heads, -1, d)
        lowest = torch.finfo(q.dtype).min

        def scores(keys: Tensor, mask: Tensor) -> Tensor:
            raw = (grouped @ keys[0].transpose(1, 2)).reshape(rows.kv_heads, -1, n, keys.shape[2])
            return torch.where(mask, raw, lowest)

        counts = torch.arange(capacity, device=q.device) < length
        both = torch.cat((scores(cache[0], counts), scores(keys, seen)), dim=-1)
        weights = both.float().softmax(-1).to(q.dtype).reshape(rows.kv_heads, grouped.shape[1], -1)
        out = weights[..., :capacity] @ cache[1][0] + weights[..., capacity:] @ values[0]
        return _join(out.reshape(1, heads, n, d)), own

    @classmethod
    def residual(cls, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        """Residual blocks of several heads side by side: x + SiLU(x @ weight + bias), block after block.

        x: [heads, P, H]; weights: [heads, H, H] each, input-major, or ``Scheme`` codes where there are scales, which are
        output-major and have a product per head; biases: [heads, 1, H] each. Returns [heads, P, H].
        """
        if scales:
            return cls._by_head(x, weights, scales, biases)
        for weight, bias in zip(weights, biases, strict=True):
            x = x + F.silu(x @ weight + bias)
        return x

    @classmethod
    def _by_head(cls, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        """``residual``, a product per head and block; of numbers only when traced."""

        def part(stacked: Tensor, i: int) -> Tensor:
            """``stacked[i]``, which ``exporter.trace`` turns into a parameter of its own over the same bytes."""
            if not is_in_onnx_export():
                return stacked[i]
            shape = stacked.shape[1:]
            return ops.symbolic("gumiho::Part", (stacked,), {"index": i}, dtype=stacked.dtype, shape=shape, version=1)

        done = []
        for i in range(x.shape[0]):
            head = x[i]
            for j, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                if scales:
                    out = cls.linear(head, part(weight, i), part(scales[j], i), part(bias, i))
                else:
                    inputs = (head, part(weight, i), part(bias, i))
                    out = ops.symbolic("Gemm", inputs, {}, dtype=x.dtype, shape=head.shape, version=13)
                head = head + F.silu(out)
            done.append(head)
        return torch.stack(done)

    @staticmethod
    def gather(x: Tensor, index: Tensor) -> Tensor:
        """Entries of the first axis. index: int64 [n] -> [n, *x.shape[1:]]."""
        if is_in_onnx_export():  # spelled out, since the tracer would reshape the index first
            shape = [index.shape[0], *x.shape[1:]]
            return ops.symbolic("Gather", (x, index), {"axis": 0}, dtype=x.dtype, shape=shape, version=13)
        return x.index_select(0, index)

    @staticmethod
    def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest of the last axis in descending order, of equal values the one with the lower index first."""
        if is_in_onnx_export():
            return torch.topk(x, k, dim=-1)  # ONNX promises the order of ties that torch leaves open
        values, indices = x.sort(dim=-1, descending=True, stable=True)
        return values[..., :k], indices[..., :k]

    @staticmethod
    def best(x: Tensor, k: int) -> Tensor:
        """Indices [k] of the k largest of x [n], in ``top_k``'s order, on every backend.

        ONNX promises how ties are broken and not every backend keeps it: when traced, each value is compared with each.
        """
        if not is_in_onnx_export():
            return x.sort(descending=True, stable=True)[1][:k]
        index = torch.arange(x.shape[0])
        # A row for each value that may be ahead, so that the sum keeps its place: MIGraphX 2.15 (ROCm 7.2.4) fails to compile a sum
        # that is squeezed and spread along another axis.
        ahead = (x[:, None] > x[None, :]) | ((x[:, None] == x[None, :]) & (index[:, None] < index[None, :]))
        rank = ahead.to(torch.float32).sum(0, keepdim=True)
        place = rank == torch.arange(k, dtype=torch.float32)[:, None]
        return torch.where(place, index.to(torch.float32), 0.0).sum(1).to(torch.int64)


class Standard(Plain):
    """Opset 24 of the default ONNX domain: normalization, rotary embedding and attention are single operators, caches are
    written in place when input and output are bound to one address, and every shape but the rows' is static.
    """

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not is_in_onnx_export():
            return Plain.rms_norm(x, weight, eps)
        return ops.symbolic(
            "RMSNormalization",
            (x, weight),
            {"axis": -1, "epsilon": eps, "stash_type": 1},
            dtype=x.dtype,
            shape=x.shape,
            version=23,
        )

    @staticmethod
    def rotary(x: Tensor, rows: Rows) -> Tensor:
        if not is_in_onnx_export():
            return Plain.rotary(x, rows)
        inputs = (x.float(), rows.cos, rows.sin, rows.position[None])
        out = ops.symbolic("RotaryEmbedding", inputs, {"interleaved": 0}, dtype=torch.float32, shape=x.shape, version=23)
        return out.to(x.dtype)

    @classmethod
    def attend(cls, rows: Rows, cache: Cache, past_length: Tensor, sight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if not is_in_onnx_export():
            return super().attend(rows, cache, past_length, sight)
        q, k = cls.rotary(_split(rows.q, rows.heads), rows), cls.rotary(_split(rows.k, rows.kv_heads), rows)
        keys, values = (
            ops.symbolic(
                "TensorScatter", (past, new, past_length), {"axis": -2}, dtype=past.dtype, shape=past.shape, version=24
            )
            for past, new in zip(cache, (k, _split(rows.v, rows.kv_heads)), strict=True)
        )
        return _join(cls._attention(q, keys, values, sight, past_length + q.shape[2])), keys, values

    @staticmethod
    def _attention(q: Tensor, keys: Tensor, values: Tensor, sight: Tensor | None, used: Tensor) -> Tensor:
        """q: [1, heads, n, d]; keys, values: the caches, rows included; used: int64 [1], their filled positions."""
        # Scaled here: TensorRT would scale queries and keys by the root each, which is a pass over the whole cache.
        inputs = (q * q.shape[-1] ** -0.5, keys, values, None if sight is None else sight[None, None])
        return ops.symbolic("Attention", inputs, {"scale": 1.0}, dtype=q.dtype, shape=q.shape, version=24)


class Decomposed(Standard):
    """``Standard`` with attention spelled out, for devices whose fused one cannot be built or is wrong."""

    @staticmethod
    def _attention(q: Tensor, keys: Tensor, values: Tensor, sight: Tensor | None, used: Tensor) -> Tensor:
        assert sight is not None
        _, heads, n, d = q.shape
        kv_heads = keys.shape[1]
        grouped = (q * d**-0.5).reshape(kv_heads, -1, d)
        scores = (grouped @ keys[0].transpose(1, 2)).reshape(kv_heads, -1, n, keys.shape[2])
        weights = torch.where(sight, scores, torch.finfo(q.dtype).min).float().softmax(-1).to(q.dtype)
        return (weights.reshape(kv_heads, grouped.shape[1], -1) @ values[0]).reshape(1, heads, n, d)


class Contrib(Standard):
    """ONNX Runtime's own GroupQueryAttention, for its CPU provider: the cost of attention follows the length of the text
    instead of the cache's capacity, and no row is transposed. Caches are written in place as in ``Standard``. Rows over an
    empty cache are taken for a prompt in order, whatever their depth and mask: a tree needs one position before it.
    """

    opset = 23  # the last one that the ONNX Runtime of Python 3.10 knows
    accuracy_level = 4

    @staticmethod
    def sight(mask: Tensor | None, rows: int, past_length: Tensor, cache: Tensor) -> Tensor | None:
        """When traced: the rows' part of the mask as a bias, behind zeros for the past; None for causal rows."""
        if not is_in_onnx_export():
            return Plain.sight(mask, rows, past_length, cache)
        return None if mask is None else Contrib._bias(mask, past_length, cache.dtype)

    @staticmethod
    def _bias(mask: Tensor, past_length: Tensor, dtype: torch.dtype) -> Tensor:
        """[1, 1, n, past_length + m] from a mask [n, m]. The shape given here is short of the past: it is data."""
        bias = torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)[None, None]
        zero = torch.zeros(1, dtype=torch.int64)
        pads = torch.cat((zero, zero, zero, past_length, zero, zero, zero, zero))
        return ops.symbolic("Pad", (bias, pads), {"mode": "constant"}, dtype=dtype, shape=bias.shape, version=23)

    @staticmethod
    def _grouped(
        rows: Rows, q: Tensor, k: Tensor, v: Tensor, cache: Cache, length: Tensor, bias: Tensor | None, rotary: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """GroupQueryAttention over [n, width] rows. length: int64 [1], positions of the past."""
        total = (length + q.shape[0]).to(torch.int32)
        inputs = [q[None], k[None], v[None], *cache, total - 1, total]
        tables: list[Tensor | None] = [rows.cos, rows.sin, rows.position[None]] if rotary else [None, None, None]
        out, keys, values = ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            [*inputs, *tables, bias],
            {"num_heads": rows.heads, "kv_num_heads": rows.kv_heads, "do_rotary": int(rotary), "rotary_interleaved": 0},
            dtypes=[q.dtype, cache[0].dtype, cache[1].dtype],
            shapes=[q[None].shape, cache[0].shape, cache[1].shape],
            version=1,
        )
        return out[0], keys, values

    @classmethod
    def residual(cls, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        """When traced: a Gemm per head and block, since ONNX Runtime packs no weights of three dimensions."""
        if not is_in_onnx_export():
            return super().residual(x, weights, scales, biases)
        return cls._by_head(x, weights, scales, biases)

    @classmethod
    def attend(cls, rows: Rows, cache: Cache, past_length: Tensor, sight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if not is_in_onnx_export():
            return super().attend(rows, cache, past_length, sight)
        return cls._grouped(rows, rows.q, rows.k, rows.v, cache, past_length, sight, rotary=True)

    @staticmethod
    def best(x: Tensor, k: int) -> Tensor:
        return Plain.top_k(x, k)[1]  # ONNX Runtime's CPU provider keeps the promise

    @classmethod
    def _beside(cls, rows: Rows, cache: Cache, length: Tensor, beside: list[Cache], seen: Tensor) -> tuple[Tensor, Cache]:
        """When traced: attention over a copy of the cache's used part, which the operator itself extends by the rows."""
        if not is_in_onnx_export():
            return super()._beside(rows, cache, length, beside, seen)
        q, k = (_join(cls.rotary(_split(x, h), rows)) for x, h in ((rows.q, rows.heads), (rows.k, rows.kv_heads)))
        own = _split(k, rows.kv_heads), _split(rows.v, rows.kv_heads)
        zero, axis = torch.zeros(1, dtype=torch.int64), torch.full((1,), 2)
        before: list[Tensor] = []
        for i in (0, 1):
            used = ops.symbolic("Slice", (cache[i], zero, length, axis), {}, dtype=k.dtype, shape=cache[i].shape, version=13)
            parts = [used, *(pair[i] for pair in beside)]
            before.append(torch.cat(parts, dim=2) if beside else used)
        past = length + sum(pair[0].shape[2] for pair in beside)
        bias = cls._bias(seen, length, k.dtype)
        return cls._grouped(rows, q, k, rows.v, (before[0], before[1]), past, bias, rotary=False)[0], own


class Exact(Standard):
    """For quantized targets on ONNX Runtime's CPU provider: a row's numbers are the same to the last bit whatever other rows there
    are, and wherever its ancestors lie among them.

    The products round the rows they multiply to int8, and a rounding turns over on differences as small as another order of
    summation makes; a few layers on, these decide between tokens. The products themselves add up each row alike, in blocks of up to
    32 codes of 4 bits or 64 of 8 (docs/decisions.md), and those of whole rows in whole numbers, where there is no order; attention,
    whose order follows the places of the rows, adds up in double precision, where that order is lost when the sum is rounded.
    """

    accuracy_level = 4

    @staticmethod
    def _whole(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """When traced: each row is rounded to 127 steps of its largest number. ONNX Runtime's fast products are of unsigned bytes
        with signed ones."""
        if not is_in_onnx_export():
            return Plain._whole(x, weight, scale)
        largest = x.abs().amax(-1, keepdim=True)
        # Rounded by cutting off what is behind the point. A row of zeros is not a number here, and zeros again once it is scaled.
        steps = (x * (127 / largest) + 128.5).to(torch.uint8)
        inputs = (steps, weight, torch.tensor(1 / 127), scale, torch.tensor(128, dtype=torch.uint8))
        shape = [x.shape[0], weight.shape[1]]
        made = ops.symbolic("com.microsoft::MatMulIntegerToFloat", inputs, {}, dtype=x.dtype, shape=shape, version=1)
        return made * largest

    @staticmethod
    def sight(mask: Tensor | None, rows: int, past_length: Tensor, cache: Tensor) -> Tensor | None:
        """When traced: the rows' part of the mask as a bias in double precision, behind zeros for the past."""
        if not is_in_onnx_export():
            return Plain.sight(mask, rows, past_length, cache)
        own = torch.ones(rows, rows, dtype=torch.bool).tril() if mask is None else mask
        return Contrib._bias(own, past_length, torch.float64)[0, 0]

    @staticmethod
    def _attention(q: Tensor, keys: Tensor, values: Tensor, sight: Tensor | None, used: Tensor) -> Tensor:
        """The shapes given here are short of the past: it is data."""
        assert sight is not None
        _, heads, n, d = q.shape
        kv_heads = keys.shape[1]
        zero, axis = torch.zeros(1, dtype=torch.int64), torch.full((1,), 2)
        k, v = (
            ops.symbolic("Slice", (cache, zero, used, axis), {}, dtype=cache.dtype, shape=[1, kv_heads, n, d], version=13)
            for cache in (keys, values)
        )
        grouped = (q * d**-0.5).reshape(1, kv_heads, -1, d)
        if heads == kv_heads:
            grouped = torch.cat((grouped, grouped), dim=2)  # the kernel for a single row adds up in another order
        shape = [1, kv_heads, grouped.shape[2], n]
        scores = ops.symbolic("com.microsoft::FusedMatMul", (grouped, k), {"transB": 1}, dtype=q.dtype, shape=shape, version=1)
        if heads == kv_heads:
            scores = scores[:, :, :n]
        weights = (scores.double() + torch.cat([sight] * (heads // kv_heads))).softmax(-1)
        return (weights @ v.double()).to(q.dtype).reshape(1, heads, -1, d)


class Basic(Plain):
    """Primitives of opset 18 alone, for backends that know nothing newer. Caches are read, never written: a pass returns
    its rows' keys and values, traced or not, and whoever runs it appends those that are accepted.
    """

    opset = 18
    appends = True

    @staticmethod
    def sight(mask: Tensor | None, rows: int, past_length: Tensor, cache: Tensor) -> Tensor | None:
        """Which of the rows each row sees, bool [n, n]; of the cache it sees what lies below ``past_length``."""
        return torch.ones(rows, rows, dtype=torch.bool, device=cache.device).tril() if mask is None else mask

    @classmethod
    def attend(cls, rows: Rows, cache: Cache, past_length: Tensor, sight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        assert sight is not None
        out, (k, v) = cls._beside(rows, cache, past_length, [], sight)
        return out, k, v

    @classmethod
    def peek(cls, rows: Rows, past: Past, beside: list[Cache], seen: Tensor) -> tuple[Tensor, Cache]:
        n, pending = rows.q.shape[0], past.written[0].shape[2]
        counts = (torch.arange(pending, device=seen.device) < past.count)[None].expand(n, pending)
        return cls._beside(rows, past.cache, past.length, [past.written, *beside], torch.cat((counts, seen), dim=1))
