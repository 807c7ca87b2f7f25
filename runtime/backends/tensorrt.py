"""NVIDIA TensorRT, 10.3 and newer, through its Python module.

Each graph is compiled to one plan with static shapes and without weights: TensorRT maps them from the bundle's files when it
builds the plan and again when it loads it (``STRIP_PLAN``, ``REFIT_IDENTICAL``). Caches are updated in place. If the device has
no fused attention for these shapes, or a wrong one, graphs with decomposed attention are used instead. Versions before 10.15
(JetPack 6) cannot update caches in place; for them there are graphs of primitive operators that return only the new rows.
"""

import json
import platform
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..bundle.manifest import Form, Graph
from ..bundle.reader import Bundle
from ..devices import Array, Call, Device, DeviceArray, Staging
from ..errors import DamageError, GumihoError, InputError, MisuseError, UnavailableError
from .memory import Free, MemoryNeeds, Space, buffers

try:
    import tensorrt as trt
except ImportError as error:
    # PyPI's packages do not run on Jetsons: there TensorRT is part of JetPack and belongs to the system's Python.
    jetson = "on a Jetson, use JetPack's, in an environment made with `python3 -m venv --system-site-packages`; elsewhere "
    raise UnavailableError(
        f"backend tensorrt needs the Python module 'tensorrt' ({error}): {jetson if platform.machine() == 'aarch64' else ''}"
        "pip install 'tensorrt>=10.15' 'cuda-bindings>=13'"
    ) from None

_OLDEST = (10, 3)
_IN_PLACE = (10, 15)  # the first version whose parser knows TensorScatter
_FIRST = "fused"  # the name of the form's first graphs; the others are named after their dialect
_CHOICE = "attention.json"
_ALIGNMENT = 256  # bytes; of every address passed to a context
_LIBRARIES = 2 << 30  # approximate bytes of host memory that CUDA and TensorRT use
_TACTICS = 1 << 30  # approximate bytes on the device, in addition to the weights, while a plan is built
_FP8 = (8, 9)  # the lowest compute capability with fp8 products: Ada, then Hopper
_STRONGLY_TYPED = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)  # the only mode of TensorRT 11


class _Log(trt.ILogger):
    """Keeps the last error: a failed call returns None or False and gives the reason only in the log."""

    def __init__(self) -> None:
        super().__init__()
        self.error = "no reason given"

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        if int(severity) <= int(trt.ILogger.ERROR):
            self.error = msg.strip()


_LOG = _Log()  # one per process: TensorRT's objects may use the first logger, which must outlive them


class _Progress(trt.IProgressMonitor):
    """Reports the phases of a build and can cancel it. TensorRT ignores exceptions from these methods."""

    def __init__(self, name: str, tell: Callable[[str], object]) -> None:
        super().__init__()
        self.name, self.tell, self.interrupted = name, tell, False

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        if parent_phase is None:
            self.tell(f"{self.name}: {phase_name}, {num_steps} steps")

    def step_complete(self, phase_name: str, step: int) -> bool:
        return not self.interrupted

    def phase_finish(self, phase_name: str) -> None:
        pass

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within the block, signals that would raise KeyboardInterrupt cancel the build; the block's end raises it."""
        main_thread = threading.current_thread() is threading.main_thread()  # only it may change signal handlers
        numbers = (signal.SIGINT, signal.SIGTERM) if main_thread else ()
        interrupts = [number for number in numbers if signal.getsignal(number) is signal.default_int_handler]

        def interrupt(*_: object) -> None:
            self.interrupted = True

        for number in interrupts:
            signal.signal(number, interrupt)
        try:
            yield
        finally:
            for number in interrupts:
                signal.signal(number, signal.default_int_handler)
        if self.interrupted:
            raise KeyboardInterrupt


class TensorRT:
    """Devices: the index of an NVIDIA GPU."""

    NAME: ClassVar[str] = "tensorrt"
    THREADS: ClassVar[bool] = False

    def __init__(self, device: str) -> None:
        if device and not device.isdigit():
            raise InputError(f"there is no device '{device}' of backend tensorrt: give the index of a GPU")
        if _version() < _OLDEST:
            raise UnavailableError(f"TensorRT {trt.__version__} is too old: install 10.3 or newer (10.15 for fused attention)")
        from ..devices.cuda import Cuda

        self._device = Cuda(int(device or 0))
        self._device.close()  # only for questions about the device; ``open`` makes another one for the engines

    def versions(self) -> dict[str, str]:
        return {"tensorrt": trt.__version__, "device": self._device.name}

    def details(self) -> dict[str, str]:
        return self._device.details()

    def memory(self, bundle: Bundle) -> MemoryNeeds:
        # The host only maps weights. Each plan has a copy on the device, where building it takes more memory to try tactics.
        weights = [graph.weights for graph in bundle.manifest.form(self.NAME).graphs.values()]
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
                f"TensorRT {trt.__version__} cannot update caches in place, and the bundle has no graphs that avoid it: "
                "install 10.15 or newer, or export it again"
            )
        for attention, graphs in spellings.items():
            try:
                for name, graph in graphs.items():
                    self._build(bundle, graph, folder / f"{name}.plan", tune, progress)
                (folder / _CHOICE).write_text(json.dumps({"attention": attention, "reason": str(failure or "")}), "utf-8")
                progress(f"replaying the golden run with {attention} attention")
                check()
                return
            except GumihoError as error:
                failure = type(error)(*error.args)  # without the traceback, which would keep the failed build in memory
                progress(f"{attention} attention does not work here: {error}")
        assert failure
        raise failure

    def _build(self, bundle: Bundle, graph: Graph, file: Path, tune: bool, progress: Callable[[str], object]) -> None:
        source = bundle.path / graph.file
        self._device.enter()
        builder = trt.Builder(_LOG)
        network = builder.create_network(_STRONGLY_TYPED)
        parser = trt.OnnxParser(network, _LOG)
        # The paths of weights are relative to this path's folder; the parser maps them without copying.
        if not parser.parse(source.read_bytes(), str(bundle.path / source.name)):
            reason = parser.get_error(0).desc() if parser.num_errors else _LOG.error
            raise GumihoError(f"TensorRT {trt.__version__} cannot read {source} ({reason}): try another version")
        config = builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)
        config.set_flag(trt.BuilderFlag.STRIP_PLAN)
        config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)
        config.builder_optimization_level = 5 if tune else 3
        config.progress_monitor = monitor = _Progress(file.stem, progress)
        # Kernel timings of earlier builds are reused. TensorRT refuses those of another device or version.
        timings = bundle.path / "engines" / "tensorrt-timings.bin"
        for content in (timings.read_bytes() if timings.is_file() else b"", b""):
            cache = config.create_timing_cache(content)
            if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
                break
        with monitor.interruptible():
            plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise GumihoError(f"TensorRT {trt.__version__} cannot build {source} ({_LOG.error}): try another version")
        file.write_bytes(plan)
        if (updated := config.get_timing_cache()) is not None:
            timings.write_bytes(updated.serialize())

    def form(self, bundle: Bundle, folder: Path) -> Form:
        form = bundle.manifest.form(self.NAME)
        try:
            attention = json.loads((folder / _CHOICE).read_text("utf-8"))["attention"]
            return form if attention == _FIRST else replace(form, dialect=attention, graphs=form.spares[attention])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._stale(bundle, folder / _CHOICE, str(error)) from None

    def open(self, bundle: Bundle, folder: Path, threads: int = 0) -> tuple[dict[str, "Engine"], Device]:
        graphs = self.form(bundle, folder).graphs
        self._device.enter()
        runtime = trt.Runtime(_LOG)
        loaded = {name: self._load(runtime, bundle, graph, folder / f"{name}.plan") for name, graph in graphs.items()}
        device = type(self._device)(self._device.index)
        # Engines run one after another, so they share one block of scratch memory.
        scratch = device.zeros((max(1, *(engine.device_memory_size_v2 for engine in loaded.values())),), np.uint8)
        return {name: Engine(engine, graphs[name], device, scratch) for name, engine in loaded.items()}, device

    def _load(self, runtime: trt.Runtime, bundle: Bundle, graph: Graph, file: Path) -> trt.ICudaEngine:
        try:
            engine = runtime.deserialize_cuda_engine(file.read_bytes())
        except OSError as error:
            raise self._stale(bundle, file, str(error)) from None
        if engine is None:
            raise self._stale(bundle, file, _LOG.error)
        source = bundle.path / graph.file
        refitter = trt.Refitter(engine, _LOG)
        parser = trt.OnnxParserRefitter(refitter, _LOG)
        if not (parser.refit_from_bytes(source.read_bytes(), str(bundle.path / source.name)) and refitter.refit_cuda_engine()):
            raise self._stale(bundle, file, f"refitting its weights failed: {_LOG.error}")
        for tensor in (*graph.inputs, *graph.outputs):
            if engine.get_tensor_mode(tensor.name) == trt.TensorIOMode.NONE:
                continue  # an input that nothing reads
            expected = np.dtype(tensor.dtype), tensor.shape, trt.TensorLocation.DEVICE
            actual = (np.dtype(trt.nptype(engine.get_tensor_dtype(tensor.name))), tuple(engine.get_tensor_shape(tensor.name)),
                      engine.get_tensor_location(tensor.name))  # fmt: skip
            if actual != expected:
                raise UnavailableError(
                    f"TensorRT {trt.__version__} takes '{tensor.name}' as {actual}, but in {source} it is {expected}: "
                    "try another version"
                )
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


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in trt.__version__.split(".")[:2])


class Engine:
    """A plan with its weights; see ``backends.Engine``."""

    def __init__(self, engine: trt.ICudaEngine, graph: Graph, device: Any, scratch: DeviceArray) -> None:
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self._inputs = {name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT}
        self._outputs = set(names) - self._inputs
        self._sizes = {name: trt.volume(engine.get_tensor_shape(name)) for name in self._outputs}
        # Versions that cannot update caches in place lack this function.
        self._aliases = {name: None if graph.appends else engine.get_aliased_input_tensor(name) for name in self._outputs}
        self._device = device
        context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise UnavailableError(f"TensorRT cannot run an engine ({_LOG.error}): free memory on the device")
        context.set_device_memory(scratch.address, scratch.nbytes)
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
                        raise GumihoError(f"TensorRT refuses the address of '{name}' ({_LOG.error}): try another version")
                self._current = this_call
            if not context.execute_async_v3(self._device.stream):
                raise GumihoError(f"TensorRT failed to run an engine ({_LOG.error}): free memory or try another version")

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
