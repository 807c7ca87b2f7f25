"""Which whole numbers the values of a graph may hold: interval arithmetic from its inputs and constants.

MIGraphX up to ROCm 7.2.4 computes int64 in fp32 on a GPU (``eliminate_data_type`` in its targets/gpu/target.cpp) and then drops
the casts that would have cut fractions off. A graph computes the same there if every integer in it is a whole number that fp32
holds, without being rounded to one. Only such values have a range here; floats have one if they are known to be whole.
"""

from collections.abc import Callable, Mapping
from math import prod

import numpy as np
import onnx_ir as ir

Range = tuple[int, int]  # the least and the largest value
Shape = tuple[int, ...]

LIMIT = 1 << 24  # fp32 holds every whole number up to this magnitude
_READ = 1 << 20  # constants with more elements are not looked at
_TYPES = (ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT)


def _hull(*given: Range) -> Range:
    return min(low for low, _ in given), max(high for _, high in given)


def _product(a: Range, b: Range) -> Range:
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


# By operator: the inputs whose values count, and what their ranges make the range of the output. Operators that are not here may
# round, or are not needed by our graphs. ReduceSum, ArgMax and TopK depend on sizes, see ``_made``.
_RULES: Mapping[str, tuple[slice, Callable[..., Range]]] = {
    **dict.fromkeys(
        (
            "Identity", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Tile", "Slice", "Split", "Gather",
            "GatherElements", "GatherND", "ReduceMax", "ReduceMin", "Cast", "CastLike", "TopK",
        ),
        (slice(1), _hull),
    ),
    **dict.fromkeys(("Concat", "Max", "Min"), (slice(None), _hull)),
    "Where": (slice(1, 3), _hull),
    "Range": (slice(2), _hull),
    "Neg": (slice(1), lambda a: (-a[1], -a[0])),
    "Add": (slice(2), lambda a, b: (a[0] + b[0], a[1] + b[1])),
    "Sub": (slice(2), lambda a, b: (a[0] - b[1], a[1] - b[0])),
    "Mul": (slice(2), _product),
}  # fmt: skip


def _constant(value: ir.Value) -> Range | None:
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.dtype not in _TYPES or not 0 < tensor.size <= _READ:
        return None
    numbers = tensor.numpy()
    if not np.all(np.isfinite(numbers)) or np.any(numbers != np.trunc(numbers)):
        return None
    return int(numbers.min()), int(numbers.max())


def _made(node: ir.Node, known: Mapping[ir.Value, Range], shapes: Mapping[ir.Value, Shape]) -> list[Range | None]:
    """The range of each output, None if it is not known to be whole."""
    if node.op_type == "Constant":
        return [_constant(node.outputs[0])]
    first = shapes[node.inputs[0]] if node.inputs and node.inputs[0] is not None else ()
    if node.op_type in ("ArgMax", "ArgMin"):
        return [(0, first[node.attributes.get_int("axis", 0)] - 1)]
    if node.op_type == "ReduceSum" and node.inputs[0] in known:
        # Partial sums included: of one term up to all of them.
        count, a = prod(first) // max(1, prod(shapes[node.outputs[0]])), known[node.inputs[0]]
        return [_hull(a, (count * a[0], count * a[1]))]
    values = None
    if node.op_type in _RULES:
        counted, rule = _RULES[node.op_type]
        given = [known.get(value) for value in node.inputs[counted] if value is not None]
        values = None if None in given else rule(*given)
    if node.op_type == "TopK":
        return [values, (0, first[node.attributes.get_int("axis", -1)] - 1)]
    return [values] * len(node.outputs)


def ranges(
    graph: ir.Graph, shapes: Mapping[ir.Value, Shape], dtypes: Mapping[ir.Value, ir.DataType | None], most: int
) -> dict[ir.Value, Range]:
    """The range of every value that is known to hold whole numbers within ``LIMIT`` and nothing else.

    shapes, dtypes: of all values; all shapes are static. most: the largest integer that an input, or a weight that is kept in a
    file and not read here, may hold; none is negative.
    """
    known: dict[ir.Value, Range] = {}

    def note(value: ir.Value, made: Range | None) -> None:
        if dtypes[value] == ir.DataType.BOOL:
            made = 0, 1
        # Other types do not hold all whole numbers of such a range: fp16 ends at 2048.
        if made is not None and dtypes[value] in _TYPES and made[0] >= -LIMIT and made[1] <= LIMIT:
            known[value] = made

    for value in (*graph.inputs, *graph.initializers.values()):
        unread = value.const_value is None or isinstance(value.const_value, ir.ExternalTensor)
        whole = dtypes[value] != ir.DataType.FLOAT
        note(value, ((0, most) if whole else None) if unread else _constant(value))
    for node in graph:
        for value, made in zip(node.outputs, _made(node, known, shapes), strict=True):
            note(value, made)
    return known
