"""The ranges of integers in a graph, by interval arithmetic from its inputs and constants.

On a GPU, MIGraphX up to ROCm 7.2.4 computes int64 in fp32 (``eliminate_data_type`` in its targets/gpu/target.cpp) and
then drops the casts that would have truncated fractions. A graph is still exact there if every integer in it is,
without rounding, a whole number that fp32 can represent. Only such values get a range here, and floats that are known
to be whole numbers.
"""

from collections.abc import Callable, Mapping
from math import prod

import numpy as np
import onnx_ir as ir

Range = tuple[int, int]  # the least and the largest value
Shape = tuple[int, ...]

LIMIT = 1 << 24  # fp32 represents every integer up to this magnitude
_LARGEST_READ = 1 << 20  # constants with more elements are not read
_TYPES = (ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT)


def _hull(*ranges: Range) -> Range:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _product(a: Range, b: Range) -> Range:
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


# By operator: the inputs that determine the output, and its range from theirs. Operators that are not listed may round,
# or our graphs do not need them. Those whose ranges depend on sizes are in ``_output_ranges``: ReduceSum, ArgMax and
# TopK.
_RULES: Mapping[str, tuple[slice, Callable[..., Range]]] = {
    **dict.fromkeys(
        (
            "Identity",
            "Reshape",
            "Flatten",
            "Transpose",
            "Squeeze",
            "Unsqueeze",
            "Expand",
            "Tile",
            "Slice",
            "Split",
            "Gather",
            "GatherElements",
            "GatherND",
            "ReduceMax",
            "ReduceMin",
            "Cast",
            "CastLike",
            "TopK",
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
}


def _constant(value: ir.Value) -> Range | None:
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.dtype not in _TYPES or not 0 < tensor.size <= _LARGEST_READ:
        return None
    numbers = tensor.numpy()
    if not np.all(np.isfinite(numbers)) or np.any(numbers != np.trunc(numbers)):
        return None
    return int(numbers.min()), int(numbers.max())


def _clipped(value: ir.Value | None) -> Range | None:
    """The range of a float that is clipped to whole constants."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Clip" or len(node.inputs) < 3:
        return None
    low, high = (_constant(bound) if bound is not None else None for bound in node.inputs[1:3])
    return _hull(low, high) if low and high else None


def _output_ranges(
    node: ir.Node, ranges: Mapping[ir.Value, Range], shapes: Mapping[ir.Value, Shape]
) -> list[Range | None]:
    """The range of each output of a node, None if it may not be a whole number."""
    if node.op_type == "Constant":
        return [_constant(node.outputs[0])]
    first = shapes[node.inputs[0]] if node.inputs and node.inputs[0] is not None else ()
    if node.op_type in ("ArgMax", "ArgMin"):
        return [(0, first[node.attributes.get_int("axis", 0)] - 1)]
    if node.op_type == "ReduceSum" and node.inputs[0] in ranges:
        # Includes partial sums, of one term up to all.
        count, a = prod(first) // max(1, prod(shapes[node.outputs[0]])), ranges[node.inputs[0]]
        return [_hull(a, (count * a[0], count * a[1]))]
    if node.op_type == "Floor":
        return [_clipped(node.inputs[0])]
    result = None
    if node.op_type in _RULES:
        inputs, rule = _RULES[node.op_type]
        operands = [ranges.get(value) for value in node.inputs[inputs] if value is not None]
        result = None if None in operands else rule(*operands)
    if node.op_type == "TopK":
        return [result, (0, first[node.attributes.get_int("axis", -1)] - 1)]
    return [result] * len(node.outputs)


def ranges(
    graph: ir.Graph, shapes: Mapping[ir.Value, Shape], dtypes: Mapping[ir.Value, ir.DataType | None], most: int
) -> dict[ir.Value, Range]:
    """The range of every value that certainly contains only whole numbers within ``LIMIT``.

    shapes, dtypes: of all values; all shapes are static. most: the largest integer in an input, or in a weight that is
    stored in a file and not read here; none is negative.
    """
    known_ranges: dict[ir.Value, Range] = {}

    def note(value: ir.Value, value_range: Range | None) -> None:
        if dtypes[value] == ir.DataType.BOOL:
            value_range = 0, 1
        # Other types cannot represent all integers of such a range; fp16 only up to 2048.
        if value_range is not None and dtypes[value] in _TYPES and value_range[0] >= -LIMIT and value_range[1] <= LIMIT:
            known_ranges[value] = value_range

    for value in (*graph.inputs, *graph.initializers.values()):
        unread = value.const_value is None or isinstance(value.const_value, ir.ExternalTensor)
        whole = dtypes[value] != ir.DataType.FLOAT
        note(value, ((0, most) if whole else None) if unread else _constant(value))
    for node in graph:
        for value, value_range in zip(node.outputs, _output_ranges(node, known_ranges, shapes), strict=True):
            note(value, value_range)
    return known_ranges
