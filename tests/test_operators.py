"""exporter.backends.operators: what each parser takes and refuses, on graphs of one node; the real graphs; MIGraphX
itself where it is."""

import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from exporter.backends.operators import PARSERS, check, refusals
from exporter.backends.rules import Rule
from exporter.tracing.trace import trace
from exporter.weights.source import Location
from graphs.dialects.basic import Basic
from graphs.dialects.plain import Plain
from graphs.dialects.standard import Standard
from graphs.drafters.gumiho import Gumiho
from graphs.layer import LlamaShape
from graphs.target import Target
from graphs.tree import TreeConfig
from runtime.errors import GumihoError

OPSETS = {"migraphx": 18, "tensorrt": 24, "tensorrt-basic": 18}


def made(backend: str, nodes: str, opset: int = 0) -> ir.Model:
    """``inputs => outputs | initializers | nodes`` in ONNX's text syntax; the initializers may be left out."""
    tensors, *weights, body = nodes.split("|")
    ends = " => ".join(f"({end.strip()})" for end in tensors.split("=>"))
    imports = f'"" : {opset or OPSETS[backend]}, "com.microsoft" : 1'
    inner = f"<{weights[0]}>" if weights else ""
    return ir.from_onnx_text(f"<ir_version: 10, opset_import: [{imports}]> g {ends} {inner} {{ {body} }}")


X = "float[2,8] x => float[2,8] y"
MASK = "float[2,8] x => bool[2,8] y"
ZEROS, ONES = ", ".join("0" * 256), ", ".join("1" * 256)
W4 = f"float[2,32] x => float[2,8] y | uint8[8,2,8] w = {{{ZEROS[:382]}}}, float[16] s = {{{ONES[:46]}}}"
Q4 = f"float[2,8] x => float[4,8] y | int4[4,8] q = {{{ZEROS[:46]}}}, float[4,2] s = {{{ONES[:22]}}}"
Q8 = f"float[2,8] x => float[4,8] y | int8[4,8] q = {{{ONES[:94]}}}, float[4,2] s = {{{ONES[:22]}}}"
B4 = f"float[2,8] x => float[1,128] y | int4[1,128] q = {{{', '.join('0' * 128)}}}, float[1,2] s = {{1, 1}}"
E8 = (
    "float[2,4] x => float[4,4] y | float8e4m3fn[4,4] q = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, float[4] s "
    "= {1, 1, 1, 1}"
)
AXIS = " | int64[1] a = {1} | "
CACHE = "float[1,2,16,4] past, float[1,2,3,4] new, int64[1] at => float[1,2,16,4] y | "
SIGHT = "float[1,4,3,8] q, float[1,2,16,8] k, float[1,2,16,8] v, bool[1,1,3,16] m => float[1,4,3,8] y | "

# Taken by both.
BOTH = [
    *(
        f"{X} | y = {op}(x)"
        for op in ("Exp", "Log", "Sqrt", "Erf", "Sigmoid", "Tanh", "Reciprocal", "Floor", "Abs", "Neg", "Identity")
    ),
    *(f"{X} | y = {op}(x, x)" for op in ("Mod <fmod = 1> ", "Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum")),
    *(f"{MASK} | y = {op}(x, x)" for op in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")),
    *(f"bool[8] x => bool[8] y | y = {op}(x, x)" for op in ("And", "Or", "Xor")),
    *(f"{X} | y = {op} <axis = -1> (x)" for op in ("Softmax", "LogSoftmax")),
    *(
        f"float[2,8] x => float[2] y{AXIS}y = {op} <keepdims = 0> (x, a)"
        for op in ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")
    ),
    *(f"float[2,8] x => int64[2] y | y = {op} <axis = 1, keepdims = 0> (x)" for op in ("ArgMax", "ArgMin")),
    f"int64[2,8] x => int64[2] y{AXIS}y = ReduceMax <keepdims = 0> (x, a)",
    "bool[8] x => bool[8] y | y = Not(x)",
    "float[2,8] x => bool[2,8] y | y = IsNaN(x)",
    "bool[2,1] c, float[8] x => float[2,8] y | float z = {0} | y = Where(c, x, z)",
    f"{X} | float low = {{0}}, float high = {{1}} | y = Clip(x, low, high)",
    "float[2,8] x => float16[2,8] y | y = Cast <to = 10> (x)",
    "float[2,8] x, float16[1] z => float16[2,8] y | y = CastLike(x, z)",
    "float[3,2,8] x, float[3,8,4] w => float[3,2,4] y | y = MatMul(x, w)",
    "float[2,8] x, float[4,8] w, float[4] c => float[2,4] y | y = Gemm <transB = 1> (x, w, c)",
    'float[2,8] x, float[4,8] w => float[2,4] y | y = Einsum <equation = "ik,jk->ij"> (x, w)',
    f"{X} | int64 a = {{1}} | y = CumSum <exclusive = 1> (x, a)",
    "float[2,8] x => float[2,3] y, int64[2,3] i | int64[1] k = {3} | y, i = TopK <axis = -1> (x, k)",
    "bool[2,8] x, bool[2,1] z => bool[2,9] y | y = Concat <axis = 1> (x, z)",
    "float[2,8] x => float[2,3] y, float[2,5] z | int64[2] n = {3, 5} | y, z = Split <axis = 1> (x, n)",
    "int64[8] x => int64[5] y | int64[1] a = {3}, int64[1] b = {9223372036854775807}, int64[1] c = {0} | y = Slice(x, "
    "a, b, c)",
    "float[9,8] x, int64[3] i => float[3,8] y | y = Gather <axis = 0> (x, i)",
    "float[2,8] x, int64[2,3] i => float[2,3] y | y = GatherElements <axis = 1> (x, i)",
    "float[2,8] x, int64[3,1] i => float[3,8] y | y = GatherND(x, i)",
    "float[2,8] x, int64[2,3] i, float[2,3] u => float[2,8] y | y = ScatterElements <axis = 1> (x, i, u)",
    "float[2,8] x, int64[3,1] i, float[3,8] u => float[2,8] y | y = ScatterND(x, i, u)",
    "float[2,8] x => float[4,4] y | int64[2] s = {4, -1} | y = Reshape <allowzero = 1> (x, s)",
    "float[2,8] x => float[2,8] y | y = Flatten(x)",
    "float[2,8] x => float[8,2] y | y = Transpose <perm = [1, 0]> (x)",
    f"float[2,1] x => float[2] y{AXIS}y = Squeeze(x, a)",
    f"float[2,8] x => float[2,1,8] y{AXIS}y = Unsqueeze(x, a)",
    "float[1,8] x => float[2,8] y | int64[2] s = {2, 8} | y = Expand(x, s)",
    "float[1,8] x => float[2,8] y | int64[2] s = {2, 1} | y = Tile(x, s)",
    "float[2,8] x => float[2,9] y | int64[4] p = {0, 0, 0, 1} | y = Pad(x, p)",
    "int64[4] x => int64[4] y | int64 a = {0}, int64 b = {4}, int64 c = {1} | r = Range(a, b, c) y = Add(x, r)",
    f"{X} | y = Trilu <upper = 0> (x)",
    "float[2,8] x => bool[2,8] y | y = EyeLike <dtype = 9> (x)",
    f"{X} | one = Constant <value_float = 1.0> () y = Add(x, one)",
    f"{X} | int64[2] s = {{2, 8}} | z = ConstantOfShape <value = float[1] {{1}}> (s) y = Add(x, z)",
    "float[2,8] x => int64[2] y | y = Shape(x)",
    "float[2,8] x => int64 y | y = Size(x)",
    f"{X} | float[8] s = {{1, 1, 1, 1, 1, 1, 1, 1}} | y = LayerNormalization <axis = -1> (x, s)",
    # Constants that are computed are constants.
    "float[2,8] x => float[4,4] y | int64[1] a = {4} | s = Concat <axis = 0> (a, a) y = Reshape(x, s)",
]
TAKEN = {
    "migraphx": [
        *BOTH,
        f"{W4} | y = com.microsoft.MatMulNBits <K = 32, N = 8, bits = 4, block_size = 16> (x, w, s)",
        f"{Q4} | y = DequantizeLinear <axis = 1, block_size = 4> (q, s)",
        f"{Q8} | y = DequantizeLinear <axis = 1, block_size = 4> (q, s)",
        "float[2,8] x, float[8] s => float[2,8] y | y = SimplifiedLayerNormalization <axis = -1, epsilon = 0.001> (x, "
        "s)",
        'float[2,8] x, int64[1,1] i, float[1,8] u => float[2,8] y | y = ScatterND <reduction = "add"> (x, i, u)',
        # Its parser works out what depends on shapes alone.
        "float[2,8] x => float[2,8] y | s = Shape(x) y = Reshape(x, s)",
        "float[2,8] x => float[2] y | int64 a = {1}, int64[1] s = {-1} | b = Reshape(a, s) y = ReduceSum <keepdims = "
        "0> (x, b)",
    ],
    "tensorrt": [
        *BOTH,
        "int64[4] x => int64[4] y | int64[1] d = {3} | y = Div(x, d)",
        "int64[4] x => int64[4] y | int64 d = {3} | y = Mod(x, d)",
        f"{B4} | y = DequantizeLinear <axis = 1, block_size = 64> (q, s)",
        f"{E8} | y = DequantizeLinear <axis = 0> (q, s)",
        f"{E8.replace('float[4] s', 'float s').replace('{1, 1, 1, 1}', '{1}')} | y = DequantizeLinear(q, s)",
        "float[2,8] x, float[8] s => float[2,8] y | y = RMSNormalization <axis = -1, epsilon = 0.001, stash_type = 1> "
        "(x, s)",
        "float[1,4,3,8] x, float[99,4] c, float[99,4] s, int64[1,3] at => float[1,4,3,8] y | y = RotaryEmbedding(x, c, "
        "s, at)",
        f"{CACHE} y = TensorScatter <axis = -2> (past, new, at)",
        f"{SIGHT} y = Attention(q, k, v, m)",
        "bfloat16[2,8] x => bfloat16[2,8] y | y = Sigmoid(x)",
    ],
    "tensorrt-basic": [*BOTH, f"{B4} | y = DequantizeLinear <axis = 1, block_size = 64> (q, s)"],
}

INEXACT = "integers that may change when they are computed in fp32"
REFUSED = [
    ("migraphx", X + " | y = Attention(x, x, x)", "com.microsoft's operator"),
    ("migraphx", X + " | y = RotaryEmbedding(x, x, x)", "another order"),
    (
        "migraphx",
        X + " | y = com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1> (x, x, x)",
        "misplaces rows",
    ),
    ("migraphx", X + " | y = RMSNormalization(x, x)", "is not supported"),
    ("migraphx", CACHE + "y = TensorScatter(past, new, at)", "is not supported"),
    ("migraphx", "float[rows,8] x => float[rows,8] y | y = Exp(x)", "not static"),
    ("migraphx", "float[8] x => float[n,1] y | i = NonZero(x) y = Cast <to = 1> (i)", "is not supported"),
    ("migraphx", "bfloat16[2,8] x => bfloat16[2,8] y | y = Exp(x)", "'x' is BFLOAT16"),
    (
        "migraphx",
        "bool[2,8] x => bool[8] y | int64[1] a = {0} | y = ReduceMax <keepdims = 0> (x, a)",
        "has BOOL as input 0",
    ),
    ("migraphx", "float[2,8] x, int64[1] k => float[2,k] y, int64[2,k] i | y, i = TopK(x, k)", "not static"),
    ("migraphx", "float[2,8] x, int64[2] s => float[2,8] y | y = Reshape(x, s)", "computes its input 1"),
    (
        "migraphx",
        "float[2,8] x, int64[1] a => float[2] y | y = ReduceSum <keepdims = 0> (x, a)",
        "computes its input 1",
    ),
    ("migraphx", "float[2,8] x, int64 a => float[2,8] y | y = CumSum(x, a)", "computes its input 1"),
    ("migraphx", "float[2,8] x, int64 k => float[2,8] y | y = Trilu(x, k)", "computes its input 1"),
    ("migraphx", "int64[8] x => int64[8] y | int64 a = {0} | y = CumSum(x, a)", "has INT64 as input 0"),
    ("migraphx", "int64[2,8] x => int64[2,1] y | y = ArgMax <axis = 1> (x)", "has INT64 as input 0"),
    ("migraphx", "int64[2,8] x, int64[8,2] z => int64[2,2] y | y = MatMul(x, z)", "has INT64 as input 0"),
    ("migraphx", "bfloat16[8] x => float[8] y | z = Pow(x, x) y = Cast <to = 1> (z)", "has BFLOAT16 as input 0"),
    ("migraphx", "int32[4] x => int32[4] y | int32 d = {3} | y = Mod(x, d)", "has INT32 as input 0"),
    # Integers that fp32 rounds, or does not round.
    ("migraphx", "int64[4] x => int64[4] y | int64[1] d = {3} | y = Div(x, d)", "has INT64 as input 0"),
    ("migraphx", "int64[4] x => int64[4] y | int64 d = {3} | y = Mod(x, d)", "has INT64 as input 0"),
    ("migraphx", "int64[4] x => int64[4] y | int64 d = {3} | y = Pow(x, d)", "has INT64 as input 0"),
    ("migraphx", f"int64[2,8] x => int64[2] y{AXIS}y = ReduceMean <keepdims = 0> (x, a)", "has INT64 as input 0"),
    ("migraphx", f"int64[2,8] x => int64[2] y{AXIS}y = ReduceProd <keepdims = 0> (x, a)", INEXACT),
    ("migraphx", "float[4] x => int64[4] y | y = Cast <to = 7> (x)", INEXACT),
    (
        "migraphx",
        "float[4] x => int64[4] y | float h = {0.5} | z = Floor(x) w = Mul(z, h) y = Cast <to = 7> (w)",
        INEXACT,
    ),
    (
        "migraphx",
        "bool[4] x => int64[4] y | float h = {0.5} | z = Cast <to = 1> (x) w = Mul(z, h) y = Cast <to = 7> (w)",
        INEXACT,
    ),
    ("migraphx", "bool[4] x => int64[4] y | z = Cast <to = 10> (x) y = Cast <to = 7> (z)", INEXACT),
    ("migraphx", "int64[9000000] x => int64[9000000] y | y = Add(x, x)", INEXACT),
    ("migraphx", "int64[9000000] x => int64[9000000] y | z = Neg(x) y = Sub(z, x)", INEXACT),
    ("migraphx", "int64[5000] x => int64[5000] y | y = Mul(x, x)", INEXACT),
    ("migraphx", "int64[5000] x => int64[5000] y | z = Neg(x) y = Mul(z, x)", INEXACT),
    ("migraphx", f"int64[2,5000] x => int64[2] y{AXIS}y = ReduceSum <keepdims = 0> (x, a)", INEXACT),
    ("migraphx", "int64[17000000] x => int64[17000000] y | y = Identity(x)", INEXACT),
    ("migraphx", "int64[4] x => bool[4] y | int64 c = {16777217} | y = Less(x, c)", INEXACT),
    (
        "migraphx",
        "int64[4] x => int64[1] y | int64[2] t = {0, 16777217}, int64[1] i = {1} | z = Gather <axis = 0> (t, x) y = "
        "Gather <axis = 0> (z, i)",
        INEXACT,
    ),
    ("tensorrt-basic", CACHE + "y = TensorScatter <axis = -2> (past, new, at)", "came after TensorRT 10.3"),
    ("tensorrt-basic", SIGHT + "y = Attention(q, k, v, m)", "came after TensorRT 10.3"),
    ("tensorrt-basic", "int64[4] x => int64[4] y | int64[1] d = {3} | y = Pow(x, d)", "has INT64 as input 0"),
    (
        "tensorrt-basic",
        f"{X} | int64 a = {{1}}, int64[1] s = {{-1}} | b = Reshape(a, s) y = CumSum(x, b)",
        "must be an initializer",
    ),
    (
        "tensorrt-basic",
        "float[2,1] x => float[2] y | int64 a = {1}, int64[1] s = {-1} | b = Reshape(a, s) y = Squeeze(x, b)",
        "must be an initializer",
    ),
    ("migraphx", X + " | y = Mod(x, x)", "floats but no fmod"),
    ("migraphx", "float x => float[1,1] y | int64[2] a = {0, 1} | y = Unsqueeze(x, a)", "several axes"),
    (
        "migraphx",
        "float[9,8] x, int64 i => float[1,8] y | int64[1] s = {1} | j = Expand(i, s) y = Gather(x, j)",
        "remains a scalar",
    ),
    (
        "migraphx",
        "float[2,8] x => float[1,8] y | int64[1] a = {0}, int64[1] b = {1} | y = Slice(x, a, b)",
        "has no axes",
    ),
    ("migraphx", "float[2,8] x => float[2,8] y | float[2,0] e = {} | y = Concat <axis = 1> (x, e)", "without elements"),
    (
        "migraphx",
        'float[2,8] x => float[2,9] y | int64[2] p = {0, 1}, int64[1] a = {1} | y = Pad <mode = "reflect"> (x, p, , a)',
        "has mode 'reflect'",
    ),
    (
        "migraphx",
        'float[2,8] x, int64[1,1] i, float[1,8] u => float[2,8] y | y = ScatterND <reduction = "mean"> (x, i, u)',
        "reduction 'mean'",
    ),
    ("migraphx", "float[8] x => bool[8] y | y = Cast <to = 9> (x)", "casts floats to bool"),
    ("migraphx", X + " | y = SimplifiedLayerNormalization <axis = 0> (x, x)", "does not normalize the last"),
    (
        "migraphx",
        "float16[2,8] x => float16[2,8] y | y = SimplifiedLayerNormalization (x, x)",
        "has FLOAT16 as input 0",
    ),
    ("migraphx", X + " | y = LayerNormalization <flavour = 1> (x, x)", "the attribute 'flavour'"),
    ("migraphx", X + " | q = Constant <value = int4[4] {0, 0, 0, 0}> () y = Max(x, x)", "has INT4 as output"),
    (
        "migraphx",
        Q4.replace("[4,2] s", "[2,4] s") + " | y = DequantizeLinear <axis = 1, block_size = 4> (q, s)",
        "divided into blocks",
    ),
    (
        "migraphx",
        Q4.replace("[4,2] s", "[2,4] s") + " | y = DequantizeLinear <axis = 0, block_size = 4> (q, s)",
        "divided into blocks",
    ),
    (
        "migraphx",
        "float[2,8] x, int8[4,8] q, float[4,1] s => float[4,8] y | y = DequantizeLinear <axis = 1, block_size = 8> (q, "
        "s)",
        "as long as the axis",
    ),
    (
        "migraphx",
        "float[2,8] x, int8[4,8] q, float s, int8[1] z => float[4,8] y | y = DequantizeLinear(q, s, z)",
        "another shape",
    ),
    (
        "migraphx",
        "float[2,7] x => float[2,7] y | int4[2,7] q = {0, 0, 0, 0, 0, 0, 0}, float s = {1} | y = DequantizeLinear(q, "
        "s)",
        "odd length",
    ),
    (
        "tensorrt",
        "float[2,7] x => float[2,7] y | int4[2,7] q = {0, 0, 0, 0, 0, 0, 0}, float s = {1} | y = DequantizeLinear(q, "
        "s)",
        "odd length",
    ),
    (
        "migraphx",
        W4.replace("float[16] s", "float16[16] s")
        + " | y = com.microsoft.MatMulNBits <K = 32, N = 8, bits = 4, block_size = 16> (x, w, s)",
        "another type",
    ),
    (
        "migraphx",
        W4 + ", uint8[8,1] z = {0, 0, 0, 0, 0, 0, 0, 0} | y = com.microsoft.MatMulNBits <K = 32, N = 8, bits = 4, "
        "block_size = 16> (x, w, s, z)",
        "one dimension",
    ),
    (
        "migraphx",
        W4 + " | y = com.microsoft.MatMulNBits <K = 32, N = 8, bits = 8, block_size = 16> (x, w, s)",
        "8 bits",
    ),
    (
        "migraphx",
        W4 + " | y = com.microsoft.MatMulNBits <K = 32, N = 8, bits = 4, block_size = 24> (x, w, s)",
        "power of two",
    ),
    (
        "migraphx",
        W4 + " | y = com.microsoft.MatMulNBits <K = 32, N = 8, bits = 4, block_size = 16> (x, w, s, , , x)",
        "6 inputs",
    ),
    ("migraphx", W4 + " | y = MatMulNBits <K = 32, N = 8, bits = 4, block_size = 16> (x, w, s)", "of the domain ''"),
    ("tensorrt", X + " | y = Swish(x)", "11.0"),
    ("tensorrt", X + " | y = com.microsoft.MatMulNBits <K = 32> (x, x, x)", "is not supported"),
    ("tensorrt", "float[rows,8] x => float[rows,8] y | y = Exp(x)", "not static"),
    ("tensorrt", "uint8[4] x => bool[4] y | y = Equal(x, x)", "'x' is UINT8"),
    ("tensorrt", "int64[4] x => bool[4] y | z = Cast <to = 2> (x) y = Equal(z, z)", "has UINT8 as input 0"),
    ("tensorrt", "int64[4] x => bool[4] y | z = Cast <to = 2> (x) y = Equal(z, z)", "has UINT8 as output"),
    ("tensorrt", "bool[4] x => bool[4] y | y = Equal(x, x)", "has BOOL as input 0"),
    (
        "tensorrt",
        "bool[2,8] x => bool[8] y | int64[1] a = {0} | y = ReduceMax <keepdims = 0> (x, a)",
        "has BOOL as input 0",
    ),
    ("tensorrt", "int64[8] x => int64[8] y | int64 a = {0} | y = CumSum(x, a)", "has INT64 as input 0"),
    ("tensorrt", "int64[2,8] x, int64[8,2] z => int64[2,2] y | y = MatMul(x, z)", "has INT64 as input 0"),
    ("tensorrt", "int64[4] x => bool[4] y | y = IsNaN(x)", "has INT64 as input 0"),
    (
        "tensorrt",
        "bool[2,8] x, int64[1,1] i, bool[1,8] u => bool[2,8] y | y = ScatterND(x, i, u)",
        "has BOOL as input 0",
    ),
    (
        "tensorrt",
        'float[2,8] x, int64[1,1] i, float[1,8] u => float[2,8] y | y = ScatterND <reduction = "add"> (x, i, u)',
        "reduction 'add'",
    ),
    (
        "tensorrt",
        "float[2,8] x => float[2] y | int64 a = {1}, int64[1] s = {-1} | b = Reshape(a, s) y = ReduceSum <keepdims = "
        "0> (x, b)",
        "must be an initializer",
    ),
    (
        "tensorrt",
        "float[2,8] x, int64[1] a => float[2] y | y = ReduceSum <keepdims = 0> (x, a)",
        "computes its input 1",
    ),
    (
        "tensorrt",
        "float[4,5000] x => float[4,3840] y, int64[4,3840] i | int64[1] k = {3840} | y, i = TopK(x, k)",
        "3840 entries",
    ),
    (
        "tensorrt",
        "float[2,8] x => float[2,3] y, int64[2,3] i | int64[1] k = {3} | y, i = TopK <sorted = 0> (x, k)",
        "not sorted",
    ),
    (
        "tensorrt",
        "float[2,1,1,1,1] x => float[1,1,1,1,1] y, int64[1,1,1,1,1] i | int64[1] k = {1} | y, i = TopK <axis = 0> (x, "
        "k)",
        "last four",
    ),
    (
        "tensorrt",
        "float[2,8] x => float[1,8] y | int64[1] a = {0}, int64[1] b = {1} | y = Slice(x, a, b)",
        "has no axes",
    ),
    ("tensorrt", X + " | y = Trilu(x)", "lacks the attribute 'upper'"),
    ("tensorrt", X + " | y = Mod(x, x)", "floats but no fmod"),
    ("tensorrt", CACHE + "y = TensorScatter <axis = 1> (past, new, at)", "second to last"),
    ("tensorrt", CACHE + 'y = TensorScatter <axis = -2, mode = "circular"> (past, new, at)', "mode 'circular'"),
    (
        "tensorrt",
        CACHE + "old = Neg(past) y = TensorScatter <axis = -2> (old, new, at)",
        "not both an input and an output",
    ),
    ("tensorrt", CACHE + "z = TensorScatter <axis = -2> (past, new, at) y = Neg(z)", "not both an input and an output"),
    (
        "tensorrt",
        SIGHT.replace("bool[1,1,3,16]", "bool[3,16]") + "y = Attention(q, k, v, m)",
        "without exactly 4 dimensions",
    ),
    ("tensorrt", SIGHT.replace("bool[", "float16[") + "y = Attention(q, k, v, m)", "mask of another type"),
    ("tensorrt", SIGHT + "y = Attention <is_causal = 1> (q, k, v, m)", "causal and has a mask"),
    ("tensorrt", SIGHT + "y = Attention <softcap = 2.0> (q, k, v, m)", "the attribute 'softcap'"),
    ("tensorrt", SIGHT + "y = Attention(q, k, v, m, k, v)", "6 inputs"),
    ("tensorrt", SIGHT.replace("8] y", "8] y, float[1,2,16,8] a") + "y, a = Attention(q, k, v, m)", "2 outputs"),
    (
        "tensorrt",
        "float[4,3,8] x, float[99,4] c, int64[4,3] at => float[4,3,8] y | y = RotaryEmbedding(x, c, c, at)",
        "without exactly 4 dimensions",
    ),
    (
        "tensorrt",
        "float16[1,4,3,8] x, float[99,4] c, int64[1,3] at => float16[1,4,3,8] y | y = RotaryEmbedding(x, c, c, at)",
        "mixes FLOAT16 and FLOAT",
    ),
    (
        "tensorrt",
        "float[1,4,3,8] x, float[1,3,4] c, int64[1,3] at => float[1,4,3,8] y | y = RotaryEmbedding(x, c, c, at)",
        "tables without exactly 2",
    ),
    (
        "tensorrt",
        'float[2,8] x, int64[2,3] i, float[2,3] u => float[2,8] y | y = ScatterElements <reduction = "max"> (x, i, u)',
        "reduction 'max'",
    ),
    ("tensorrt", "float[4] x => double[4] y | y = Cast <to = 11> (x)", "'y' is DOUBLE"),
    (
        "tensorrt",
        Q4.replace("[4,2] s", "[2,4] s") + " | y = DequantizeLinear <axis = 1, block_size = 4> (q, s)",
        "blocks along one axis",
    ),
    ("tensorrt", Q4 + " | y = DequantizeLinear <axis = 1, block_size = 4> (q, s, q)", "3 inputs"),
    ("tensorrt", E8 + " | y = DequantizeLinear <axis = 1> (q, s)", "fp8 scales that are not one per row"),
    (
        "tensorrt",
        E8.replace("[4] s = {1, 1, 1, 1}", "[4,1] s = {1, 1, 1, 1}")
        + " | y = DequantizeLinear <axis = 1, block_size = 4> (q, s)",
        "not one per row",
    ),
    ("migraphx", E8 + " | y = DequantizeLinear <axis = 0> (q, s)", "has FLOAT8E4M3FN as input 0"),
    (
        "tensorrt",
        Q4 + " | y = DequantizeLinear <axis = 1, block_size = 4> (q, s)",
        "blocks of 4, expected the documented 64 or 128",
    ),
]


def said(model: ir.Model, backend: str) -> str:
    return "; ".join(what for _, what in refusals(model, backend))


@pytest.mark.parametrize(("backend", "nodes"), [(b, n) for b in TAKEN for n in TAKEN[b]])
def test_taken(backend: str, nodes: str) -> None:
    model = made(backend, nodes)
    assert said(model, backend) == ""
    check(model, backend)


@pytest.mark.parametrize("backend", TAKEN)
def test_every_line_of_a_table_is_tried(backend: str) -> None:
    tried = {node.op_type for nodes in TAKEN[backend] for node in made(backend, nodes).graph}
    assert tried == {name for name, rule in PARSERS[backend].operators.items() if isinstance(rule, Rule)}


@pytest.mark.parametrize(("backend", "nodes", "phrase"), REFUSED)
def test_refused(backend: str, nodes: str, phrase: str) -> None:
    assert phrase in said(made(backend, nodes), backend)


@pytest.mark.parametrize(
    ("backend", "opset", "taken"),
    [
        ("migraphx", 19, True),
        ("migraphx", 20, False),
        ("tensorrt-basic", 20, True),
        ("tensorrt-basic", 21, False),
        ("tensorrt", 24, True),
        ("tensorrt", 25, False),
        ("tensorrt", 12, False),
    ],
)
def test_opsets(backend: str, opset: int, taken: bool) -> None:
    assert ("declares opset" not in said(made(backend, f"{X} | y = Exp(x)", opset), backend)) == taken


def test_migraphx_takes_the_highest_opset_of_any_domain() -> None:
    model = made("migraphx", f"{X} | y = Exp(x)")
    model.opset_imports["com.microsoft"] = 20
    assert "declares opset 20 of the domain 'com.microsoft'" in said(model, "migraphx")


@pytest.mark.parametrize("backend", TAKEN)
def test_of_sizes_that_are_not_static_only_the_inputs_are_named(backend: str) -> None:
    model = made(backend, "float[rows,8] x, float[8] z => float[rows,8] y | a = Exp(x) y = Add(a, z)")
    assert refusals(model, backend) == [("input", "'x' has the shape [rows,8], which is not static")]


@pytest.mark.parametrize(
    "nodes",
    [
        "int64[8000000] x => int64[8000000] y | y = Add(x, x)",
        "int64[4000] x => int64[4000] y | y = Mul(x, x)",
        "int64[2,4000] x => int64[2] y | int64[1] a = {1} | y = ReduceSum <keepdims = 0> (x, a)",
        "bool[4] x => int64[4] y | float h = {3.0} | z = Cast <to = 1> (x) w = Mul(z, h) y = Cast <to = 7> (w)",
    ],
)
def test_integers_that_fp32_holds_are_taken(nodes: str) -> None:
    assert said(made("migraphx", nodes), "migraphx") == ""


def test_integers_are_refused_where_they_are_lost() -> None:
    """What follows from them would only bury it."""
    model = made("migraphx", "int64[5000] x => int64[5000] y | z = Mul(x, x) [late] w = Neg(z) y = Add(w, x)")
    assert [what.split(" has ")[0] for _, what in refusals(model, "migraphx")] == ["node 'z' (Mul)"]


def test_the_error_names_graph_node_and_operator_and_counts_all() -> None:
    model = made("tensorrt", f"{X} | a = Swish(x) [late] b = Swish(a) y = com.microsoft.BiasGelu(b, b)")
    with pytest.raises(GumihoError) as error:
        check(model, "tensorrt")
    assert str(error.value) == (
        "graph 'g' is not supported by TensorRT 10.15: node 'a' (Swish) is supported from TensorRT 11.0 on (3 problems "
        "in all: Swish 2, BiasGelu 1); spell these operations in graphs/dialects as the tables in exporter/backends "
        "require"
    )


def test_backends_without_a_table_are_not_judged() -> None:
    check(made("tensorrt", f"{X} | y = com.microsoft.Anything(x)"), "cpu")


def external(offset: int | None, length: int | None, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Model:
    """A graph whose weight lies in a file that is not there."""
    model = made("migraphx", f"{X} | float[8] w = {{0, 0, 0, 0, 0, 0, 0, 0}} | y = Add(x, w)")
    tensor = ir.ExternalTensor("w.bin", offset, length, dtype, shape=ir.Shape([8]), name="w", base_dir="nowhere")
    model.graph.initializers["w"].const_value = tensor
    return model


def test_weights_are_not_read() -> None:
    assert said(external(4096, 32), "migraphx") == ""


@pytest.mark.parametrize(("offset", "length"), [(None, 32), (0, None)])
def test_external_data_say_all_that_migraphx_reads_by_position(offset: int | None, length: int | None) -> None:
    assert "'w' lacks its offset or length" in said(external(offset, length), "migraphx")
    assert said(external(offset, length), "tensorrt") == ""


def test_external_data_are_written_in_the_order_that_migraphx_reads() -> None:
    (weight,) = ir.to_proto(external(0, 32)).graph.initializer
    assert [(e.key, e.value) for e in weight.external_data] == [
        ("location", "w.bin"),
        ("offset", "0"),
        ("length", "32"),
    ]


def test_a_weight_of_another_type_than_the_graph_was_traced_with() -> None:
    assert "mixes FLOAT and FLOAT16" in said(external(0, 16, ir.DataType.FLOAT16), "migraphx")


def test_migraphx_itself_takes_what_its_table_takes() -> None:
    """Where its Python module is; scalars come back as vectors of one entry."""
    migraphx = pytest.importorskip("migraphx")
    draw = np.random.default_rng(0)
    for nodes in TAKEN["migraphx"]:
        model = made("migraphx", nodes)
        feed = {v.name: draw.integers(0, 2, tuple(v.shape)).astype(v.dtype.numpy()) for v in model.graph.inputs}
        program = migraphx.parse_onnx_buffer(ir.to_proto(model).SerializeToString())
        program.compile(migraphx.get_target("ref"))
        found = program.run({name: migraphx.argument(feed[name]) for name in program.get_parameter_names()})
        if "EyeLike" in nodes:
            continue  # ONNX Runtime makes none of bool
        # 4-bit blocks are of an opset that MIGraphX does not promise, but its parser asks for none.
        proto = ir.to_proto(made("migraphx", nodes, opset=24)).SerializeToString()
        wanted = ort.InferenceSession(proto, providers=["CPUExecutionProvider"]).run(None, feed)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(np.array(a).reshape(np.shape(b)), b, rtol=1e-5, err_msg=nodes)
            assert np.array(a).dtype == b.dtype


def test_migraphx_itself_refuses_one_block_a_row() -> None:
    migraphx = pytest.importorskip("migraphx")
    (nodes,) = (
        nodes for backend, nodes, phrase in REFUSED if backend == "migraphx" and phrase == "as long as the axis"
    )
    with pytest.raises(RuntimeError, match="must have size > 1 along provided axis|must be within range"):
        migraphx.parse_onnx_buffer(ir.to_proto(made("migraphx", nodes)).SerializeToString())


# --- the real graphs --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def calm() -> Iterator[None]:
    """pytest keeps every record that is logged, and the tracer logs thousands."""
    logger = logging.getLogger("torch")
    propagate, logger.propagate = logger.propagate, False
    yield
    logger.propagate = propagate


SHAPE = LlamaShape(vocabulary=101, hidden=32, intermediate=48, layers=1, heads=4, kv_heads=2, head_dim=8, eps=1e-5)
TREE = TreeConfig(rows=9, serial_steps=2, heads=1, top_k=2, head_top_k=2, beam=2)


@cache
def graphs(ops: type[Plain], dtype: torch.dtype) -> list[ir.Model]:
    """A target and a draft graph of fixed sizes, whose weights are nowhere."""
    target, drafter = Target(SHAPE, 64, 128, ops), Gumiho(SHAPE, 64, 128, TREE, fc_bias=True, ops=ops)

    def traced(module: Target | Gumiho, sizes: dict[str, int]) -> ir.Model:
        module.to("meta", dtype).rotary.float()  # the tables keep fp32
        parameters = enumerate(module.named_parameters())
        places = {n: Location("w.bin", 4096 * i, t.nbytes, t.dtype, tuple(t.shape)) for i, (n, t) in parameters}
        return trace(module, places, Path("nowhere"), dtype, sizes)

    return [traced(target, {"rows": 9}), traced(drafter, {"rows": 9, "accepted": 4})]


# Every export of the tests checks its own graphs too, most of them in fp32.
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.exhaustive), torch.float16])
@pytest.mark.parametrize(
    ("ops", "backend"),
    [
        (Basic, "migraphx"),
        (Basic, "tensorrt"),
        (Basic, "tensorrt-basic"),
        pytest.param(Standard, "tensorrt", marks=pytest.mark.exhaustive),
    ],
)
def test_our_graphs(ops: type[Plain], backend: str, dtype: torch.dtype) -> None:
    for model in graphs(ops, dtype):
        before = str(model)
        assert said(model, backend) == ""
        assert str(model) == before
