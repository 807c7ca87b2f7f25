"""ONNX Runtime on the CPU, the default.

Compiling runs the graph optimizer once and stores the optimized graphs; the weights stay in the bundle's files, which
these graphs refer to. Row counts stay symbolic, so one session serves plain decoding, verification and prefill.
"""

import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from ..bundle.graphs import SHARED, Form
from ..bundle.reader import Bundle
from ..engines.devices import Device, Host
from ..errors import InputError, UnavailableError
from . import Engine as AnyEngine
from .allocator import keep_memory_of_passes
from .memory import Free, MemoryNeeds, Space
from .onnxruntime_engine import Engine, open_session, ort, session_options
from .onnxruntime_install import require_one
from .onnxruntime_lanes import Lanes
from .processor import one_row_differs, overflows, physical_cores

_CPU = "CPUExecutionProvider"
_SMALL = 256e6  # bytes of weights below which a target has a separate engine for passes of one stream


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
        # Loading packs the weights of target and drafter in memory; the optimizer leaves them in their files.
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

    def open(
        self, bundle: Bundle, folder: Path, threads: int = 0, streams: int = 1
    ) -> tuple[dict[str, "AnyEngine"], Device]:
        _require_bytes(bundle)
        engines: dict[str, AnyEngine] = {}
        alone: Engine | None = None
        graphs = bundle.manifest.form(self.NAME).graphs
        shares = streams > 1 and SHARED in graphs
        # Each engine packs the target's weights again. For a small target that costs less than running the branches of
        # ``shared`` when only one stream decodes.
        small = shares and graphs["target"].weights < _SMALL
        needless = "" if small else "target" if shares else SHARED
        threads = threads or physical_cores()
        at_once = min(2, threads) if small else 1
        for name in sorted(graphs.keys() - {needless}, reverse=True):  # target before shared
            options = session_options(bundle, threads // at_once if name == SHARED else threads)
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            # The arena never shrinks below the peak of all passes, and concurrent passes contend for it.
            options.enable_cpu_mem_arena = False
            options.enable_mem_pattern = False  # a pattern is kept for every combination of sizes that ever ran
            # ``extend`` runs on whole chunks, where packing unquantized weights gains little, so they stay in the
            # mapped file. Quantized weights are packed, since their products would be a hundred times slower otherwise.
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
        keep_memory_of_passes()  # not before: what packing frees is not needed again
        return engines, Host()


def _require_bytes(bundle: Bundle) -> None:
    """Raises UnavailableError if the target multiplies unsigned by signed bytes (w8a8) and the processor cannot do so
    exactly."""
    if bundle.manifest.weights.get("target", "").partition(",")[0] == "w8a8" and overflows():
        raise UnavailableError(
            "w8a8 weights need a processor that sums 8-bit products in 32 bits (VNNI), which this one lacks: "
            "export with --weights w8a8-unsigned"
        )
