"""Turns ``gumiho::Either`` into branches, so that only the value that is wanted is computed."""

from collections.abc import Iterator

import onnx_ir as ir


def make(model: ir.Model) -> None:
    """Replaces every ``Either(condition, a, b)`` by an If whose branches hold the nodes that only a, or only b, needs.

    condition: bool [1].
    """
    graph = model.graph
    order = {node: i for i, node in enumerate(graph)}
    for node in [node for node in graph if node.op_type == "Either"]:
        condition, *values = node.inputs
        (result,) = node.outputs
        branches: list[ir.Attr] = []
        for name, value in zip(("then_branch", "else_branch"), values, strict=True):
            own = sorted(_only_for(value, node, graph), key=order.__getitem__)
            if value.producer() not in own:  # a branch cannot return what is computed outside of it
                own = [ir.node("Identity", [value])]
                graph.insert_before(node, own)
                own[0].outputs[0].type, value = value.type, own[0].outputs[0]
            graph.remove(own)
            node.replace_input_with(1 + len(branches), None)
            branches.append(ir.AttrGraph(name, ir.Graph([], [value], nodes=own, name=f"{node.name}.{name}")))
        made = ir.node(
            "If", [condition], attributes=dict(zip(("then_branch", "else_branch"), branches, strict=True)), name=node.name
        )
        made.outputs[0].name, made.outputs[0].type = result.name, result.type
        graph.insert_before(node, made)
        ir.convenience.replace_all_uses_with(result, made.outputs[0])
        graph.remove(node, safe=True)
    model.opset_imports.pop("gumiho", None)


def _only_for(value: ir.Value, user: ir.Node, graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes that nothing but the value needs, and the value nothing but ``user``."""
    found: set[ir.Node] = set()
    waiting = [value.producer()]
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
