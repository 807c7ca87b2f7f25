"""Traces two layers of a target and repeats the second in the graph, instead of tracing them all."""

import contextlib
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.onnx import ops

from graphs.drafter import Drafter
from graphs.features import NORMED, Features
from graphs.target import Target


def _mark(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Applies ``gumiho::Mark`` to the input of a norm."""
    (x,) = inputs
    return ops.symbolic("gumiho::Mark", (x,), {}, dtype=x.dtype, shape=x.shape, version=1)


def _structure(layer: nn.Module) -> tuple[Any, ...]:
    """What tells layers apart that are quantized in different ways."""
    return tuple((name, p.shape, p.dtype) for name, p in layer.named_parameters())


@contextlib.contextmanager
def shortened(module: Target | Drafter) -> Iterator[int]:
    """Within this context a target of more than two layers has only the first two, and a ``gumiho::Mark`` before and
    after the second, if the layers after the first are alike. Yields the number of its layers.
    """
    layers = module.layers
    hooks = list[torch.utils.hooks.RemovableHandle]()
    returns = getattr(module, "returns", NORMED)
    if isinstance(module, Target) and len(layers) > 2 and len({_structure(layer) for layer in layers[1:]}) == 1:
        module.layers, module.returns = layers[:2], returns.within(1)
        hooks = [norm.register_forward_pre_hook(_mark) for norm in (layers[1].input_layernorm, module.norm)]
    try:
        yield len(layers)
    finally:
        module.layers = layers
        if isinstance(module, Target):
            module.returns = returns
        for hook in hooks:
            hook.remove()


def _of_layer(name: str, i: int) -> str:
    return f"layers.{i}{name.removeprefix('layers.1')}" if name.startswith("layers.1.") else f"layers.{i}.{name}"


def repeat(graph: ir.Graph, layers: int, cached: int, returns: Features = NORMED) -> None:
    """Repeats the second layer until there are ``layers``, as if all had been traced. Nodes are in the order of
    tracing, so the second layer is the nodes between the marks. cached: caches of a layer. returns: of the target."""
    nodes = list(graph)
    begin, end = (node for node in nodes if node.op_type == "Mark")
    second = nodes[nodes.index(begin) + 1 : nodes.index(end)]
    first, last = begin.inputs[0], end.inputs[0]
    entering = {1: first, 2: last}
    caches, written = graph.inputs[-cached:], graph.outputs[-cached:]
    ir.convenience.replace_all_uses_with(begin.outputs[0], first)
    inner = {value for node in second for value in node.outputs}
    read = list(dict.fromkeys(v for node in second for v in node.inputs if v is not None and v not in inner))
    pattern = ir.GraphView(read, [last, *written], nodes=second)
    for i in range(2, layers):
        layer = pattern.clone()
        copies, twins, ends = list(layer), dict(zip(read, layer.inputs, strict=True)), list(layer.outputs)
        for part in (layer.inputs, layer.outputs):
            part.clear()
        layer.remove(copies)
        for node in copies:
            for named in (node, *node.outputs):
                named.name = _of_layer(str(named.name), i)
        for old, new in zip((*caches, *written), (*(twins[cache] for cache in caches), *ends[1:]), strict=True):
            new.name = old.name.removesuffix("1") + str(i)
        for value, twin in twins.items():
            if value.name.startswith("layers.1."):
                twin.name = _of_layer(value.name, i)
                graph.initializers.add(twin)
            elif value not in caches:
                ir.convenience.replace_all_uses_with(twin, last if value is first else value)
        graph.inputs.extend(twins[cache] for cache in caches)
        graph.outputs.extend(ends[1:])
        graph.insert_before(end, copies)
        entering[i + 1] = last = ends[0]
    ir.convenience.replace_all_uses_with(end.outputs[0], last)
    graph.remove((begin, end), safe=True)
    if any(tap > 1 for tap in returns.taps):
        joined = next(value for value in graph.outputs if value.name == "hidden").producer()
        while first not in joined.inputs:  # all of these were traced as what enters the second layer
            joined = joined.inputs[0].producer()
        for place, tap in enumerate(returns.taps, int(returns.normed)):
            if tap > 1:
                joined.replace_input_with(place, entering[tap])
