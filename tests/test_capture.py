"""What ``exporter.tracing.capture`` records, against what ``torch.onnx.export`` makes of the same modules.

The dialect ``Exact``, whose graphs divide integers, which PyTorch's exporter does as floats, is compared with loops in
``test_ops``.
"""

import contextlib
import io
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxruntime as ort
import pytest
import torch
from onnxscript.optimizer import fold_constants
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from exporter.tracing.capture import capture
from exporter.tracing.signature import arguments, signature
from graphs.dialects.basic import Basic
from graphs.dialects.contrib import Contrib
from graphs.dialects.decomposed import Decomposed
from graphs.dialects.quantization import Scheme, Schemes
from graphs.dialects.rounded import Rounded
from graphs.dialects.standard import Standard
from graphs.drafters.eagle3 import Eagle3
from graphs.drafters.gumiho import Gumiho
from graphs.drafters.hydra import Hydra
from graphs.drafters.medusa import Medusa
from graphs.drafters.small import Small
from graphs.layer import LlamaShape
from graphs.shared_target import SharedTarget
from graphs.target import Target
from graphs.tree import TreeConfig

SHAPE = LlamaShape(101, 64, 96, 2, heads=4, kv_heads=2, head_dim=16, eps=1e-5)
TREE = TreeConfig(rows=6, serial_steps=2, heads=2, top_k=3, head_top_k=2, beam=2)
SERIAL = TreeConfig(rows=6, serial_steps=3, heads=0, top_k=3, head_top_k=1, beam=2, wide=True)
PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 1)]
HEADS, STEPS = TreeConfig.static(PATHS, heads=True), TreeConfig.static(PATHS)
STATIC = {"rows": 8, "accepted": 5}
INT4, WHOLE = Schemes(Scheme(32, torch.uint8)), Schemes(Scheme(0, torch.int8, 8))
MODULES: dict[str, Callable[[], nn.Module]] = {
    "target, cpu": lambda: Target(SHAPE, 64, 128, Contrib),
    "target, cpu, int8 without exact rows": lambda: Target(SHAPE, 64, 128, Rounded, WHOLE),
    "target, tensorrt": lambda: Target(SHAPE, 64, 128, Standard),
    "target, tensorrt, spare": lambda: Target(SHAPE, 64, 128, Decomposed),
    "target, migraphx": lambda: Target(SHAPE, 64, 128, Basic),
    "several streams, cpu": lambda: SharedTarget(SHAPE, 64, 256, Contrib),
    "gumiho, cpu, int4": lambda: Gumiho(SHAPE, 64, 128, TREE, True, 2, Contrib, INT4, trimmed=40),
    "gumiho, migraphx": lambda: Gumiho(SHAPE, 64, 128, TREE, False, 2, Basic),
    "gumiho, cuda": lambda: Gumiho(SHAPE, 64, 128, TREE, False, 2, Standard),
    "gumiho without a tree, cpu": lambda: Gumiho(SHAPE, 64, 128, None, False, 2, Contrib),
    "eagle3, cpu": lambda: Eagle3(SHAPE, 64, 128, SERIAL, 3 * 64, True, True, Contrib),
    "medusa, cpu": lambda: Medusa(SHAPE, 64, 128, HEADS, 1, True, True, Contrib),
    "hydra, migraphx": lambda: Hydra(SHAPE, 64, 128, STEPS, 1, True, Basic),
    "small, cpu": lambda: Small(SHAPE, 64, 128, SERIAL, Contrib),
}
USUAL = ("target, migraphx", "gumiho, cpu, int4")


def modules(name: str) -> tuple[nn.Module, dict[str, int]]:
    with torch.device("meta"):
        return MODULES[name]().eval(), {} if "cpu" in name else STATIC


def recorded(module: Any, sizes: dict[str, int]) -> ir.Model:
    inputs, outputs = signature(module, torch.float32, sizes)
    return capture(module, inputs, outputs, module.ops.opset)


def exported(module: Any, sizes: dict[str, int]) -> ir.Model:
    """By PyTorch's exporter."""
    inputs, outputs = signature(module, torch.float32, sizes)
    dims = {d: torch.export.Dim(d) for _, _, axes in inputs for d in axes.values()}
    dynamic = arguments(module, {n: {a: dims[d] for a, d in axes.items()} or None for n, _, axes in inputs})
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        warnings.simplefilter("ignore")
        module.to_empty(device="cpu")
        examples = {name: torch.empty_like(example) for name, example, _ in inputs}
        program = torch.onnx.export(
            module,
            tuple(arguments(module, examples)),
            dynamo=True,
            opset_version=module.ops.opset,
            optimize=False,
            input_names=[name for name, _, _ in inputs],
            output_names=outputs,
            dynamic_shapes=tuple(dynamic),
        )
    assert program is not None
    names = {
        str(value.shape[axis]): axis_name
        for value, (_, _, axes) in zip(program.model.graph.inputs, inputs, strict=True)
        for axis, axis_name in axes.items()
    }
    for value in (*program.model.graph.inputs, *(out for node in program.model.graph for out in node.outputs)):
        value.shape = None if value.shape is None else ir.Shape([names.get(str(n), n) for n in value.shape])
    for value in program.model.graph.initializers.values():
        if value.name in dict(module.named_parameters()):
            value.const_value = None
    return program.model


def meaning(model: ir.Model) -> dict[str, Any]:
    """What each output is computed from, whatever the nodes' names and order are. Sizes may be read from any input that
    has them."""
    fold_constants(model, onnx_shape_inference=True)
    passes.IdentityEliminationPass()(model)
    inputs = set(model.graph.inputs)

    def number(value: ir.Value | None) -> np.ndarray | None:
        if value is None:
            return None
        node = value.producer()
        if node is not None and node.op_type == "Constant":
            (held,) = node.attributes.values()
            return np.array(held.value) if held.name != "value" else held.as_tensor().numpy()
        return None if value.const_value is None else value.const_value.numpy()

    @cache
    def of(value: ir.Value | None) -> Any:
        if value is None:
            return None
        found, node = number(value), value.producer()
        if found is not None:
            return hash((str(found.dtype), found.shape if found.size != 1 else "one", found.tobytes()))
        if node is None:
            return value.name
        if node.op_type == "Shape" and node.inputs[0] in inputs:
            return str(node.inputs[0].shape[node.attributes["start"].as_int()])
        if node.op_type == "Squeeze" and (value.dtype, value.shape) == (ir.DataType.INT64, ir.Shape([])):
            return of(node.inputs[0])  # a size, or several combined
        if node.op_type in ("Slice", "Reshape") and None is not node.inputs[0].shape == node.outputs[0].shape:
            return of(node.inputs[0])
        if node.op_type == "Slice" and (number(node.inputs[1]), number(node.inputs[2])) == (0, np.iinfo(np.int64).max):
            return of(node.inputs[0])
        return hash((node.domain, node.op_type, options(node), taken(node), node.outputs.index(value)))

    def options(node: ir.Node) -> Any:
        rank = None if node.outputs[0].shape is None else len(node.outputs[0].shape)
        kept = {n: a.value for n, a in node.attributes.items() if n not in ("allowzero", "noop_with_empty_axes")}
        if kept.get("axis", 0) < 0 and rank:
            kept["axis"] += rank
        return tuple(
            sorted(
                (n, str(np.float32(v) if isinstance(v, float) else tuple(v) if isinstance(v, list) else v))
                for n, v in kept.items()
            )
        )

    def taken(node: ir.Node) -> Any:
        own = [of(value) for value in node.inputs]
        if node.op_type in ("Add", "Mul"):
            return tuple(sorted(own, key=str))
        if node.op_type in ("Reshape", "Expand") or (node.op_type == "Squeeze" and node.outputs[0].shape is not None):
            return own[0], str(node.outputs[0].shape)
        if node.op_type.startswith("Reduce"):
            return own[0], tuple(np.ravel(number(node.inputs[1])) % len(node.inputs[0].shape))
        if (
            node.op_type == "Slice"
            and node.inputs[0].shape is not None
            and (axis := number(node.inputs[3])) is not None
        ):
            axis = int(axis[0]) % len(node.inputs[0].shape)
            end, size = number(node.inputs[2]), node.inputs[0].shape[axis]
            last = own[2] if end is None else min(int(end[0]), size) if isinstance(size, int) else int(end[0])
            return own[0], own[1], last, axis
        return tuple(own)

    values = (*model.graph.inputs, *model.graph.outputs)
    return {str(value.name): (of(value), str(value.dtype), str(value.shape)) for value in values}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in USUAL else pytest.mark.exhaustive) for n in MODULES])
def test_graphs_are_those_of_the_library(name: str) -> None:
    wanted = meaning(exported(*modules(name)))
    module, sizes = modules(name)
    assert meaning(recorded(module, sizes)) == wanted
    assert {p.device.type for p in module.parameters()} == {"meta"}


def test_another_graph_has_another_meaning() -> None:
    """The comparison sees one attribute, and one size."""
    module, sizes = modules("gumiho, migraphx")
    usual = meaning(recorded(module, sizes))
    changed = recorded(module, sizes)
    next(node for node in changed.graph if node.op_type == "TopK").attributes["largest"] = ir.AttrInt64("largest", 0)
    assert meaning(changed) != usual
    assert meaning(recorded(module, sizes | {"rows": 7})) != usual


class Sizes(nn.Module):
    """Sizes that are sums, products and quotients of open ones, and constants of all kinds."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        rows, wide = x.shape[0], y.shape[1] * 2
        table = torch.eye(3, dtype=torch.bool)
        ranges = torch.arange(rows + wide) // 3, torch.arange(wide // 3)
        ones = torch.ones(rows, 2, dtype=torch.bool) & torch.zeros(rows, 2, dtype=torch.bool)
        return (
            x.reshape(-1) + 1,
            *ranges,
            ones,
            torch.where(table, 1.5, 2.0),
            y.expand(rows, -1),
            torch.cat((y, y), dim=1),
            x,
        )


def test_open_sizes_and_constants_in_onnxruntime() -> None:
    model = capture(
        Sizes(),
        [("x", torch.zeros(5, 3), {0: "rows"}), ("y", torch.zeros(1, 4), {1: "wide"})],
        [f"out{i}" for i in range(8)],
        18,
    )
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    for rows, wide in ((1, 1), (5, 4), (4, 9)):
        x, y = torch.randn(rows, 3), torch.randn(1, wide)
        for found, wanted in zip(session.run(None, {"x": x.numpy(), "y": y.numpy()}), Sizes()(x, y), strict=True):
            assert torch.equal(torch.from_numpy(found), wanted)
    assert not any(node.op_type == "EyeLike" for node in model.graph)


def test_operators_without_a_spelling_are_named() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.erfinv()

    with pytest.raises(NotImplementedError, match=r"exporter/tracing/aten.py has no spelling of aten.erfinv"):
        capture(Odd(), [("x", torch.zeros(3), {})], ["y"], 18)
