"""ONNX Runtime: on the CPU, the embedded default, and on CUDA.

Compiling runs the graph optimizer once and stores what it made; weights stay in the bundle's own files, which the optimized
graphs point into. On the CPU row counts stay symbolic, so one session serves plain decoding, verification and prefill.
"""

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..bundle.manifest import Form, TensorSpec
from ..bundle.reader import Bundle
from ..devices import Accelerator, Array, Device, DeviceArray, Host, Staging
from ..errors import GumihoError
from .memory import Free, MemoryNeeds, Space, buffers
from .onnxruntime_install import INSTALL_CUDA, NO_PACKAGE, require_one

try:
    import onnxruntime as ort
except ImportError as error:
    raise GumihoError(
        f"the package onnxruntime cannot be imported ({error}): pip install --force-reinstall onnxruntime"
    ) from None
_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_LIBRARIES = 1 << 30  # bytes of host memory that CUDA with its libraries takes, about
_FUSED_INT4 = "ORT_FPA_INTB_GEMM"  # the same setting, by the environment


class Cpu:
    """ONNX Runtime's CPU provider. It has one device."""

    NAME: ClassVar[str] = "cpu"

    def __init__(self, device: str, threads: int) -> None:
        if device:
            raise GumihoError(f"there is no device '{device}' of backend cpu: leave it out")
        require_one()
        self.threads = threads

    def versions(self) -> dict[str, str]:
        return {"onnxruntime": ort.__version__, "machine": platform.machine()}

    def details(self) -> dict[str, str]:
        return {"cores": str(os.cpu_count())}

    def memory(self, bundle: Bundle) -> MemoryNeeds:
        _require_bytes(bundle)
        # Packed weights: those of the target, and of the drafter with an lm_head of its own. The optimizer leaves them in their files.
        return MemoryNeeds(Space(0), Space(bundle.weights() + bundle.caches(self.NAME)))

    def free(self) -> Free | None:
        return None

    def compile(self, bundle: Bundle, folder: Path, tune: bool, progress: Callable[[str], object]) -> None:
        for name, graph in bundle.manifest.form(self.NAME).graphs.items():
            progress(f"optimizing {name}")
            session = _options(bundle, threads=1)
            session.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
            session.optimized_model_filepath = str(folder / f"{name}.onnx")
            # Packing is for the session that runs; here it would only cost time and memory.
            session.add_session_config_entry("session.disable_prepacking", "1")
            _session(bundle.path / graph.file, session, _CPU, {})

    def form(self, bundle: Bundle, folder: Path) -> Form:
        return bundle.manifest.form(self.NAME)

    def open(self, bundle: Bundle, folder: Path) -> tuple[dict[str, "Engine"], Device]:
        _require_bytes(bundle)
        engines = {}
        for name in bundle.manifest.form(self.NAME).graphs:
            options = _options(bundle, self.threads)
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            # The cut-off drafter runs on whole chunks, where packing numbers pays little: they stay in the mapped file instead of
            # being held a second time. Codes that are not packed are multiplied a hundred times slower.
            if name == "extend" and "draft" not in bundle.manifest.weights:
                options.add_session_config_entry("session.disable_prepacking", "1")
            engines[name] = Engine(_session(folder / f"{name}.onnx", options, _CPU, {}))
        return engines, Host()


class Cuda:
    """ONNX Runtime's CUDA provider. Devices: the index of an NVIDIA GPU."""

    NAME: ClassVar[str] = "cuda"

    def __init__(self, device: str, threads: int) -> None:
        """threads: means nothing here."""
        if device and not device.isdigit():
            raise GumihoError(f"there is no device '{device}' of backend cuda: give the index of a GPU")
        require_one()
        if _CUDA not in ort.get_available_providers():
            raise GumihoError(
                f"backend cuda needs the package onnxruntime-gpu, and here is onnxruntime {ort.__version__} without it: "
                + (NO_PACKAGE if platform.machine() == "aarch64" else f"pip uninstall -y onnxruntime, then {INSTALL_CUDA}")
            )
        from ..devices.cuda import Cuda as Gpu

        ort.preload_dlls()
        self._device = Gpu(int(device or 0))
        self._device.close()  # to ask about: engines get one of their own

    def versions(self) -> dict[str, str]:
        return {"onnxruntime": ort.__version__, "device": self._device.name}

    def details(self) -> dict[str, str]:
        return self._device.details()

    def memory(self, bundle: Bundle) -> MemoryNeeds:
        # Weights are copied to the device from their mapped files, tensor by tensor; each session holds its own there.
        weights = [graph.weights for graph in bundle.manifest.form(self.NAME).graphs.values()]
        return MemoryNeeds(Space(_LIBRARIES, max(weights)), Space(_LIBRARIES, sum(weights) + buffers(bundle, self.NAME)))

    def free(self) -> Free | None:
        return Free(self._device.memory()[0], self._device.unified)

    def compile(self, bundle: Bundle, folder: Path, tune: bool, progress: Callable[[str], object]) -> None:
        for name, graph in bundle.manifest.form(self.NAME).graphs.items():
            progress(f"optimizing {name} for {self._device.name}")
            options = self._options(bundle)
            options.optimized_model_filepath = str(folder / f"{name}.onnx")
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            session = _session(bundle.path / graph.file, options, _CUDA, self._settings(None))
            elsewhere = sorted(
                f"{node.op_type} on {part.ep_name}"
                for part in session.get_provider_graph_assignment_info()
                for node in part.get_nodes()
                if part.ep_name != _CUDA
            )
            if elsewhere:
                raise GumihoError(
                    f"ONNX Runtime {ort.__version__} does not run all of {graph.file} on CUDA: {', '.join(elsewhere)}"
                )

    def form(self, bundle: Bundle, folder: Path) -> Form:
        return bundle.manifest.form(self.NAME)

    def open(self, bundle: Bundle, folder: Path) -> tuple[dict[str, "CudaEngine"], Device]:
        engines, device = {}, type(self._device)(self._device.index)
        for name, graph in bundle.manifest.form(self.NAME).graphs.items():
            options = self._options(bundle)
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            session = _session(folder / f"{name}.onnx", options, _CUDA, self._settings(device.stream))
            engines[name] = CudaEngine(session, graph.outputs, device)
        return engines, device

    @staticmethod
    def _options(bundle: Bundle) -> ort.SessionOptions:
        options = _options(bundle, threads=1)
        # Otherwise the rows of a tree make it unpack whole matrices of int4 into fp16 ones, in every pass, before multiplying.
        if any(how.startswith("int4") for how in bundle.manifest.weights.values()) and _FUSED_INT4 not in os.environ:
            options.add_session_config_entry("ep.cuda.fpa_intb_gemm", "1")
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        return options

    def _settings(self, stream: int | None) -> dict[str, str]:
        """stream: on which runs are recorded as CUDA graphs, which also refuses nodes that would be copied to the host."""
        settings = {"device_id": str(self._device.index), "use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}
        return settings | ({} if stream is None else {"user_compute_stream": str(stream), "enable_cuda_graph": "1"})


def _require_bytes(bundle: Bundle) -> None:
    """Raises GumihoError where the target's products are of bytes and the processor has none that are exact."""
    if bundle.manifest.weights.get("target", "").startswith("w8a8") and _overflows():
        raise GumihoError(
            "weights of w8a8 need a processor that adds up products of bytes in 32 bits (VNNI), which this one lacks: "
            "export with --weights int8"
        )


def _overflows() -> bool:
    """Whether products of unsigned and signed bytes are added up in pairs of 16 bits, as x86 did before VNNI; no where it is not known."""
    known = Path("/proc/cpuinfo")
    return platform.machine() == "x86_64" and known.is_file() and "vnni" not in known.read_text()


def _options(bundle: Bundle, threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    # Draft and target sessions take turns: threads of one that keep spinning would slow down the other.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
    return options


def _session(file: Path, options: ort.SessionOptions, provider: str, settings: Mapping[str, str]) -> ort.InferenceSession:
    """A session on one provider. Raises GumihoError where another one was taken, which ONNX Runtime does in silence."""
    try:
        # Without fallback: a provider that fails is tried again on another one otherwise, and what it said is lost.
        session = ort.InferenceSession(file.read_bytes(), options, providers=[(provider, dict(settings))], enable_fallback=0)
    except Exception as error:  # ONNX Runtime's exceptions share no public base class
        said = str(error).strip().splitlines()[0]
        if "till opset" in said or "TensorScatter(24)" in said:  # the newest of ours, and the last of it to get a kernel
            raise GumihoError(
                f"ONNX Runtime {ort.__version__} is too old for {file}: install onnxruntime 1.25 or newer, which needs Python 3.11"
            ) from None
        raise GumihoError(f"ONNX Runtime {ort.__version__} cannot load {file}: {said}") from None
    if session.get_providers()[0] != provider:
        raise GumihoError(
            f"ONNX Runtime {ort.__version__} placed {file} on {session.get_providers()[0]} instead of {provider}: "
            "see what its log says of the driver and of CUDA's libraries"
        )
    return session


class Call:
    """A run over bound buffers. Keeps them alive: the binding knows their addresses only."""

    __slots__ = ("_binding", "_buffers", "_run")

    def __init__(self, session: ort.InferenceSession, binding: ort.IOBinding, buffers: tuple[Array, ...]) -> None:
        self._run, self._binding, self._buffers = session.run_with_iobinding, binding, buffers

    def __call__(self) -> None:
        try:
            self._run(self._binding)
        except Exception as error:  # ONNX Runtime's exceptions share no public base class
            raise GumihoError(f"ONNX Runtime {ort.__version__} failed while running an engine: {error}") from None


class Engine:
    """A compiled graph."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session: ort.InferenceSession | None = session
        self._inputs = {value.name for value in session.get_inputs()}
        self._outputs = {value.name for value in session.get_outputs()}

    def bind(self, buffers: Mapping[str, np.ndarray]) -> Call:
        """See ``backends.Engine``."""
        if self._session is None:
            raise GumihoError("the model is closed: load the bundle again")
        missing = self._inputs - buffers.keys()
        if missing:
            raise GumihoError(f"the engine's input '{min(missing)}' has no buffer: the bundle does not fit this version")
        binding = self._session.io_binding()
        for name, buffer in buffers.items():
            assert buffer.flags.c_contiguous, name
            place = ("cpu", 0, buffer.dtype, buffer.shape, buffer.ctypes.data)
            if name in self._inputs:
                binding.bind_input(name, *place)
            elif name in self._outputs:
                binding.bind_output(name, *place)
        return Call(self._session, binding, tuple(buffers.values()))

    def close(self) -> None:
        self._session = None


class CudaEngine:
    """A session on CUDA. Every bound call is recorded as a CUDA graph of its own when a thread first makes it; ONNX Runtime then
    runs it three times over, which writes the same rows to the same places."""

    def __init__(self, session: ort.InferenceSession, outputs: tuple[TensorSpec, ...], device: Accelerator) -> None:
        self._session: ort.InferenceSession | None = session
        self._device, self._ports = device, outputs
        self._inputs = {value.name for value in session.get_inputs()}
        self._outputs = {value.name for value in session.get_outputs()}
        self._calls = 0

    def bind(self, buffers: Mapping[str, Array]) -> Staging:
        """See ``backends.Engine``."""
        if self._session is None:
            raise GumihoError("the model is closed: load the bundle again")
        session, binding, options = self._session, self._session.io_binding(), ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(self._calls))
        # What comes behind the run is on the same stream, and waits there.
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._calls += 1
        index = self._device.index

        def launch(places: Mapping[str, DeviceArray]) -> None:
            try:
                session.run_with_iobinding(binding, options)
            except Exception as error:  # ONNX Runtime's exceptions share no public base class
                raise GumihoError(f"ONNX Runtime {ort.__version__} failed while running an engine: {error}") from None

        # What is dropped needs a place all the same: a recorded run may not allocate, and writes where it was recorded to.
        dropped = {p.name: self._device.zeros(tuple(map(int, p.shape)), p.dtype) for p in self._ports if p.name not in buffers}
        call = Staging(self._device, {**buffers, **dropped}, self._inputs, self._outputs, launch, capturable=False)
        for name, place in call.buffers.items():
            bind = binding.bind_input if name in self._inputs else binding.bind_output
            bind(name, "cuda", index, place.dtype, place.shape, place.address)
        return call

    def close(self) -> None:
        self._session = None
