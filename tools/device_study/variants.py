"""Other spellings of exported graphs for ONNX Runtime on CUDA, to find out which are faster.

Each function changes a graph in place that computes the same: a target or a draft of the dialect ``Standard`` whose
weights are inputs. Tokens are equal except where rounding decides; ``tools.device_study check`` compares them.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from graphs.dialects.quantization import JOINED

MICROSOFT = "com.microsoft"
Parts = dict[str, list[str]]  # a joined weight -> the weights whose rows it has, in order


class _Editor:
    """A graph with functions that insert nodes before a given one."""

    def __init__(self, model: ir.Model) -> None:
        self.model, self.graph = model, model.graph
        self._count: Iterator[int] = model.meta.setdefault("variants", itertools.count())  # for names
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def nodes(self, *kinds: str) -> list[ir.Node]:
        return [node for node in self.graph if node.op_type in kinds]

    def constant(self, values: Any, dtype: Any = np.int64) -> ir.Value:
        array = np.asarray(values, dtype)
        key = str(array.dtype), array.shape, array.tobytes()
        if key not in self._constants:
            name = f"variant.constant.{next(self._count)}"
            value = ir.Value(name=name, const_value=ir.tensor(array, name=name), shape=ir.Shape(array.shape))
            value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
            self.graph.initializers[name] = value
            self._constants[key] = value
        return self._constants[key]

    def insert(
        self,
        before: ir.Node,
        kind: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[ir.DataType | None, Sequence[int] | None]],
        domain: str = "",
        **attributes: Any,
    ) -> list[ir.Value]:
        """Inserts a node before another. outputs: dtype and shape of each. Returns the outputs."""
        name = f"variant.{kind}.{next(self._count)}"
        if domain:
            self.model.opset_imports[domain] = 1
        values = [
            ir.Value(
                name=f"{name}.{i}",
                type=None if dtype is None else ir.TensorType(dtype),
                shape=None if shape is None else ir.Shape(shape),
            )
            for i, (dtype, shape) in enumerate(outputs)
        ]
        given = [ir.convenience.convert_attribute(name, value) for name, value in attributes.items()]
        node = ir.Node(domain, kind, inputs, given, outputs=values, name=name)
        self.graph.insert_before(before, node)
        return values

    def one(
        self, before: ir.Node, kind: str, inputs: Sequence[ir.Value | None], like: ir.Value, **attributes: Any
    ) -> ir.Value:
        """``insert`` for a node whose only output has the dtype and shape of another value."""
        return self.insert(before, kind, inputs, [(like.dtype, _sizes(like))], **attributes)[0]

    def cast(self, before: ir.Node, value: ir.Value, to: ir.DataType) -> ir.Value:
        if value.dtype == to:
            return value
        return self.insert(before, "Cast", [value], [(to, _sizes(value))], to=int(to))[0]

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Makes everything that reads ``old`` read ``new``, which takes its place and name if it is an output of the
        graph."""
        if old in self.graph.outputs:
            new.type, new.shape, name = old.type, old.shape, old.name
            old.name, new.name = f"{name}.replaced", name
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)

    def clean(self) -> None:
        """Removes nodes, and inputs that are weights, which nothing reads."""
        outputs = set(self.graph.outputs)
        for node in reversed(list(self.graph)):
            if not any(value.uses() or value in outputs for value in node.outputs):
                self.graph.remove(node, safe=True)
        for value in [value for value in self.graph.inputs if is_weight(value) and not value.uses()]:
            self.graph.inputs.remove(value)


def is_weight(value: ir.Value) -> bool:
    """Whether an input is a weight: only these have names of modules."""
    return "." in str(value.name) and not str(value.name).startswith(("past_", "present_"))


def _sizes(value: ir.Value) -> list[int] | None:
    return None if value.shape is None else [int(size) for size in value.shape]


def _known(value: ir.Value) -> list[int]:
    """The sizes of a value whose shape is known."""
    sizes = _sizes(value)
    assert sizes is not None, value
    return sizes


def _producer(value: ir.Value | None, *kinds: str) -> ir.Node:
    node = value.producer() if value is not None else None
    assert node is not None, value
    assert node.op_type in kinds, (value, kinds)
    return node


def _behind(value: ir.Value | None, *skipped: str) -> ir.Value:
    """A value without the nodes of some kinds that it went through."""
    assert value is not None
    while (node := value.producer()) is not None and node.op_type in skipped:
        assert node.inputs[0] is not None
        value = node.inputs[0]
    return value


def joined(model: ir.Model) -> Parts:
    """One product for q, k and v, and one for gate and up."""
    edit, parts = _Editor(model), Parts()
    for first in edit.nodes("Gemm"):
        found = re.fullmatch(r"(.*\.)(q|gate)_proj\.weight", str(first.inputs[1].name))
        if not found or len(first.inputs) > 2:
            continue
        whole = next(whole for whole, names in JOINED.items() if names[0] == f"{found[2]}_proj")
        names = [f"{found[1]}{part}.weight" for part in JOINED[whole]]
        same = {str(use.node.inputs[1].name): use.node for use in first.inputs[0].uses() if use.node.op_type == "Gemm"}
        nodes = [same[name] for name in names]
        weights = [node.inputs[1] for node in nodes]
        rows = [int(weight.shape[0]) for weight in weights]
        name = f"{found[1]}{whole}.weight"
        weight = next((value for value in model.graph.inputs if value.name == name), None)
        if weight is None:
            shape = [sum(rows), int(weights[0].shape[1])]
            weight = ir.Value(name=name, type=weights[0].type, shape=ir.Shape(shape))
            model.graph.inputs.append(weight)
            parts[name] = names
        out, n = first.outputs[0], _known(first.outputs[0])[0]
        product = edit.insert(first, "Gemm", [first.inputs[0], weight], [(out.dtype, [n, sum(rows)])], transB=1)[0]
        split = [(out.dtype, [n, width]) for width in rows]
        pieces = edit.insert(first, "Split", [product, edit.constant(rows)], split, axis=-1)
        for node, piece in zip(nodes, pieces, strict=True):
            edit.replace(node.outputs[0], piece)
    edit.clean()
    return parts


def casts(model: ir.Model) -> Parts:
    """Rotates in the dtype of the caches instead of fp32, and leaves scaling queries to the attention."""
    edit = _Editor(model)
    for node in edit.nodes("RotaryEmbedding"):
        before = node.inputs[0].producer()
        if before is None or before.op_type != "Cast":
            continue
        plain, after = before.inputs[0], next(iter(node.outputs[0].uses())).node
        assert plain is not None
        assert after.op_type == "Cast"
        tables = [edit.cast(node, table, plain.dtype) for table in node.inputs[1:3]]
        rotated = edit.one(node, "RotaryEmbedding", [plain, *tables, node.inputs[3]], plain, interleaved=0)
        edit.replace(after.outputs[0], rotated)
    for node in edit.nodes("Attention"):
        scaled = _producer(node.inputs[0], "Mul")
        node.replace_input_with(0, scaled.inputs[0])
        node.attributes["scale"] = ir.AttrFloat32("scale", _scale(scaled))
    edit.clean()
    return {}


def _scale(scaled: ir.Node) -> float:
    return float(scaled.inputs[1].const_value.numpy())


def lengths(model: ir.Model) -> Parts:
    """Attention over the filled positions instead of a mask over all; for passes of one row, else unchanged."""
    edit = _Editor(model)
    inputs = {value.name: value for value in model.graph.inputs}
    for node in edit.nodes("Attention"):
        if "mask" not in inputs or _sizes(inputs["mask"]) != [1, 1]:
            continue
        used = edit.one(node, "Add", [inputs["past_length"], edit.constant([1])], inputs["past_length"])
        given = [*node.inputs[:3], None, None, None, used]
        edit.replace(node.outputs[0], edit.one(node, "Attention", given, node.outputs[0], scale=1.0))
    edit.clean()
    return {}


def grouped(model: ir.Model) -> Parts:
    """ONNX Runtime's GroupQueryAttention, which rotates and writes into the caches too."""
    return _grouped(model, True)


def grouped_apart(model: ir.Model) -> Parts:
    """``grouped``, but rows are rotated before, in fp32."""
    return _grouped(model, False)


def _grouped(model: ir.Model, rotates: bool) -> Parts:
    edit, inputs = _Editor(model), {value.name: value for value in model.graph.inputs}
    for node in edit.nodes("Attention"):
        keys, values = (_producer(node.inputs[i], "TensorScatter") for i in (1, 2))
        _, heads, n, d = _known(node.outputs[0])
        _, kv_heads, capacity, _ = _known(keys.outputs[0])
        dtype = node.outputs[0].dtype
        turns = [
            _producer(_behind(value, "Mul", "Cast"), "RotaryEmbedding") for value in (node.inputs[0], keys.inputs[1])
        ]
        rows = [_behind(turn.inputs[0], "Cast", "Transpose", "Reshape") for turn in turns]
        rows.append(_behind(values.inputs[1], "Transpose", "Reshape"))
        counts = heads, kv_heads, kv_heads
        flat = [
            edit.insert(node, "Unsqueeze", [row, edit.constant([0])], [(dtype, [1, n, count * d])])[0]
            for row, count in zip(rows, counts, strict=True)
        ]
        tables: list[ir.Value | None] = [None, None, None]
        if rotates:
            cos, sin = (edit.cast(node, table, dtype) for table in turns[0].inputs[1:3])
            tables = [cos, sin, turns[0].inputs[3]]
        else:
            for i, (turn, count) in enumerate(zip(turns, counts, strict=False)):
                wide = edit.cast(node, flat[i], ir.DataType.FLOAT)
                turned = edit.one(
                    node, "RotaryEmbedding", [wide, *turn.inputs[1:]], wide, interleaved=0, num_heads=count
                )
                flat[i] = edit.cast(node, turned, dtype)
        length = inputs["past_length"]
        last = edit.insert(node, "Add", [length, edit.constant([n - 1])], [(ir.DataType.INT64, [1])])[0]
        # A constant, since the operator reads it on the host: the last axis of the bias, not the filled positions.
        total = edit.constant(capacity, np.int32)
        bias = _bias(edit, node, n, dtype) if "mask" in inputs and n > 1 else None
        given = [
            *flat,
            keys.inputs[0],
            values.inputs[0],
            edit.cast(node, last, ir.DataType.INT32),
            total,
            *tables,
            bias,
        ]
        cache = dtype, [1, kv_heads, capacity, d]
        out, new_keys, new_values = edit.insert(
            node,
            "GroupQueryAttention",
            given[: len(given) if bias else 10 if rotates else 7],
            [(dtype, [1, n, heads * d]), cache, cache],
            MICROSOFT,
            num_heads=heads,
            kv_num_heads=kv_heads,
            do_rotary=int(rotates),
            rotary_interleaved=0,
        )
        joined_heads = next(iter(next(iter(node.outputs[0].uses())).node.outputs[0].uses())).node  # Transpose, Reshape
        flat_out = edit.one(node, "Squeeze", [out, edit.constant([0])], joined_heads.outputs[0])
        for old, new in ((joined_heads, flat_out), (keys, new_keys), (values, new_values)):
            edit.replace(old.outputs[0], new)
    edit.clean()
    return {}


def _bias(edit: _Editor, node: ir.Node, n: int, dtype: ir.DataType) -> ir.Value:
    """The mask of an Attention as a bias [1, 1, n, S]; repeated ones are merged by ONNX Runtime."""
    mask = node.inputs[3]
    low, zero = (edit.constant(number, dtype.numpy()) for number in (np.finfo(dtype.numpy()).min, 0))
    assert mask is not None
    return edit.insert(node, "Where", [mask, zero, low], [(dtype, _sizes(mask))])[0]


def skip_norm(model: ir.Model) -> Parts:
    """One operator for adding to the residual stream and norming the sum."""
    edit = _Editor(model)
    for node in edit.nodes("RMSNormalization"):
        added = node.inputs[0].producer()
        if added is None or added.op_type != "Add" or any(_sizes(x) != _sizes(added.outputs[0]) for x in added.inputs):
            continue
        out, weight = added.outputs[0], node.inputs[1]
        like = (out.dtype, _sizes(out))
        normed, _, _, total = edit.insert(
            # The norm's place, since its weight and both summands are known there.
            added,
            "SkipSimplifiedLayerNormalization",
            [*added.inputs, weight],
            [like, (None, None), (None, None), like],
            MICROSOFT,
            epsilon=node.attributes["epsilon"].as_float(),
        )
        normed.producer().outputs[1].name = normed.producer().outputs[2].name = ""
        edit.replace(node.outputs[0], normed)
        edit.replace(out, total)
    edit.clean()
    return {}


def top_k_first(model: ir.Model) -> Parts:
    """Chooses by logits and normalizes only what was chosen, instead of all log-probabilities."""
    edit = _Editor(model)
    for node in edit.nodes("TopK"):
        normed = node.inputs[0].producer()
        if normed is None or normed.op_type != "LogSoftmax":
            continue
        logits, values = normed.inputs[0], node.outputs[0]
        assert logits is not None
        shape = [*_known(logits)[:-1], 1]
        total = edit.insert(
            node, "ReduceLogSumExp", [logits, edit.constant([-1])], [(values.dtype, shape)], keepdims=1
        )[0]
        like = [(out.dtype, _sizes(out)) for out in node.outputs]
        best, index = edit.insert(node, "TopK", [logits, node.inputs[1]], like, axis=-1, largest=1, sorted=1)
        edit.replace(values, edit.one(node, "Sub", [best, total], values))
        edit.replace(node.outputs[1], index)
    edit.clean()
    return {}


# By name, the functions that make a variant, in order.
VARIANTS: dict[str, tuple[Callable[[ir.Model], Parts], ...]] = {
    "base": (),
    "joined": (joined,),
    "grouped": (grouped,),
    "grouped-apart": (grouped_apart,),
    "lengths": (lengths,),
    "casts": (casts,),
    "skip-norm": (skip_norm,),
    "top-k-first": (top_k_first,),
    "all-grouped": (grouped, joined, skip_norm, top_k_first),
    "all-standard": (lengths, casts, joined, skip_norm, top_k_first),
}


def reads(model: ir.Model, dtypes: dict[str, int]) -> tuple[int, int]:
    """Bytes of a graph's weights without tables of which a pass reads rows, each once, and as often as they are
    multiplied. dtypes: bytes of an element, by weight."""
    once, multiplied = 0, 0
    for value in model.graph.inputs:
        if not is_weight(value) or str(value.name).startswith("rotary."):
            continue
        nbytes = prod(_sizes(value) or []) * dtypes[str(value.name)]
        uses = sum(use.node.op_type != "Gather" for use in value.uses())
        once, multiplied = once + nbytes * (uses > 0), multiplied + nbytes * uses
    return once, multiplied
