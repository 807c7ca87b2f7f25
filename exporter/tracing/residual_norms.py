"""Joins a norm with the addition before it, in graphs for ONNX Runtime's CPU provider."""

import onnx_ir as ir


def join(graph: ir.Graph) -> None:
    """Turns every RMSNormalization of a sum into a SkipSimplifiedLayerNormalization, which returns the sum too. Sums
    with parameters, which are not residual, stay."""
    for node in [node for node in graph if node.op_type == "RMSNormalization"]:
        added = node.inputs[0].producer()
        if added is None or added.op_type != "Add" or any(x.is_initializer() for x in added.inputs):
            continue
        joined = ir.node(
            "SkipSimplifiedLayerNormalization",
            [*added.inputs, node.inputs[1]],
            {"epsilon": node.attributes["epsilon"].as_float()},
            domain="com.microsoft",
            num_outputs=4,
            name=node.name,
        )
        graph.insert_before(added, joined)
        for old, new in ((node.outputs[0], joined.outputs[0]), (added.outputs[0], joined.outputs[3])):
            new.name, new.type, new.shape = old.name, old.type, old.shape
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        for unused in joined.outputs[1:3]:
            unused.name = ""
        graph.remove((node, added), safe=True)
        graph.opset_imports.setdefault("com.microsoft", 1)
