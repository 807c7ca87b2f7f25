"""How the operators of PyTorch that graphs use are spelled in ONNX (opset 18 and later)."""

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from .recording import Recording

# (recorder, the operator's output or outputs, its arguments) -> a value for each output
Spelling = Callable[..., ir.Value | Sequence[ir.Value]]
SPELLINGS: dict[str, Spelling] = {}


def _spells(*names: str) -> Callable[[Spelling], Spelling]:
    def register(spelling: Spelling) -> Spelling:
        SPELLINGS.update(dict.fromkeys(names, spelling))
        return spelling

    return register


def _same(r: Recording, out: Tensor, x: Tensor, *_: Any, **__: Any) -> ir.Value:
    return r.value(x)


for _name in ("alias", "clone", "detach"):
    SPELLINGS[_name] = _same


def _binary(op: str, compares: bool = False) -> Spelling:
    def spelling(r: Recording, out: Tensor, x: Any, y: Any, alpha: int = 1) -> ir.Value:
        assert alpha == 1, "no graph scales a summand"
        first, second = (1 if isinstance(z, torch.SymInt) else z for z in (x, y))
        dtype = torch.result_type(first, second) if compares else out.dtype
        return r.emit(op, [r.operand(z, dtype, out.dim()) for z in (x, y)], out)

    return spelling


SPELLINGS |= {
    name: _binary(op)
    for name, op in {
        "add": "Add",
        "sub": "Sub",
        "mul": "Mul",
        "div": "Div",
        "maximum": "Max",
        "pow": "Pow",
        "bitwise_and": "And",
        "bitwise_or": "Or",
    }.items()
}
SPELLINGS |= {
    name: _binary(op, compares=True)
    for name, op in {
        "eq": "Equal",
        "lt": "Less",
        "le": "LessOrEqual",
        "gt": "Greater",
        "ge": "GreaterOrEqual",
    }.items()
}


def _unary(op: str, **attributes: Any) -> Spelling:
    return lambda r, out, x: r.emit(op, [r.value(x)], out, **attributes)


SPELLINGS |= {"abs": _unary("Abs"), "exp": _unary("Exp"), "floor": _unary("Floor")}


@_spells("div.Tensor_mode", "floor_divide")
def _quotient(r: Recording, out: Tensor, x: Tensor, y: Any, rounding_mode: str = "floor") -> ir.Value:
    """Of integers, none negative: ONNX rounds toward zero."""
    assert (out.is_floating_point(), rounding_mode) == (False, "floor")
    return r.emit("Div", [r.operand(z, out.dtype, out.dim()) for z in (x, y)], out)


@_spells("rsqrt")
def _rsqrt(r: Recording, out: Tensor, x: Tensor) -> ir.Value:
    return r.emit("Reciprocal", [r.emit("Sqrt", [r.value(x)], out)], out)


@_spells("silu")
def _silu(r: Recording, out: Tensor, x: Tensor) -> ir.Value:
    return r.emit("Mul", [r.value(x), r.emit("Sigmoid", [r.value(x)], out)], out)


@_spells("clamp")
def _clamp(r: Recording, out: Tensor, x: Tensor, min: Any = None, max: Any = None) -> ir.Value:
    bounds = [None if bound is None else r.operand(bound, out.dtype, 0) for bound in (min, max)]
    return r.emit("Clip", [r.value(x), *bounds[: 2 - (max is None)]], out)


@_spells("_to_copy")
def _cast(r: Recording, out: Tensor, x: Tensor, **_: Any) -> ir.Value:
    return r.cast(r.value(x), x.dtype, out.shape, out.dtype)


@_spells("where")
def _where(r: Recording, out: Tensor, condition: Tensor, x: Tensor, y: Tensor) -> ir.Value:
    return r.emit("Where", [r.value(condition), *(r.operand(z, out.dtype, out.dim()) for z in (x, y))], out)


@_spells("arange")
def _arange(r: Recording, out: Tensor, end: Any, **_: Any) -> ir.Value:
    zero, one = (r.constant(torch.tensor(n)) for n in (0, 1))
    return r.emit("Range", [zero, r.operand(end, torch.int64, 0), one], out)


@_spells("arange.start")
def _arange_from(r: Recording, out: Tensor, start: Any, end: Any, **_: Any) -> ir.Value:
    return r.emit("Range", [*(r.operand(n, torch.int64, 0) for n in (start, end)), r.constant(torch.tensor(1))], out)


def _constant_of(number: int) -> Spelling:
    """A tensor of symbolic sizes."""

    def spelling(r: Recording, out: Tensor, *_: Any, **__: Any) -> ir.Value:
        return r.emit("Expand", [r.constant(torch.tensor(number, dtype=out.dtype)), r.shape(out.shape)], out)

    return spelling


SPELLINGS |= {
    "zeros": _constant_of(0),
    "ones": _constant_of(1),
    "zeros_like": _constant_of(0),
    "ones_like": _constant_of(1),
}


@_spells("tril")
def _tril(r: Recording, out: Tensor, x: Tensor, diagonal: int = 0) -> ir.Value:
    assert diagonal == 0
    if x.dtype != torch.bool:
        return r.emit("Trilu", [r.value(x)], out, upper=0)
    # Trilu of booleans is not in every backend.
    whole = r.cast(r.value(x), x.dtype, x.shape, torch.int64)
    lower = r.emit("Trilu", [whole], (torch.int64, x.shape), upper=0)
    return r.cast(lower, torch.int64, x.shape, torch.bool)


@_spells("view", "_unsafe_view", "reshape")
def _view(r: Recording, out: Tensor, x: Tensor, _: Any) -> ir.Value:
    return (
        r.value(x) if r.same_shape(x.shape, out.shape) else r.emit("Reshape", [r.value(x), r.reshaped(out.shape)], out)
    )


@_spells("expand")
def _expand(r: Recording, out: Tensor, x: Tensor, *_: Any, **__: Any) -> ir.Value:
    if r.same_shape(x.shape, out.shape):
        return r.value(x)
    own = [1] * (out.dim() - x.dim()) + list(x.shape)
    sizes = [1 if r.same_shape([a], [b]) else b for a, b in zip(own, out.shape, strict=True)]
    return r.emit("Expand", [r.value(x), r.shape(sizes)], out)


@_spells("unsqueeze")
def _unsqueeze(r: Recording, out: Tensor, x: Tensor, dim: int) -> ir.Value:
    return r.emit("Unsqueeze", [r.value(x), r.constant(torch.tensor([dim % out.dim()]))], out)


@_spells("squeeze.dim")
def _squeeze(r: Recording, out: Tensor, x: Tensor, dim: int) -> ir.Value:
    return r.emit("Squeeze", [r.value(x), r.constant(torch.tensor([dim % x.dim()]))], out)


@_spells("transpose", "t")
def _transpose(r: Recording, out: Tensor, x: Tensor, first: int = 0, second: int = 1) -> ir.Value:
    order = list(range(x.dim()))
    order[first], order[second] = order[second], order[first]
    return r.emit("Transpose", [r.value(x)], out, perm=order)


@_spells("permute")
def _permute(r: Recording, out: Tensor, x: Tensor, order: Sequence[int]) -> ir.Value:
    return r.emit("Transpose", [r.value(x)], out, perm=[axis % x.dim() for axis in order])


@_spells("cat")
def _cat(r: Recording, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> ir.Value:
    return r.emit("Concat", [r.operand(part, out.dtype, out.dim()) for part in parts], out, axis=dim)


@_spells("stack")
def _stack(r: Recording, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> ir.Value:
    axis, shape = r.constant(torch.tensor([dim % out.dim()])), list(out.shape)
    shape[dim] = 1
    apart = [r.emit("Unsqueeze", [r.value(part), axis], (out.dtype, shape)) for part in parts]
    return r.emit("Concat", apart, out, axis=dim)


@_spells("split_with_sizes")
def _split(r: Recording, out: Sequence[Tensor], x: Tensor, sizes: Sequence[Any], dim: int = 0) -> Sequence[ir.Value]:
    return r.emit_all("Split", [r.value(x), r.shape(sizes)], out, axis=dim)


@_spells("split")
def _split_evenly(r: Recording, out: Sequence[Tensor], x: Tensor, _: int, dim: int = 0) -> Sequence[ir.Value]:
    return r.emit_all("Split", [r.value(x)], out, axis=dim, num_outputs=len(out))


@_spells("unbind")
def _unbind(r: Recording, out: Sequence[Tensor], x: Tensor, dim: int = 0) -> Sequence[ir.Value]:
    axis, shape = r.constant(torch.tensor([dim % x.dim()])), list(x.shape)
    shape[dim] = 1

    def part(i: int) -> ir.Value:
        bounds = [r.constant(torch.tensor([n])) for n in (i, i + 1)]
        return r.emit("Slice", [r.value(x), *bounds, axis], (x.dtype, shape))

    return [r.emit("Squeeze", [part(i), axis], own) for i, own in enumerate(out)]


@_spells("slice")
def _slice(
    r: Recording, out: Tensor, x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> ir.Value:
    assert step == 1
    if r.same_shape(x.shape, out.shape):
        return r.value(x)
    size, start = x.shape[dim], start or 0
    if isinstance(size, int):
        start, end = (
            min(max(n + size * (n < 0), 0), size) if isinstance(n, int) else n
            for n in (start, size if end is None else end)
        )
    bounds = [r.shape([n]) for n in (start, end)]
    return r.emit("Slice", [r.value(x), *bounds, r.constant(torch.tensor([dim % x.dim()]))], out)


@_spells("select")
def _select(r: Recording, out: Tensor, x: Tensor, dim: int, index: int) -> ir.Value:
    return r.emit("Gather", [r.value(x), r.constant(torch.tensor(index))], out, axis=dim)


@_spells("embedding")
def _embedding(r: Recording, out: Tensor, table: Tensor, index: Tensor) -> ir.Value:
    return r.emit("Gather", [r.value(table), r.value(index)], out, axis=0)


@_spells("index_select")
def _index_select(r: Recording, out: Tensor, x: Tensor, dim: int, index: Tensor) -> ir.Value:
    return r.emit("Gather", [r.value(x), r.value(index)], out, axis=dim)


def _reduction(op: str) -> Spelling:
    def spelling(r: Recording, out: Tensor, x: Tensor, dims: Any, keepdim: bool = False, **_: Any) -> ir.Value:
        axes = sorted(dim % x.dim() for dim in ([dims] if isinstance(dims, int) else dims))
        inputs = [r.operand(x, out.dtype, x.dim()), r.constant(torch.tensor(axes))]
        return r.emit(op, inputs, out, keepdims=int(keepdim), noop_with_empty_axes=0)

    return spelling


SPELLINGS |= {
    "sum": _reduction("ReduceSum"),
    "mean": _reduction("ReduceMean"),
    "amax": _reduction("ReduceMax"),
    "amin": _reduction("ReduceMin"),
}


@_spells("argmax")
def _argmax(r: Recording, out: Tensor, x: Tensor, dim: int, keepdim: bool = False) -> ir.Value:
    return r.emit("ArgMax", [r.value(x)], out, axis=dim, keepdims=int(keepdim), select_last_index=0)


@_spells("topk")
def _topk(r: Recording, out: Sequence[Tensor], x: Tensor, k: int, dim: int = -1) -> Sequence[ir.Value]:
    return r.emit_all("TopK", [r.value(x), r.constant(torch.tensor([k]))], out, axis=dim, largest=1, sorted=1)


@_spells("_softmax")
def _softmax(r: Recording, out: Tensor, x: Tensor, dim: int, half_to_float: bool) -> ir.Value:
    return r.emit("Softmax", [r.value(x)], out, axis=dim)


@_spells("_log_softmax")
def _log_softmax(r: Recording, out: Tensor, x: Tensor, dim: int, half_to_float: bool) -> ir.Value:
    return r.emit("LogSoftmax", [r.value(x)], out, axis=dim)


@_spells("matmul")
def _matmul(r: Recording, out: Tensor, x: Tensor, y: Tensor) -> ir.Value:
    return r.emit("MatMul", [r.value(x), r.value(y)], out)


@_spells("linear")
def _linear(r: Recording, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> ir.Value:
    """x: [n, K]; weight: [N, K]."""
    inputs = [r.value(x), r.value(weight), *([] if bias is None else [r.value(bias)])]
    return r.emit("Gemm", inputs, out, alpha=1.0, beta=1.0, transA=0, transB=1)


@_spells("_symbolic", "_symbolic_multi_out")
def _symbolic(r: Recording, out: Any, inputs: Sequence[Tensor | None], op: str, _: Any, **how: Any) -> Any:
    """``torch.onnx.ops.symbolic``: an operator of ONNX, of a domain and a version, with encoded attributes."""
    attributes = {}
    lists = {"i": how["attr_ints"], "f": how["attr_floats"], "s": how["attr_strs"]}
    for key, kind, (begin, end) in zip(how["attr_keys"], how["attr_types"], how["attr_pos"], strict=True):
        values = lists[kind[0]][begin:end]
        attributes[key] = values[0] if len(kind) == 1 else list(values)
    several = isinstance(out, (list, tuple))
    values = [None if x is None else r.value(x) for x in inputs]
    while values[-1] is None:
        values.pop()
    found = r.emit_all(op, values, out if several else [out], domain=how.get("domain", ""), **attributes)
    return found if several else found[0]
