"""Graphs with their weights inside, made from those that take them as inputs: as older exports wrote them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from runtime.bundle.graphs import Weight
from runtime.bundle.manifest import BOUND_WEIGHTS
from runtime.bundle.reader import Bundle
from tests.seal import edit, update


def put_inside(model: onnx.ModelProto, weights: Mapping[str, Weight]) -> None:
    """Turns the inputs that are weights into initializers that point to the weights' files."""
    for value in [value for value in model.graph.input if value.name in weights]:
        weight, tensor = weights[value.name], onnx.TensorProto()
        tensor.name = value.name
        tensor.data_type = value.type.tensor_type.elem_type
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.dims.extend(weight.shape)
        place = {"location": weight.file, "offset": str(weight.offset), "length": str(weight.nbytes)}
        for key, text in place.items():
            tensor.external_data.add(key=key, value=text)
        model.graph.initializer.append(tensor)
        model.graph.input.remove(value)


def as_older_exports_wrote_it(bundle: Path, backend: str) -> None:
    """Changes a bundle so that a backend's graphs contain their weights."""
    form = Bundle(bundle).manifest.form(backend)
    for name, graph in form.graphs.items():
        model = onnx.load(bundle / graph.file, load_external_data=False)
        put_inside(model, form.inputs(name))
        (bundle / graph.file).write_bytes(model.SerializeToString())

    def change(manifest: dict[str, Any]) -> None:
        del manifest["forms"][backend]["weights"]
        if not any(form["weights"] for form in manifest["forms"].values() if "weights" in form):
            manifest["requires"].remove(BOUND_WEIGHTS)

    edit(bundle, change)
    update(bundle, *(graph.file for graph in form.graphs.values()))
