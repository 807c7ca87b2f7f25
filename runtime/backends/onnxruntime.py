"""ONNX Runtime on the CPU, the embedded default.

Compiling runs the graph optimizer once and stores what it made; weights stay in the bundle's own files, which the optimized
graphs point into. Row counts stay symbolic, so one session serves plain decoding, verification and prefill.
"""

import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from ..bundle import Bundle
from ..errors import GumihoError

NAME = "cpu"


def key(bundle: Bundle) -> dict[str, str]:
    """What an engine depends on; a different value of any part makes it another engine."""
    graphs = {f"graph {name}": bundle.manifest.files[graph.file][1] for name, graph in bundle.manifest.graphs.items()}
    return {"backend": NAME, "onnxruntime": ort.__version__, "machine": platform.machine(), **graphs}


def compile(bundle: Bundle, folder: Path) -> None:
    """Optimizes every graph of the bundle into ``folder``."""
    for name, graph in bundle.manifest.graphs.items():
        options = _options(bundle, threads=1)
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(folder / f"{name}.onnx")
        # Packing is for the session that runs; here it would only cost time and memory.
        options.add_session_config_entry("session.disable_prepacking", "1")
        _session(bundle.path / graph.file, options)


def open_engines(bundle: Bundle, folder: Path, threads: int) -> dict[str, "Engine"]:
    """Loads the engines compiled into ``folder``. threads: 0 for one per physical core."""
    engines = {}
    for name in bundle.manifest.graphs:
        options = _options(bundle, threads)
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        # The cut-off drafter runs on whole chunks only, where packing pays little: its weights stay in the mapped file
        # instead of being held a second time.
        if name == "extend":
            options.add_session_config_entry("session.disable_prepacking", "1")
        engines[name] = Engine(_session(folder / f"{name}.onnx", options))
    return engines


def _options(bundle: Bundle, threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    # Draft and target sessions take turns: threads of one that keep spinning would slow down the other.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
    return options


def _session(file: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    try:
        session = ort.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no public base class
        raise GumihoError(f"ONNX Runtime {ort.__version__} cannot load {file}: {str(error).strip().splitlines()[0]}") from None
    if session.get_providers() != ["CPUExecutionProvider"]:
        raise GumihoError(f"ONNX Runtime placed {file} on {session.get_providers()}, expected the CPU")
    return session


class Call:
    """A run over bound buffers. Keeps them alive: the binding knows their addresses only."""

    __slots__ = ("_binding", "_buffers", "_run")

    def __init__(self, session: ort.InferenceSession, binding: ort.IOBinding, buffers: tuple[np.ndarray, ...]) -> None:
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
        """Ties inputs and outputs to buffers and returns the call that runs over them.

        Inputs are read from, and outputs written to, the buffers' own memory. An output named
        like no buffer is computed and dropped; raises GumihoError where an input has none.
        """
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
