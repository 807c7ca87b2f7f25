"""ONNX Runtime, on the CPU (the default) and on CUDA.

Compiling runs the graph optimizer once and stores the optimized graphs; the weights stay in the bundle's files, which these
graphs refer to. On the CPU row counts stay symbolic, so one session serves plain decoding, verification and prefill.
"""

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..bundle.manifest import Form, TensorSpec
from ..bundle.reader import Bundle
from ..devices import Accelerator, Array, Device, DeviceArray, Host, Staging, require_buffers
from ..errors import GumihoError, InputError, MisuseError, UnavailableError
from .memory import Free, MemoryNeeds, Space, buffers
from .onnxruntime_install import INSTALL_CUDA, NO_PACKAGE, require_one
from .processor import overflows, physical_cores

try:
    import onnxruntime as ort
except ImportError as error:
    raise UnavailableError(f"onnxruntime cannot be imported ({error}): pip install --force-reinstall onnxruntime") from None
_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_LIBRARIES = 1 << 30  # approximate bytes of host memory that CUDA and its libraries use
_FUSED_INT4 = "ORT_FPA_INTB_GEMM"  # environment variable for the session option ep.cuda.fpa_intb_gemm


class Cpu:
    """ONNX Runtime's CPU provider. It has one device."""

    NAME: ClassVar[str] = "cpu"
    THREADS: ClassVar[bool] = True

    def __init__(self, device: str) -> None:
        if device:
            raise InputError(f"there is no device '{device}' of backend cpu: leave it out")
        require_one()

    def versions(self) -> dict[str, str]:
        return {"onnxruntime": ort.__version__, "machine": platform.machine()}

    def details(self) -> dict[str, str]:
        return {"cores": str(os.cpu_count())}

    def memory(self, bundle: Bundle) -> MemoryNeeds:
        _require_bytes(bundle)
        # Running packs the weights of the target and of the drafter in memory. The optimizer leaves them in their files.
        return MemoryNeeds(Space(0), Space(bundle.weights() + bundle.caches(self.NAME)))

    def free(self) -> Free | None:
        return None

    def compile(
        self, bundle: Bundle, folder: Path, tune: bool, progress: Callable[[str], object], check: Callable[[], object]
    ) -> None:
        for name, graph in bundle.manifest.form(self.NAME).graphs.items():
            progress(f"optimizing {name}")
            options = _options(bundle, threads=1)
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
            options.optimized_model_filepath = str(folder / f"{name}.onnx")
            # Only the session that runs needs packed weights; packing here would only take time and memory.
            options.add_session_config_entry("session.disable_prepacking", "1")
            _session(bundle.path / graph.file, options, _CPU, {})

    def form(self, bundle: Bundle, folder: Path) -> Form:
        return bundle.manifest.form(self.NAME)

    def open(self, bundle: Bundle, folder: Path, threads: int = 0) -> tuple[dict[str, "Engine"], Device]:
        _require_bytes(bundle)
        engines = {}
        for name in bundle.manifest.form(self.NAME).graphs:
            options = _options(bundle, threads)
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            # ``extend`` runs on whole chunks, where packing unquantized weights gains little, so they stay in the mapped file.
            # Quantized weights are packed, since their products would be a hundred times slower otherwise.
            if name == "extend" and "draft" not in bundle.manifest.weights:
                options.add_session_config_entry("session.disable_prepacking", "1")
            engines[name] = Engine(_session(folder / f"{name}.onnx", options, _CPU, {}))
        return engines, Host()


class Cuda:
    """ONNX Runtime's CUDA provider. Devices: the index of an NVIDIA GPU."""

    NAME: ClassVar[str] = "cuda"
    THREADS: ClassVar[bool] = False

    def __init__(self, device: str) -> None:
        if device and not device.isdigit():
            raise InputError(f"there is no device '{device}' of backend cuda: give the index of a GPU")
        require_one()
        if _CUDA not in ort.get_available_providers():
            raise UnavailableError(
                f"backend cuda needs the package onnxruntime-gpu, and the installed onnxruntime {ort.__version__} lacks CUDA: "
                + (NO_PACKAGE if platform.machine() == "aarch64" else f"pip uninstall -y onnxruntime, then {INSTALL_CUDA}")
            )
        from ..devices.cuda import Cuda as Gpu

        ort.preload_dlls()
        self._device = Gpu(int(device or 0))
        self._device.close()  # only for questions about the device; ``open`` makes another one for the engines

    def versions(self) -> dict[str, str]:
        return {"onnxruntime": ort.__version__, "device": self._device.name}

    def details(self) -> dict[str, str]:
        return self._device.details()

    def memory(self, bundle: Bundle) -> MemoryNeeds:
        # Weights are copied from their mapped files to the device one tensor at a time; each session has its own copy there.
        weights = [graph.weights for graph in bundle.manifest.form(self.NAME).graphs.values()]
        return MemoryNeeds(Space(_LIBRARIES, max(weights)), Space(_LIBRARIES, sum(weights) + buffers(bundle, self.NAME)))

    def free(self) -> Free | None:
        return Free(self._device.memory()[0], self._device.unified)

    def compile(
        self, bundle: Bundle, folder: Path, tune: bool, progress: Callable[[str], object], check: Callable[[], object]
    ) -> None:
        for name, graph in bundle.manifest.form(self.NAME).graphs.items():
            progress(f"optimizing {name} for {self._device.name}")
            options = self._options(bundle)
            options.optimized_model_filepath = str(folder / f"{name}.onnx")
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            session = _session(bundle.path / graph.file, options, _CUDA, self._settings(None))
            other_nodes = sorted(
                f"{node.op_type} on {part.ep_name}"
                for part in session.get_provider_graph_assignment_info()
                for node in part.get_nodes()
                if part.ep_name != _CUDA
            )
            if other_nodes:
                raise UnavailableError(
                    f"ONNX Runtime {ort.__version__} does not run all of {graph.file} on CUDA "
                    f"({', '.join(other_nodes)}): try another version"
                )

    def form(self, bundle: Bundle, folder: Path) -> Form:
        return bundle.manifest.form(self.NAME)

    def open(self, bundle: Bundle, folder: Path, threads: int = 0) -> tuple[dict[str, "CudaEngine"], Device]:
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
        # Without it, a pass over a tree first unpacks whole int4 matrices to fp16.
        if any(how.startswith("int4") for how in bundle.manifest.weights.values()) and _FUSED_INT4 not in os.environ:
            options.add_session_config_entry("ep.cuda.fpa_intb_gemm", "1")
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        return options

    def _settings(self, stream: int | None) -> dict[str, str]:
        """stream: runs are recorded on it as CUDA graphs, which also excludes nodes on the host; None to record nothing."""
        settings = {"device_id": str(self._device.index), "use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}
        return settings | ({} if stream is None else {"user_compute_stream": str(stream), "enable_cuda_graph": "1"})


def _require_bytes(bundle: Bundle) -> None:
    """Raises UnavailableError if the target multiplies 8-bit integers (w8a8) and the processor cannot do so exactly."""
    if bundle.manifest.weights.get("target", "").startswith("w8a8") and overflows():
        raise UnavailableError(
            "w8a8 weights need a processor that sums 8-bit products in 32 bits (VNNI), which this one lacks: "
            "export with --weights int8"
        )


def _options(bundle: Bundle, threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or physical_cores()  # its own default ignores which cores the process may use
    # Draft and target sessions run in turn: spinning threads of one would slow down the other.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
    return options


def _session(file: Path, options: ort.SessionOptions, provider: str, settings: Mapping[str, str]) -> ort.InferenceSession:
    """A session on one provider. Raises GumihoError if it cannot be made, or if ONNX Runtime used another provider."""
    try:
        # With fallback, a failing provider would be replaced by another one and its error message lost.
        session = ort.InferenceSession(file.read_bytes(), options, providers=[(provider, dict(settings))], enable_fallback=0)
    except Exception as error:  # ONNX Runtime's exceptions share no public base class
        reason = str(error).strip().splitlines()[0]
        # The graphs use opset 24, and TensorScatter was its last operator to get a kernel.
        if "till opset" in reason or "TensorScatter(24)" in reason:
            raise UnavailableError(
                f"ONNX Runtime {ort.__version__} is too old for {file}: install onnxruntime 1.25 or newer, "
                "which needs Python 3.11"
            ) from None
        raise GumihoError(f"ONNX Runtime {ort.__version__} cannot load {file} ({reason}): try another version") from None
    if session.get_providers()[0] != provider:
        raise UnavailableError(
            f"ONNX Runtime {ort.__version__} placed {file} on {session.get_providers()[0]} instead of {provider}: "
            "look in its log for errors of the driver and of CUDA's libraries"
        )
    return session


def _failed_run(error: Exception) -> GumihoError:
    return GumihoError(f"ONNX Runtime {ort.__version__} failed to run an engine ({error}): free memory or try another version")


class Call:
    """A run on bound buffers. It keeps the buffers alive, since the binding stores only their addresses."""

    __slots__ = ("_binding", "_buffers", "_run")

    def __init__(self, session: ort.InferenceSession, binding: ort.IOBinding, buffers: tuple[Array, ...]) -> None:
        self._run, self._binding, self._buffers = session.run_with_iobinding, binding, buffers

    def __call__(self) -> None:
        try:
            self._run(self._binding)
        except Exception as error:  # ONNX Runtime's exceptions share no public base class
            raise _failed_run(error) from None


class Engine:
    """A compiled graph."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session: ort.InferenceSession | None = session
        self._inputs = {value.name for value in session.get_inputs()}
        self._outputs = {value.name for value in session.get_outputs()}

    def bind(self, buffers: Mapping[str, np.ndarray]) -> Call:
        """See ``backends.Engine``."""
        if self._session is None:
            raise MisuseError("the model is closed: load the bundle again")
        require_buffers(self._inputs, buffers)
        binding = self._session.io_binding()
        for name, buffer in buffers.items():
            assert buffer.flags.c_contiguous, name
            tensor = ("cpu", 0, buffer.dtype, buffer.shape, buffer.ctypes.data)
            if name in self._inputs:
                binding.bind_input(name, *tensor)
            elif name in self._outputs:
                binding.bind_output(name, *tensor)
        return Call(self._session, binding, tuple(buffers.values()))

    def close(self) -> None:
        self._session = None


class CudaEngine:
    """A session on CUDA. Each bound call is recorded as a separate CUDA graph when a thread first makes it; ONNX Runtime then
    runs it three times, which writes the same rows to the same positions each time."""

    def __init__(self, session: ort.InferenceSession, outputs: tuple[TensorSpec, ...], device: Accelerator) -> None:
        self._session: ort.InferenceSession | None = session
        self._device, self._output_specs = device, outputs
        self._inputs = {value.name for value in session.get_inputs()}
        self._outputs = {value.name for value in session.get_outputs()}
        self._calls = 0

    def bind(self, buffers: Mapping[str, Array]) -> Staging:
        """See ``backends.Engine``."""
        if self._session is None:
            raise MisuseError("the model is closed: load the bundle again")
        session, binding, options = self._session, self._session.io_binding(), ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(self._calls))
        # The work after the run is on the same stream and waits for it there.
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._calls += 1
        index = self._device.index

        def launch(arrays: Mapping[str, DeviceArray]) -> None:
            try:
                session.run_with_iobinding(binding, options)
            except Exception as error:  # ONNX Runtime's exceptions share no public base class
                raise _failed_run(error) from None

        # Dropped outputs also need a buffer: a recorded run may not allocate memory and writes to the recorded addresses.
        unused = [output for output in self._output_specs if output.name not in buffers]
        dropped = {output.name: self._device.zeros(tuple(map(int, output.shape)), output.dtype) for output in unused}
        call = Staging(self._device, {**buffers, **dropped}, self._inputs, self._outputs, launch, capturable=False)
        for name, array in call.buffers.items():
            bind = binding.bind_input if name in self._inputs else binding.bind_output
            bind(name, "cuda", index, array.dtype, array.shape, array.address)
        return call

    def close(self) -> None:
        self._session = None
