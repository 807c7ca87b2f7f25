"""ONNX Runtime on the CPU, the default.

Compiling runs the graph optimizer once and stores the optimized graphs; the weights stay in the bundle's files, which these
graphs refer to. Row counts stay symbolic, so one session serves plain decoding, verification and prefill.
"""

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..bundle.graphs import SHARED, Form
from ..bundle.reader import Bundle
from ..devices import Array, Device, Host, require_buffers
from ..errors import GumihoError, InputError, MisuseError, UnavailableError
from . import Engine as AnyEngine
from .memory import Free, MemoryNeeds, Space
from .onnxruntime_install import require_one
from .processor import one_row_differs, overflows, physical_cores

try:
    import onnxruntime as ort
except ImportError as error:
    raise UnavailableError(f"onnxruntime cannot be imported ({error}): pip install --force-reinstall onnxruntime") from None
__all__ = "Cpu", "Engine", "failed_run", "open_session", "ort", "session_options"  # onnxruntime_cuda uses all but the first two
_CPU = "CPUExecutionProvider"
_SMALL = 256e6  # bytes of weights of a target whose passes of 1 and of several streams have an engine each


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
            options = session_options(bundle, threads=1)
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
            options.optimized_model_filepath = str(folder / f"{name}.onnx")
            # Only the session that runs needs packed weights; packing here would only take time and memory.
            options.add_session_config_entry("session.disable_prepacking", "1")
            open_session(bundle.path / graph.file, options, _CPU, {})

    def form(self, bundle: Bundle, folder: Path) -> Form:
        form = bundle.manifest.form(self.NAME)
        exact = form.graphs["target"].precision == "int8" and "int4" in bundle.manifest.weights.get("target", "")
        return replace(form, least=2) if exact and one_row_differs() else form

    def open(self, bundle: Bundle, folder: Path, threads: int = 0, streams: int = 1) -> tuple[dict[str, "AnyEngine"], Device]:
        _require_bytes(bundle)
        from .onnxruntime_lanes import Lanes  # which imports this module

        engines: dict[str, AnyEngine] = {}
        alone: Engine | None = None
        graphs = bundle.manifest.form(self.NAME).graphs
        shares = streams > 1 and SHARED in graphs
        # Each packs the target's weights. Of a small target a stream alone would lose more by the branches of ``shared``.
        small = shares and graphs["target"].weights < _SMALL
        needless = "" if small else "target" if shares else SHARED
        threads = threads or physical_cores()
        at_once = min(2, threads) if small else 1
        for name in sorted(graphs.keys() - {needless}, reverse=True):  # target before shared
            options = session_options(bundle, threads // at_once if name == SHARED else threads)
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            # Its own arena keeps the most that passes ever took at once, and several passes at once wait for each other in it.
            options.enable_cpu_mem_arena = False
            options.enable_mem_pattern = False  # one is kept for every combination of sizes that ever ran
            # ``extend`` runs on whole chunks, where packing unquantized weights gains little, so they stay in the mapped file.
            # Quantized weights are packed, since their products would be a hundred times slower otherwise.
            if name.partition(".")[0] == "extend" and "draft" not in bundle.manifest.weights:
                options.add_session_config_entry("session.disable_prepacking", "1")
            session = open_session(folder / f"{name}.onnx", options, _CPU, {})
            if name == SHARED:
                engines["target"] = Lanes(session, graphs[SHARED], graphs["target"], alone, at_once)
            else:
                beside = None
                if at_once > 1 and name != "target":
                    options.intra_op_num_threads = threads // at_once
                    beside = open_session(folder / f"{name}.onnx", options, _CPU, {})
                engines[name] = own = Engine(session, beside)
                alone = own if name == "target" else alone
        return engines, Host()


def _require_bytes(bundle: Bundle) -> None:
    """Raises UnavailableError if the target multiplies 8-bit integers (w8a8) and the processor cannot do so exactly."""
    if bundle.manifest.weights.get("target", "").startswith("w8a8") and overflows():
        raise UnavailableError(
            "w8a8 weights need a processor that sums 8-bit products in 32 bits (VNNI), which this one lacks: "
            "export with --weights int8"
        )


def session_options(bundle: Bundle, threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or physical_cores()  # its own default ignores which cores the process may use
    # Draft and target sessions run in turn, or have half of the threads each: spinning threads of one would slow down the other.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
    return options


def open_session(file: Path, options: ort.SessionOptions, provider: str, settings: Mapping[str, str]) -> ort.InferenceSession:
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


def failed_run(error: Exception) -> GumihoError:
    return GumihoError(f"ONNX Runtime {ort.__version__} failed to run an engine ({error}): free memory or try another version")


class Call:
    """A run on bound buffers. It keeps the buffers alive, since the binding stores only their addresses.

    beside: the same run, for while another engine runs too, if that is another. Nothing refers to itself here, directly or by others: a cycle
    would keep the binding, whose memory the garbage collector does not see, until it looks through all objects.
    """

    __slots__ = ("_binding", "_buffers", "_run", "beside")

    def __init__(self, session: ort.InferenceSession, binding: ort.IOBinding, buffers: tuple[Array, ...]) -> None:
        self._run, self._binding, self._buffers = session.run_with_iobinding, binding, buffers
        self.beside: Call | None = None

    def __call__(self) -> None:
        try:
            self._run(self._binding)
        except Exception as error:  # ONNX Runtime's exceptions share no public base class
            raise failed_run(error) from None


class Engine:
    """A compiled graph. beside: it again with fewer threads, for runs while another engine runs too."""

    def __init__(self, session: ort.InferenceSession, beside: ort.InferenceSession | None = None) -> None:
        self._session: ort.InferenceSession | None = session
        self._beside = beside
        self._inputs = {value.name for value in session.get_inputs()}
        self._outputs = {value.name for value in session.get_outputs()}

    def bind(self, buffers: Mapping[str, np.ndarray]) -> Call:
        """See ``backends.Engine``."""
        if self._session is None:
            raise MisuseError("the model is closed: load the bundle again")
        require_buffers(self._inputs, buffers)
        call = self._bound(self._session, buffers)
        if self._beside:
            call.beside = self._bound(self._beside, buffers)
        return call

    def _bound(self, session: ort.InferenceSession, buffers: Mapping[str, np.ndarray]) -> Call:
        binding = session.io_binding()
        for name, buffer in buffers.items():
            assert buffer.flags.c_contiguous, name
            tensor = ("cpu", 0, buffer.dtype, buffer.shape, buffer.ctypes.data)
            if name in self._inputs:
                binding.bind_input(name, *tensor)
            elif name in self._outputs:
                binding.bind_output(name, *tensor)
        return Call(session, binding, tuple(buffers.values()))

    def close(self) -> None:
        self._session = self._beside = None
