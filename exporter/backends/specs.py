"""What each backend requires of the graphs: their dialect, dtypes, quantization and static sizes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from graphs.dialects.basic import Basic
from graphs.dialects.contrib import Contrib
from graphs.dialects.decomposed import Decomposed
from graphs.dialects.exact import Exact
from graphs.dialects.plain import Plain
from graphs.dialects.rounded import Rounded
from graphs.dialects.standard import Standard
from graphs.tree import TreeConfig

from ..checkpoints.pair import Pair

_CHUNK = 128
_STEP = 64  # cache capacities are multiples of this, because TensorRT requires addresses aligned to 256 bytes


@dataclass(frozen=True)
class BackendSpec:
    """What a backend supports.

    rows: of the default tree. static: whether every pass has the same number of rows, fixed at export. dtypes: those that it
    computes in, the default first. quantized: supported formats of quantized weights. spare: dialects to fall back on if the
    device or the installed release does not support the first. codes, block: of int4 and int8 weights, see ``Scheme``. aligned:
    whether weights need aligned addresses. zeros: whether int4 targets have zero points, and 8 bits in their lm_head. drafter:
    default format of the drafter's weights, the best one measured, or ``none`` if nothing was measured.
    """

    dialect: type[Plain]
    rows: int
    static: bool
    dtypes: tuple[torch.dtype, ...]
    quantized: tuple[str, ...] = ("int4", "int8")
    spare: tuple[type[Plain], ...] = ()
    codes: torch.dtype = torch.uint8
    block: int = 32
    aligned: bool = False
    zeros: bool = False
    drafter: str = "none"


# ONNX Runtime's CUDA provider has a fast TopK kernel for up to 32 entries; the paper uses 35.
CUDA_TOP_K = 32
# With more rows than this, GPUs unpack the whole int4 matrix before multiplying: about 4.5 bytes per weight instead of 0.5.
INT4_ROWS = 16
_GPU = (torch.float16, torch.float32)
_BF16 = (*_GPU, torch.bfloat16)
BACKENDS: Mapping[str, BackendSpec] = {
    # On a CPU more rows take longer: a pass of 8 fp32 rows takes 1.4 times as long as one of 1 row, of 64 rows 4 times.
    "cpu": BackendSpec(
        Contrib, rows=8, static=False, dtypes=(torch.float32,), quantized=("int4", "int8", "w8a8"), zeros=True, drafter="int4"
    ),
    # CUDA graphs need static shapes. Weights are read from addresses that are multiples of 256 bytes.
    "cuda": BackendSpec(Standard, rows=64, static=True, dtypes=_GPU, aligned=True, zeros=True),
    # It supports MatMulNBits only with 4 bits, DequantizeLinear with 4 and 8.
    "migraphx": BackendSpec(Basic, rows=64, static=True, dtypes=_BF16, codes=torch.int8),
    # TensorRT's documentation of quantized types lists only blocks of 64 and 128 for int4.
    # Releases before 10.15 support neither attention nor caches in place.
    "tensorrt": BackendSpec(
        Standard,
        rows=64,
        static=True,
        dtypes=_BF16,
        quantized=("int4", "fp8"),
        spare=(Decomposed, Basic),
        codes=torch.int8,
        block=64,
    ),
}


@dataclass(frozen=True)
class TraceSpec:
    """How a backend's graphs are traced.

    dialect, drafting: of target and drafter. slots: positions of the caches. chunk: rows of a prefill pass. static: whether
    every pass has as many rows. pinned: by graph, the sizes of its static axes.
    """

    dialect: type[Plain]
    drafting: type[Plain]
    slots: int
    chunk: int
    static: bool
    pinned: Mapping[str, Mapping[str, int]]


def trace_spec(backend: str, pair: Pair, tree: TreeConfig, capacity: int, quantized: Collection[str], exact: bool) -> TraceSpec:
    """How a backend's graphs are traced for a pair, a tree, and a capacity in positions.

    quantized: which of ``target`` and ``draft`` are. exact: whether the CPU has kernels for all of the target's quantized
    products that sum every row in the same order.
    """
    spec = BACKENDS[backend]
    dialect = spec.dialect
    if not spec.static:
        # ONNX Runtime's GroupQueryAttention rotates head sizes in steps of 16 only.
        shapes = (pair.target_shape, pair.draft_shape) if pair.has_drafter else (pair.target_shape,)
        odd = any(shape.head_dim % 16 for shape in shapes)
        unquantized = Standard if odd else dialect
        # ``Standard`` does not round activations, which is slower.
        target_dialect = unquantized if "target" not in quantized else Exact if exact else Standard
        drafting = Rounded if odd and "draft" in quantized else unquantized
        sizes: dict[str, dict[str, int]] = {"target": {}, "draft": {}, "extend": {}}
        return TraceSpec(target_dialect, drafting, capacity, min(_CHUNK, capacity), False, sizes)
    rows, accepted = tree.rows, tree.depth + 1
    # A padded pass also writes its padding, after the real rows, so the last pass of a text needs room for it.
    slots = capacity if dialect.appends else -(-(capacity + rows) // _STEP) * _STEP
    pinned = {
        "target": {"rows": rows},
        "draft": {"accepted": accepted, "rows": rows},
        "extend": {"accepted": rows, "rows": rows},
    }
    return TraceSpec(dialect, dialect, slots, rows, True, pinned)


def tables(trace_specs: Mapping[str, TraceSpec], tree: TreeConfig, capacity: int) -> int:
    """Rows of the rotary tables: serial steps go a few positions beyond the text, padded passes up to a chunk."""
    return capacity + max(
        tree.serial_steps, *(trace_spec.chunk if trace_spec.static else 0 for trace_spec in trace_specs.values())
    )
