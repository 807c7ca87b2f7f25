"""Writes the graphs that are measured, without weights: a few megabytes for any shape of model.

A set is a model's shape, dtype and formats. It has the graphs of a cycle: the target's passes of 1 row, of a tree and
of other sizes, and the draft, each in the variants of ``variants``. ``study.json`` describes inputs, outputs and
weights.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from exporter.tracing.trace import as_inputs, trace
from exporter.weights.source import Location
from graphs.dialects.decomposed import Decomposed
from graphs.dialects.plain import Plain
from graphs.dialects.quantization import UNQUANTIZED, Scheme, Schemes
from graphs.dialects.standard import Standard
from graphs.drafter import Drafter
from graphs.drafters.gumiho import Gumiho
from graphs.layer import LlamaShape
from graphs.target import Target
from graphs.tree import TreeConfig, default_beam
from runtime.errors import InputError

from .variants import VARIANTS, is_weight, reads

_CHUNK, _ALIGNMENT = 128, 256
_DTYPES = {torch.float16: "fp16", torch.float32: "fp32"}


class _HeadsApart(Standard):
    """The drafter's heads one by one, as for the CPU."""

    residual = Plain._by_head


@dataclass(frozen=True)
class Set:
    """shape: of the target; the drafter has two such layers. rows: R. sizes: rows of the target's passes. schemes: of
    the target's weights, which are constants then. trimmed: a draft vocabulary that one variant has. variants: which
    are written."""

    shape: LlamaShape
    dtype: torch.dtype
    rows: int
    capacity: int
    sizes: tuple[int, ...]
    schemes: Schemes = UNQUANTIZED
    drafts: bool = True
    trimmed: int = 0
    variants: tuple[str, ...] = tuple(VARIANTS)


_8B = LlamaShape(128256, 4096, 14336, 32, 32, 8, 128, 1e-5)
_1B = LlamaShape(128256, 2048, 8192, 16, 32, 8, 64, 1e-5)
_DEMO = LlamaShape(2048, 192, 512, 6, 6, 2, 32, 1e-5)
_TINY = LlamaShape(1000, 128, 256, 2, 8, 2, 16, 1e-5)  # four queries a key, as 8B
_FEW = ("base",)


def _int4(block: int, zeros: bool, head: int) -> Schemes:
    """head: bits of the lm_head."""
    own = {"lm_head.weight": Scheme(block, torch.uint8, head)} if head == 8 else {}
    return Schemes(Scheme(block, torch.uint8, zeros=zeros), own, joined=True)


def _sets() -> dict[str, Set]:
    one_b = Set(_1B, torch.float16, 16, 2048, (1, 16), drafts=False, variants=_FEW)
    tiny = Set(_TINY, torch.float32, 16, 192, (1, 4, 16), trimmed=200)
    int4 = {"zeros-32": (32, True, 8), "32": (32, False, 4), "64": (64, False, 4), "128": (128, False, 4)}
    return {
        "8b": Set(_8B, torch.float16, 64, 2048, (1, 64), trimmed=32768),
        "tiny": tiny,
        "tiny-fp16": replace(tiny, dtype=torch.float16),
        "rows": Set(_DEMO, torch.float32, 8, 1024, (1, 2, 4, 8, 16, 32, 64, 128), drafts=False),
        "1b": one_b,
        **{f"1b-int4-{name}": replace(one_b, schemes=_int4(*how)) for name, how in int4.items()},
        "tiny-int4": Set(_TINY, torch.float32, 16, 192, (1,), _int4(32, True, 8), False, variants=_FEW),
    }


SETS = _sets()


def _places(module: Target | Drafter, dtype: torch.dtype) -> dict[str, Location]:
    """Where each parameter would be in a file of all of them."""
    places, offset = dict[str, Location](), 0
    for name, parameter in module.named_parameters():
        own = parameter.dtype
        if own == torch.float32 and not name.startswith("rotary."):
            own = dtype
        length = parameter.numel() * own.itemsize
        places[name] = Location("weights.bin", offset, length, own, tuple(parameter.shape))
        offset += -(-length // _ALIGNMENT) * _ALIGNMENT
    return places


def _traced(module: Target | Drafter, one: Set, sizes: Mapping[str, int]) -> tuple[ir.Model, dict[str, Any]]:
    """A graph, and its weights by name: dtype, shape and, if they are constants, offset."""
    model = trace(module, _places(module, one.dtype), Path("."), one.dtype, sizes)
    if ids := model.graph.initializers.get("token_ids"):
        chosen = np.arange(ids.shape[0], dtype=np.int64)
        ids.const_value = ir.tensor(chosen, name="token_ids")
    if one.schemes is UNQUANTIZED:
        weights = {name: (weight.dtype, weight.shape) for name, weight in as_inputs(model).items()}
        return model, {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in weights.items()}
    constants = {
        n: v.const_value for n, v in model.graph.initializers.items() if isinstance(v.const_value, ir.ExternalTensor)
    }
    return model, {
        name: {"dtype": str(at.dtype.numpy()), "shape": [int(n) for n in at.shape], "offset": at.offset}
        for name, at in constants.items()
    }


def _graphs(one: Set) -> Iterator[tuple[str, str, ir.Model, dict[str, Any]]]:
    """Kind of graph, spelling, graph and weights, not yet varied."""
    slots = -(-(one.capacity + _CHUNK) // 64) * 64
    tree = TreeConfig(one.rows, 2, 5, 14, 32, default_beam(one.rows)).fitted(one.trimmed or one.shape.vocabulary)
    spellings = {"base": Standard, "decomposed": Decomposed} if len(one.variants) > 1 else {"base": Standard}
    for spelling, ops in spellings.items():
        for size in one.sizes:
            with torch.device("meta"):
                target = Target(one.shape, slots, slots, ops, one.schemes).eval()
            yield f"target-{size}", spelling, *_traced(target, one, {"rows": size})
    if not one.drafts:
        return
    shape, most = replace(one.shape, layers=2), max(_CHUNK, *one.sizes)
    for spelling, ops, trimmed in [
        ("base", Standard, None),
        ("heads-apart", _HeadsApart, None),
        ("vocabulary", Standard, one.trimmed),
    ]:
        with torch.device("meta"):
            draft = Gumiho(shape, slots, slots, tree, True, ops=ops, trimmed=trimmed).eval()
        yield "draft", spelling, *_traced(draft, one, {"accepted": tree.depth + 1, "rows": most})


def _tensors(values: Any) -> list[dict[str, Any]]:
    return [
        {"name": value.name, "dtype": str(value.dtype.numpy()), "shape": [int(n) for n in value.shape]}
        for value in values
        if not is_weight(value)
    ]


def _written(folder: Path, file: str, model: ir.Model, weights: Mapping[str, Any]) -> dict[str, Any]:
    (folder / file).write_bytes(ir.to_proto(model).SerializeToString())
    used = {name: weights[name] for name in (str(v.name) for v in model.graph.inputs) if name in weights}
    used |= {name: how for name, how in weights.items() if "offset" in how}
    sizes = {name: np.dtype(how["dtype"]).itemsize for name, how in used.items()}
    once, multiplied = reads(model, sizes)
    for name, how in used.items():
        if "offset" in how and not name.startswith(("rotary.", "embed_tokens.")):
            once, multiplied = (total + prod(how["shape"]) * sizes[name] for total in (once, multiplied))
    return {
        "file": file,
        "inputs": _tensors(model.graph.inputs),
        "outputs": _tensors(model.graph.outputs),
        "weights": used,
        "reads_once": once,
        "reads": multiplied,
        "nodes": len(model.graph),
    }


def write(folder: Path, name: str) -> dict[str, Any]:
    """Writes a set's graphs to a folder. Returns their description, by kind and variant."""
    one, found = SETS[name], dict[str, dict[str, Any]]()
    folder.mkdir(parents=True, exist_ok=True)
    for kind, spelling, model, weights in _graphs(one):
        for variant, changes in VARIANTS.items() if spelling == "base" else [(spelling, ())]:
            if spelling == "base" and variant not in one.variants:
                continue
            varied, own = model.clone(), dict(weights)
            for change in changes:
                for whole, parts in change(varied).items():
                    rows = [weights[part]["shape"][0] for part in parts]
                    shape = [sum(rows), *weights[parts[0]]["shape"][1:]]
                    own[whole] = {**weights[parts[0]], "shape": shape, "parts": parts, "rows": rows}
            if changes and not any(str(node.name).startswith("variant.") for node in varied.graph):
                continue  # it does not concern this graph
            described = _written(folder, f"{name}-{kind}-{variant}.onnx", varied, own)
            found.setdefault(kind, {})[variant] = described
    return found


def write_all(folder: Path, names: Sequence[str] | None) -> str:
    """Writes sets, all by default, and their description. Returns what there is, as text."""
    if unknown := [name for name in names or () if name not in SETS]:
        raise InputError(f"there is no set '{unknown[0]}': give some of {', '.join(SETS)}")
    study = {name: write(folder, name) for name in names or SETS}
    (folder / "study.json").write_text(json.dumps(study))
    files = [file for file in folder.iterdir() if file.suffix == ".onnx"]
    return f"{len(files)} graphs, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB"
