"""NVIDIA TensorRT, 10.15 and newer, through its own Python module.

A plan per graph, of static shapes and without its weights: those come from the bundle's own files, mapped, when the plan is
built and again when it is loaded (``STRIP_PLAN``, ``REFIT_IDENTICAL``). Caches are updated in place. Where the device has no
fused attention for these shapes, or a wrong one, the graphs that spell attention out take over.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..bundle import Bundle, Graph
from ..devices import Array, Call, Device, DeviceArray, Staging
from ..errors import GumihoError

try:
    import tensorrt as trt
except ImportError as error:
    raise GumihoError(
        f"backend tensorrt needs the Python module 'tensorrt' ({error}): pip install 'tensorrt>=10.15' 'cuda-bindings>=13' from "
        "NVIDIA's package index"
    ) from None

_OLDEST = (10, 15)
_CHOICE = "attention.json"
_STRONGLY_TYPED = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)  # 11 knows nothing else and still takes the flag


class _Log(trt.ILogger):
    """Keeps the last error: calls that fail return None or False, and say why in the log alone."""

    def __init__(self) -> None:
        super().__init__()
        self.error = "no reason given"

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        if int(severity) <= int(trt.ILogger.ERROR):
            self.error = msg.strip()


class _Progress(trt.IProgressMonitor):
    """Tells of the phases of a build, and cancels it at an interrupt."""

    def __init__(self, name: str, tell: Callable[[str], object]) -> None:
        super().__init__()
        self.name, self.tell, self.interrupted = name, tell, False

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        if parent_phase is None:
            self.tell(f"{self.name}: {phase_name}, {num_steps} steps")

    def step_complete(self, phase_name: str, step: int) -> bool:
        try:
            return not self.interrupted
        except KeyboardInterrupt:
            self.interrupted = True
            return False

    def phase_finish(self, phase_name: str) -> None:
        pass


class TensorRT:
    """Devices: the index of an NVIDIA GPU."""

    NAME: ClassVar[str] = "tensorrt"

    def __init__(self, device: str, threads: int) -> None:
        """threads: means nothing here."""
        if device and not device.isdigit():
            raise GumihoError(f"there is no device '{device}' of backend tensorrt: give the index of a GPU")
        if tuple(int(part) for part in trt.__version__.split(".")[:2]) < _OLDEST:
            raise GumihoError(f"TensorRT {trt.__version__} cannot update caches in place: install 10.15 or newer")
        from ..devices.cuda import Cuda

        self._device = Cuda(int(device or 0))
        self._log = _Log()

    def versions(self) -> dict[str, str]:
        return {"tensorrt": trt.__version__, "device": self._device.name}

    def details(self) -> dict[str, str]:
        return self._device.details()

    def memory(self, bundle: Bundle) -> tuple[int, int]:
        # Weights stay mapped on the host; on the device each plan holds its own, and tactics are tried beside them.
        graphs = bundle.manifest.form(self.NAME).graphs.values()
        return 2 << 30, sum(graph.weights for graph in graphs) + bundle.caches(self.NAME) + (1 << 30)

    def compile(self, bundle: Bundle, folder: Path, tune: bool, progress: Callable[[str], object]) -> None:
        from .. import golden

        form = bundle.manifest.form(self.NAME)
        reason = ""
        for attention, graphs in (("fused", form.graphs), ("decomposed", form.spare)):
            try:
                for name, graph in graphs.items():
                    self._build(bundle, graph, folder / f"{name}.plan", tune, progress)
                (folder / _CHOICE).write_text(json.dumps({"attention": attention, "reason": reason}), "utf-8")
                progress(f"replaying the golden run with {attention} attention")
                engines, _ = self.open(bundle, folder)
                golden.replay(bundle, self.NAME, engines, self._device)
                for engine in engines.values():
                    engine.close()
                return
            except GumihoError as error:
                reason = str(error)
                progress(f"{attention} attention will not do: {reason}")
        raise GumihoError(reason)

    def _build(self, bundle: Bundle, graph: Graph, file: Path, tune: bool, progress: Callable[[str], object]) -> None:
        source = bundle.path / graph.file
        builder = trt.Builder(self._log)
        network = builder.create_network(_STRONGLY_TYPED)
        parser = trt.OnnxParser(network, self._log)
        # The path stands for the folder that weights are named relative to; the parser maps them and copies nothing.
        if not parser.parse(source.read_bytes(), str(bundle.path / source.name)):
            said = parser.get_error(0).desc() if parser.num_errors else self._log.error
            raise GumihoError(f"TensorRT {trt.__version__} cannot read {source}: {said}")
        config = builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)
        config.set_flag(trt.BuilderFlag.STRIP_PLAN)
        config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)
        config.builder_optimization_level = 5 if tune else 3
        config.progress_monitor = monitor = _Progress(file.stem, progress)
        # Timings of kernels outlive the engines they were taken for.
        timings = bundle.path / "engines" / "tensorrt-timings.bin"
        cache = config.create_timing_cache(timings.read_bytes() if timings.is_file() else b"")
        if cache is not None:
            config.set_timing_cache(cache, ignore_mismatch=False)
        plan = builder.build_serialized_network(network, config)
        if monitor.interrupted:
            raise KeyboardInterrupt
        if plan is None:
            raise GumihoError(f"TensorRT {trt.__version__} cannot build {source}: {self._log.error}")
        file.write_bytes(plan)
        if (kept := config.get_timing_cache()) is not None:
            timings.write_bytes(kept.serialize())

    def open(self, bundle: Bundle, folder: Path) -> tuple[dict[str, "Engine"], Device]:
        form = bundle.manifest.form(self.NAME)
        try:
            decomposed = json.loads((folder / _CHOICE).read_text("utf-8"))["attention"] == "decomposed"
        except (OSError, ValueError, KeyError) as error:
            raise self._stale(bundle, folder / _CHOICE, str(error)) from None
        runtime = trt.Runtime(self._log)
        loaded = {name: self._load(runtime, bundle, graph, folder / f"{name}.plan")
                  for name, graph in (form.spare if decomposed else form.graphs).items()}  # fmt: skip
        # Engines run one after another, so they share what they compute with.
        scratch = self._device.zeros((max(1, *(engine.device_memory_size_v2 for engine in loaded.values())),), np.uint8)
        return {name: Engine(engine, self._device, scratch, self._log) for name, engine in loaded.items()}, self._device

    def _load(self, runtime: trt.Runtime, bundle: Bundle, graph: Graph, file: Path) -> trt.ICudaEngine:
        try:
            engine = runtime.deserialize_cuda_engine(file.read_bytes())
        except OSError as error:
            raise self._stale(bundle, file, str(error)) from None
        if engine is None:
            raise self._stale(bundle, file, self._log.error)
        source = bundle.path / graph.file
        refitter = trt.Refitter(engine, self._log)
        parser = trt.OnnxParserRefitter(refitter, self._log)
        if not (parser.refit_from_bytes(source.read_bytes(), str(bundle.path / source.name)) and refitter.refit_cuda_engine()):
            raise self._stale(bundle, file, f"its weights do not fit: {self._log.error}")
        for port in graph.caches:
            written = port.name.replace("past", "present")
            if engine.get_aliased_input_tensor(written) != port.name:
                raise GumihoError(
                    f"TensorRT {trt.__version__} does not update cache '{port.name}' in place: try another version"
                )
        return engine

    def _stale(self, bundle: Bundle, file: Path, reason: str) -> GumihoError:
        return GumihoError(
            f"TensorRT {trt.__version__} cannot load {file} ({reason}): "
            f"run `python -m runtime.compile {bundle.path} --backend tensorrt` again"
        )


class Engine:
    """A plan with its weights; see ``backends.Engine``."""

    def __init__(self, engine: trt.ICudaEngine, device: Any, scratch: DeviceArray, log: _Log) -> None:
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self._inputs = {name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT}
        self._outputs = set(names) - self._inputs
        self._sizes = {name: trt.volume(engine.get_tensor_shape(name)) for name in self._outputs}
        self._device, self._log = device, log
        context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise GumihoError(f"TensorRT cannot run an engine ({log.error}): free memory on the device")
        context.set_device_memory(scratch.address, scratch.nbytes)
        self._context: trt.IExecutionContext | None = context
        self._current: object = None  # whose addresses the context holds

    def bind(self, buffers: Mapping[str, Array]) -> Call:
        if self._context is None:
            raise GumihoError("the model is closed: load the bundle again")
        dropped = {name: self._device.zeros((self._sizes[name],), np.int64) for name in self._outputs - buffers.keys()}
        context, me = self._context, object()

        def launch(places: Mapping[str, DeviceArray]) -> None:
            if self._current is not me:
                for name, place in {**places, **dropped}.items():
                    if not context.set_tensor_address(name, place.address):
                        raise GumihoError(f"TensorRT takes no address for '{name}': {self._log.error}")
                self._current = me
            if not context.execute_async_v3(self._device.stream):
                raise GumihoError(f"TensorRT failed while running an engine: {self._log.error}")

        return Staging(self._device, buffers, self._inputs, self._outputs, launch, capturable=True)

    def close(self) -> None:
        self._context = None
