"""Writes the files of a bundle. ``staging`` makes sure that it is written completely or not at all."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from graphs.dialects.plain import Plain
from graphs.drafter import Drafter as DrafterModule
from graphs.target import Target
from graphs.tree import TreeConfig
from runtime.bundle.graphs import Form, Graph, TensorSpec, Weight
from runtime.bundle.hashes import File
from runtime.bundle.manifest import FEATURES, MANIFEST, Drafter, Manifest, TreeShape
from runtime.bundle.reader import draft_tokens_of, golden_of
from runtime.decoding.text.template_files import TEMPLATES

from ..backends import operators
from ..backends.specs import BACKENDS, Codes
from ..checkpoints.pair import Pair
from ..progress import Progress
from ..recipe.recipe import DTYPE_NAMES, RECODED, Recipe
from ..tracing.symbolic_rows import of_any_rows, of_rows
from ..tracing.trace import as_inputs, io_dtype, trace
from ..weights.notes import NOTES
from ..weights.packer import Packer
from ..weights.quantize import Rounding, recoded, weight_of
from ..weights.source import Location
from . import golden_recorder as golden

_TOKENIZER_FILES = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def _tensor_specs(values: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(v.name, str(v.dtype.numpy()), tuple(d if isinstance(d, int) else str(d.value) for d in v.shape))
        for v in values
    )


def _traffic(model: ir.Model) -> tuple[int, int]:
    """Bytes of a graph's weights, and of those that a pass reads: all but embedding and rotary tables."""
    weights = {v for v in model.graph.initializers.values() if isinstance(v.const_value, ir.ExternalTensor)}
    tables = {v for v in weights if str(v.name).startswith("rotary.")}
    read = [
        v
        for node in model.graph
        if node.op_type not in ("Gather", "GatherBlockQuantized")
        for v in node.inputs
        if v in weights - tables
    ]
    held, passed = (sum(v.const_value.nbytes for v in values if v.const_value) for values in (weights, read))
    return held, passed


def _precision(model: ir.Model, dtype: torch.dtype, backend: str) -> str:
    """The precision of a graph's products: its weights' dtype, or int8 if the CPU rounds the rows of a pass to int8."""
    rounds = backend == "cpu" and any(
        node.attributes.get_int("accuracy_level", 0) == 4 or node.op_type == "MatMulIntegerToFloat"
        for node in model.graph
    )
    return "int8" if rounds else DTYPE_NAMES[dtype]


def _graphs(
    recipe: Recipe,
    backend: str,
    dialects: tuple[type[Plain], type[Plain]],
    kind: str,
    locations: Mapping[str, dict[str, Location]],
    folder: Path,
    progress: Progress,
    weights: dict[str, dict[str, Weight]],
    suffix: str = "",
) -> dict[str, Graph]:
    """Traces a backend's graphs, checks their operators against the backend's table, and writes them.

    weights: receives those that the graphs take as inputs, by model and name. suffix: of the names of a further
    drafter's graphs, of whose recipe only these are traced.
    """
    spec, graphs, schemes = recipe.trace_specs[backend], {}, recipe.schemes(BACKENDS[backend].codes)
    (folder / "graphs" / kind).mkdir(parents=True, exist_ok=True)
    pinned = {name: sizes for name, sizes in spec.pinned.items() if not suffix or name in ("draft", "extend")}
    for name, sizes in pinned.items():
        progress.tell(f"{name} for {kind}")
        model_name, _, _ = name.partition("-")
        module = recipe.pair.modules(recipe.tree, spec.slots, recipe.positions, *dialects, schemes)[model_name]
        places = locations[model_name + suffix]
        if spec.profiles and isinstance(module, Target):
            file, model = "target.onnx", of_any_rows(module, places, folder, recipe.dtype)
            sized = of_rows(model, sizes["rows"])
        else:
            file, model = f"{name}{suffix}.onnx", trace(module, places, folder, recipe.dtype, sizes)
            sized = model
        operators.check(sized, kind if kind in operators.PARSERS else backend)
        tensors = _tensor_specs(sized.graph.inputs), _tensor_specs(sized.graph.outputs)
        graph = Graph(f"graphs/{kind}/{file}", *_traffic(model), _precision(model, recipe.dtype, backend), *tensors)
        graphs[name + suffix] = graph
        if spec.bound:
            weights.setdefault("target" if model_name == "target" else f"draft{suffix}", {}).update(as_inputs(model))
        (folder / graph.file).write_bytes(ir.to_proto(model).SerializeToString())
        progress.advance(1)
    return graphs


def _by_suffix(recipe: Recipe) -> dict[str, Recipe]:
    """The recipes of all drafters, by what ends the names of their graphs and files."""
    return {"": recipe} | {f".{name}": own for name, own in recipe.further.items()}


def _form(
    recipe: Recipe, backend: str, locations: Mapping[str, dict[str, Location]], folder: Path, progress: Progress
) -> Form:
    spec = recipe.trace_specs[backend]
    weights: dict[str, dict[str, Weight]] = {}

    def traced(spare: type[Plain] | None, kind: str) -> dict[str, Graph]:
        graphs = dict[str, Graph]()
        for suffix, own in _by_suffix(recipe).items():
            of = own.trace_specs[backend]
            dialects = (spare, spare) if spare else (of.dialect, of.drafting)
            graphs |= _graphs(own, backend, dialects, kind, locations, folder, progress, weights, suffix)
        return graphs

    graphs = traced(None, backend)
    spares = {(name := spare.__name__.lower()): traced(spare, f"{backend}-{name}") for spare in BACKENDS[backend].spare}
    return Form(spec.dialect.__name__.lower(), spec.chunk, spec.static, graphs, spares, weights)


def _pack(
    recipe: Recipe, packer: Packer, rounding: Rounding | None = None
) -> dict[Codes, dict[str, dict[str, Location]]]:
    """Writes the weight files. Returns the location of every graph's parameters, by the dtypes of the codes.

    rounding: see ``Recipe.sources``.
    """
    sources = recipe.sources(rounding=rounding)
    drafters = {f"draft{suffix}": own for suffix, own in _by_suffix(recipe).items()} if recipe.pair.has_drafter else {}
    recipes = {"target": recipe, **drafters}
    packed = {name: packer.pack(f"weights/{name}.bin", sources[f"weights/{name}.bin"]) for name in recipes}
    locations = {codes: dict(packed) for codes in recipe.codes}
    for name, own in recipes.items():
        model = name.partition(".")[0]
        if model not in recipe.quantized:
            continue
        signed = own.signed(model, {n: place.dtype for n, place in packed[name].items()})
        if not signed:
            continue
        converted = {n: recoded(packed[name][n], packer.bundle, bits) for n, bits in signed.items()}
        recoded_places = packer.pack(RECODED.format(name), converted)
        for codes in recipe.codes[1:]:
            schemes = own.schemes(codes)[model]
            found = {
                n: at for n, at in recoded_places.items() if (s := schemes[weight_of(n)]) and s.codes == torch.int8
            }
            locations[codes][name] = packed[name] | found
    of = {"shared": "target"} | {name.replace("draft", "extend", 1): name for name in drafters}
    return {
        codes: models | {graph: models[model] for graph, model in of.items()} for codes, models in locations.items()
    }


def _golden_work(form: Form) -> int:
    """Bytes of weights that the golden run reads, about: for each drafter, or without one, a pass of the target, and
    two of the drafter."""
    drafts = (graph for name, graph in form.graphs.items() if name.partition(".")[0] == "draft")
    return sum(form.graphs["target"].reads + 2 * graph.reads for graph in drafts) or form.graphs["target"].reads


def write_tokenizer(pair: Pair, folder: Path) -> None:
    """Writes the tokenizer and the chat template as transformers reads them, and the target's generation settings."""
    further = sorted(f"{TEMPLATES}/{file.name}" for file in (pair.target.folder / TEMPLATES).glob("*.jinja"))
    for name in (*_TOKENIZER_FILES, *further):
        if (pair.target.folder / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(pair.target.folder / name, folder / name)
    if pair.tokenizer is not None:
        tokenizer = pair.tokenizer.backend_tokenizer
        # Some checkpoints ship the truncation and padding of their training; transformers resets both in every call.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.save(str(folder / "tokenizer.json"))
        # The files' map, plus the tokens that the tokenizer's class adds, minus those that it no longer reads.
        (folder / "special_tokens_map.json").write_text(
            json.dumps(pair.tokenizer.special_tokens_map, indent=1), "utf-8"
        )


def _shape(tree: TreeConfig, vocabulary: int) -> TreeShape:
    known = {field.name for field in fields(TreeShape)} - {"vocabulary"}
    return TreeShape(**{name: getattr(tree, name) for name in known}, vocabulary=vocabulary)


def _record(recipe: Recipe, locations: Mapping[str, dict[str, Location]], folder: Path, progress: Progress) -> None:
    """Writes the golden run of every drafter. locations: of the parameters of the backends' first codes."""
    codes, capacity = recipe.codes[0], min(recipe.capacity, golden.positions(recipe.tree.rows))
    with golden.weights(folder, progress.advance) as weights:
        schemes, dialect = recipe.schemes(codes), weights.dialect()
        target = recipe.pair.modules(recipe.tree, capacity, recipe.positions, dialect, schemes=schemes)["target"]
        weights.fill(target, locations["target"])
        for suffix, own in _by_suffix(recipe).items():
            drafter = None
            if recipe.pair.has_drafter:
                drafter = own.pair.modules(own.tree, capacity, own.positions, dialect, schemes=own.schemes(codes))[
                    "draft"
                ]
                weights.fill(drafter, locations[f"draft{suffix}"])
            run = golden.record(target, drafter, own.tree, io_dtype(recipe.dtype))  # type: ignore[arg-type]
            np.savez(folder / golden_of(suffix), **run)  # type: ignore[arg-type]
            if isinstance(drafter, DrafterModule) and drafter.noisy and (drafted := own.pair.draft_vocabulary):
                np.savez(folder / draft_tokens_of(suffix), ids=drafted.ids.to(torch.int32).numpy())


def write(recipe: Recipe, folder: Path, progress: Progress) -> Rounding:
    """Writes every file of a bundle except its engines into an empty folder, or one that an interrupted export left.

    Returns the errors of the matrices that a target ``as-is`` does not hold in codes, as far as this run has packed
    them.
    """
    rounding: Rounding = {}
    pair = recipe.pair
    progress.start(
        "quantizing and packing weights" if recipe.quantized else "packing weights", sum(recipe.sizes().values())
    )
    packer = Packer(folder, recipe.dtype, progress.advance)
    locations = _pack(recipe, packer, rounding)

    traced = {name: (1 + len(BACKENDS[name].spare)) for name in recipe.backends}
    graphs = sum(
        count * (len(recipe.trace_specs[name].pinned) + 2 * len(recipe.further)) for name, count in traced.items()
    )
    progress.start("tracing graphs", graphs, "graphs")
    forms = {name: _form(recipe, name, locations[BACKENDS[name].codes], folder, progress) for name in recipe.backends}

    progress.start("recording the golden run", _golden_work(forms[recipe.backends[0]]))
    _record(recipe, locations[recipe.codes[0]], folder, progress)
    write_tokenizer(pair, folder)

    files = dict(packer.hashes)
    for file in sorted(p for p in folder.rglob("*") if p.is_file() and NOTES not in p.parts):
        if (name := str(file.relative_to(folder))) not in files:
            files[name] = File.of(file)
    manifest = Manifest(
        capacity=recipe.capacity,
        rows=recipe.tree.rows,
        depth=recipe.tree.depth,
        vocabulary=pair.target_shape.vocabulary,
        hidden=pair.features,
        dtype=DTYPE_NAMES[io_dtype(recipe.dtype)],
        weights={name: recipe.how(name) for name in recipe.quantized},
        eos_token_ids=pair.eos_token_ids,
        forms=forms,
        tree=_shape(recipe.tree, pair.drafted) if pair.has_drafter else None,
        sources={"target": pair.target.source} | ({"drafter": pair.drafter.source} if pair.has_drafter else {}),
        files=files,
        drafters={
            name: Drafter(own.tree.depth, _shape(own.tree, own.pair.drafted), own.pair.drafter.source)
            for name, own in ({recipe.name: recipe, **recipe.further} if recipe.further else {}).items()
        },
    )
    manifest = replace(manifest, requires=tuple(feature for feature, (_, has) in FEATURES.items() if has(manifest)))
    (folder / MANIFEST).write_text(manifest.to_json(), "utf-8")
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    return rounding
