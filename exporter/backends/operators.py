"""Checks graphs against tables of what each backend's ONNX parser supports, which needs no hardware.

The tables contain the operators that our graphs may need, according to the sources and documents of the parsers.
Whether a device computes a parsed graph correctly is checked when it is compiled, by replaying the golden run.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import onnx
import onnx_ir as ir
from onnxscript.optimizer import fold_constants

from runtime.errors import GumihoError

from .migraphx import MIG_ANY, MIGRAPHX
from .ranges import LIMIT, ranges
from .rules import ANY, INTS, Facts, Parser, Rule, Use, dtypes, named
from .tensorrt import TENSORRT, TENSORRT_10_3

_TENSORRT = Parser("TensorRT 10.15", range(13, 25), ANY, ANY, TENSORRT, empty=True, positional=False)
PARSERS: Mapping[str, Parser] = {
    # Of numpy's types, src/py/migraphx_py.cpp passes all of these, bool as bool, but not bfloat16. From tensors without
    # elements, Expand makes one (common.cpp uses the larger size), and most other operators an undefined value.
    # onnx_parser.cpp: the first entry of external data is the file, the second the offset, the third the length.
    "migraphx": Parser(
        "MIGraphX 2.16", range(13, 20), "fhil" + "bBc", MIG_ANY, MIGRAPHX, empty=False, positional=True, floating=True
    ),
    "tensorrt": _TENSORRT,
    "tensorrt-rtx": replace(_TENSORRT, label="TensorRT for RTX 1.7"),
    "tensorrt-basic": Parser("TensorRT 10.3", range(13, 21), ANY, ANY, TENSORRT_10_3, empty=True, positional=False),
}


def _facts(model: ir.Model) -> dict[ir.Value, Facts]:
    """The facts of every value; the tracer leaves many out. Constants are folded to infer shapes; weights are not
    read."""
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


def _constants(model: ir.Model, facts: Mapping[ir.Value, Facts]) -> set[ir.Value]:
    """The values that do not depend on any input of the graph."""
    constants = set(model.graph.initializers.values()) - set(model.graph.inputs)
    for node in model.graph:
        by_shape = node.op_type in ("Shape", "Size") and facts[node.inputs[0]].shape is not None
        if by_shape or all(value is None or value in constants for value in node.inputs):
            constants.update(node.outputs)
    return constants


def _mixed_types(use: Use, opset: int) -> str:
    """A phrase if inputs differ in type that ONNX requires to be equal, else ""; some parsers convert them silently."""
    node = use.node
    if node.domain or not onnx.defs.has(node.op_type, opset, ""):
        return ""
    formal = onnx.defs.get_schema(node.op_type, opset, "").inputs
    seen: dict[str, ir.DataType] = {}
    for i, value_facts in enumerate(use.inputs):
        if value_facts is None or value_facts.dtype is None or not formal:
            continue
        parameter = formal[min(i, len(formal) - 1)]
        if not parameter.is_homogeneous:
            continue
        if seen.setdefault(parameter.type_str, value_facts.dtype) != value_facts.dtype:
            return f"mixes {seen[parameter.type_str].name} and {value_facts.dtype.name}"
    return ""


def _violations(use: Use, rule: Rule, constants: set[ir.Value], parser: Parser, opset: int) -> Iterator[str]:
    """Phrases for everything in a node that a rule does not allow."""
    node, types = use.node, rule.types.split()
    if node.domain != rule.domain:
        yield f"is of the domain '{node.domain}', expected '{rule.domain}'"
    for i, value_facts in enumerate(use.inputs):
        accepted = types[min(i, len(types) - 1)] if types else ""
        if value_facts is not None and value_facts.dtype not in dtypes(accepted):
            dtype = value_facts.dtype.name if value_facts.dtype else "no type"
            yield f"has {dtype} as input {i}, expected {named(accepted)}"
    for name in node.attributes:
        if name not in rule.attributes.split():
            yield f"has the attribute '{name}', which the parser ignores"
    for i in map(int, rule.constant + rule.stored):
        value = node.inputs[i] if i < len(node.inputs) else None
        if value is None:
            continue
        if value not in constants:
            yield f"computes its input {i}, which must be a constant"
        elif str(i) in rule.stored and not (value.is_initializer() or value.producer().op_type == "Constant"):
            yield f"has a folded constant as input {i}, which must be an initializer or a Constant"
    if len(node.inputs) > rule.most[0] or len(node.outputs) > rule.most[1]:
        count = f"{len(node.inputs)} inputs and {len(node.outputs)} outputs"
        yield f"has {count}, expected at most {rule.most[0]} and {rule.most[1]}"
    for facts, out in zip(use.outputs, node.outputs, strict=True):
        at_end = parser.io_dtypes if out.is_graph_output() else ""
        if facts.dtype not in dtypes(parser.types + at_end):
            yield f"has {facts.dtype.name if facts.dtype else 'no type'} as output, expected {named(parser.types)}"
    if phrase := _mixed_types(use, opset):
        yield phrase
    if phrase := rule.refuse(use):
        yield phrase


def _integers(values: Iterable[ir.Value | None], facts: Mapping[ir.Value, Facts]) -> set[ir.Value]:
    return {value for value in values if value is not None and facts[value].dtype in dtypes(INTS)}


def _inexact_nodes(
    graph: ir.Graph, facts: Mapping[ir.Value, Facts], constants: set[ir.Value], parser: Parser
) -> Iterator[ir.Node]:
    """The first nodes whose integer inputs or outputs may change if they are computed in fp32 without rounding.

    Integer inputs and weights of our graphs count or select entries of an axis: tokens select rows of the embedding,
    ``path`` rows of ``hidden``, ``past_length`` counts positions of a cache. So none is larger than the longest axis.
    """
    shapes = {value: fact.shape or () for value, fact in facts.items()}
    largest = max(
        (size for value in (*graph.inputs, *graph.initializers.values()) for size in shapes[value]), default=0
    )
    exact = ranges(graph, shapes, {value: fact.dtype for value, fact in facts.items()}, largest)
    reported: set[ir.Value] = set()
    for node in graph:
        rule = parser.operators.get(node.op_type)
        if not isinstance(rule, Rule) or constants.issuperset(node.outputs):
            continue  # refused already, or computed while parsing
        computed = [value for i, value in enumerate(node.inputs) if str(i) not in rule.constant]
        lost = _integers((*computed, *node.outputs), facts) - exact.keys()
        if lost and not lost & reported:
            yield node
        reported |= lost


def _label(node: ir.Node) -> str:
    return f"node '{node.name or node.outputs[0].name}' ({node.op_type})"


def refusals(model: ir.Model, backend: str) -> list[tuple[str, str]]:
    """Everything in a graph that a backend does not support: the operator or part of the graph, and a phrase for it."""
    parser, graph = PARSERS[backend], model.graph
    opset = model.opset_imports.get("", 0)
    problems = [
        (
            "opset",
            f"declares opset {version} of the domain '{domain}', expected {parser.opsets[0]} to {parser.opsets[-1]}",
        )
        for domain, version in model.opset_imports.items()
        if version > parser.opsets[-1] or (not domain and version < parser.opsets[0])
    ]
    for value in graph.inputs:
        if value.shape is None or not all(isinstance(d, int) for d in value.shape):
            problems.append(("input", f"'{value.name}' has the shape {value.shape}, which is not static"))
    if any(part == "input" for part, _ in problems):
        return problems  # they cause many other problems, which are not worth reporting
    for end, values in (("input", graph.inputs), ("output", graph.outputs)):
        for value in values:
            if value.dtype not in dtypes(parser.io_dtypes):
                problems.append((end, f"'{value.name}' is {value.dtype}, expected {named(parser.io_dtypes)}"))
    for value in graph.initializers.values():
        tensor = value.const_value
        if parser.positional and isinstance(tensor, ir.ExternalTensor) and None in (tensor.offset, tensor.length):
            problems.append(("weight", f"'{value.name}' lacks its offset or length, which are read by position"))

    facts = _facts(model)
    constants = _constants(model, facts)
    for node in graph:
        use = Use(node, [None if v is None else facts[v] for v in node.inputs], [facts[v] for v in node.outputs])
        rule = parser.operators.get(node.op_type, "is not supported")
        shapes = [f.shape for f in (*use.outputs, *filter(None, use.inputs))]
        if isinstance(rule, str):
            phrases = [rule]
        elif any(shape is None for shape in shapes):
            phrases = ["has values whose shape is not static"]
        elif not parser.empty and any(0 in (shape or ()) for shape in shapes):
            phrases = ["has a tensor without elements"]
        else:
            phrases = list(_violations(use, rule, constants, parser, opset))
        problems += [(node.op_type, f"{_label(node)} {what}") for what in phrases]
    if parser.floating and not problems:
        what = f"has integers that may change when they are computed in fp32 without rounding, or exceed {LIMIT}"
        problems += [
            (node.op_type, f"{_label(node)} {what}") for node in _inexact_nodes(graph, facts, constants, parser)
        ]
    return problems


def check(model: ir.Model, backend: str) -> None:
    """Raises GumihoError for a graph that a backend's parser does not support.

    backend: its name, or that of a spare form with its own parser. ONNX Runtime's backends have no table; they are
    tested when a bundle is compiled.
    """
    if backend not in PARSERS or not (problems := refusals(model, backend)):
        return
    counts = ", ".join(f"{part} {n}" for part, n in Counter(part for part, _ in problems).most_common())
    raise GumihoError(
        f"graph '{model.graph.name}' is not supported by {PARSERS[backend].label}: {problems[0][1]} ({len(problems)} "
        f"problems in all: {counts}); spell these operations in graphs/dialects as the tables in exporter/backends "
        "require"
    )
