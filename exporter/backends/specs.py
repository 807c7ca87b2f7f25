"""What each backend wants of the graphs: their dialect, and which sizes are fixed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from graphs.dialects.basic import Basic
from graphs.dialects.contrib import Contrib
from graphs.dialects.decomposed import Decomposed
from graphs.dialects.exact import Exact
from graphs.dialects.plain import Plain
from graphs.dialects.standard import Standard
from graphs.tree import TreeConfig

from ..checkpoints.pair import Pair

_CHUNK = 128
_STEP = 64  # positions of caches in place: TensorRT wants every address it is given aligned to 256 bytes


@dataclass(frozen=True)
class BackendSpec:
    """What a backend can take. rows: of the default tree. static: one row count for every pass, pinned at export. dtypes: that it
    computes in, the default first. quantized: what weights may be quantized to. spare: dialects to fall back on if the device or
    the installed release cannot do with the first. codes, block: of int4 and int8 weights, see ``Scheme``. aligned: whether weights must lie at round
    addresses. drafter: what the drafter's weights are quantized to unless asked otherwise: what was measured as best, ``none``
    where nothing was.
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
    drafter: str = "none"


# ONNX Runtime's CUDA provider has a fast TopK kernel of up to 32 entries; the paper's are 35.
CUDA_TOP_K = 32
# GPUs unpack a whole int4 matrix before they multiply it with more rows than this: about 4.5 bytes a number instead of half of one.
INT4_ROWS = 16
_GPU = (torch.float16, torch.float32)
_BF16 = (*_GPU, torch.bfloat16)
BACKENDS: Mapping[str, BackendSpec] = {
    # On a CPU a row is not free: 8 fp32 rows cost 1.4 passes of one, 64 rows cost 4.
    "cpu": BackendSpec(
        Contrib, rows=8, static=False, dtypes=(torch.float32,), quantized=("int4", "int8", "w8a8"), drafter="int4"
    ),
    # CUDA graphs need every shape to be known. Weights are read from multiples of 256 bytes.
    "cuda": BackendSpec(Standard, rows=64, static=True, dtypes=_GPU, aligned=True),
    # It takes MatMulNBits of 4 bits alone, and DequantizeLinear of both.
    "migraphx": BackendSpec(Basic, rows=64, static=True, dtypes=_BF16, codes=torch.int8),
    # TensorRT's documentation of its quantized types names blocks of 64 and 128 numbers for int4, and no others.
    # Releases before 10.15 have neither attention nor caches in place.
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

    dialect, drafting: of target and drafter. slots: positions of the caches. chunk: rows of a prefill pass. static: of every
    pass. pinned: by graph, sizes of its axes that are static.
    """

    dialect: type[Plain]
    drafting: type[Plain]
    slots: int
    chunk: int
    static: bool
    pinned: Mapping[str, Mapping[str, int]]


def trace_spec(backend: str, pair: Pair, tree: TreeConfig, capacity: int, quantized: Collection[str], exact: bool) -> TraceSpec:
    """The layout of a backend's graphs for a pair, its tree, and the positions a text may take.

    quantized: whose weights are, of ``target`` and ``draft``. exact: whether the CPU has products for all of the target's that round
    rows and add up each alike.
    """
    spec = BACKENDS[backend]
    dialect = spec.dialect
    if not spec.static:
        # ONNX Runtime's GroupQueryAttention rotates head sizes in steps of 16 only.
        odd = any(size % 16 for size in (pair.target_shape.head_dim, pair.draft_shape.head_dim))
        usual = Standard if odd else dialect
        # ``Standard`` rounds no rows, which is slower.
        own = usual if "target" not in quantized else Exact if exact else Standard
        drafting = Exact if odd and "draft" in quantized else usual
        sizes: dict[str, dict[str, int]] = {"target": {}, "draft": {}, "extend": {}}
        return TraceSpec(own, drafting, capacity, min(_CHUNK, capacity), False, sizes)
    rows, accepted = tree.rows, tree.depth + 1
    # Rows of a padded pass that do not count are written behind those that do, so the last pass of a text needs room for them.
    slots = capacity if dialect.appends else -(-(capacity + rows) // _STEP) * _STEP
    pinned = {
        "target": {"rows": rows},
        "draft": {"accepted": accepted, "rows": rows},
        "extend": {"accepted": rows, "rows": rows},
    }
    return TraceSpec(dialect, dialect, slots, rows, True, pinned)


def tables(trace_specs: Mapping[str, TraceSpec], tree: TreeConfig, capacity: int) -> int:
    """Rows of the rotary tables: the drafter looks a few positions past the text's end, padding as far as a chunk."""
    return capacity + max(
        tree.serial_steps, *(trace_spec.chunk if trace_spec.static else 0 for trace_spec in trace_specs.values())
    )
