"""exporter.tracing.trace: a target whose layers are repeated is, node by node, the one of a trace of all its layers."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from exporter.tracing.trace import _traced, trace
from exporter.weights.source import Location
from graphs.dialects.basic import Basic
from graphs.dialects.contrib import Contrib
from graphs.dialects.decomposed import Decomposed
from graphs.dialects.exact import Exact
from graphs.dialects.plain import Plain
from graphs.dialects.quantization import FP8, Scheme, Schemes
from graphs.dialects.standard import Standard
from graphs.features import NORMED, Features
from graphs.layer import LlamaShape
from graphs.shared_target import SharedTarget
from graphs.target import Target

LAYERS = 4
SHAPE = LlamaShape(101, 64, 96, LAYERS, heads=4, kv_heads=2, head_dim=16, eps=1e-5)
BIASED = LlamaShape(
    101, 64, 96, LAYERS, heads=4, kv_heads=4, head_dim=16, eps=1e-5, qkv_bias=True, o_bias=True, mlp_bias=True
)
QWEN3 = replace(SHAPE, qk_norm=True)
STATIC, HALF = {"rows": 8}, torch.float16
INT4 = Scheme(32, torch.uint8)
ODD = {f"layers.0.self_attn.{name}_proj.weight": Scheme(32, torch.uint8, 8) for name in "qkv"}
# Every dialect as the backends have it, and every kind of codes.
FORMS: dict[str, tuple[LlamaShape, type[Plain], torch.dtype, dict[str, int], Scheme | Schemes | None]] = {
    "cpu": (SHAPE, Contrib, torch.float32, {}, None),
    "cpu, odd heads": (SHAPE, Standard, torch.float32, {}, None),
    "cpu, int4": (SHAPE, Exact, torch.float32, {}, INT4),
    "cpu, int4, another first layer": (SHAPE, Exact, torch.float32, {}, Schemes(INT4, ODD)),
    "cpu, several streams": (SHAPE, Exact, torch.float32, {}, INT4),
    "cpu, taps": (SHAPE, Contrib, torch.float32, {}, None),
    "cpu, another first layer, taps": (SHAPE, Exact, torch.float32, {}, Schemes(INT4, ODD)),
    "cpu, a key for every head, int8": (BIASED, Exact, torch.float32, {}, Scheme(32, torch.uint8, 8)),
    "cpu, w8a8": (SHAPE, Exact, torch.float32, {}, Scheme(0, torch.int8, 8)),
    "cpu, w8a8-unsigned": (SHAPE, Exact, torch.float32, {}, Scheme(0, torch.uint8, 8)),
    "cpu, normed heads": (QWEN3, Contrib, torch.float32, {}, None),
    "migraphx, normed heads": (QWEN3, Basic, HALF, STATIC, None),
    "cuda": (SHAPE, Standard, HALF, STATIC, None),
    "migraphx": (SHAPE, Basic, HALF, STATIC, None),
    "migraphx, int8": (SHAPE, Basic, HALF, STATIC, Scheme(32, torch.int8, 8)),
    "tensorrt": (SHAPE, Standard, HALF, STATIC, None),
    "tensorrt, int4": (SHAPE, Standard, HALF, STATIC, Scheme(16, torch.int8)),
    "tensorrt, spare, fp8": (SHAPE, Decomposed, HALF, STATIC, Scheme(0, FP8)),
    "tensorrt, spare, bfloat16": (BIASED, Decomposed, torch.bfloat16, STATIC, None),
}


def traced(
    shape: LlamaShape,
    ops: type[Plain],
    dtype: torch.dtype,
    sizes: dict[str, int],
    scheme: Scheme | Schemes | None,
    kind: type[Target] = Target,
    returns: Features = NORMED,
) -> ir.Model:
    """A target whose weights are nowhere."""
    schemes = scheme if isinstance(scheme, Schemes) else Schemes(scheme)
    with torch.device("meta"):
        module = kind(shape, 128, 128, ops, schemes, returns).eval()
    places = dict[str, Location]()
    for i, (name, parameter) in enumerate(module.named_parameters()):
        numbers = parameter.dtype == torch.float32 and not name.startswith("rotary.")
        kept = dtype if numbers else parameter.dtype
        places[name] = Location("w.bin", 4096 * i, parameter.numel() * kept.itemsize, kept, tuple(parameter.shape))
    return trace(module, places, Path("nowhere"), dtype, sizes)


def spelled(model: ir.Model) -> list[Any]:
    """All that a graph says, but for the names of what is made within it: these are told by the order they come in."""
    graph, names = model.graph, dict[ir.Value | None, str]()
    for value in graph.inputs:
        names[value] = str(value.name)
    for name, value in graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        if isinstance(tensor, ir.ExternalTensor):
            names[value] = f"{name}, {tensor.name} at {tensor.location} {tensor.offset} {tensor.length}"
        else:
            names[value] = str(tensor.numpy().tolist())

    def tensor(value: ir.Value | None) -> tuple[str, ...]:
        if value is None:
            return ("",)
        return names.setdefault(value, f"made {len(names)}"), str(value.dtype), str(value.shape)

    def attribute(own: ir.Attr) -> Any:
        return nodes(own.as_graph()) if own.type == ir.AttributeType.GRAPH else str(own)

    def nodes(graph: ir.Graph) -> list[Any]:
        return [
            *(
                (
                    node.domain,
                    node.op_type,
                    node.version,
                    [tensor(value) for value in node.inputs],
                    [(name, attribute(own)) for name, own in sorted(node.attributes.items())],
                    [tensor(value) for value in node.outputs],
                )
                for node in graph
            ),
            *(tensor(value) for value in graph.outputs),
        ]

    return [
        *(tensor(value) for value in graph.inputs),
        *nodes(graph),
        *((value.name, tensor(value)) for value in graph.outputs),
        *sorted(tensor(value) for value in graph.initializers.values()),
        sorted(model.opset_imports.items()),
    ]


USUAL = {
    "cpu",
    "cpu, taps",
    "cpu, another first layer, taps",
    "cpu, w8a8",
    "migraphx, normed heads",
    "tensorrt, int4",
    "tensorrt, spare, bfloat16",
}


@pytest.mark.parametrize("form", [pytest.param(n, marks=() if n in USUAL else pytest.mark.exhaustive) for n in FORMS])
def test_repeated_layers_are_those_of_a_full_trace(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.tracing.trace._capture", _traced)  # else the second were the first
    kind = SharedTarget if "streams" in form else Target
    returns = Features(False, (0, 1, 3, LAYERS)) if "taps" in form else NORMED
    repeated = traced(*FORMS[form], kind, returns)
    monkeypatch.setattr("exporter.tracing.trace.shortened", lambda module: nullcontext(0))
    whole = traced(*FORMS[form], kind, returns)
    assert repeated.graph.inputs[-1].name.endswith(f".{LAYERS - 1}")
    assert spelled(repeated) == spelled(whole)
    for names in (
        [node.name for node in repeated.graph],
        [*repeated.graph.initializers, *(x.name for node in repeated.graph for x in node.outputs if x.name)],
    ):
        assert len(set(names)) == len(names)
