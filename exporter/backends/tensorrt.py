"""The operators that TensorRT's parser supports, by release."""

import onnx_ir as ir

from .rules import (
    ANY,
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


def _trt_attention(use: Use) -> str:
    """AttentionHelpers.cpp: IAttention supports a mask or causality, not both."""
    if any(len(use.shape(i)) != 4 for i in range(4) if use.has(i)):
        return "has queries, keys, values or a mask without exactly 4 dimensions"
    if use.has(3) and use.type(3) not in (ir.DataType.BOOL, use.type(0)):
        return "has a mask of another type than its queries"
    return "is causal and has a mask" if use.has(3) and use.integer("is_causal", 0) else ""


def _trt_rotary(use: Use) -> str:
    if len(use.shape(0)) != 4:
        return "has an input without exactly 4 dimensions"
    return "has tables without exactly 2 dimensions" if use.has(3) and len(use.shape(1)) != 2 else ""


def _trt_scatter(use: Use) -> str:
    """IKVCacheUpdateLayer: the cache must be both an input and an output of the graph."""
    if len(use.shape(0)) != 4 or use.axis(-2) != 2:
        return "does not write along the second to last of 4 dimensions"
    if not (use.node.inputs[0].is_graph_input() and use.node.outputs[0].is_graph_output()):
        return "has a cache that is not both an input and an output of the graph"
    return one_of("mode", "linear", "linear")(use)


def _trt_top_k(use: Use) -> str:
    """ITopKLayer: one of the last four axes, and at most 3840 entries, or fewer than 3840 according to
    docs/operators.md."""
    rank, axis = len(use.shape(0)), use.axis(-1)
    if not use.integer("sorted", 1):
        return "is not sorted"
    if rank - axis > 4:
        return "is over an axis before the last four"
    k = (use.outputs[0].shape or (0,))[axis]
    return "" if k < 3840 else f"selects {k} entries, expected fewer than 3840"


def _trt_trilu(use: Use) -> str:
    """The importer's default for ``upper`` is 0, that of ONNX is 1."""
    return "" if "upper" in use.node.attributes else "lacks the attribute 'upper'"


def _trt_dequantize(use: Use) -> str:
    """QuantDequantLinearHelper: one scale, one per entry of the axis, or one per block along one axis.

    The sizes of int4 blocks are from the documentation of quantized types.
    """
    x, scale = use.shape(0), use.shape(1)
    if len(scale) > 1 and (len(scale) != len(x) or sum(a != b for a, b in zip(x, scale, strict=True)) != 1):
        return "has a scale whose shape is not that of its input divided into blocks along one axis"
    if has_odd_nibbles(use):
        return "has 4-bit rows of odd length"
    block = use.integer("block_size", 0)
    if use.type(0) in dtypes("e") and (block or (len(scale) == 1 and use.axis(1) != 0)):
        return "has fp8 scales that are not one per row"
    return (
        f"has 4-bit blocks of {block}, expected the documented 64 or 128"
        if use.type(0) in dtypes("n") and block not in (64, 128)
        else ""
    )


# TensorRT 10.15 to 11: docs/operators.md of onnx-tensorrt at 10.15, without what its onnxOpImporters.cpp and
# importerUtils.cpp or the operator pages of the TensorRT documentation exclude. Networks are strongly typed. The parser
# folds no constants, so an input that it needs as weights must be an initializer or a Constant. Only inputs and outputs
# of the network can be uint8.
TENSORRT: dict[str, Rule | str] = {
    **dict.fromkeys(UNARY, Rule(FLOATS)),
    **dict.fromkeys(("Abs", "Neg"), Rule(NUMBERS)),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum"), Rule(NUMBERS)),
    **dict.fromkeys(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"), Rule(NUMBERS)),
    **dict.fromkeys(("And", "Or", "Xor", "Not"), Rule(BOOL)),
    "Where": Rule(f"{BOOL} {ANY}"),
    "Clip": Rule(FLOATS),
    "Mod": Rule(NUMBERS, "fmod", refuse=float_mod),
    "Cast": Rule(ANY + "B", "to saturate"),
    "CastLike": Rule(ANY + "B", "saturate"),
    "MatMul": Rule(FLOATS),
    "Gemm": Rule(FLOATS, "alpha beta transA transB"),
    "Einsum": Rule(FLOATS, "equation"),
    **dict.fromkeys(("ArgMax", "ArgMin"), Rule(NUMBERS, "axis keepdims select_last_index")),
    "CumSum": Rule(f"{FLOATS} {INTS}", "exclusive reverse", constant="1"),
    **dict.fromkeys(("Softmax", "LogSoftmax"), Rule(FLOATS, "axis")),
    **dict.fromkeys(REDUCTIONS, Rule(f"{NUMBERS} l", REDUCED, stored="1")),
    "TopK": Rule(f"{NUMBERS} l", "axis largest sorted", constant="1", refuse=_trt_top_k),
    "Identity": Rule(ANY),
    "Concat": Rule(ANY, "axis"),
    "Split": Rule(f"{ANY} l", "axis num_outputs", constant="1"),
    "Slice": Rule(f"{ANY} {INTS}", constant="1234", refuse=no_axes),
    "Gather": Rule(f"{ANY} {INTS}", "axis"),
    "GatherElements": Rule(f"{ANY} {INTS}", "axis"),
    "GatherND": Rule(f"{ANY} {INTS}", "batch_dims"),
    # With a reduction it needs a plugin of another library.
    "ScatterElements": Rule(
        f"{NUMBERS} {INTS} {NUMBERS}", "axis reduction", refuse=one_of("reduction", "none", "none")
    ),
    "ScatterND": Rule(f"{NUMBERS} {INTS} {NUMBERS}", "reduction", refuse=one_of("reduction", "none", "none")),
    "Reshape": Rule(f"{ANY} l", "allowzero", constant="1"),
    "Flatten": Rule(ANY, "axis"),
    "Transpose": Rule(ANY, "perm"),
    "Squeeze": Rule(f"{ANY} l", constant="1"),
    "Unsqueeze": Rule(f"{ANY} l", constant="1"),
    "Expand": Rule(f"{ANY} l", constant="1"),
    "Tile": Rule(f"{ANY} l", constant="1"),
    "Pad": Rule(
        f"{NUMBERS} l {NUMBERS} {INTS}",
        "mode",
        constant="13",
        refuse=one_of("mode", "constant", "constant", "edge", "reflect", "wrap"),
    ),
    "Range": Rule("fil", constant="012"),
    "Trilu": Rule(f"{ANY} l", "upper", refuse=_trt_trilu),
    "EyeLike": Rule(ANY, "dtype k"),
    "Constant": Rule("", CONSTANTS),
    "ConstantOfShape": Rule("l", "value", constant="0"),
    "Shape": Rule(ANY, "start end"),
    "Size": Rule(ANY),
    "DequantizeLinear": Rule(f"cne {FLOATS}", "axis block_size output_dtype", most=(2, 1), refuse=_trt_dequantize),
    "LayerNormalization": Rule(FLOATS, "axis epsilon stash_type", most=(3, 1)),
    "RMSNormalization": Rule(FLOATS, "axis epsilon stash_type"),
    "RotaryEmbedding": Rule(
        f"{FLOATS} {FLOATS} {FLOATS} l", "interleaved num_heads rotary_embedding_dim", refuse=_trt_rotary
    ),
    "TensorScatter": Rule(f"{FLOATS} {FLOATS} l", "axis mode", refuse=_trt_scatter),
    "Attention": Rule(
        f"{FLOATS} {FLOATS} {FLOATS} {FLOATS}b",
        "is_causal scale q_num_heads kv_num_heads TRT_decomposable",
        most=(4, 1),
        refuse=_trt_attention,
    ),
    "Swish": "is supported from TensorRT 11.0 on",
}
# TensorRT 10.3 (JetPack 6): docs/operators.md, onnxOpImporters.cpp and importerUtils.cpp of onnx-tensorrt at 10.1, the
# newest earlier release with available sources; 10.3 supports all that 10.1 does.
TENSORRT_10_3: dict[str, Rule | str] = {
    **TENSORRT,
    **dict.fromkeys(("Attention", "TensorScatter", "RotaryEmbedding", "RMSNormalization"), "came after TensorRT 10.3"),
    "Pow": Rule(FLOATS),
    "CumSum": Rule(f"{FLOATS} {INTS}", "exclusive reverse", stored="1"),
    "Squeeze": Rule(f"{ANY} l", stored="1"),
}
