"""What a backend's ONNX parser takes, as tables: the proof that can be had without the hardware.

The tables hold what the parsers' sources and documents say of the operators that our graphs may need. What a device makes of
a graph that its parser takes is not here: engines are replayed against the golden run where they are compiled.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import onnx
import onnx_ir as ir
from onnxscript.optimizer import fold_constants

from runtime.errors import GumihoError

from .migraphx import MIG_ANY, MIGRAPHX
from .ranges import LIMIT, ranges
from .rules import ANY, INTS, Facts, Parser, Rule, Use, dtypes, named
from .tensorrt import TENSORRT, TENSORRT_10_3

PARSERS: Mapping[str, Parser] = {
    # Of what numpy holds, src/py/migraphx_py.cpp passes every type of these; bool comes out as bool. bfloat16 it refuses.
    # Without elements, Expand gives one (common.cpp takes the larger size) and most others an undefined value.
    # onnx_parser.cpp: the first entry of external data is the place, the second the offset, the third the length.
    "migraphx": Parser(
        "MIGraphX 2.16", range(13, 20), "fhil" + "bBc", MIG_ANY, MIGRAPHX, empty=False, positional=True, floating=True
    ),
    "tensorrt": Parser("TensorRT 10.15", range(13, 25), ANY, ANY, TENSORRT, empty=True, positional=False),
    "tensorrt-basic": Parser("TensorRT 10.3", range(13, 21), ANY, ANY, TENSORRT_10_3, empty=True, positional=False),
}


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
        if given is not None and given.dtype not in dtypes(accepted):
            yield f"has {given.dtype.name if given.dtype else 'no type'} as input {i}, accepted are {named(accepted)}"
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
        at_end = parser.io_dtypes if out.is_graph_output() else ""
        if facts.dtype not in dtypes(parser.types + at_end):
            yield f"makes {facts.dtype.name if facts.dtype else 'no type'}, accepted are {named(parser.types)}"
    if mixed := _mixed(use, opset):
        yield mixed
    if said := rule.refuse(use):
        yield said


def _integers(values: Iterable[ir.Value | None], facts: Mapping[ir.Value, Facts]) -> set[ir.Value]:
    return {value for value in values if value is not None and facts[value].dtype in dtypes(INTS)}


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
            if value.dtype not in dtypes(parser.io_dtypes):
                found.append((end, f"'{value.name}' is {value.dtype}, accepted are {named(parser.io_dtypes)}"))
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
        f"{counts}); spell these operations in graphs/dialects as exporter/backends accepts them"
    )
