"""What a backend's ONNX parser takes, as tables: the proof that can be had without the hardware.

The tables hold what the parsers' sources and documents say of the operators that our graphs may need. What a device makes of
a graph that its parser takes is not here: engines are replayed against the golden run where they are compiled.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import onnx
import onnx_ir as ir
from onnxscript.optimizer import fold_constants

from runtime.errors import GumihoError

from .ranges import LIMIT, ranges

# Element types, a letter each; a string of letters is a choice.
_LETTERS = {
    "f": ir.DataType.FLOAT, "h": ir.DataType.FLOAT16, "g": ir.DataType.BFLOAT16, "i": ir.DataType.INT32, "l": ir.DataType.INT64,
    "b": ir.DataType.BOOL, "B": ir.DataType.UINT8, "c": ir.DataType.INT8, "N": ir.DataType.UINT4, "n": ir.DataType.INT4, "e": ir.DataType.FLOAT8E4M3FN,
}  # fmt: skip
_FLOATS, _INTS, _BOOL = "fhg", "il", "b"
_NUMBERS = _FLOATS + _INTS
_ANY = _NUMBERS + _BOOL


@dataclass(frozen=True)
class Facts:
    """Element type and shape of a value, None where they are not known."""

    dtype: ir.DataType | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Use:
    """A node and the facts of its values; those of an input that is left out are None, its shape is ()."""

    node: ir.Node
    inputs: list[Facts | None]
    outputs: list[Facts]

    def has(self, i: int) -> bool:
        return i < len(self.inputs) and self.inputs[i] is not None

    def type(self, i: int) -> ir.DataType | None:
        facts = self.inputs[i] if self.has(i) else None
        return facts and facts.dtype

    def shape(self, i: int) -> tuple[int, ...]:
        facts = self.inputs[i] if self.has(i) else None
        return (facts and facts.shape) or ()

    def whole(self, name: str, default: int) -> int:
        return int(self.node.attributes.get_int(name, default))

    def text(self, name: str, default: str) -> str:
        return str(self.node.attributes.get_string(name, default))

    def axis(self, default: int) -> int:
        """The attribute ``axis``, counted from the front of the first input."""
        return self.whole("axis", default) % max(1, len(self.shape(0)))


@dataclass(frozen=True)
class Rule:
    """What a parser takes of one operator, a line of its table.

    types: of each input, separated by blanks, the last for all that follow. attributes: those it honours, or may ignore without
    harm. constant: positions of the inputs that must be known when parsing; stored: of those that must be initializers or
    Constants, and not computed from them. most: inputs and outputs at most. refuse: says what else it does not take.
    """

    types: str
    attributes: str = ""
    constant: str = ""
    stored: str = ""
    most: tuple[int, int] = (99, 99)
    domain: str = ""
    refuse: Callable[[Use], str] = lambda use: ""


@dataclass(frozen=True)
class Parser:
    """Of a backend. opsets: that it knows, as far back as ours could go. ports: element types of a graph's inputs and outputs; types: of all other values.

    operators: by name; a string says why one that the parser knows must not be used. empty: whether tensors without elements
    are taken. positional: whether external data are read by the order of their entries. floating: whether integers are computed
    in fp32 without rounding, so that only ``exporter.backends.ranges`` tells whether they stay what they are.
    """

    label: str
    opsets: range
    ports: str
    types: str
    operators: Mapping[str, Rule | str] = field(repr=False)
    empty: bool
    positional: bool
    floating: bool = False


def _one_of(attribute: str, default: str, *accepted: str) -> Callable[[Use], str]:
    def refuse(use: Use) -> str:
        found = use.text(attribute, default)
        return "" if found in accepted else f"has {attribute} '{found}'"

    return refuse


_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")
_REDUCED = "axes keepdims noop_with_empty_axes"
_UNARY = ("Exp", "Log", "Sqrt", "Erf", "Sigmoid", "Tanh", "Reciprocal", "Floor", "IsNaN")
_CONSTANTS = "value value_float value_floats value_int value_ints"


def _float_mod(use: Use) -> str:
    return "has floats and no fmod" if use.type(0) in _dtypes(_FLOATS) and not use.whole("fmod", 0) else ""


def _no_axes(use: Use) -> str:
    """Both count axes they are not told by the rank, not by the starts."""
    return "" if use.has(3) or use.shape(1) == (len(use.shape(0)),) else "has no axes"


def _odd_nibbles(use: Use) -> bool:
    """4-bit rows that do not fill their last byte."""
    return use.type(0) in _dtypes("nN") and bool(use.shape(0)) and use.shape(0)[-1] % 2 == 1


# --- MIGraphX ------------------------------------------------------------------------------------------------------------


def _scalar_axes(use: Use) -> str:
    """op/unsqueeze.hpp knows no rank 0: a scalar is a vector of one entry, and stays one however many axes it is given."""
    several = not use.shape(0) and len(use.outputs[0].shape or ()) > 1
    return "gives a scalar several axes, of which one is made" if several else ""


def _lone_scalar(use: Use) -> str:
    """A vector of one entry and stride 0 passes for a scalar: Gather drops its dimension, Unsqueeze adds none."""
    return "makes one entry of a scalar, which stays a scalar" if not use.shape(0) and use.outputs[0].shape == (1,) else ""


def _mig_cast(use: Use) -> str:
    """Fractions become false: on their way to a truth value they are cut off to whole numbers."""
    fractions = use.type(0) in _dtypes(_FLOATS) and use.outputs[0].dtype == ir.DataType.BOOL
    return "makes truth values of floats" if fractions else ""


def _mig_dequantize(use: Use) -> str:
    """op/builder/quantize_dequantize_linear.hpp: one scale, one per entry of the axis, or one per block along it."""
    x, scale, axis = use.shape(0), use.shape(1), use.axis(1)
    if _odd_nibbles(use):
        return "has 4-bit rows of odd length"
    if use.has(2) and use.shape(2) != scale:
        return "has a zero point of another shape than its scale"
    if len(scale) > 1 and (
        len(scale) != len(x) or any(a != b for i, (a, b) in enumerate(zip(x, scale, strict=True)) if i != axis)
    ):
        return "has a scale that is not its input's shape cut into blocks along the axis"
    return "has blocks as long as the axis" if len(scale) > 1 and scale[axis] == 1 else ""


def _mig_matmul_bits(use: Use) -> str:
    """parse_matmulnbits.cpp; what it multiplies must agree in type, and inputs behind the zero points are not read."""
    block = use.whole("block_size", 0)
    if use.whole("bits", 4) != 4:
        return f"has {use.whole('bits', 4)} bits instead of 4"
    if block < 16 or block & (block - 1):
        return f"has blocks of {block}, no power of two from 16 on"
    if use.type(0) != use.type(2):
        return "has scales of another type than its input"
    return "has zero points of more than one dimension" if len(use.shape(3)) > 1 else ""


def _mig_simplified_norm(use: Use) -> str:
    """parse_simplified_layer_normalization.cpp averages over the one axis, where ONNX Runtime goes on to the last."""
    rank = len(use.shape(0))
    return "" if rank > 1 and use.axis(-1) == rank - 1 else "is not over the last of at least two axes"


# MIGraphX 2.16: src/onnx/parse_*.cpp (what is taken), src/op and src/targets/gpu (what comes of it), and
# docs/dev/onnx_operators.rst, which promises opsets up to 19. Operators are told apart by name alone, unknown attributes and
# surplus inputs are ignored. It computes constants while parsing, so that only what hangs on an input is not known.
_MIG_NUMBERS = _NUMBERS + "Bc"
_MIG_ANY = _MIG_NUMBERS + _BOOL
_MIG_BITS = "K N bits block_size accuracy_level"
_MIG_SCATTER = _one_of("reduction", "none", "none", "add", "mul", "min", "max")
_MIGRAPHX: dict[str, Rule | str] = {
    # parse_generic_op.cpp
    **dict.fromkeys(_UNARY, Rule(_FLOATS)),
    **dict.fromkeys(("Abs", "Neg"), Rule(_NUMBERS)),
    "Not": Rule(_BOOL),
    "Identity": Rule(_MIG_ANY),
    "Concat": Rule(_MIG_ANY, "axis"),
    "Flatten": Rule(_MIG_ANY, "axis"),
    "Gather": Rule(f"{_MIG_ANY} {_INTS}", "axis"),
    "GatherND": Rule(f"{_MIG_ANY} {_INTS}", "batch_dims"),
    # parse_binary_op.cpp, parse_variadic_op.cpp, parse_compare_op.cpp, parse_lessorequal.cpp, parse_greaterorequal.cpp
    **dict.fromkeys(("Add", "Sub", "Mul"), Rule(_MIG_NUMBERS, most=(2, 1))),
    **dict.fromkeys(("And", "Or", "Xor"), Rule(_BOOL, most=(2, 1))),
    **dict.fromkeys(("Max", "Min", "Sum"), Rule(_MIG_NUMBERS)),
    **dict.fromkeys(("Greater", "GreaterOrEqual", "Less", "LessOrEqual"), Rule(_MIG_NUMBERS)),
    "Equal": Rule(_MIG_ANY),
    "Where": Rule(f"{_BOOL} {_MIG_ANY}"),
    "Clip": Rule(_MIG_NUMBERS),
    # A GPU computes these in fp32 when they are int64, and up to ROCm 7.2.4 leaves out the rounding; Mod of int32 is wrong there
    # (its issue 2268). parse_pow.cpp has no bfloat16.
    "Div": Rule(_FLOATS, most=(2, 1)),
    "Mod": Rule(_FLOATS, "fmod", refuse=_float_mod),
    "Pow": Rule("fh"),
    "Cast": Rule(_MIG_ANY, "to saturate", refuse=_mig_cast),
    "CastLike": Rule(_MIG_ANY, "saturate", refuse=_mig_cast),
    # Whole numbers from 2^24 on are lost. For operators that take integers, ``exporter.backends.ranges`` follows how large they get.
    "MatMul": Rule(_FLOATS, most=(2, 1)),
    "Gemm": Rule(_FLOATS, "alpha beta transA transB"),
    "Einsum": Rule(_FLOATS, "equation"),
    **dict.fromkeys(("ArgMax", "ArgMin"), Rule(_FLOATS + "i", "axis keepdims select_last_index")),
    "CumSum": Rule(f"{_FLOATS}i {_INTS}", "exclusive reverse", constant="1"),
    **dict.fromkeys(("Softmax", "LogSoftmax"), Rule(_FLOATS, "axis")),
    "ReduceMean": Rule(f"{_FLOATS} l", _REDUCED, constant="1"),
    **dict.fromkeys(_REDUCTIONS[1:], Rule(f"{_NUMBERS} l", _REDUCED, constant="1")),
    "TopK": Rule(f"{_MIG_NUMBERS} l", "axis largest sorted", constant="1"),  # sorted always; lower index first, on a GPU too
    "Split": Rule(f"{_MIG_ANY} l", "axis num_outputs", constant="1"),
    "Slice": Rule(f"{_MIG_ANY} {_INTS}", constant="1234", refuse=_no_axes),
    # Adds up index and stride: unlike Gather, a negative index reads another entry.
    "GatherElements": Rule(f"{_MIG_ANY} {_INTS}", "axis"),
    "ScatterElements": Rule(f"{_MIG_ANY} {_INTS} {_MIG_ANY}", "axis reduction", refuse=_MIG_SCATTER),
    "ScatterND": Rule(f"{_MIG_ANY} {_INTS} {_MIG_ANY}", "reduction", refuse=_MIG_SCATTER),
    "Reshape": Rule(f"{_MIG_ANY} l", "allowzero", constant="1"),  # without empty tensors allowzero says nothing
    "Transpose": Rule(_MIG_ANY, "perm"),
    "Squeeze": Rule(f"{_MIG_ANY} l", constant="1"),
    "Unsqueeze": Rule(f"{_MIG_ANY} l", constant="1", refuse=_scalar_axes),
    "Expand": Rule(f"{_MIG_ANY} l", constant="1", refuse=_lone_scalar),
    "Tile": Rule(f"{_MIG_ANY} l", constant="1"),
    "Pad": Rule(f"{_MIG_ANY} l {_MIG_ANY}", "mode", constant="123", refuse=_one_of("mode", "constant", "constant")),
    "Range": Rule(_NUMBERS, constant="012"),
    "Trilu": Rule(f"{_MIG_ANY} l", "upper", constant="1"),  # multiplies by 0 and 1: infinities outside become NaN
    "EyeLike": Rule(_MIG_ANY, "dtype k"),
    "Constant": Rule("", _CONSTANTS),
    "ConstantOfShape": Rule("l", "value", constant="0"),
    "Shape": Rule(_MIG_ANY, "start end"),
    "Size": Rule(_MIG_ANY),
    "DequantizeLinear": Rule(f"BcNn {_FLOATS} BcNn", "axis block_size", refuse=_mig_dequantize),
    "MatMulNBits": Rule(f"{_FLOATS} B {_FLOATS} B", _MIG_BITS, most=(4, 1), domain="com.microsoft", refuse=_mig_matmul_bits),
    # Rounds the mean of squares to the input's type: fp16 overflows from a root mean square of 256 on.
    "SimplifiedLayerNormalization": Rule("fg", "axis epsilon stash_type", most=(2, 1), refuse=_mig_simplified_norm),
    "LayerNormalization": Rule(_FLOATS, "axis epsilon stash_type", most=(3, 1)),
    # Known by name, and something else.
    "Attention": "is taken for com.microsoft's operator of that name",
    "RotaryEmbedding": "is taken for com.microsoft's operator of that name, whose inputs come in another order",
    "GroupQueryAttention": "loses its positions and its bias, and misplaces rows behind a past",
}


# --- TensorRT ------------------------------------------------------------------------------------------------------------


def _trt_attention(use: Use) -> str:
    """AttentionHelpers.cpp; IAttention takes a mask or causality, not both."""
    if any(len(use.shape(i)) != 4 for i in range(4) if use.has(i)):
        return "has queries, keys, values or a mask of other than 4 dimensions"
    if use.has(3) and use.type(3) not in (ir.DataType.BOOL, use.type(0)):
        return "has a mask of another type than its queries"
    return "is causal and has a mask" if use.has(3) and use.whole("is_causal", 0) else ""


def _trt_rotary(use: Use) -> str:
    if len(use.shape(0)) != 4:
        return "has an input of other than 4 dimensions"
    return "has tables of other than 2 dimensions" if use.has(3) and len(use.shape(1)) != 2 else ""


def _trt_scatter(use: Use) -> str:
    """IKVCacheUpdateLayer: the cache is bound from outside, in and out."""
    if len(use.shape(0)) != 4 or use.axis(-2) != 2:
        return "does not write along the second to last of 4 dimensions"
    if not (use.node.inputs[0].is_graph_input() and use.node.outputs[0].is_graph_output()):
        return "has a cache that is not an input of the graph and, written, an output of it"
    return _one_of("mode", "linear", "linear")(use)


def _trt_top_k(use: Use) -> str:
    """ITopKLayer: one of the last four axes, and at most 3840 entries; the document says fewer."""
    rank, axis = len(use.shape(0)), use.axis(-1)
    if not use.whole("sorted", 1):
        return "is not sorted"
    if rank - axis > 4:
        return "is over an axis before the last four"
    k = (use.outputs[0].shape or (0,))[axis]
    return "" if k < 3840 else f"asks for {k} entries, and fewer than 3840 can be had"


def _trt_trilu(use: Use) -> str:
    """Its importer takes a missing ``upper`` for 0, where ONNX says 1."""
    return "" if "upper" in use.node.attributes else "does not say whether it is upper"


def _trt_dequantize(use: Use) -> str:
    """QuantDequantLinearHelper: one scale, one per entry of the axis, or one per block along one axis. The sizes of int4 blocks
    are those of the documentation of quantized types."""
    x, scale = use.shape(0), use.shape(1)
    if len(scale) > 1 and (len(scale) != len(x) or sum(a != b for a, b in zip(x, scale, strict=True)) != 1):
        return "has a scale that is not its input's shape cut into blocks along one axis"
    if _odd_nibbles(use):
        return "has 4-bit rows of odd length"
    block = use.whole("block_size", 0)
    if use.type(0) in _dtypes("e") and (block or (len(scale) == 1 and use.axis(1) != 0)):
        return "has fp8 scales that are not one a row"
    return (
        f"has 4-bit blocks of {block}, documented are 64 and 128"
        if use.type(0) in _dtypes("n") and block not in (64, 128)
        else ""
    )


# TensorRT 10.15 to 11: docs/operators.md of onnx-tensorrt at 10.15, narrowed by what its onnxOpImporters.cpp and
# importerUtils.cpp and the operator pages of the TensorRT documentation take less of. Networks are strongly typed; the parser computes no constants of its
# own, so an input that it wants as weights must be an initializer or a Constant. uint8 exists at the network's ends only.
_TENSORRT: dict[str, Rule | str] = {
    **dict.fromkeys(_UNARY, Rule(_FLOATS)),
    **dict.fromkeys(("Abs", "Neg"), Rule(_NUMBERS)),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum"), Rule(_NUMBERS)),
    **dict.fromkeys(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"), Rule(_NUMBERS)),
    **dict.fromkeys(("And", "Or", "Xor", "Not"), Rule(_BOOL)),
    "Where": Rule(f"{_BOOL} {_ANY}"),
    "Clip": Rule(_FLOATS),
    "Mod": Rule(_NUMBERS, "fmod", refuse=_float_mod),
    "Cast": Rule(_ANY + "B", "to saturate"),
    "CastLike": Rule(_ANY + "B", "saturate"),
    "MatMul": Rule(_FLOATS),
    "Gemm": Rule(_FLOATS, "alpha beta transA transB"),
    "Einsum": Rule(_FLOATS, "equation"),
    **dict.fromkeys(("ArgMax", "ArgMin"), Rule(_NUMBERS, "axis keepdims select_last_index")),
    "CumSum": Rule(f"{_FLOATS} {_INTS}", "exclusive reverse", constant="1"),
    **dict.fromkeys(("Softmax", "LogSoftmax"), Rule(_FLOATS, "axis")),
    **dict.fromkeys(_REDUCTIONS, Rule(f"{_NUMBERS} l", _REDUCED, stored="1")),
    "TopK": Rule(f"{_NUMBERS} l", "axis largest sorted", constant="1", refuse=_trt_top_k),
    "Identity": Rule(_ANY),
    "Concat": Rule(_ANY, "axis"),
    "Split": Rule(f"{_ANY} l", "axis num_outputs", constant="1"),
    "Slice": Rule(f"{_ANY} {_INTS}", constant="1234", refuse=_no_axes),
    "Gather": Rule(f"{_ANY} {_INTS}", "axis"),
    "GatherElements": Rule(f"{_ANY} {_INTS}", "axis"),
    "GatherND": Rule(f"{_ANY} {_INTS}", "batch_dims"),
    # With a reduction it is a plugin of another library.
    "ScatterElements": Rule(f"{_NUMBERS} {_INTS} {_NUMBERS}", "axis reduction", refuse=_one_of("reduction", "none", "none")),
    "ScatterND": Rule(f"{_NUMBERS} {_INTS} {_NUMBERS}", "reduction", refuse=_one_of("reduction", "none", "none")),
    "Reshape": Rule(f"{_ANY} l", "allowzero", constant="1"),
    "Flatten": Rule(_ANY, "axis"),
    "Transpose": Rule(_ANY, "perm"),
    "Squeeze": Rule(f"{_ANY} l", constant="1"),
    "Unsqueeze": Rule(f"{_ANY} l", constant="1"),
    "Expand": Rule(f"{_ANY} l", constant="1"),
    "Tile": Rule(f"{_ANY} l", constant="1"),
    "Pad": Rule(
        f"{_NUMBERS} l {_NUMBERS} {_INTS}",
        "mode",
        constant="13",
        refuse=_one_of("mode", "constant", "constant", "edge", "reflect", "wrap"),
    ),
    "Range": Rule("fil", constant="012"),
    "Trilu": Rule(f"{_ANY} l", "upper", refuse=_trt_trilu),
    "EyeLike": Rule(_ANY, "dtype k"),
    "Constant": Rule("", _CONSTANTS),
    "ConstantOfShape": Rule("l", "value", constant="0"),
    "Shape": Rule(_ANY, "start end"),
    "Size": Rule(_ANY),
    "DequantizeLinear": Rule(f"cne {_FLOATS}", "axis block_size output_dtype", most=(2, 1), refuse=_trt_dequantize),
    "LayerNormalization": Rule(_FLOATS, "axis epsilon stash_type", most=(3, 1)),
    "RMSNormalization": Rule(_FLOATS, "axis epsilon stash_type"),
    "RotaryEmbedding": Rule(
        f"{_FLOATS} {_FLOATS} {_FLOATS} l", "interleaved num_heads rotary_embedding_dim", refuse=_trt_rotary
    ),
    "TensorScatter": Rule(f"{_FLOATS} {_FLOATS} l", "axis mode", refuse=_trt_scatter),
    "Attention": Rule(
        f"{_FLOATS} {_FLOATS} {_FLOATS} {_FLOATS}b",
        "is_causal scale q_num_heads kv_num_heads TRT_decomposable",
        most=(4, 1),
        refuse=_trt_attention,
    ),
    "Swish": "is known from TensorRT 11.0 on",
}
# TensorRT 10.3, JetPack 6's: docs/operators.md, onnxOpImporters.cpp and importerUtils.cpp of onnx-tensorrt at 10.1, the newest before
# it whose sources were at hand; what 10.1 takes, 10.3 takes.
_TENSORRT_10_3: dict[str, Rule | str] = {
    **_TENSORRT,
    **dict.fromkeys(("Attention", "TensorScatter", "RotaryEmbedding", "RMSNormalization"), "came after TensorRT 10.3"),
    "Pow": Rule(_FLOATS),
    "CumSum": Rule(f"{_FLOATS} {_INTS}", "exclusive reverse", stored="1"),
    "Squeeze": Rule(f"{_ANY} l", stored="1"),
}

PARSERS: Mapping[str, Parser] = {
    # Of what numpy holds, src/py/migraphx_py.cpp passes every type of these; bool comes out as bool. bfloat16 it refuses.
    # Without elements, Expand gives one (common.cpp takes the larger size) and most others an undefined value.
    # onnx_parser.cpp: the first entry of external data is the place, the second the offset, the third the length.
    "migraphx": Parser(
        "MIGraphX 2.16", range(13, 20), "fhil" + "bBc", _MIG_ANY, _MIGRAPHX, empty=False, positional=True, floating=True
    ),
    "tensorrt": Parser("TensorRT 10.15", range(13, 25), _ANY, _ANY, _TENSORRT, empty=True, positional=False),
    "tensorrt-basic": Parser("TensorRT 10.3", range(13, 21), _ANY, _ANY, _TENSORRT_10_3, empty=True, positional=False),
}


# --- the check -----------------------------------------------------------------------------------------------------------


def _dtypes(letters: str) -> list[ir.DataType]:
    return [_LETTERS[letter] for letter in letters]


def _named(letters: str) -> str:
    return ", ".join(dtype.name for dtype in _dtypes(letters))


def _facts(model: ir.Model) -> dict[ir.Value, Facts]:
    """Of every value: a tracer leaves many out. Constants are folded to follow shapes that are computed; no weight is read."""
    copy = model.clone()
    originals, copies = (
        [*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)]
        for graph in (model.graph, copy.graph)
    )
    for value in copy.graph.initializers.values():
        if isinstance(tensor := value.const_value, ir.ExternalTensor):
            value.dtype, value.shape, value.const_value = tensor.dtype, tensor.shape, None
    fold_constants(copy, onnx_shape_inference=True)

    def facts(value: ir.Value) -> Facts:
        dims = None if value.shape is None else tuple(value.shape)
        return Facts(value.dtype, dims if dims is not None and all(isinstance(d, int) for d in dims) else None)

    return {value: facts(twin) for value, twin in zip(originals, copies, strict=True)}


def _known(model: ir.Model, facts: Mapping[ir.Value, Facts]) -> set[ir.Value]:
    """Values that depend on no input of the graph."""
    known = set(model.graph.initializers.values()) - set(model.graph.inputs)
    for node in model.graph:
        by_shape = node.op_type in ("Shape", "Size") and facts[node.inputs[0]].shape is not None
        if by_shape or all(value is None or value in known for value in node.inputs):
            known.update(node.outputs)
    return known


def _mixed(use: Use, opset: int) -> str:
    """Element types that ONNX wants equal and that are not; some parsers convert them in silence."""
    node = use.node
    if node.domain or not onnx.defs.has(node.op_type, opset, ""):
        return ""
    formal = onnx.defs.get_schema(node.op_type, opset, "").inputs
    seen: dict[str, ir.DataType] = {}
    for i, given in enumerate(use.inputs):
        if given is None or given.dtype is None or not formal:
            continue
        parameter = formal[min(i, len(formal) - 1)]
        if not parameter.is_homogeneous:
            continue
        if seen.setdefault(parameter.type_str, given.dtype) != given.dtype:
            return f"mixes {seen[parameter.type_str].name} and {given.dtype.name}"
    return ""


def _refused(use: Use, rule: Rule, known: set[ir.Value], parser: Parser, opset: int) -> Iterator[str]:
    """What a rule does not take of a node."""
    node, types = use.node, rule.types.split()
    if node.domain != rule.domain:
        yield f"is of the domain '{node.domain}', and '{rule.domain}' is meant"
    for i, given in enumerate(use.inputs):
        accepted = types[min(i, len(types) - 1)] if types else ""
        if given is not None and given.dtype not in _dtypes(accepted):
            yield f"has {given.dtype.name if given.dtype else 'no type'} as input {i}, accepted are {_named(accepted)}"
    for name in node.attributes:
        if name not in rule.attributes.split():
            yield f"has the attribute '{name}', which is not honoured"
    for i in map(int, rule.constant + rule.stored):
        value = node.inputs[i] if i < len(node.inputs) else None
        if value is None:
            continue
        if value not in known:
            yield f"computes its input {i}, which must be a constant"
        elif str(i) in rule.stored and not (value.is_initializer() or value.producer().op_type == "Constant"):
            yield f"has a folded constant as input {i}, which must be stored"
    if len(node.inputs) > rule.most[0] or len(node.outputs) > rule.most[1]:
        yield f"has {len(node.inputs)} inputs and {len(node.outputs)} outputs, at most {rule.most[0]} and {rule.most[1]} are read"
    for facts, out in zip(use.outputs, node.outputs, strict=True):
        at_end = parser.ports if out.is_graph_output() else ""
        if facts.dtype not in _dtypes(parser.types + at_end):
            yield f"makes {facts.dtype.name if facts.dtype else 'no type'}, accepted are {_named(parser.types)}"
    if mixed := _mixed(use, opset):
        yield mixed
    if said := rule.refuse(use):
        yield said


def _integers(values: Iterable[ir.Value | None], facts: Mapping[ir.Value, Facts]) -> set[ir.Value]:
    return {value for value in values if value is not None and facts[value].dtype in _dtypes(_INTS)}


def _inexact(graph: ir.Graph, facts: Mapping[ir.Value, Facts], known: set[ir.Value], parser: Parser) -> Iterator[ir.Node]:
    """The nodes that first read or make integers that may change when they are computed in fp32 without rounding.

    The inputs of our graphs, and integers among the weights, count or select entries of an axis of the graph: tokens rows of the
    embedding, ``path`` rows of ``hidden``, ``past_length`` positions of a cache. None is larger than the longest axis.
    """
    shapes = {value: fact.shape or () for value, fact in facts.items()}
    most = max((size for value in (*graph.inputs, *graph.initializers.values()) for size in shapes[value]), default=0)
    exact = ranges(graph, shapes, {value: fact.dtype for value, fact in facts.items()}, most)
    named: set[ir.Value] = set()
    for node in graph:
        rule = parser.operators.get(node.op_type)
        if not isinstance(rule, Rule) or known.issuperset(node.outputs):
            continue  # refused already, or worked out while parsing
        computed = [value for i, value in enumerate(node.inputs) if str(i) not in rule.constant]
        lost = _integers((*computed, *node.outputs), facts) - exact.keys()
        if lost and not lost & named:
            yield node
        named |= lost


def _node(node: ir.Node) -> str:
    return f"node '{node.name or node.outputs[0].name}' ({node.op_type})"


def refusals(model: ir.Model, backend: str) -> list[tuple[str, str]]:
    """Everything of a graph that a backend does not take: the operator or part it concerns, and a phrase that says what."""
    parser, graph = PARSERS[backend], model.graph
    opset = model.opset_imports.get("", 0)
    found = [
        ("opset", f"declares opset {version} of the domain '{domain}', known are {parser.opsets[0]} to {parser.opsets[-1]}")
        for domain, version in model.opset_imports.items()
        if version > parser.opsets[-1] or (not domain and version < parser.opsets[0])
    ]
    for value in graph.inputs:
        if value.shape is None or not all(isinstance(d, int) for d in value.shape):
            found.append(("input", f"'{value.name}' has the shape {value.shape}, which is not static"))
    if any(part == "input" for part, _ in found):
        return found  # what follows from them would only bury them
    for end, values in (("input", graph.inputs), ("output", graph.outputs)):
        for value in values:
            if value.dtype not in _dtypes(parser.ports):
                found.append((end, f"'{value.name}' is {value.dtype}, accepted are {_named(parser.ports)}"))
    for value in graph.initializers.values():
        tensor = value.const_value
        if parser.positional and isinstance(tensor, ir.ExternalTensor) and None in (tensor.offset, tensor.length):
            found.append(("weight", f"'{value.name}' does not say its offset and length, which are read by position"))

    facts = _facts(model)
    known = _known(model, facts)
    for node in graph:
        use = Use(node, [None if v is None else facts[v] for v in node.inputs], [facts[v] for v in node.outputs])
        rule = parser.operators.get(node.op_type, "is not known")
        shapes = [f.shape for f in (*use.outputs, *filter(None, use.inputs))]
        if isinstance(rule, str):
            said = [rule]
        elif any(shape is None for shape in shapes):
            said = ["has values whose shape is not static"]
        elif not parser.empty and any(0 in (shape or ()) for shape in shapes):
            said = ["has a tensor without elements"]
        else:
            said = list(_refused(use, rule, known, parser, opset))
        found += [(node.op_type, f"{_node(node)} {what}") for what in said]
    if parser.floating and not found:
        what = f"has integers that may change when they are computed in fp32 without rounding, or pass {LIMIT}"
        found += [(node.op_type, f"{_node(node)} {what}") for node in _inexact(graph, facts, known, parser)]
    return found


def check(model: ir.Model, backend: str) -> None:
    """Raises GumihoError where a graph holds what a backend's parser does not take.

    backend: its name, or that of a spare form that has a parser of its own. Backends without a table, ONNX Runtime's, are tried
    for real when a bundle is compiled.
    """
    if backend not in PARSERS or not (found := refusals(model, backend)):
        return
    counts = ", ".join(f"{part} {n}" for part, n in Counter(part for part, _ in found).most_common())
    raise GumihoError(
        f"graph '{model.graph.name}' is not one that {PARSERS[backend].label} takes: {found[0][1]} ({len(found)} refused in all: "
        f"{counts}); spell these operations in graphs/ops.py as exporter/operators.py accepts them"
    )
