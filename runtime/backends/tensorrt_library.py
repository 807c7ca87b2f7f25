"""What NVIDIA's two libraries have in common: TensorRT, and TensorRT for RTX, whose Python modules have the same
members."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorrt


class Library:
    """One of the two.

    trt: its Python module. log: its logger; one per process, since the library's objects may use the first one, which
    must outlive them.
    """

    def __init__(self, trt: Any, name: str) -> None:
        self.trt, self._name, self.log = trt, name, _log(trt)

    @property
    def label(self) -> str:
        """Its name and version, for messages."""
        return f"{self._name} {self.trt.__version__}"

    @property
    def version(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.trt.__version__.split(".")[:2])

    @property
    def error(self) -> str:
        """The last error. A failed call returns None or False and gives the reason only in the log."""
        return str(self.log.error)  # type: ignore[attr-defined]


def _log(trt: Any) -> "tensorrt.ILogger":
    class Log(trt.ILogger):
        def __init__(self) -> None:
            super().__init__()
            self.error = "no reason given"

        def log(self, severity: Any, msg: str) -> None:
            if int(severity) <= int(trt.ILogger.ERROR):
                self.error = msg.strip()

    return Log()


class Progress:
    """Reports the phases of a build and can cancel it."""

    def __init__(self, library: Library, name: str, tell: Callable[[str], object]) -> None:
        """name: of what is built. tell: gets each phase as text."""
        self._interrupted = False
        own, base = self, library.trt.IProgressMonitor

        class Monitor(base):  # type: ignore[misc, valid-type]  # the library ignores exceptions from these methods
            def __init__(self) -> None:
                super().__init__()

            def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
                if parent_phase is None:
                    tell(f"{name}: {phase_name}, {num_steps} steps")

            def step_complete(self, phase_name: str, step: int) -> bool:
                return not own._interrupted

            def phase_finish(self, phase_name: str) -> None:
                pass

        self.monitor: tensorrt.IProgressMonitor = Monitor()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within the block, signals that would raise KeyboardInterrupt cancel the build; the block's end raises it."""
        main_thread = threading.current_thread() is threading.main_thread()  # only it may change signal handlers
        numbers = (signal.SIGINT, signal.SIGTERM) if main_thread else ()
        interrupts = [number for number in numbers if signal.getsignal(number) is signal.default_int_handler]

        def interrupt(*_: object) -> None:
            self._interrupted = True

        for number in interrupts:
            signal.signal(number, interrupt)
        try:
            yield
        finally:
            for number in interrupts:
                signal.signal(number, signal.default_int_handler)
        if self._interrupted:
            raise KeyboardInterrupt
