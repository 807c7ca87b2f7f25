"""Turns ``gumiho::Either`` into branches, so that only the values that are wanted are computed."""

from collections.abc import Iterator, Sequence

import onnx_ir as ir

_BRANCHES = "then_branch", "else_branch"


def make(model: ir.Model) -> None:
    """Replaces every ``Either(condition, *a, *b)``, with as many outputs as each of a and b, by an If whose branches
    hold the nodes that only a, or only b, needs. They may be nested.

    condition: bool [1].
    """
    _make(model.graph)
    model.opset_imports.pop("gumiho", None)


def _make(graph: ir.Graph) -> None:
    order = {node: i for i, node in enumerate(graph)}
    # what a branch takes is made inside of it
    for node in reversed([node for node in graph if node.op_type == "Either"]):
        if node.graph is not graph:
            continue
        count, results = len(node.outputs), list(node.outputs)
        condition, values = node.inputs[0], list(node.inputs[1:])
        branches: list[ir.Graph] = []
        for name, wanted in zip(_BRANCHES, (values[:count], values[count:]), strict=True):
            own = sorted(_only_for(wanted, node, graph), key=order.__getitem__)
            graph.remove(own)
            returned = [_inside(value, own, f"{node.name}.{name}.{i}") for i, value in enumerate(wanted)]
            branches.append(ir.Graph([], returned, nodes=own, name=f"{node.name}.{name}"))
        for i in range(len(values)):
            node.replace_input_with(1 + i, None)
        attributes = {name: ir.AttrGraph(name, branch) for name, branch in zip(_BRANCHES, branches, strict=True)}
        made = ir.node("If", [condition], attributes=attributes, num_outputs=count, name=node.name)
        graph.insert_before(node, made)
        for result, value in zip(results, made.outputs, strict=True):
            value.name, value.type = result.name, result.type
            if result.is_graph_output():
                value.shape = result.shape
            ir.convenience.replace_all_uses_with(result, value, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        for branch in branches:
            _make(branch)


def _inside(value: ir.Value, own: list[ir.Node], name: str) -> ir.Value:
    """The value, or a copy that a branch can return if it is computed outside. own: the branch's nodes, which the copy
    joins."""
    if value.producer() in own:
        return value
    own.append(ir.node("Identity", [value]))
    copy = own[-1].outputs[0]
    copy.name, copy.type = name, value.type
    return copy


def _only_for(values: Sequence[ir.Value], user: ir.Node, graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes that nothing but the values need, and these nothing but ``user``."""
    found: set[ir.Node] = set()
    waiting = [value.producer() for value in values]
    while waiting:
        node = waiting.pop()
        if node is None or node in found or node.graph is not graph:
            continue
        users = {use.node for output in node.outputs for use in output.uses()}
        if not users <= found | {user} or any(output.is_graph_output() for output in node.outputs):
            continue
        found.add(node)
        yield node
        waiting += [x.producer() for x in node.inputs if x is not None]
