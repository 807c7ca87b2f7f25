"""NVIDIA TensorRT, 10.3 and newer, through its Python module.

Plans (``tensorrt_plans``) are without weights: TensorRT maps them from the bundle's files when it builds a plan and
again when it loads it (``STRIP_PLAN``, ``REFIT_IDENTICAL``). Versions before 10.15 (JetPack 6) cannot update caches in
place; for them there are graphs of primitive operators that return only the new rows.
"""

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from ..bundle.graphs import Graph
from ..bundle.reader import Bundle
from ..errors import UnavailableError
from .memory import MemoryNeeds, Space, buffers

try:
    import tensorrt as trt
except ImportError as error:
    # PyPI's packages do not run on Jetsons: there TensorRT is part of JetPack and belongs to the system's Python.
    jetson = (
        "on a Jetson, use JetPack's, in an environment made with `python3 -m venv --system-site-packages`; elsewhere "
    )
    raise UnavailableError(
        f"backend tensorrt needs the Python module 'tensorrt' ({error}): "
        f"{jetson if platform.machine() == 'aarch64' else ''}pip install 'tensorrt>=10.15' 'cuda-bindings>=13'"
    ) from None

from .tensorrt_compile import build
from .tensorrt_library import Library
from .tensorrt_plans import FUSED, Plans

_OLDEST = (10, 3)
_IN_PLACE = (10, 15)  # the first version whose parser knows TensorScatter
_LIBRARIES = 2 << 30  # approximate bytes of host memory that CUDA and TensorRT use
_TACTICS = 1 << 30  # approximate bytes on the device, in addition to the weights, while a plan is built
_FP8 = (8, 9)  # the lowest compute capability with fp8 products: Ada, then Hopper


class TensorRT(Plans):
    """Devices: the index of an NVIDIA GPU."""

    NAME: ClassVar[str] = "tensorrt"
    LIBRARY: ClassVar[Library] = Library(trt, "TensorRT")

    def __init__(self, device: str) -> None:
        if self.LIBRARY.version < _OLDEST:
            raise UnavailableError(
                f"TensorRT {trt.__version__} is too old: install 10.3 or newer (10.15 for fused attention)"
            )
        super().__init__(device)

    def versions(self) -> dict[str, str]:
        return {"tensorrt": trt.__version__, "device": self._device.name}

    def memory(self, bundle: Bundle) -> MemoryNeeds:
        # The host only maps weights. Each plan has a copy on the device, where building it takes more memory to try
        # tactics.
        weights = {graph.file: graph.weights for graph in bundle.manifest.form(self.NAME).graphs.values()}.values()
        return MemoryNeeds(
            Space(_LIBRARIES, max(weights) + _TACTICS), Space(_LIBRARIES, sum(weights) + buffers(bundle, self.NAME))
        )

    def spellings(self, bundle: Bundle) -> dict[str, Mapping[str, Graph]]:
        form = bundle.manifest.form(self.NAME)
        if self._device.capability < _FP8 and any(how.startswith("fp8") for how in bundle.manifest.weights.values()):
            major, minor = self._device.capability
            raise UnavailableError(
                f"fp8 weights need compute capability 8.9 (Ada, Hopper and newer), and {self._device.name} has "
                f"{major}.{minor}: export again with --weights int4 or none"
            )
        spellings = {FUSED: form.graphs, **form.spares}
        if self.LIBRARY.version < _IN_PLACE:
            spellings = {name: graphs for name, graphs in spellings.items() if graphs["target"].appends}
        if not spellings:
            raise UnavailableError(
                f"TensorRT {trt.__version__} cannot update caches in place, and the bundle has no graphs that avoid "
                "it: install 10.15 or newer, or export it again"
            )
        return spellings

    def build(self, bundle: Bundle, graphs: list[Graph], tune: bool, progress: Callable[[str], object]) -> bytes:
        timings = bundle.path / "engines" / "tensorrt-timings.bin"
        configured: list[trt.IBuilderConfig] = []

        def configure(config: trt.IBuilderConfig) -> None:
            config.set_flag(trt.BuilderFlag.STRIP_PLAN)
            config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)
            config.builder_optimization_level = 5 if tune else 3
            # Kernel timings of earlier builds are reused. TensorRT refuses those of another device or version.
            for content in (timings.read_bytes() if timings.is_file() else b"", b""):
                cache = config.create_timing_cache(content)
                if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
                    break
            configured.append(config)

        plan = build(self.LIBRARY, bundle, graphs, configure, progress)
        if (updated := configured[0].get_timing_cache()) is not None:
            timings.write_bytes(updated.serialize())
        return plan

    def fill(self, bundle: Bundle, plan: trt.ICudaEngine, graph: Graph, file: Path) -> None:
        source = bundle.path / graph.file
        refitter = trt.Refitter(plan, self.LIBRARY.log)
        parser = trt.OnnxParserRefitter(refitter, self.LIBRARY.log)
        if not (
            parser.refit_from_bytes(source.read_bytes(), str(bundle.path / source.name))
            and refitter.refit_cuda_engine()
        ):
            raise self.stale(bundle, file, f"refitting its weights failed: {self.LIBRARY.error}")
