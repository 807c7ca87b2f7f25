"""The backends by name, and their common interface. A backend's libraries are imported only when it is used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Protocol

from ..bundle.graphs import Form
from ..bundle.reader import Bundle
from ..engines.devices import Array, Call, Device
from ..errors import InputError
from ..errors.interruption import delayed
from .memory import Free, MemoryNeeds


class Engine(Protocol):
    """A compiled graph."""

    def bind(self, buffers: Mapping[str, Array]) -> Call:
        """Binds inputs and outputs to buffers and returns a function that runs the graph on them; it can be called
        repeatedly.

        Buffers that the device can access are read and written in place. Buffers whose name the graph does not have are
        ignored, and outputs without a buffer are dropped. The function may return the duration of the run in
        nanoseconds if that differs from the duration of the call. Raises DamageError if an input has no buffer, and
        MisuseError after ``close``.
        """

    def close(self) -> None:
        """Frees the engine; calls bound to it must not be used afterwards."""


class Backend(Protocol):
    """One way to run graphs on one device."""

    NAME: ClassVar[str]
    THREADS: ClassVar[bool]  # whether engines compute with CPU threads

    def __init__(self, device: str) -> None:
        """device: its name, "" for the first one.

        Raises InputError for a device that the backend does not have, and UnavailableError if this machine lacks
        something.
        """

    def versions(self) -> dict[str, str]:
        """Versions of libraries and driver, and the device's name: the part of an engine's key that does not depend on
        the bundle.
        """

    def details(self) -> dict[str, str]:
        """More facts about driver and device, as text for people."""

    def memory(self, bundle: Bundle) -> MemoryNeeds:
        """Estimates the memory for compiling and running, which ``engines.memory_check.require`` compares with free
        memory.

        Raises UnavailableError if the processor lacks instructions that the bundle's weights need; so does ``open``.
        """

    def free(self) -> Free | None:
        """Free memory of the device now; None if the backend runs on the CPU."""

    def compile(
        self, bundle: Bundle, folder: Path, tune: bool, progress: Callable[[str], object], check: Callable[[], object]
    ) -> None:
        """Compiles every graph of the bundle's form for this backend into an empty folder; see
        ``engines.store.compile_engines``.

        tune: search longer for faster kernels. progress: called with the name of each step. check: raises GumihoError
        if the engines in the folder compute wrong results; a backend that can spell the graphs in several ways calls it
        to choose one.
        """

    def form(self, bundle: Bundle, folder: Path) -> Form:
        """The bundle's form for this backend, with the graphs that the engines in ``folder`` were compiled from."""

    def open(
        self, bundle: Bundle, folder: Path, threads: int = 0, streams: int = 1
    ) -> tuple[Mapping[str, Engine], Device]:
        """Loads the engines in ``folder``. Returns them by graph name, and the device whose memory they use.

        threads: of the CPU, 0 for one per physical core; not used unless ``THREADS``. streams: how many decode
        concurrently. With several, if the bundle has the graph ``shared``, the engine named ``target`` runs that graph.
        """


_MODULES = {
    "cpu": "onnxruntime:Cpu",
    "cuda": "onnxruntime_cuda:Cuda",
    "migraphx": "migraphx:MIGraphX",
    "tensorrt": "tensorrt:TensorRT",
    "tensorrt-rtx": "tensorrt_rtx:TensorRTForRTX",
}
NAMES = tuple(_MODULES)
DEVICES = (
    "device of the backend: 0, 1, … for cuda, tensorrt and tensorrt-rtx; gpu, gpu:1, … or ref (MIGraphX's CPU "
    "reference) for migraphx (default: the first)"
)


def close(engines: Mapping[str, Engine], device: Device) -> None:
    """Frees the engines and the device of ``Backend.open``; engines first, since they use the device's stream."""
    for engine in engines.values():
        engine.close()
    device.close()


def require(name: str) -> None:
    """Raises InputError if there is no backend of that name."""
    if name not in _MODULES:
        raise InputError(f"there is no backend '{name}': expected one of {', '.join(NAMES)}")


def backend(name: str, device: str = "") -> Backend:
    """The backend of that name, ready to use.

    device: see ``Backend``. Raises InputError for an unknown name or device, and UnavailableError if the backend
    cannot run on this machine.
    """
    require(name)
    module, cls = _MODULES[name].split(":")
    with delayed():
        kind = getattr(import_module(f".{module}", __name__), cls)
    instance: Backend = kind(device)
    return instance
