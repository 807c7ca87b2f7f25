"""What each backend requires of the graphs: their dialect, dtypes, quantization and static sizes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from graphs.dialects.basic import Basic
from graphs.dialects.contrib import Contrib
from graphs.dialects.decomposed import Decomposed
from graphs.dialects.exact import Exact
from graphs.dialects.plain import Plain
from graphs.dialects.rounded import Rounded
from graphs.dialects.standard import Standard
from graphs.shared_target import LANES
from graphs.tree import TreeConfig

from ..checkpoints.pair import Pair

_CHUNK = 128
_SPLIT = 8  # rows of a tree from which on a quarter of it has a graph of its own
_STEP = 64  # cache capacities are multiples of this, because TensorRT requires addresses aligned to 256 bytes


class Codes(NamedTuple):
    """The dtypes of codes of 4 and of 8 bits: torch.uint8 or torch.int8, see ``Scheme``."""

    four: torch.dtype
    eight: torch.dtype

    def of(self, bits: int) -> torch.dtype:
        return self.four if bits == 4 else self.eight


UNSIGNED, SIGNED = Codes(torch.uint8, torch.uint8), Codes(torch.int8, torch.int8)


@dataclass(frozen=True)
class BackendSpec:
    """What a backend supports.

    rows: of the default tree. static: whether passes have numbers of rows that are fixed at export. bound: dtypes in
    which weights are inputs of the graphs, so that these share them, and the target has graphs of several sizes; with
    quantized weights only if bound_codes. profiles: whether the target has one graph of symbolic rows, of which one
    engine for several sizes is made. dtypes: those that it computes in, the default first. quantized: supported formats
    of quantized weights. spare: dialects to fall back on if the device or the installed release does not support the
    first. codes, block: of int4 and int8 weights, see ``Scheme``. aligned: whether weights need aligned addresses.
    zeros: whether int4 targets have zero points, and 8 bits in their lm_head. drafter: default format of the drafter's
    weights, the best one measured, or ``none`` if nothing was measured. joins: whether quantized matrices that read the
    same rows are joined for it; the compilers of the others join them where that pays.
    """

    dialect: type[Plain]
    rows: int
    static: bool
    dtypes: tuple[torch.dtype, ...]
    quantized: tuple[str, ...] = ("int4", "int8")
    spare: tuple[type[Plain], ...] = ()
    codes: Codes = UNSIGNED
    block: int = 32
    aligned: bool = False
    zeros: bool = False
    drafter: str = "none"
    bound: tuple[torch.dtype, ...] = ()
    bound_codes: bool = False
    profiles: bool = False
    joins: bool = False


# ONNX Runtime's CUDA provider has a fast TopK kernel for up to 32 entries; the paper uses 35.
CUDA_TOP_K = 32
# With more rows than this, GPUs unpack the whole int4 matrix before multiplying: about 4.5 bytes per weight instead of
# 0.5.
INT4_ROWS = 16
_GPU = (torch.float16, torch.float32)
_BF16 = (*_GPU, torch.bfloat16)
# TensorRT's documentation of quantized types lists only blocks of 64 and 128 for int4.
# Releases before 10.15 support neither attention nor caches in place.
_TENSORRT = BackendSpec(
    Standard,
    rows=64,
    static=True,
    dtypes=_BF16,
    quantized=("int4", "fp8"),
    spare=(Decomposed, Basic),
    codes=SIGNED,
    block=64,
    profiles=True,
)
BACKENDS: Mapping[str, BackendSpec] = {
    # On a CPU more rows take longer: a pass of 8 fp32 rows takes 1.4 times as long as one of 1 row, of 64 rows 4 times.
    "cpu": BackendSpec(
        Contrib,
        rows=8,
        static=False,
        dtypes=(torch.float32,),
        quantized=("int4", "int8", "w8a8", "w8a8-unsigned"),
        zeros=True,
        drafter="int4",
        joins=True,
    ),
    # CUDA graphs need static shapes. Weights are read from addresses that are multiples of 256 bytes. The fast product
    # of int4 and fp16 takes codes that were rearranged when the session was made, so they must be constants.
    "cuda": BackendSpec(Standard, rows=64, static=True, dtypes=_GPU, aligned=True, zeros=True, bound=_GPU, joins=True),
    # It supports MatMulNBits only with 4 bits, and 4 bits as an input only with MatMulNBits. Its Python module cannot
    # pass bfloat16.
    "migraphx": BackendSpec(
        Basic, rows=64, static=True, dtypes=_BF16, codes=Codes(torch.uint8, torch.int8), bound=_GPU, bound_codes=True
    ),
    "tensorrt": _TENSORRT,
    # Its compiler, with weights as inputs of the plans; it fails on an int4 draft of matrices that are not joined.
    "tensorrt-rtx": replace(_TENSORRT, spare=(Decomposed,), bound=_BF16, bound_codes=True, joins=True),
}


@dataclass(frozen=True)
class TraceSpec:
    """How a backend's graphs are traced.

    dialect, drafting: of target and drafter. slots: positions of the caches. chunk: rows of a prefill pass. static: see
    ``Form``. bound: whether weights are inputs. profiles: whether the target's graphs are one of symbolic rows. pinned:
    by graph, the sizes of its static axes.
    """

    dialect: type[Plain]
    drafting: type[Plain]
    slots: int
    chunk: int
    static: bool
    bound: bool
    profiles: bool
    pinned: Mapping[str, Mapping[str, int]]


def trace_spec(
    backend: str,
    pair: Pair,
    tree: TreeConfig,
    capacity: int,
    dtype: torch.dtype,
    quantized: Collection[str],
    exact: bool,
) -> TraceSpec:
    """How a backend's graphs are traced for a pair, a tree, a capacity in positions, and a dtype of weights.

    quantized: which of ``target`` and ``draft`` are. exact: whether the CPU has kernels for all of the target's
    quantized products that sum every row in the same order.
    """
    spec = BACKENDS[backend]
    dialect, drafter = spec.dialect, ("draft",) * pair.has_drafter + ("extend",) * (pair.has_drafter and pair.stateful)
    if not spec.static:
        # ONNX Runtime's GroupQueryAttention rotates head sizes in steps of 16 only.
        shapes = (pair.target_shape, pair.draft_shape) if pair.has_drafter else (pair.target_shape,)
        odd = any(shape.head_dim % 16 for shape in shapes)
        unquantized = Standard if odd else dialect
        # ``Standard`` does not round activations, which is slower.
        target_dialect = unquantized if "target" not in quantized else Exact if exact else Standard
        drafting = Rounded if odd and "draft" in quantized else unquantized
        return TraceSpec(
            target_dialect,
            drafting,
            capacity + pair.ahead,
            min(_CHUNK, capacity),
            False,
            False,
            False,
            {n: {} for n in ("target", "shared", *drafter)},
        )
    bound = dtype in spec.bound and (spec.bound_codes or not quantized)
    # Only graphs that share their weights come in several sizes.
    shared = bound or spec.profiles
    chunk = max(tree.rows, min(_CHUNK, capacity)) if shared else tree.rows
    # A padded pass also writes its padding, after the real rows, so the last pass of a text needs room for it.
    slots = capacity if dialect.appends else -(-(capacity + chunk + pair.ahead) // _STEP) * _STEP
    smaller = {f"target-{size}": {"rows": size} for size in _smaller(tree.rows, chunk)} if shared else {}
    of_drafter = {
        "draft": {"accepted": tree.depth + 1, "rows": chunk},
        "extend": {"accepted": chunk, "rows": chunk},
    }
    pinned = {"target": {"rows": chunk}, **smaller, **{name: of_drafter[name] for name in drafter}}
    return TraceSpec(dialect, dialect, slots, chunk, True, bound, spec.profiles, pinned)


def _smaller(rows: int, chunk: int) -> list[int]:
    """Rows of the target's passes besides prefill: 1, a tree of ``rows``, and a part of it that takes clearly less
    time."""
    return sorted({1, rows // 4 if rows >= _SPLIT else 1, rows} - {chunk})


def tables(trace_specs: Mapping[str, TraceSpec], tree: TreeConfig, capacity: int, ahead: int) -> int:
    """Rows of the rotary tables: serial steps go a few positions beyond the text, padded passes up to a chunk. ONNX
    Runtime refuses passes of more rows than the tables have, and those of several streams together have more than the
    capacity if that is small."""
    specs = trace_specs.values()
    beyond = max(tree.serial_steps, *(spec.chunk if spec.static else 0 for spec in specs))
    return max(capacity + beyond + ahead, *(0 if spec.static else LANES * max(spec.chunk, tree.rows) for spec in specs))
