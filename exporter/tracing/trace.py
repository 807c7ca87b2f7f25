"""Converts a module on the meta device to ONNX. The graph's parameters point into the weight files."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch

from graphs.drafter import Drafter
from graphs.features import NORMED
from graphs.shared_target import SharedTarget
from graphs.target import Target
from runtime.bundle.graphs import Weight
from runtime.errors import InputError

from ..weights.source import Location
from . import branches, residual_norms
from .capture import capture
from .recording import DTYPES
from .repeated_layers import repeat, shortened
from .signature import signature

# Operators of the dialects whose output shapes depend on past_length, so that the traced shapes are wrong.
_SIZED_BY_DATA = ("Pad", "Slice", "Concat", "GroupQueryAttention")
_CACHE_INPUTS = ("past_key.", "past_value.")


def io_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of caches, hidden rows and logits for weights of ``dtype``: numpy and some backends do not support
    bfloat16."""
    return torch.float16 if dtype == torch.bfloat16 else dtype


def _forget_shapes(model: ir.Model, everywhere: bool) -> None:
    """Drops the declared shapes of values whose sizes depend on data, or those of all values."""
    for node in model.graph:
        if everywhere or node.op_type in _SIZED_BY_DATA:
            for value in node.outputs:
                if not value.is_graph_output():
                    value.shape = None


def _external(name: str, place: Location, bundle: Path) -> ir.ExternalTensor:
    dtype, shape = DTYPES[place.dtype], ir.Shape(place.shape)
    return ir.ExternalTensor(place.file, place.offset, place.length, dtype, shape=shape, name=name, base_dir=bundle)


def _name_codes(model: ir.Model) -> None:
    """Gives codes the shapes that their operators expect: signed ones [N, K] and zero points that of the scales, both
    of type INT4 if they have 4 bits, for DequantizeLinear; zero points [N * bytes of a row] for MatMulNBits; codes of
    an embedding [V, bytes of a row] for GatherBlockQuantized."""

    def retype(value: ir.Value, dtype: ir.DataType, shape: Sequence[Any]) -> None:
        old = value.const_value
        value.shape, value.type = ir.Shape(shape), ir.TensorType(dtype)
        value.const_value = ir.ExternalTensor(
            old.location, old.offset, old.length, dtype, shape=value.shape, name=value.name, base_dir=old.base_dir
        )

    for node in model.graph:
        if node.op_type == "GatherBlockQuantized":
            vocabulary, *row = node.inputs[0].const_value.shape
            retype(node.inputs[0], ir.DataType.UINT8, [vocabulary, prod(row)])
        if node.op_type == "MatMulNBits" and len(node.inputs) > 3:  # MIGraphX takes zero points as a vector only
            retype(node.inputs[3], ir.DataType.UINT8, [prod(node.inputs[3].const_value.shape)])
        codes = node.inputs[0] if node.op_type == "DequantizeLinear" else None
        if codes is None or codes.dtype != ir.DataType.INT8 or len(codes.const_value.shape) == 2:
            continue  # not in blocks, or named already
        block = node.attributes["block_size"].as_int()
        *rows, count, width = codes.const_value.shape
        # INT4: two per byte
        retype(codes, ir.DataType.INT8 if width == block else ir.DataType.INT4, [*rows, count * block])
        if len(node.inputs) > 2:
            if count % 2:
                raise InputError(
                    f"'{codes.name}' has zero points and an odd number of blocks in a row, which DequantizeLinear "
                    "cannot read: export for the CPU or cuda only"
                )
            retype(node.inputs[2], ir.DataType.INT4, [*rows, count])


def _split_parts(model: ir.Model, locations: dict[str, Location], bundle: Path) -> None:
    """Replaces every ``gumiho::Part`` of a stacked parameter by a parameter that points to its part of the bytes."""
    for node in list(model.graph):
        if node.op_type != "Part":
            continue
        stacked, i = node.inputs[0].name, node.attributes["index"].as_int()
        whole = locations[stacked]
        length = whole.length // whole.shape[0]
        place = replace(whole, offset=whole.offset + i * length, length=length, shape=whole.shape[1:])
        tensor = _external(f"{stacked}.{i}", place, bundle)
        part = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        model.graph.initializers[tensor.name] = part
        ir.convenience.replace_all_uses_with(node.outputs[0], part)
        model.graph.remove(node, safe=True)
    model.opset_imports.pop("gumiho", None)


def _simplify(model: ir.Model) -> None:
    """Removes nodes that are unused, are there twice, or change nothing."""
    for node in [node for node in model.graph if node.op_type == "Concat" and len(node.inputs) == 1]:
        node.op_type = "Identity"
        node.attributes.clear()
    passes.IdentityEliminationPass()(model)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.RemoveUnusedNodesPass()(model)


_MAX_CAPTURED = 24  # graphs, more than an export has
_captured: dict[bytes, ir.Model] = {}


def _capture(module: Target | Drafter, dtype: torch.dtype, sizes: Mapping[str, int] | None) -> ir.Model:
    """The graph without its weights. Graphs that several backends share are traced once per process.

    The pickle of a module on the meta device contains its whole structure, so equal pickles give equal graphs.
    """
    key = pickle.dumps((module, dtype, sorted((sizes or {}).items())))
    model = _captured.pop(key) if key in _captured else _traced(module, dtype, sizes)
    while len(_captured) >= _MAX_CAPTURED:
        del _captured[next(iter(_captured))]
    _captured[key] = model  # behind the others: the one that goes first was used longest ago
    return model.clone()


def _traced(module: Target | Drafter, dtype: torch.dtype, sizes: Mapping[str, int] | None) -> ir.Model:
    with shortened(module) as layers:
        inputs, outputs = signature(module, io_dtype(dtype), sizes)
        for name, parameter in module.named_parameters():
            if parameter.dtype == torch.float32 and not name.startswith("rotary."):  # codes keep their dtype
                parameter.data = parameter.data.to(dtype)
        model = capture(module, inputs, outputs, module.ops.opset)
    # Lanes without rows have other shapes than the traced ones, and so has much of ``Exact``.
    _forget_shapes(model, everywhere=isinstance(module, SharedTarget) or module.ops.block is not None)
    cached = [name for name, _, _ in inputs if name.startswith(_CACHE_INPUTS)]
    traced = 1 + int(cached[-1].rpartition(".")[2]) if cached else 0
    if layers > traced:
        repeat(model.graph, layers, traced, len(cached) // traced, getattr(module, "returns", NORMED))
    return model


def trace(
    module: Target | Drafter,
    locations: dict[str, Location],
    bundle: Path,
    dtype: torch.dtype,
    sizes: Mapping[str, int] | None = None,
) -> ir.Model:
    """Converts a module on the meta device to a graph, without reading any weights.

    locations: of the parameters in the bundle's files. dtype: of weights. sizes: see ``signature``.
    """
    model = _capture(module, dtype, sizes)
    for name, value in model.graph.initializers.items():
        if name in locations:
            tensor = _external(name, locations[name], bundle)
            value.const_value, value.shape, value.type = tensor, tensor.shape, ir.TensorType(tensor.dtype)
    _split_parts(model, locations, bundle)
    _name_codes(model)
    _simplify(model)
    if module.ops.joins_norms:
        residual_norms.join(model.graph)
    branches.make(model)
    for name, value in list(model.graph.initializers.items()):
        if not value.uses():
            del model.graph.initializers[name]
    model.graph.name = module.__class__.__name__.lower()
    model.producer_name = "gumiho-export"
    return model


def as_inputs(model: ir.Model) -> dict[str, Weight]:
    """Turns the weights of a graph into inputs. Returns them by name. Token ids stay: parsers look at the values of
    integers."""
    weights = {}
    for name, value in list(model.graph.initializers.items()):
        if isinstance(tensor := value.const_value, ir.ExternalTensor) and tensor.dtype != ir.DataType.INT64:
            shape = tuple(int(n) for n in tensor.shape)
            weights[name] = Weight(str(tensor.dtype.numpy()), shape, str(tensor.location), int(tensor.offset or 0))
            del model.graph.initializers[name]
            value.const_value = None
            model.graph.inputs.append(value)
    return weights
