"""NVIDIA TensorRT, 10.3 and newer, through its Python module.

Each file of graphs is compiled to one plan without weights: TensorRT maps them from the bundle's files when it builds
the plan and again when it loads it (``STRIP_PLAN``, ``REFIT_IDENTICAL``). Shapes are fixed. The target's plan has a set
of shapes (a profile) with its own context for each of its sizes, over one copy of the weights. Caches are updated in
place. If the device has no fused attention for these shapes, or a wrong one, graphs with decomposed attention are used
instead. Versions before 10.15 (JetPack 6) cannot update caches in place; for them there are graphs of primitive
operators that return only the new rows.
"""

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..bundle.graphs import Form, Graph
from ..bundle.reader import Bundle
from ..engines.devices import Array, Call, Device, DeviceArray, Staging
from ..errors import DamageError, GumihoError, InputError, MisuseError, UnavailableError
from .memory import Free, MemoryNeeds, Space, buffers

try:
    import tensorrt as trt
except ImportError as error:
    # PyPI's packages do not run on Jetsons: there TensorRT is part of JetPack and belongs to the system's Python.
    jetson = (
        "on a Jetson, use JetPack's, in an environment made with `python3 -m venv --system-site-packages`; elsewhere "
    )
    raise UnavailableError(
        f"backend tensorrt needs the Python module 'tensorrt' ({error}): "
        f"{jetson if platform.machine() == 'aarch64' else ''}pip install 'tensorrt>=10.15' 'cuda-bindings>=13'"
    ) from None

from .tensorrt_compile import LOG, build

_OLDEST = (10, 3)
_IN_PLACE = (10, 15)  # the first version whose parser knows TensorScatter
_FIRST = "fused"  # the name of the form's first graphs; the others are named after their dialect
_CHOICE = "attention.json"
_ALIGNMENT = 256  # bytes; of every address passed to a context
_LIBRARIES = 2 << 30  # approximate bytes of host memory that CUDA and TensorRT use
_TACTICS = 1 << 30  # approximate bytes on the device, in addition to the weights, while a plan is built
_FP8 = (8, 9)  # the lowest compute capability with fp8 products: Ada, then Hopper


class TensorRT:
    """Devices: the index of an NVIDIA GPU."""

    NAME: ClassVar[str] = "tensorrt"
    THREADS: ClassVar[bool] = False

    def __init__(self, device: str) -> None:
        if device and not device.isdigit():
            raise InputError(f"there is no device '{device}' of backend tensorrt: give the index of a GPU")
        if _version() < _OLDEST:
            raise UnavailableError(
                f"TensorRT {trt.__version__} is too old: install 10.3 or newer (10.15 for fused attention)"
            )
        from ..engines.devices.cuda import Cuda

        self._device = Cuda(int(device or 0))
        self._device.close()  # it was only needed for queries; ``open`` makes another one for the engines

    def versions(self) -> dict[str, str]:
        return {"tensorrt": trt.__version__, "device": self._device.name}

    def details(self) -> dict[str, str]:
        return self._device.details()

    def memory(self, bundle: Bundle) -> MemoryNeeds:
        # The host only maps weights. Each plan has a copy on the device, where building it takes more memory to try
        # tactics.
        weights = {graph.file: graph.weights for graph in bundle.manifest.form(self.NAME).graphs.values()}.values()
        return MemoryNeeds(
            Space(_LIBRARIES, max(weights) + _TACTICS), Space(_LIBRARIES, sum(weights) + buffers(bundle, self.NAME))
        )

    def free(self) -> Free | None:
        return Free(self._device.memory()[0], self._device.unified)

    def compile(
        self, bundle: Bundle, folder: Path, tune: bool, progress: Callable[[str], object], check: Callable[[], object]
    ) -> None:
        form = bundle.manifest.form(self.NAME)
        if self._device.capability < _FP8 and any(how.startswith("fp8") for how in bundle.manifest.weights.values()):
            major, minor = self._device.capability
            raise UnavailableError(
                f"fp8 weights need compute capability 8.9 (Ada, Hopper and newer), and {self._device.name} has "
                f"{major}.{minor}: export again with --weights int4 or none"
            )
        failure: GumihoError | None = None
        spellings = {_FIRST: form.graphs, **form.spares}
        if _version() < _IN_PLACE:
            spellings = {name: graphs for name, graphs in spellings.items() if graphs["target"].appends}
            failure = UnavailableError(
                f"TensorRT {trt.__version__} cannot update caches in place, and the bundle has no graphs that avoid "
                "it: install 10.15 or newer, or export it again"
            )
        for attention, graphs in spellings.items():
            try:
                self._device.enter()
                for file, sizes in _by_file(graphs).items():
                    plan = build(bundle, [graphs[name] for name in sizes], tune, progress)
                    (folder / f"{Path(file).stem}.plan").write_bytes(plan)
                (folder / _CHOICE).write_text(
                    json.dumps({"attention": attention, "reason": str(failure or "")}), "utf-8"
                )
                progress(f"replaying the golden run with {attention} attention")
                check()
                return
            except GumihoError as error:
                failure = type(error)(*error.args)  # without the traceback, which would keep the failed build in memory
                progress(f"{attention} attention does not work here: {error}")
        assert failure
        raise failure

    def form(self, bundle: Bundle, folder: Path) -> Form:
        form = bundle.manifest.form(self.NAME)
        try:
            attention = json.loads((folder / _CHOICE).read_text("utf-8"))["attention"]
            return form if attention == _FIRST else replace(form, dialect=attention, graphs=form.spares[attention])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._stale(bundle, folder / _CHOICE, str(error)) from None

    def open(
        self, bundle: Bundle, folder: Path, threads: int = 0, streams: int = 1
    ) -> tuple[dict[str, "Engine"], Device]:
        graphs = self.form(bundle, folder).graphs
        self._device.enter()
        # loaded: the plan and profile of each graph.
        runtime, loaded = trt.Runtime(LOG), dict[str, tuple[trt.ICudaEngine, int]]()
        for file, sizes in _by_file(graphs).items():
            engine = self._load(runtime, bundle, graphs[sizes[0]], folder / f"{Path(file).stem}.plan")
            loaded |= {name: (engine, i) for i, name in enumerate(sizes)}
        device = type(self._device)(self._device.index)
        # Engines run one after another, so they share one block of scratch memory.
        scratch = device.zeros((max(1, *(engine.device_memory_size_v2 for engine, _ in loaded.values())),), np.uint8)
        return {
            name: Engine(engine, graphs[name], device, scratch, profile) for name, (engine, profile) in loaded.items()
        }, device

    def _load(self, runtime: trt.Runtime, bundle: Bundle, graph: Graph, file: Path) -> trt.ICudaEngine:
        try:
            engine = runtime.deserialize_cuda_engine(file.read_bytes())
        except OSError as error:
            raise self._stale(bundle, file, str(error)) from None
        if engine is None:
            raise self._stale(bundle, file, LOG.error)
        source = bundle.path / graph.file
        refitter = trt.Refitter(engine, LOG)
        parser = trt.OnnxParserRefitter(refitter, LOG)
        if not (
            parser.refit_from_bytes(source.read_bytes(), str(bundle.path / source.name))
            and refitter.refit_cuda_engine()
        ):
            raise self._stale(bundle, file, f"refitting its weights failed: {LOG.error}")
        for tensor in (*graph.inputs, *graph.outputs):
            if engine.get_tensor_mode(tensor.name) == trt.TensorIOMode.NONE:
                continue  # an input that nothing reads
            expected = np.dtype(tensor.dtype), trt.TensorLocation.DEVICE
            actual = np.dtype(trt.nptype(engine.get_tensor_dtype(tensor.name))), engine.get_tensor_location(tensor.name)
            if actual != expected:
                raise _other(tensor.name, actual, expected)
        for tensor in () if graph.appends else graph.caches:
            output = tensor.name.replace("past", "present")
            if engine.get_aliased_input_tensor(output) != tensor.name:
                raise UnavailableError(
                    f"TensorRT {trt.__version__} does not update cache '{tensor.name}' in place: try another version"
                )
        return engine

    def _stale(self, bundle: Bundle, file: Path, reason: str) -> DamageError:
        return DamageError(
            f"TensorRT {trt.__version__} cannot load {file} ({reason}): "
            f"run `gumiho compile {bundle.path} --backend tensorrt` again"
        )


def _by_file(graphs: Mapping[str, Graph]) -> dict[str, list[str]]:
    """The names of graphs by the file they share: one plan, with a profile for each in this order."""
    names: dict[str, list[str]] = {}
    for name, graph in graphs.items():
        names.setdefault(graph.file, []).append(name)
    return names


def _other(name: str, actual: object, expected: object) -> UnavailableError:
    return UnavailableError(
        f"TensorRT {trt.__version__} takes '{name}' as {actual}, but in the bundle it is {expected}: try another "
        "version"
    )


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in trt.__version__.split(".")[:2])


class Engine:
    """A plan with its weights, for one size of its inputs; see ``backends.Engine``."""

    def __init__(
        self, engine: trt.ICudaEngine, graph: Graph, device: Any, scratch: DeviceArray, profile: int = 0
    ) -> None:
        """profile: of the graph's sizes. Raises UnavailableError if the plan's shapes are not the graph's."""
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self._inputs = {name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT}
        self._outputs = set(names) - self._inputs
        # Versions that cannot update caches in place lack this function.
        self._aliases = {
            name: None if graph.appends else engine.get_aliased_input_tensor(name) for name in self._outputs
        }
        self._device = device
        context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise UnavailableError(f"TensorRT cannot run an engine ({LOG.error}): free memory on the device")
        context.set_device_memory(scratch.address, scratch.nbytes)
        if profile:  # on the stream of every run, which therefore waits for it
            context.set_optimization_profile_async(profile, device.stream)
        for tensor in graph.inputs:
            if tensor.name in self._inputs and -1 in tuple(engine.get_tensor_shape(tensor.name)):
                context.set_input_shape(tensor.name, tuple(map(int, tensor.shape)))
        for tensor in (*graph.inputs, *graph.outputs):
            if tensor.name in names and (shape := tuple(context.get_tensor_shape(tensor.name))) != tensor.shape:
                raise _other(tensor.name, list(shape), list(tensor.shape))
        self._sizes = {name: trt.volume(context.get_tensor_shape(name)) for name in self._outputs}
        self._context: trt.IExecutionContext | None = context
        self._current: object = None  # the bound call whose addresses the context has

    def bind(self, buffers: Mapping[str, Array]) -> Call:
        if self._context is None:
            raise MisuseError("the model is closed: load the bundle again")
        context, this_call = self._context, object()

        def launch(arrays: Mapping[str, DeviceArray]) -> None:
            if self._current is not this_call:
                for name, array in {**arrays, **dropped}.items():
                    if not context.set_tensor_address(name, array.address):
                        raise GumihoError(
                            f"TensorRT refuses the address of '{name}' ({LOG.error}): try another version"
                        )
                self._current = this_call
            if not context.execute_async_v3(self._device.stream):
                raise GumihoError(f"TensorRT failed to run an engine ({LOG.error}): free memory or try another version")

        call = Staging(self._device, buffers, self._inputs, self._outputs, launch, capturable=True)
        dropped = {}
        for name in self._outputs - call.buffers.keys():
            alias = self._aliases[name]
            dropped[name] = call.buffers[alias] if alias else self._device.zeros((self._sizes[name],), np.int64)
        if unaligned := next((name for name, array in call.buffers.items() if array.address % _ALIGNMENT), None):
            raise GumihoError(
                f"TensorRT needs buffers at multiples of {_ALIGNMENT} bytes, and '{unaligned}' is not at one: "
                "export the bundle again with another --capacity"
            )
        return call

    def close(self) -> None:
        self._context = None
