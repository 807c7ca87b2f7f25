"""AMD MIGraphX through its own Python module, which comes with ROCm.

A program per graph, of static shapes. On a GPU its outputs are parameters, bound to buffers like its inputs, and everything is
ordered on one stream; the reference target, which runs on any processor, returns its outputs instead, and they are copied.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import disk_usage
from typing import Any, ClassVar

import numpy as np

from ..bundle.manifest import Form, Graph
from ..bundle.reader import Bundle
from ..devices import Accelerator, Array, Call, Device, DeviceArray, Host, Staging
from ..devices.hip import Hip, advice
from ..engines.memory_check import IGNORE
from ..errors import GumihoError
from .memory import Free, MemoryNeeds, Space, buffers, size
from .migraphx_compile import Job, compile_apart

try:
    import migraphx

    # A folder of that name on the path, or the package of that name on the registry, imports as a module without anything in it.
    _MISSING = "" if hasattr(migraphx, "program") else f"the one found, {migraphx}, is empty"
except ImportError as error:
    _MISSING = str(error)
if _MISSING:
    raise GumihoError(f"backend migraphx needs the Python module 'migraphx' ({_MISSING}): {advice()}")

# Before 2.13 (ROCm 7.0) TopK on a GPU leaves the order of ties open. The tree needs it: a child as likely as its parent must come
# after it. (It also takes one thread a row there: src/targets/gpu/device/topk.cpp.)
_OLDEST = (2, 13)
# The kernel of TopK has a loop of no steps there, which does not compile (local_stride in kernels/index.hpp, mended in 2.14).
_UNCOMPILABLE = (2, 13)
_SAVING, _LOADING = 4, 3  # times a program's weights on the host at the peak, measured on the reference target
_ARRIVED = 0.8  # of its weights, the least that a program which was loaded must have taken on the device
_PROBLEMS, _SPECIFIC = "MIGRAPHX_PROBLEM_CACHE", "MIGRAPHX_MLIR_USE_SPECIFIC_OPS"
_OUTPUT = re.compile(
    r"main:#output_(?::0*)?(\d+)"
)  # 10 is ``main:#output_10`` up to ROCm 7.2.2 and ``main:#output_:00010`` since


class MIGraphX:
    """Devices: ``gpu`` (the first), ``gpu:N``, and ``ref``, MIGraphX's reference implementation on the processor."""

    NAME: ClassVar[str] = "migraphx"

    def __init__(self, device: str, threads: int) -> None:
        """threads: means nothing here."""
        kind, _, index = (device or "gpu").partition(":")
        if kind not in ("gpu", "ref") or (index and not (kind == "gpu" and index.isdigit())):
            raise GumihoError(f"there is no device '{device}' of backend migraphx: give gpu, gpu:N or ref")
        self.target, self.index = kind, int(index or 0)
        self._device: Hip | None = None
        if kind == "gpu":
            if _version() < _OLDEST:
                raise GumihoError(
                    f"MIGraphX {migraphx.__version__} leaves the order of equal TopK values open, and a tree needs it: "
                    "install ROCm 7.1 or newer"
                )
            self._device = Hip(self.index)
            self._device.close()  # to ask about: engines get one of their own

    def versions(self) -> dict[str, str]:
        return {"migraphx": migraphx.__version__, "device": self._device.name if self._device else "ref"}

    def details(self) -> dict[str, str]:
        return self._device.details() if self._device else {}

    def memory(self, bundle: Bundle) -> MemoryNeeds:
        weights = [graph.weights for graph in bundle.manifest.form(self.NAME).graphs.values()]
        work = buffers(bundle, self.NAME)
        # Programs are loaded one after another, and each keeps its weights on the host for good, on a GPU too (``hip_copy_literal``).
        loading = max(sum(weights[:i]) + _LOADING * own for i, own in enumerate(weights))
        if self._device:
            return MemoryNeeds(Space(_SAVING * max(weights), max(weights)), Space(loading, sum(weights) + work))
        return MemoryNeeds(Space(_SAVING * max(weights)), Space(max(loading, sum(weights) + work)))

    def free(self) -> Free | None:
        return Free(self._device.memory()[0], self._device.unified) if self._device else None

    def compile(self, bundle: Bundle, folder: Path, tune: bool, progress: Callable[[str], object]) -> None:
        needed = sum(graph.weights for graph in bundle.manifest.form(self.NAME).graphs.values())  # a program holds its own
        if (free := disk_usage(folder).free) < needed:
            raise GumihoError(
                f"the programs take {needed / 1e9:.2f} GB and the disk of {folder} has {free / 1e9:.2f} GB free: free some space"
            )
        graphs = {name: graph.file for name, graph in bundle.manifest.form(self.NAME).graphs.items()}
        with tempfile.TemporaryDirectory(dir=folder, prefix=".scratch-") as scratch:
            job = Job(self.target, self.index, tune, str(bundle.path), str(folder), graphs)
            try:
                with self._problems(bundle, Path(scratch), tune) as problems:
                    compile_apart(job, Path(scratch), problems | self._settings(bundle), progress)
            except GumihoError as error:
                if not (self._device and _version() == _UNCOMPILABLE):
                    raise
                raise GumihoError(f"{error} (ROCm 7.0 has no TopK of some sizes: install ROCm 7.1 or newer)") from None

    @contextmanager
    def _problems(self, bundle: Bundle, scratch: Path, tune: bool) -> Iterator[dict[str, str]]:
        """The environment in which solutions of tuning are taken from, and added to, those of earlier compilations on this device.

        MIGraphX writes the file in place, so it works on a copy. What was found without ``tune`` would stop it from looking longer.
        """
        if not self._device or _PROBLEMS in os.environ:
            yield {}
            return
        digest = hashlib.sha256(json.dumps([self.versions(), tune]).encode()).hexdigest()[:12]
        kept, copy = bundle.path / "engines" / f"migraphx-problems-{digest}.json", scratch / "problems.json"
        with suppress(OSError, ValueError):
            text = kept.read_text("utf-8")
            json.loads(text)  # MIGraphX would refuse to compile anything over a damaged one
            copy.write_text(text, "utf-8")
        yield {_PROBLEMS: str(copy)}
        if copy.is_file():
            os.replace(copy, kept)

    def _settings(self, bundle: Bundle) -> dict[str, str]:
        """On gfx9 larger products go to hipBLASLt unless told otherwise, which reads no int4: weights would be unpacked in every
        pass (``is_mlir_dot``, src/targets/gpu/fuse_mlir.cpp)."""
        int4 = any(how.startswith("int4") for how in bundle.manifest.weights.values())
        if not (self._device and self._device.architecture.startswith("gfx9") and int4) or _SPECIFIC in os.environ:
            return {}
        return {_SPECIFIC: "fused,dot"}

    def form(self, bundle: Bundle, folder: Path) -> Form:
        return bundle.manifest.form(self.NAME)

    def open(self, bundle: Bundle, folder: Path) -> tuple[dict[str, "Engine"], Device]:
        accelerator = Hip(self.index) if self._device else None
        engines = {}
        try:
            for name, graph in bundle.manifest.form(self.NAME).graphs.items():
                before = accelerator.memory()[0] if accelerator else 0
                engines[name] = Engine(self._load(bundle, folder / f"{name}.mxr"), graph, accelerator)
                if accelerator and not accelerator.unified:
                    # Where the device is full, MIGraphX puts weights into the host's memory and says nothing (allocate_gpu, src/
                    # targets/gpu/hip.cpp); every pass would read them from there.
                    taken = max(0, before - accelerator.memory()[0])
                    if taken < _ARRIVED * graph.weights and not os.environ.get(IGNORE):
                        raise GumihoError(
                            f"the weights of {name} take {size(graph.weights)} and {size(taken)} of them are on {accelerator.name}, "
                            "the rest in the host's memory: free memory on the device, or export again with --weights int4 or a "
                            f"smaller --capacity ({IGNORE}=1 runs it slowly)"
                        )
        except GumihoError:
            if accelerator:
                accelerator.close()
            raise
        return engines, accelerator or Host()

    def _load(self, bundle: Bundle, file: Path) -> Any:
        try:
            return migraphx.load(str(file))
        except RuntimeError as error:
            raise GumihoError(
                f"MIGraphX {migraphx.__version__} cannot load {file} ({_first_line(error)}): "
                f"run `python -m runtime.compile {bundle.path} --backend migraphx` again"
            ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in migraphx.__version__.split(".")[:2])


def _output_parameters(program: Any, graph: Graph) -> dict[str, str]:
    """A program's parameters that are outputs, and the graph's name of each. The reference target's programs have none.

    An output that is a constant, an input or the same as another output has no parameter. Source: MIGraphX,
    src/replace_allocate.cpp and src/param_utils.cpp. Raises GumihoError for a parameter that is nothing the graph has: the program
    would read or write memory that nobody meant.
    """
    inputs, found = {tensor.name for tensor in graph.inputs}, dict[str, str]()
    parameters, outputs = program.get_parameter_shapes(), program.get_output_shapes()

    def refuse(what: str) -> GumihoError:
        return GumihoError(f"MIGraphX {migraphx.__version__} gives {graph.file} {what}: try another version")

    if len(outputs) != len(graph.outputs):
        raise refuse(f"{len(outputs)} outputs, and it has {len(graph.outputs)}")
    for parameter, shape in parameters.items():
        if parameter in inputs:
            continue
        match = _OUTPUT.fullmatch(parameter)
        index = int(match[1]) if match else len(outputs)
        if index >= len(outputs):
            raise refuse(f"a parameter '{parameter}', which is neither an input nor an output")
        name = graph.outputs[index].name
        if (shape.lens(), shape.type_string()) != (outputs[index].lens(), outputs[index].type_string()):
            raise refuse(f"a parameter '{parameter}' of another shape than its output '{name}'")
        if name in found.values():
            raise refuse(f"two parameters for its output '{name}'")
        found[parameter] = name
    return found


class Engine:
    """A compiled program; see ``backends.Engine``."""

    def __init__(self, program: Any, graph: Graph, device: Accelerator | None) -> None:
        self._program, self._device = program, device
        self._outputs = [tensor.name for tensor in graph.outputs]  # in order, which is all that MIGraphX keeps of their names
        self._shapes = program.get_parameter_shapes()
        self._bound = _output_parameters(program, graph)
        self._inputs = self._shapes.keys() - self._bound.keys()

    def bind(self, buffers: Mapping[str, Array]) -> Call:
        if self._program is None:
            raise GumihoError("the model is closed: load the bundle again")
        if missing := self._inputs - buffers.keys():
            raise GumihoError(f"the engine's input '{min(missing)}' has no buffer: the bundle does not fit this version")
        return self._on_host(buffers) if self._device is None else self._on_device(buffers, self._device)

    def _on_host(self, buffers: Mapping[str, np.ndarray]) -> Call:
        """A call of the reference target, whose outputs are copied to their buffers."""
        inputs = {name: buffers[name] for name in self._inputs}
        outputs = [(i, buffers[name]) for i, name in enumerate(self._outputs) if name in buffers]
        run = self._program.run

        def call() -> None:
            results = run(inputs)
            for i, buffer in outputs:
                buffer[...] = np.asarray(results[i]).reshape(buffer.shape)

        return call

    def _on_device(self, buffers: Mapping[str, Array], device: Accelerator) -> Call:
        """A call of a GPU's program, whose outputs are parameters. Those that are a constant, an input or another output have none,
        and are copied from where the program says they are."""
        run, stream = self._program.run_async, device.stream
        loose = [(i, name) for i, name in enumerate(self._outputs) if name in buffers and name not in self._bound.values()]

        def launch(places: Mapping[str, DeviceArray]) -> None:
            results = run(arguments, stream, "ihipStream_t")
            for i, name in loose:
                found, place = results[i].get_shape(), places[name]
                if (found.bytes(), found.standard()) != (place.nbytes, True):
                    raise GumihoError(f"MIGraphX {migraphx.__version__} lays out '{name}' in another way: try another version")
                device.copy(place.address, results[i].data_ptr(), place.nbytes)

        call = Staging(device, buffers, self._inputs, set(self._outputs), launch, capturable=False)
        arguments = {}
        for parameter, name in ({name: name for name in self._inputs} | self._bound).items():
            shape = self._shapes[parameter]
            place = call.buffers[name] if name in call.buffers else device.zeros((shape.bytes(),), np.uint8)
            if (shape.bytes(), shape.standard()) != (place.nbytes, True):
                raise GumihoError(f"MIGraphX {migraphx.__version__} lays out '{name}' in another way: try another version")
            arguments[parameter] = migraphx.argument_from_pointer(shape, place.address)
        return call

    def close(self) -> None:
        self._program = None
