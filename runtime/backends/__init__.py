"""The backends by name, and what each of them offers. A backend's libraries are imported when it is asked for."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Protocol

from ..bundle.manifest import Form
from ..bundle.reader import Bundle
from ..devices import Array, Call, Device
from ..errors import GumihoError
from .memory import Free, MemoryNeeds


class Engine(Protocol):
    """A compiled graph."""

    def bind(self, buffers: Mapping[str, Array]) -> Call:
        """Ties inputs and outputs to buffers and returns the call that runs over them, as often as it is called.

        Inputs are read from, and outputs written to, the buffers' own memory where the device reaches it. A buffer whose name
        the graph does not have is left out, an output without a buffer computed and dropped; raises GumihoError where an input
        has none.
        """

    def close(self) -> None:
        """Frees the engine; calls bound to it are dead after it."""


class Backend(Protocol):
    """One way to run graphs on one device."""

    NAME: ClassVar[str]

    def __init__(self, device: str, threads: int) -> None:
        """device: which one, "" for the first; threads: of engines on the processor, 0 for one per physical core.

        Raises GumihoError naming what is missing where the backend cannot run here.
        """

    def versions(self) -> dict[str, str]:
        """Libraries, driver and device: the part of an engine's key that is not the bundle's."""

    def details(self) -> dict[str, str]:
        """What else there is to know of driver and device, for a reader."""

    def memory(self, bundle: Bundle) -> MemoryNeeds:
        """What compiling and running take, about; compared with what is free by ``engines.memory_check.require``.

        Raises GumihoError where the processor lacks what the bundle's products take; so does ``open``.
        """

    def free(self) -> Free | None:
        """What is free on the device now; None where that is the processor."""

    def compile(self, bundle: Bundle, folder: Path, tune: bool, progress: Callable[[str], object]) -> None:
        """Compiles every graph of the bundle's form for this backend into an empty folder; ``engines.store.compile_engines``."""

    def form(self, bundle: Bundle, folder: Path) -> Form:
        """The bundle's form for this backend with the graphs that the engines in ``folder`` were compiled from: the first, or spares."""

    def open(self, bundle: Bundle, folder: Path) -> tuple[Mapping[str, Engine], Device]:
        """Loads the engines compiled into ``folder``, by graph, and the memory they work on."""


_MODULES = {
    "cpu": "onnxruntime:Cpu",
    "cuda": "onnxruntime:Cuda",
    "migraphx": "migraphx:MIGraphX",
    "tensorrt": "tensorrt:TensorRT",
}
NAMES = tuple(_MODULES)
DEVICES = "device of the backend: 0, 1, … for cuda and tensorrt; gpu, gpu:1, … or ref (MIGraphX's CPU reference) for migraphx (default: the first)"


def close(engines: Mapping[str, Engine], device: Device) -> None:
    """Frees what ``Backend.open`` gave: engines first, since they use the device's stream."""
    for engine in engines.values():
        engine.close()
    device.close()


def require(name: str) -> None:
    """Raises GumihoError for a name that is no backend's."""
    if name not in _MODULES:
        raise GumihoError(f"there is no backend '{name}': expected one of {', '.join(NAMES)}")


def backend(name: str, device: str = "", threads: int = 0) -> Backend:
    """The backend of that name. Raises GumihoError for a name that is none, or naming what is missing to run it here."""
    require(name)
    module, cls = _MODULES[name].split(":")
    made: Backend = getattr(import_module(f".{module}", __name__), cls)(device, threads)
    return made
