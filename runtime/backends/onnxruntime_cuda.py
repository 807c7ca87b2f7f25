"""ONNX Runtime on CUDA. All calls are recorded as CUDA graphs. Graphs share the weights that they take as inputs."""

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from ..bundle.graphs import Form, TensorSpec, Weight
from ..bundle.reader import Bundle
from ..engines.devices import Accelerator, Array, Device, DeviceArray, Staging
from ..errors import GumihoError, InputError, MisuseError, UnavailableError
from .memory import Free, MemoryNeeds, Space, buffers
from .onnxruntime_engine import failed_run, open_session, ort, session_options
from .onnxruntime_install import INSTALL_CUDA, JETSON, require_one
from .shared_weights import SharedWeights, nbytes

CUDA = "CUDAExecutionProvider"
_WARNINGS, _ERRORS = 2, 3  # severities of ONNX Runtime's log; warnings are its default
# Approximate bytes that CUDA and its libraries use: on an H100 0.8 GB on the host, and 0.3 to 0.5 GB on the device
# beyond weights and caches.
_LIBRARIES, _LIBRARIES_THERE = 1 << 30, 1 << 29
_FUSED_INT4 = "ORT_FPA_INTB_GEMM"  # environment variable for the session option ep.cuda.fpa_intb_gemm
# Turns off kernels that first copy K and V of the whole capacity for every head that shares them; with them a pass of
# an 8B shape takes 1.3 to 1.4 times as long (H100). The provider's option `sdpa_kernel` has not been measured.
_COPYING_ATTENTION = "ORT_DISABLE_MEMORY_EFFICIENT_ATTENTION"


class Cuda:
    """ONNX Runtime's CUDA provider. Devices: the index of an NVIDIA GPU."""

    NAME: ClassVar[str] = "cuda"
    THREADS: ClassVar[bool] = False

    def __init__(self, device: str) -> None:
        if device and not device.isdigit():
            raise InputError(f"there is no device '{device}' of backend cuda: give the index of a GPU")
        require_one()
        if CUDA not in ort.get_available_providers():
            raise UnavailableError(
                f"backend cuda needs the package onnxruntime-gpu, and the installed onnxruntime {ort.__version__} "
                "lacks CUDA: pip uninstall -y onnxruntime, then "
                f"{INSTALL_CUDA}{JETSON if platform.machine() == 'aarch64' else ''}"
            )
        from ..engines.devices.cuda import Cuda as Gpu

        ort.preload_dlls()
        os.environ.setdefault(_COPYING_ATTENTION, "1")
        self._device = Gpu(int(device or 0))
        self._device.close()  # it was only needed for queries; ``open`` makes another one for the engines

    def versions(self) -> dict[str, str]:
        return {"onnxruntime": ort.__version__, "device": self._device.name}

    def details(self) -> dict[str, str]:
        return self._device.details()

    def memory(self, bundle: Bundle) -> MemoryNeeds:
        form, work = bundle.manifest.form(self.NAME), buffers(bundle, self.NAME) + _LIBRARIES_THERE
        if form.weights:
            return MemoryNeeds(Space(_LIBRARIES), Space(_LIBRARIES, nbytes(form) + work))
        # Weights are copied from their mapped files to the device one tensor at a time; each session has its own copy
        # there.
        weights = [graph.weights for graph in form.graphs.values()]
        return MemoryNeeds(Space(_LIBRARIES, max(weights)), Space(_LIBRARIES, sum(weights) + work))

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
            session = _open(bundle.path / graph.file, options, self._settings(None))
            other_nodes = sorted(
                f"{node.op_type} on {part.ep_name}"
                for part in session.get_provider_graph_assignment_info()
                for node in part.get_nodes()
                if part.ep_name != CUDA
            )
            if other_nodes:
                raise UnavailableError(
                    f"ONNX Runtime {ort.__version__} does not run all of {graph.file} on CUDA "
                    f"({', '.join(other_nodes)}): try another version"
                )

    def form(self, bundle: Bundle, folder: Path) -> Form:
        return bundle.manifest.form(self.NAME)

    def open(
        self, bundle: Bundle, folder: Path, threads: int = 0, streams: int = 1
    ) -> tuple[dict[str, "Engine"], Device]:
        engines, form, device = {}, bundle.manifest.form(self.NAME), type(self._device)(self._device.index)
        try:
            shared = SharedWeights(bundle, form, device)
            for name, graph in form.graphs.items():
                options = self._options(bundle)
                options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
                session = _open(folder / f"{name}.onnx", options, self._settings(device.stream))
                weights = form.inputs(name)
                engines[name] = Engine(session, graph.outputs, device, weights, shared.addresses(weights))
        except GumihoError:
            device.close()
            raise
        return engines, device

    @staticmethod
    def _options(bundle: Bundle) -> ort.SessionOptions:
        options = session_options(bundle, threads=1)
        # Otherwise a pass over a tree first unpacks whole int4 matrices to fp16.
        if any(how.startswith("int4") for how in bundle.manifest.weights.values()) and _FUSED_INT4 not in os.environ:
            options.add_session_config_entry("ep.cuda.fpa_intb_gemm", "1")
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        return options

    def _settings(self, stream: int | None) -> dict[str, str]:
        """stream: the one on which runs are recorded as CUDA graphs, which also excludes nodes on the host; None to
        record nothing."""
        settings = {"device_id": str(self._device.index), "use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}
        return settings | ({} if stream is None else {"user_compute_stream": str(stream), "enable_cuda_graph": "1"})


def _open(file: Path, options: ort.SessionOptions, settings: Mapping[str, str]) -> ort.InferenceSession:
    """See ``open_session``. Silences ONNX Runtime 1.31's warning, for every session, that CUDA is not a plugin."""
    ort.set_default_logger_severity(_ERRORS)
    try:
        return open_session(file, options, CUDA, settings)
    finally:
        ort.set_default_logger_severity(_WARNINGS)


class Engine:
    """A session. Each bound call is recorded as a separate CUDA graph when a thread first makes it. ONNX Runtime then
    runs it three times; this is safe, since each run writes the same rows to the same positions."""

    def __init__(
        self,
        session: ort.InferenceSession,
        outputs: tuple[TensorSpec, ...],
        device: Accelerator,
        weights: Mapping[str, Weight],
        addresses: Mapping[str, int],
    ) -> None:
        """weights: those that the session may take as inputs; addresses: where they are on the device."""
        self._session: ort.InferenceSession | None = session
        self._device, self._output_specs = device, outputs
        inputs = {value.name for value in session.get_inputs()}
        self._weights = [
            (name, weight.dtype, weight.shape, addresses[name]) for name, weight in weights.items() if name in inputs
        ]
        self._inputs = inputs - weights.keys()
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
                raise failed_run(error) from None

        # Dropped outputs also need a buffer: a recorded run may not allocate memory and writes to the recorded
        # addresses.
        unused = [output for output in self._output_specs if output.name not in buffers]
        dropped = {output.name: self._device.zeros(tuple(map(int, output.shape)), output.dtype) for output in unused}
        call = Staging(self._device, {**buffers, **dropped}, self._inputs, self._outputs, launch)
        for name, array in call.buffers.items():
            bind = binding.bind_input if name in self._inputs else binding.bind_output
            bind(name, "cuda", index, array.dtype, array.shape, array.address)
        for name, dtype, shape, address in self._weights:
            binding.bind_input(name, "cuda", index, dtype, shape, address)
        return call

    def close(self) -> None:
        self._session = None
