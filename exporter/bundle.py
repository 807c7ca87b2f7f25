"""Writes a bundle: the whole of it, or nothing."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from tqdm import tqdm

from graphs.dialects.plain import Plain
from runtime.bundle.hashes import File
from runtime.bundle.manifest import MANIFEST, Form, Graph, Manifest, TensorSpec, TreeShape

from . import golden_recorder as golden
from .backends import operators
from .backends.specs import BACKENDS
from .checkpoints.pair import Pair
from .plan import DTYPE_NAMES, RECODED, Plan, eos_token_ids
from .trace import handed, trace
from .weights.notes import NOTES
from .weights.packer import Packer
from .weights.quantize import recoded
from .weights.source import Location

_TOKENIZER_FILES = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def _tensor_specs(values: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(v.name, str(v.dtype.numpy()), tuple(d if isinstance(d, int) else str(d.value) for d in v.shape))
        for v in values
    )


def _traffic(model: ir.Model) -> tuple[int, int]:
    """Bytes of a graph's weights, and of those that a pass reads: of embedding and rotary tables it reads few rows."""
    weights = {v for v in model.graph.initializers.values() if isinstance(v.const_value, ir.ExternalTensor)}
    tables = {v for v in weights if str(v.name).startswith("rotary.")}
    read = [v for node in model.graph if node.op_type != "Gather" for v in node.inputs if v in weights - tables]
    held, passed = (sum(v.const_value.nbytes for v in values if v.const_value) for values in (weights, read))
    return held, passed


def _precision(model: ir.Model, dtype: torch.dtype, backend: str) -> str:
    """What a graph's products are computed in: its weights' dtype, or int8 where their rows are rounded to it, as the CPU does."""
    rounds = backend == "cpu" and any(
        node.attributes.get_int("accuracy_level", 0) == 4 or node.op_type == "MatMulIntegerToFloat" for node in model.graph
    )
    return "int8" if rounds else DTYPE_NAMES[dtype]


def _graphs(
    plan: Plan,
    backend: str,
    dialects: tuple[type[Plain], type[Plain]],
    kind: str,
    locations: Mapping[str, dict[str, Location]],
    folder: Path,
) -> dict[str, Graph]:
    """Traces a backend's graphs, checks them against what it is known to accept, and writes them."""
    made, graphs, schemes = plan.trace_specs[backend], {}, plan.schemes(BACKENDS[backend].codes)
    (folder / "graphs" / kind).mkdir(parents=True)
    modules = plan.pair.modules(plan.tree, made.slots, plan.positions, *dialects, schemes)
    for name, module in tqdm(modules.items(), unit="graph", desc=f"graphs for {kind}", disable=None):
        model = trace(module, locations[name], folder, plan.dtype, made.pinned[name])
        operators.check(model, kind if kind in operators.PARSERS else backend)
        tensors = _tensor_specs(model.graph.inputs), _tensor_specs(model.graph.outputs)
        graphs[name] = Graph(f"graphs/{kind}/{name}.onnx", *_traffic(model), _precision(model, plan.dtype, backend), *tensors)
        (folder / graphs[name].file).write_bytes(ir.to_proto(model).SerializeToString())
    return graphs


def _form(plan: Plan, backend: str, locations: Mapping[str, dict[str, Location]], folder: Path) -> Form:
    made = plan.trace_specs[backend]
    graphs = _graphs(plan, backend, (made.dialect, made.drafting), backend, locations, folder)
    spares = {
        (name := spare.__name__.lower()): _graphs(plan, backend, (spare, spare), f"{backend}-{name}", locations, folder)
        for spare in BACKENDS[backend].spare
    }
    return Form(made.dialect.__name__.lower(), made.chunk, made.static, graphs, spares)


def _pack(plan: Plan, packer: Packer) -> dict[torch.dtype, dict[str, dict[str, Location]]]:
    """Writes the weight files. Returns where each graph's parameters lie, by the way that codes are kept."""
    first, *others = plan.codes
    sources = plan.sources()
    places = {name: packer.pack(f"weights/{name}.bin", sources[f"weights/{name}.bin"]) for name in ("target", "draft")}
    found = {first: places}
    for codes in others:
        found[codes] = dict(places)
        for name in plan.quantized:
            bits = plan.schemes(codes)[name].bits
            again = {n: recoded(place, packer.bundle, bits) for n, place in places[name].items() if place.dtype == first}
            found[codes][name] = places[name] | packer.pack(RECODED.format(name), again)
    return {codes: {**models, "extend": models["draft"]} for codes, models in found.items()}


def write_tokenizer(pair: Pair, folder: Path) -> None:
    """Writes what turns text and conversations into token ids, as transformers does it, and the target's settings."""
    for name in _TOKENIZER_FILES:
        if (pair.target.folder / name).is_file():
            shutil.copyfile(pair.target.folder / name, folder / name)
    if pair.tokenizer is not None:
        tokenizer = pair.tokenizer.backend_tokenizer
        # transformers sets both anew in every call; some checkpoints ship what their training cut and filled texts to.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.save(str(folder / "tokenizer.json"))
        # Its map is the files' with what the tokenizer's class adds, less what it no longer reads.
        (folder / "special_tokens_map.json").write_text(json.dumps(pair.tokenizer.special_tokens_map, indent=1), "utf-8")


def write(plan: Plan, folder: Path) -> Manifest:
    """Writes every file of a bundle into an empty folder."""
    pair, sizes = plan.pair, plan.sizes()
    with tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, desc="weights", disable=None) as bar:
        packer = Packer(folder, plan.dtype, bar.update)
        locations = _pack(plan, packer)
    forms = {name: _form(plan, name, locations[BACKENDS[name].codes], folder) for name in plan.backends}

    codes, capacity = plan.codes[0], min(plan.capacity, golden.positions(plan.tree.rows))
    with golden.weights(folder) as weights:
        eager = pair.modules(plan.tree, capacity, plan.positions, weights.dialect(), schemes=plan.schemes(codes))
        for name in ("target", "draft"):
            weights.fill(eager[name], locations[codes][name])
        np.savez(folder / "golden.npz", **golden.record(eager["target"], eager["draft"], handed(plan.dtype)))  # type: ignore[arg-type]

    write_tokenizer(pair, folder)

    files = dict(packer.hashes)
    for file in sorted(p for p in folder.rglob("*") if p.is_file() and NOTES not in p.parts):
        if (name := str(file.relative_to(folder))) not in files:
            files[name] = File.of(file)
    manifest = Manifest(
        capacity=plan.capacity,
        rows=plan.tree.rows,
        depth=plan.tree.depth,
        vocabulary=pair.target_shape.vocabulary,
        hidden=pair.target_shape.hidden,
        dtype=DTYPE_NAMES[handed(plan.dtype)],
        weights={name: plan.how(name) for name in plan.quantized},
        eos_token_ids=eos_token_ids(pair),
        forms=forms,
        tree=TreeShape(**asdict(plan.tree), vocabulary=pair.drafted),
        sources={"target": pair.target.source, "drafter": pair.drafter.source},
        files=files,
    )
    (folder / MANIFEST).write_text(manifest.to_json(), "utf-8")
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    return manifest
