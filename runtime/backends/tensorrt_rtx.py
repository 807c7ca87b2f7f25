"""NVIDIA TensorRT for RTX, through its Python module: for GeForce, RTX PRO and other cards from Turing to Blackwell.

Plans (``tensorrt_plans``) take weights as inputs, which they share (``shared_weights``). They are built without a GPU
too: then they have not computed anything yet, and ``compile`` replays the golden run on the device. Kernels are
compiled on the device, when contexts are created, and kept between runs.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..bundle.graphs import Graph
from ..bundle.hashes import sample_hash
from ..bundle.manifest import RTX
from ..bundle.reader import Bundle
from ..errors import UnavailableError
from .memory import MemoryNeeds, Space, buffers
from .rtx_cards import Card, card_of, require
from .shared_weights import nbytes

try:
    import tensorrt_rtx_bindings as trt
except ImportError as error:
    raise UnavailableError(
        f"backend tensorrt-rtx needs the Python module 'tensorrt_rtx_bindings' ({error}), which NVIDIA has for x86-64: "
        "pip install 'gumiho-export[tensorrt-rtx]'"
    ) from None

from .tensorrt_compile import build
from .tensorrt_library import Library
from .tensorrt_plans import FUSED, Contexts, Plans, build_first

if TYPE_CHECKING:
    import tensorrt

_LIBRARIES = 2 << 30  # approximate bytes of host memory that CUDA and TensorRT for RTX use
_KERNELS = "kernels"  # folder beside the engines
# Whether the target's plan has one profile from its smallest to its largest size, which takes half of the time to build
# and a third of the space; only a device can tell what it costs in a pass.
RANGED = False


class TensorRTForRTX(Plans):
    """Devices: the index of an NVIDIA GPU."""

    NAME: ClassVar[str] = RTX
    LIBRARY: ClassVar[Library] = Library(trt, "TensorRT for RTX")
    ASKS: ClassVar[bool] = True

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._card = card_of(self._device.capability, self._device.name)

    def versions(self) -> dict[str, str]:
        return versions(self._card) | {"device": self._device.name}

    def memory(self, bundle: Bundle) -> MemoryNeeds:
        form = bundle.manifest.form(self.NAME)
        work = buffers(bundle, self.NAME)
        return MemoryNeeds(Space(_LIBRARIES), Space(_LIBRARIES, nbytes(form) + work))

    def spellings(self, bundle: Bundle) -> dict[str, Mapping[str, Graph]]:
        return _spellings(bundle, self._card)

    def build(self, bundle: Bundle, graphs: list[Graph], tune: bool, progress: Callable[[str], object]) -> bytes:
        return _build(bundle, graphs, self._card, progress)

    def fill(self, bundle: Bundle, plan: trt.ICudaEngine, graph: Graph, file: Path) -> None:
        """Plans lack no weights: they take them as inputs."""

    def contexts(self, plan: trt.ICudaEngine, file: Path) -> Contexts:
        depends_on = sample_hash(file), self._device.name, self._device.details()["driver"]
        name = hashlib.sha256("\n".join(depends_on).encode()).hexdigest()[:16]
        return _CachedContexts(self.LIBRARY, plan, file.parent.parent / _KERNELS / f"{name}.bin")


class _CachedContexts(Contexts):
    """Contexts whose kernels are read from a file, and written to it if there are new ones."""

    def __init__(self, library: Library, plan: "tensorrt.ICudaEngine", file: Path) -> None:
        super().__init__(library, plan)
        trt, self._file, self._known = library.trt, file, b""
        self._config = plan.create_runtime_config()
        self._config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        # All kernels are compiled now, since other ones later could round differently in the middle of a text.
        self._config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        self._cache = self._config.create_runtime_cache()
        with suppress(OSError):
            content = file.read_bytes()
            if self._cache.deserialize(content):
                self._known = content
        self._config.set_runtime_cache(self._cache)

    def _create(self) -> "tensorrt.IExecutionContext | None":
        return self.plan.create_execution_context(self._config)

    def complete(self) -> None:
        """Keeps the kernels, where the bundle can be written."""
        if (content := bytes(self._cache.serialize())) == self._known:
            return
        with suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._file.parent, delete=False) as new:
                new.write(content)
            os.replace(new.name, self._file)


def build_for(bundle: Bundle, card: Card, folder: Path, progress: Callable[[str], object]) -> None:
    """Builds plans for a kind of card, on any machine, into an empty folder. Raises UnavailableError if such cards lack
    the bundle's formats."""
    build_first(
        _spellings(bundle, card),
        folder,
        lambda graphs: _build(bundle, graphs, card, progress),
        progress,
        lambda attention: progress(f"built for {card.name} with {attention} attention"),
    )


def _spellings(bundle: Bundle, card: Card) -> dict[str, Mapping[str, Graph]]:
    """See ``Plans.spellings``."""
    require(card, bundle)
    form = bundle.manifest.form(RTX)
    return {FUSED: form.graphs, **form.spares}


def versions(card: Card) -> dict[str, str]:
    """What plans for a kind of card depend on; see ``Backend.versions``."""
    return {RTX: trt.__version__, "capability": card.name}


def _build(bundle: Bundle, graphs: list[Graph], card: Card, progress: Callable[[str], object]) -> bytes:
    def configure(config: trt.IBuilderConfig) -> None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, card.name.upper()), 0)
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # as NVIDIA asks for runs that are recorded

    return build(TensorRTForRTX.LIBRARY, bundle, graphs, configure, progress, RANGED)
