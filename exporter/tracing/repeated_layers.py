"""Traces one layer of a target and repeats it in the graph, instead of tracing them all."""

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
    """Within this context a target whose layers are alike has only the first, and a ``gumiho::Mark`` before and after
    it; one whose first layer is unlike the others has the first two, and the marks around the second. Yields the number
    of its layers.
    """
    layers = module.layers
    hooks = list[torch.utils.hooks.RemovableHandle]()
    returns = getattr(module, "returns", NORMED)
    kinds = [_structure(layer) for layer in layers]
    last = 0 if len(set(kinds)) == 1 else 1
    if isinstance(module, Target) and len(layers) > last + 1 and len(set(kinds[last:])) == 1:
        module.layers, module.returns = layers[: last + 1], returns.within(last)
        hooks = [norm.register_forward_pre_hook(_mark) for norm in (layers[last].input_layernorm, module.norm)]
    try:
        yield len(layers)
    finally:
        module.layers = layers
        if isinstance(module, Target):
            module.returns = returns
        for hook in hooks:
            hook.remove()


def repeat(graph: ir.Graph, layers: int, traced: int, cached: int, returns: Features = NORMED) -> None:
    """Repeats the last of the traced layers until there are ``layers``, as if all had been traced. Nodes are in the
    order of tracing, so that layer is the nodes between the marks. cached: caches of a layer. returns: of the target.
    """
    at = traced - 1
    prefix = f"layers.{at}."
    nodes = list(graph)
    begin, end = (node for node in nodes if node.op_type == "Mark")
    within = nodes[nodes.index(begin) + 1 : nodes.index(end)]
    first, last = begin.inputs[0], end.inputs[0]
    entering = {at: first, traced: last}
    caches, written = graph.inputs[-cached:], graph.outputs[-cached:]
    ir.convenience.replace_all_uses_with(begin.outputs[0], first)
    inner = {value for node in within for value in node.outputs}
    read = list(dict.fromkeys(v for node in within for v in node.inputs if v is not None and v not in inner))
    pattern = ir.GraphView(read, [last, *written], nodes=within)
    for i in range(traced, layers):
        layer = pattern.clone()
        copies, twins, ends = list(layer), dict(zip(read, layer.inputs, strict=True)), list(layer.outputs)
        for part in (layer.inputs, layer.outputs):
            part.clear()
        layer.remove(copies)
        for node in copies:
            for named in (node, *node.outputs):
                named.name = f"layers.{i}.{str(named.name).removeprefix(prefix)}"
        for old, new in zip((*caches, *written), (*(twins[cache] for cache in caches), *ends[1:]), strict=True):
            new.name = old.name.removesuffix(str(at)) + str(i)
        for value, twin in twins.items():
            if value.name.startswith(prefix):
                twin.name = f"layers.{i}.{value.name.removeprefix(prefix)}"
                graph.initializers.add(twin)
            elif value not in caches:
                ir.convenience.replace_all_uses_with(twin, last if value is first else value)
        graph.inputs.extend(twins[cache] for cache in caches)
        graph.outputs.extend(ends[1:])
        graph.insert_before(end, copies)
        entering[i + 1] = last = ends[0]
    ir.convenience.replace_all_uses_with(end.outputs[0], last)
    graph.remove((begin, end), safe=True)
    if any(tap > at for tap in returns.taps):
        joined = next(value for value in graph.outputs if value.name == "hidden").producer()
        while first not in joined.inputs:  # all of these were traced as what enters that layer
            joined = joined.inputs[0].producer()
        for place, tap in enumerate(returns.taps, int(returns.normed)):
            if tap > at:
                joined.replace_input_with(place, entering[tap])
