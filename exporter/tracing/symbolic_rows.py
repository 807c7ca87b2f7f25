"""A target's graph of symbolic rows, from which TensorRT builds one engine for several sizes of passes."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch

from graphs.target import Target

from ..weights.source import Location
from .trace import trace


def of_any_rows(module: Target, locations: dict[str, Location], bundle: Path, dtype: torch.dtype) -> ir.Model:
    """``trace`` of a target whose rows are symbolic, with choice and logits of all of them. Shapes that consist of
    constants and one other number are made constants: so the graph is that of static rows but for its inputs and what
    counts the rows."""
    model = trace(module, locations, bundle, dtype, {"wanted": 0})
    for node in list(model.graph):
        shape = node.inputs[1].producer() if node.op_type == "Reshape" else None
        parts = [part.const_value for part in shape.inputs] if shape and shape.op_type == "Concat" else []
        if sum(part is None for part in parts) == 1 and not any(
            part is not None and -1 in part.numpy() for part in parts
        ):
            numbers = np.concatenate([[-1] if part is None else part.numpy() for part in parts]).astype(np.int64)
            name = f"{node.outputs[0].name}.shape"
            constant = ir.Value(name=name, const_value=ir.tensor(numbers, name=name), shape=ir.Shape(numbers.shape))
            constant.dtype = ir.DataType.INT64
            model.graph.initializers[name] = constant
            node.replace_input_with(1, constant)
    passes.RemoveUnusedNodesPass()(model)
    return model


def of_rows(model: ir.Model, rows: int) -> ir.Model:
    """A copy of a graph of symbolic rows for so many of them."""
    copy = model.clone()
    for value in (*copy.graph.inputs, *copy.graph.outputs, *(out for node in copy.graph for out in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape(
                [rows if not isinstance(n, int) and str(n.value) == "rows" else n for n in value.shape]
            )
    return copy
