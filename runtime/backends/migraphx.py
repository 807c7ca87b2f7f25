"""AMD MIGraphX through its own Python module, which comes with ROCm.

A program per graph, of static shapes. On a GPU its outputs are parameters, bound to buffers like its inputs, and everything is
ordered on one stream; the reference target, which runs on any processor, returns its outputs instead, and they are copied.
"""

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import disk_usage
from typing import Any, ClassVar

import numpy as np

from ..bundle import Bundle
from ..devices import Accelerator, Array, Call, Device, DeviceArray, Host, Staging
from ..devices.hip import Hip
from ..errors import GumihoError

try:
    import migraphx
except ImportError as error:
    raise GumihoError(
        f"backend migraphx needs the Python module 'migraphx' ({error}): install ROCm's package migraphx, and put "
        "/opt/rocm/lib on PYTHONPATH"
    ) from None


class MIGraphX:
    """Devices: ``gpu`` (the first), ``gpu:N``, and ``ref``, MIGraphX's reference implementation on the processor."""

    NAME: ClassVar[str] = "migraphx"

    def __init__(self, device: str, threads: int) -> None:
        """threads: means nothing here."""
        kind, _, index = (device or "gpu").partition(":")
        if kind not in ("gpu", "ref") or (index and not (kind == "gpu" and index.isdigit())):
            raise GumihoError(f"there is no device '{device}' of backend migraphx: give gpu, gpu:N or ref")
        self.target, self.index = kind, int(index or 0)
        self._device: Hip | None = None
        if kind == "gpu":
            self._device = Hip(self.index)
            self._device.close()  # to ask about: engines get one of their own

    def versions(self) -> dict[str, str]:
        return {"migraphx": migraphx.__version__, "device": self._device.name if self._device else "ref"}

    def details(self) -> dict[str, str]:
        return self._device.details() if self._device else {}

    def memory(self, bundle: Bundle) -> tuple[int, int]:
        # A program holds its weights while it is compiled, constants folded from them beside.
        weights = 2 * bundle.weights()
        return (
            (weights, bundle.weights() + bundle.caches(self.NAME)) if self._device else (weights + bundle.caches(self.NAME), 0)
        )

    def compile(self, bundle: Bundle, folder: Path, tune: bool, progress: Callable[[str], object]) -> None:
        needed = sum(graph.weights for graph in bundle.manifest.form(self.NAME).graphs.values())  # a program holds its own
        if (free := disk_usage(folder).free) < needed:
            raise GumihoError(
                f"the programs take {needed / 1e9:.2f} GB and the disk of {folder} has {free / 1e9:.2f} GB free: free some space"
            )
        if self._device:
            self._device.enter()
        for name, graph in bundle.manifest.form(self.NAME).graphs.items():
            progress(f"compiling {name} for {self.target}")
            file = bundle.path / graph.file
            try:
                program = migraphx.parse_onnx_buffer(file.read_bytes(), external_data_path=str(bundle.path))
                program.compile(migraphx.get_target(self.target), offload_copy=False, fast_math=False, exhaustive_tune=tune)
                migraphx.save(program, str(folder / f"{name}.mxr"))
            except RuntimeError as error:
                raise GumihoError(f"MIGraphX {migraphx.__version__} cannot compile {file}: {_first_line(error)}") from None
            del program
            gc.collect()

    def open(self, bundle: Bundle, folder: Path) -> tuple[dict[str, "Engine"], Device]:
        engines = {}
        accelerator = Hip(self.index) if self._device else None
        for name, graph in bundle.manifest.form(self.NAME).graphs.items():
            try:
                program = migraphx.load(str(folder / f"{name}.mxr"))
            except RuntimeError as error:
                raise GumihoError(
                    f"MIGraphX {migraphx.__version__} cannot load {folder / name}.mxr ({_first_line(error)}): "
                    f"run `python -m runtime.compile {bundle.path} --backend migraphx` again"
                ) from None
            engines[name] = Engine(program, [port.name for port in graph.outputs], accelerator)
        return engines, accelerator or Host()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _output(i: int) -> str:
    """The parameter of a program's i-th output (MIGraphX, src/param_utils.cpp)."""
    return f"main:#output_{i}" if i < 10 else f"main:#output_:{i:05}"


class Engine:
    """A compiled program; see ``backends.Engine``."""

    def __init__(self, program: Any, outputs: list[str], device: Accelerator | None) -> None:
        """outputs: names in the graph's order, which is all that MIGraphX keeps of them."""
        self._program, self._device = program, device
        parameters = program.get_parameter_shapes()
        self._outputs = outputs
        named = {_output(i): name for i, name in enumerate(outputs)}
        self._bound = {parameter: name for parameter, name in named.items() if parameter in parameters}
        self._inputs = {name: shape for name, shape in parameters.items() if name not in self._bound}
        self._shapes = parameters

    def bind(self, buffers: Mapping[str, Array]) -> Call:
        if self._program is None:
            raise GumihoError("the model is closed: load the bundle again")
        if missing := self._inputs.keys() - buffers.keys():
            raise GumihoError(f"the engine's input '{min(missing)}' has no buffer: the bundle does not fit this version")
        return self._on_host(buffers) if self._device is None else self._on_device(buffers, self._device)

    def _on_host(self, buffers: Mapping[str, np.ndarray]) -> Call:
        """A call of the reference target, whose outputs are copied to their buffers."""
        inputs = {name: buffers[name] for name in self._inputs}
        outputs = [(i, buffers[name]) for i, name in enumerate(self._outputs) if name in buffers]
        run = self._program.run

        def call() -> None:
            results = run(inputs)
            for i, buffer in outputs:
                buffer[...] = np.asarray(results[i]).reshape(buffer.shape)

        return call

    def _on_device(self, buffers: Mapping[str, Array], device: Accelerator) -> Call:
        """A call of a GPU's program, whose outputs are parameters. Those that are a constant, an input or another output have none,
        and are copied from where the program says they are."""
        run, stream = self._program.run_async, device.stream
        loose = [(i, name) for i, name in enumerate(self._outputs) if name in buffers and name not in self._bound.values()]

        def launch(places: Mapping[str, DeviceArray]) -> None:
            results = run(arguments, stream, "ihipStream_t")
            for i, name in loose:
                found, place = results[i].get_shape(), places[name]
                if (found.bytes(), found.standard()) != (place.nbytes, True):
                    raise GumihoError(f"MIGraphX {migraphx.__version__} lays out '{name}' in another way: try another version")
                device.copy(place.address, results[i].data_ptr(), place.nbytes)

        call = Staging(device, buffers, set(self._inputs), set(self._outputs), launch, capturable=False)
        arguments = {}
        for parameter, name in ({name: name for name in self._inputs} | self._bound).items():
            shape = self._shapes[parameter]
            place = call.buffers[name] if name in call.buffers else device.zeros((shape.bytes(),), np.uint8)
            if (shape.bytes(), shape.standard()) != (place.nbytes, True):
                raise GumihoError(f"MIGraphX {migraphx.__version__} lays out '{name}' in another way: try another version")
            arguments[parameter] = migraphx.argument_from_pointer(shape, place.address)
        return call

    def close(self) -> None:
        self._program = None
