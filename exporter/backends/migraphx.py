"""The operators that MIGraphX's parser supports."""

import onnx_ir as ir

from .rules import (
    BOOL,
    CONSTANTS,
    FLOATS,
    INTS,
    NUMBERS,
    REDUCED,
    REDUCTIONS,
    UNARY,
    Rule,
    Use,
    dtypes,
    float_mod,
    has_odd_nibbles,
    no_axes,
    one_of,
)


def _scalar_axes(use: Use) -> str:
    """op/unsqueeze.hpp has no rank 0: a scalar is a vector of one entry, and remains one whatever axes are added."""
    several = not use.shape(0) and len(use.outputs[0].shape or ()) > 1
    return "adds several axes to a scalar, of which the parser adds one" if several else ""


def _lone_scalar(use: Use) -> str:
    """A vector of one entry with stride 0 counts as a scalar: Gather drops its dimension, Unsqueeze adds none."""
    return (
        "expands a scalar to one entry, which remains a scalar"
        if not use.shape(0) and use.outputs[0].shape == (1,)
        else ""
    )


def _mig_cast(use: Use) -> str:
    """Casts from floats to bool truncate first, so that fractions below 1 become false."""
    fractions = use.type(0) in dtypes(FLOATS) and use.outputs[0].dtype == ir.DataType.BOOL
    return "casts floats to bool" if fractions else ""


def _mig_dequantize(use: Use) -> str:
    """op/builder/quantize_dequantize_linear.hpp: one scale, one per entry of the axis, or one per block along it."""
    x, scale, axis = use.shape(0), use.shape(1), use.axis(1)
    if has_odd_nibbles(use):
        return "has 4-bit rows of odd length"
    if use.has(2) and use.shape(2) != scale:
        return "has a zero point of another shape than its scale"
    if len(scale) > 1 and (
        len(scale) != len(x) or any(a != b for i, (a, b) in enumerate(zip(x, scale, strict=True)) if i != axis)
    ):
        return "has a scale whose shape is not that of its input divided into blocks along the axis"
    return "has blocks as long as the axis" if len(scale) > 1 and scale[axis] == 1 else ""


def _mig_matmul_bits(use: Use) -> str:
    """parse_matmulnbits.cpp: input and scales must have the same type, and inputs after the zero points are not
    read."""
    block = use.integer("block_size", 0)
    if use.integer("bits", 4) != 4:
        return f"has {use.integer('bits', 4)} bits instead of 4"
    if block < 16 or block & (block - 1):
        return f"has blocks of {block}, expected a power of two of at least 16"
    if use.type(0) != use.type(2):
        return "has scales of another type than its input"
    return "has zero points of more than one dimension" if len(use.shape(3)) > 1 else ""


def _mig_simplified_norm(use: Use) -> str:
    """parse_simplified_layer_normalization.cpp averages over one axis, ONNX Runtime over all from it to the last."""
    rank = len(use.shape(0))
    return "" if rank > 1 and use.axis(-1) == rank - 1 else "does not normalize the last of at least two axes"


# MIGraphX 2.16: src/onnx/parse_*.cpp (what is parsed), src/op and src/targets/gpu (what is computed), and
# docs/dev/onnx_operators.rst, which documents opsets up to 19. Operators are identified only by name, not by domain;
# unknown attributes and surplus inputs are ignored. Constants are computed while parsing, so every value that depends
# on no input is known.
_MIG_NUMBERS = NUMBERS + "Bc"
MIG_ANY = _MIG_NUMBERS + BOOL
_MIG_BITS = "K N bits block_size accuracy_level"
_MIG_SCATTER = one_of("reduction", "none", "none", "add", "mul", "min", "max")
MIGRAPHX: dict[str, Rule | str] = {
    # parse_generic_op.cpp
    **dict.fromkeys(UNARY, Rule(FLOATS)),
    **dict.fromkeys(("Abs", "Neg"), Rule(NUMBERS)),
    "Not": Rule(BOOL),
    "Identity": Rule(MIG_ANY),
    "Concat": Rule(MIG_ANY, "axis"),
    "Flatten": Rule(MIG_ANY, "axis"),
    "Gather": Rule(f"{MIG_ANY} {INTS}", "axis"),
    "GatherND": Rule(f"{MIG_ANY} {INTS}", "batch_dims"),
    # parse_binary_op.cpp, parse_variadic_op.cpp, parse_compare_op.cpp, parse_lessorequal.cpp, parse_greaterorequal.cpp
    **dict.fromkeys(("Add", "Sub", "Mul"), Rule(_MIG_NUMBERS, most=(2, 1))),
    **dict.fromkeys(("And", "Or", "Xor"), Rule(BOOL, most=(2, 1))),
    **dict.fromkeys(("Max", "Min", "Sum"), Rule(_MIG_NUMBERS)),
    **dict.fromkeys(("Greater", "GreaterOrEqual", "Less", "LessOrEqual"), Rule(_MIG_NUMBERS)),
    "Equal": Rule(MIG_ANY),
    "Where": Rule(f"{BOOL} {MIG_ANY}"),
    "Clip": Rule(_MIG_NUMBERS),
    # On a GPU, int64 is computed in fp32, up to ROCm 7.2.4 without rounding, and Mod of int32 is wrong (issue 2268 of
    # MIGraphX). parse_pow.cpp has no bfloat16.
    "Div": Rule(FLOATS, most=(2, 1)),
    "Mod": Rule(FLOATS, "fmod", refuse=float_mod),
    "Pow": Rule("fh"),
    "Cast": Rule(MIG_ANY, "to saturate", refuse=_mig_cast),
    "CastLike": Rule(MIG_ANY, "saturate", refuse=_mig_cast),
    # Integers from 2^24 on are inexact. For operators that support integers, ``exporter.backends.ranges`` computes
    # their ranges.
    "MatMul": Rule(FLOATS, most=(2, 1)),
    "Gemm": Rule(FLOATS, "alpha beta transA transB"),
    "Einsum": Rule(FLOATS, "equation"),
    **dict.fromkeys(("ArgMax", "ArgMin"), Rule(FLOATS + "i", "axis keepdims select_last_index")),
    "CumSum": Rule(f"{FLOATS}i {INTS}", "exclusive reverse", constant="1"),
    **dict.fromkeys(("Softmax", "LogSoftmax"), Rule(FLOATS, "axis")),
    "ReduceMean": Rule(f"{FLOATS} l", REDUCED, constant="1"),
    **dict.fromkeys(REDUCTIONS[1:], Rule(f"{NUMBERS} l", REDUCED, constant="1")),
    # always sorted, ties by lower index, on a GPU too
    "TopK": Rule(f"{_MIG_NUMBERS} l", "axis largest sorted", constant="1"),
    "Split": Rule(f"{MIG_ANY} l", "axis num_outputs", constant="1"),
    "Slice": Rule(f"{MIG_ANY} {INTS}", constant="1234", refuse=no_axes),
    # Computes offsets from unchecked indices: unlike in Gather, a negative index reads a wrong entry.
    "GatherElements": Rule(f"{MIG_ANY} {INTS}", "axis"),
    "ScatterElements": Rule(f"{MIG_ANY} {INTS} {MIG_ANY}", "axis reduction", refuse=_MIG_SCATTER),
    "ScatterND": Rule(f"{MIG_ANY} {INTS} {MIG_ANY}", "reduction", refuse=_MIG_SCATTER),
    "Reshape": Rule(f"{MIG_ANY} l", "allowzero", constant="1"),  # without empty tensors, allowzero has no effect
    "Transpose": Rule(MIG_ANY, "perm"),
    "Squeeze": Rule(f"{MIG_ANY} l", constant="1"),
    "Unsqueeze": Rule(f"{MIG_ANY} l", constant="1", refuse=_scalar_axes),
    "Expand": Rule(f"{MIG_ANY} l", constant="1", refuse=_lone_scalar),
    "Tile": Rule(f"{MIG_ANY} l", constant="1"),
    "Pad": Rule(f"{MIG_ANY} l {MIG_ANY}", "mode", constant="123", refuse=one_of("mode", "constant", "constant")),
    "Range": Rule(NUMBERS, constant="012"),
    "Trilu": Rule(f"{MIG_ANY} l", "upper", constant="1"),  # multiplies by 0 and 1, so that masked infinities become NaN
    "EyeLike": Rule(MIG_ANY, "dtype k"),
    "Constant": Rule("", CONSTANTS),
    "ConstantOfShape": Rule("l", "value", constant="0"),
    "Shape": Rule(MIG_ANY, "start end"),
    "Size": Rule(MIG_ANY),
    "DequantizeLinear": Rule(f"BcNn {FLOATS} BcNn", "axis block_size", refuse=_mig_dequantize),
    "MatMulNBits": Rule(
        f"{FLOATS} B {FLOATS} B", _MIG_BITS, most=(4, 1), domain="com.microsoft", refuse=_mig_matmul_bits
    ),
    # Rounds the mean of squares to the input's type, so fp16 overflows from a root mean square of 256 on.
    "SimplifiedLayerNormalization": Rule("fg", "axis epsilon stash_type", most=(2, 1), refuse=_mig_simplified_norm),
    "LayerNormalization": Rule(FLOATS, "axis epsilon stash_type", most=(3, 1)),
    # The parser knows these names, but with another meaning.
    "Attention": "is parsed as com.microsoft's operator of that name",
    "RotaryEmbedding": "is parsed as com.microsoft's operator of that name, whose inputs have another order",
    "GroupQueryAttention": "loses its positions and its bias, and misplaces rows after a past",
}
