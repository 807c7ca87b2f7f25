"""ONNX Runtime's sessions, and engines on its CPU provider."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..bundle.reader import Bundle
from ..engines.devices import Array, require_buffers
from ..errors import GumihoError, MisuseError, UnavailableError
from .processor import physical_cores

try:
    import onnxruntime as ort
except ImportError as error:
    raise UnavailableError(
        f"onnxruntime cannot be imported ({error}): pip install --force-reinstall onnxruntime"
    ) from None
__all__ = "Call", "Engine", "failed_run", "open_session", "ort", "session_options"


def session_options(bundle: Bundle, threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # ONNX Runtime's default ignores which cores the process may use.
    options.intra_op_num_threads = threads or physical_cores()
    # Draft and target sessions alternate, or have half of the threads each. Spinning threads of one would slow down the
    # other.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
    return options


def open_session(
    file: Path, options: ort.SessionOptions, provider: str, settings: Mapping[str, str]
) -> ort.InferenceSession:
    """A session on one provider. Raises GumihoError if it cannot be made, or if ONNX Runtime used another provider."""
    try:
        # With fallback, a failing provider would be replaced by another one and its error message lost.
        session = ort.InferenceSession(
            file.read_bytes(), options, providers=[(provider, dict(settings))], enable_fallback=0
        )
    except Exception as error:  # ONNX Runtime's exceptions share no public base class
        reason = str(error).strip().splitlines()[0]
        # The graphs use opset 24, and TensorScatter was its last operator to get a kernel.
        if "till opset" in reason or "TensorScatter(24)" in reason:
            raise UnavailableError(
                f"ONNX Runtime {ort.__version__} is too old for {file}: install onnxruntime 1.25 or newer, "
                "which needs Python 3.11"
            ) from None
        raise GumihoError(
            f"ONNX Runtime {ort.__version__} cannot load {file} ({reason}): try another version"
        ) from None
    if session.get_providers()[0] != provider:
        raise UnavailableError(
            f"ONNX Runtime {ort.__version__} placed {file} on {session.get_providers()[0]} instead of {provider}: "
            "look in its log for errors of the driver and of CUDA's libraries"
        )
    return session


def failed_run(error: Exception) -> GumihoError:
    return GumihoError(
        f"ONNX Runtime {ort.__version__} failed to run an engine ({error}): free memory or try another version"
    )


class Call:
    """A run on bound buffers. It keeps the buffers alive, since the binding stores only their addresses.

    beside: the same run in a session with fewer threads, for use while another engine runs; None if there is no such
    session. Calls must not be part of a reference cycle: it would keep the binding, whose memory the garbage collector
    does not count, until the next full collection.
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
    """A compiled graph. beside: a second session of it with fewer threads, for runs while another engine runs."""

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
