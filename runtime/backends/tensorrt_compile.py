"""Builds TensorRT's plans."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import tensorrt as trt

from ..bundle.graphs import Graph
from ..bundle.reader import Bundle
from ..errors import GumihoError

_STRONGLY_TYPED = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)  # the only mode of TensorRT 11


class Log(trt.ILogger):
    """Keeps the last error: a failed call returns None or False and gives the reason only in the log."""

    def __init__(self) -> None:
        super().__init__()
        self.error = "no reason given"

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        if int(severity) <= int(trt.ILogger.ERROR):
            self.error = msg.strip()


LOG = Log()  # one per process: TensorRT's objects may use the first logger, which must outlive them


class Progress(trt.IProgressMonitor):
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


def build(bundle: Bundle, graphs: Sequence[Graph], tune: bool, progress: Callable[[str], object]) -> bytes:
    """The plan of a graph, without its weights. graphs: the sizes of one file, for each of which the plan has a
    profile.

    Raises GumihoError if TensorRT cannot read or build it.
    """
    source = bundle.path / graphs[0].file
    builder = trt.Builder(LOG)
    network = builder.create_network(_STRONGLY_TYPED)
    parser = trt.OnnxParser(network, LOG)
    # The paths of weights are relative to this path's folder; the parser maps them without copying.
    if not parser.parse(source.read_bytes(), str(bundle.path / source.name)):
        reason = parser.get_error(0).desc() if parser.num_errors else LOG.error
        raise GumihoError(f"TensorRT {trt.__version__} cannot read {source} ({reason}): try another version")
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    config.set_flag(trt.BuilderFlag.STRIP_PLAN)
    config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)
    config.builder_optimization_level = 5 if tune else 3
    config.progress_monitor = monitor = Progress(source.stem, progress)
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    symbolic = {tensor.name for tensor in inputs if -1 in tuple(tensor.shape)}
    for graph in graphs if symbolic else ():
        profile = builder.create_optimization_profile()
        refused = f"TensorRT {trt.__version__} refuses sizes of {source}"
        for tensor in graph.inputs:
            if tensor.name in symbolic:
                shape = tuple(map(int, tensor.shape))
                try:
                    profile.set_shape(tensor.name, shape, shape, shape)
                except RuntimeError as error:
                    raise GumihoError(f"{refused} ({error}): try another version") from None
        if config.add_optimization_profile(profile) < 0:
            raise GumihoError(f"{refused} ({LOG.error}): try another version")
    # Kernel timings of earlier builds are reused. TensorRT refuses those of another device or version.
    timings = bundle.path / "engines" / "tensorrt-timings.bin"
    for content in (timings.read_bytes() if timings.is_file() else b"", b""):
        cache = config.create_timing_cache(content)
        if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
            break
    with monitor.interruptible():
        plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise GumihoError(f"TensorRT {trt.__version__} cannot build {source} ({LOG.error}): try another version")
    if (updated := config.get_timing_cache()) is not None:
        timings.write_bytes(updated.serialize())
    return bytes(plan)
