"""AMD MIGraphX through its Python module, which is part of ROCm.

Each graph is compiled to one program with static shapes. Weights are inputs that all programs share
(``shared_weights``). Only bfloat16 weights, which the Python module cannot pass, and those of older bundles are part of
the programs. On a GPU, outputs are parameters that are bound to buffers like inputs, and one stream orders all work.
The reference target runs on any processor; it returns its outputs, which are copied to the buffers.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import disk_usage
from typing import Any, ClassVar

import numpy as np

from ..bundle.graphs import Form, Graph, Weight
from ..bundle.reader import Bundle
from ..engines.devices import Accelerator, Array, Call, Device, DeviceArray, Host, Staging, require_buffers
from ..engines.devices.hip import Hip, advice
from ..errors import DamageError, GumihoError, InputError, MisuseError, UnavailableError
from .memory import IGNORE, Free, MemoryNeeds, Space, buffers, size
from .migraphx_compile import Job, compile_apart
from .shared_weights import SharedWeights, nbytes

try:
    import migraphx

    # A folder named migraphx on the path and PyPI's package of that name both import as an empty module.
    _MISSING = "" if hasattr(migraphx, "program") else f"{migraphx} is empty"
except ImportError as error:
    _MISSING = str(error)
if _MISSING:
    raise UnavailableError(f"backend migraphx needs the Python module 'migraphx' ({_MISSING}): {advice()}")

# Before 2.13 (ROCm 7.0) the order of ties in TopK on a GPU is undefined, but in the tree a child with its parent's
# score must come after the parent. (Also, TopK uses only one thread per row in those versions:
# src/targets/gpu/device/topk.cpp.)
_OLDEST = (2, 13)
# In this version TopK's kernel does not compile for some sizes (an empty loop: local_stride in kernels/index.hpp, fixed
# in 2.14).
_UNCOMPILABLE = (2, 13)
_SAVING, _LOADING = 4, 3  # peak host memory as a multiple of a program's weights, measured on the reference target
_DEVICE_SHARE = 0.8  # share of a loaded program's weights that must be in the device's memory
_PROBLEMS, _SPECIFIC = "MIGRAPHX_PROBLEM_CACHE", "MIGRAPHX_MLIR_USE_SPECIFIC_OPS"
# Output 10 is ``main:#output_10`` up to ROCm 7.2.2 and ``main:#output_:00010`` in later releases.
_OUTPUT = re.compile(r"main:#output_(?::0*)?(\d+)")


class MIGraphX:
    """Devices: ``gpu`` (the first), ``gpu:N``, and ``ref``, MIGraphX's reference implementation on the processor."""

    NAME: ClassVar[str] = "migraphx"
    THREADS: ClassVar[bool] = False

    def __init__(self, device: str) -> None:
        kind, _, index = (device or "gpu").partition(":")
        if kind not in ("gpu", "ref") or (index and not (kind == "gpu" and index.isdigit())):
            raise InputError(f"there is no device '{device}' of backend migraphx: give gpu, gpu:N or ref")
        self.target, self.index = kind, int(index or 0)
        self._device: Hip | None = None
        if kind == "gpu":
            if _version() < _OLDEST:
                raise UnavailableError(
                    f"MIGraphX {migraphx.__version__} leaves the order of equal TopK values undefined, but draft trees "
                    "depend on it: install ROCm 7.1 or newer"
                )
            self._device = Hip(self.index)
            self._device.close()  # it was only needed for queries; ``open`` makes another one for the engines

    def versions(self) -> dict[str, str]:
        return {"migraphx": migraphx.__version__, "device": self._device.name if self._device else "ref"}

    def details(self) -> dict[str, str]:
        return self._device.details() if self._device else {}

    def memory(self, bundle: Bundle) -> MemoryNeeds:
        form, work = bundle.manifest.form(self.NAME), buffers(bundle, self.NAME)
        if form.weights:
            shared = nbytes(form) + work
            return MemoryNeeds(Space(0), Space(0, shared) if self._device else Space(shared))
        weights = [graph.weights for graph in form.graphs.values()]
        # Programs are loaded one after another, and each keeps a copy of its weights on the host, even on a GPU
        # (hip_copy_literal).
        loading = max(sum(weights[:i]) + _LOADING * nbytes for i, nbytes in enumerate(weights))
        if self._device:
            return MemoryNeeds(Space(_SAVING * max(weights), max(weights)), Space(loading, sum(weights) + work))
        return MemoryNeeds(Space(_SAVING * max(weights)), Space(max(loading, sum(weights) + work)))

    def free(self) -> Free | None:
        return Free(self._device.memory()[0], self._device.unified) if self._device else None

    def compile(
        self, bundle: Bundle, folder: Path, tune: bool, progress: Callable[[str], object], check: Callable[[], object]
    ) -> None:
        form = bundle.manifest.form(self.NAME)
        needed = 0 if form.weights else sum(graph.weights for graph in form.graphs.values())
        if (free := disk_usage(folder).free) < needed:
            raise UnavailableError(
                f"the programs take {size(needed)} and the disk of {folder} has {size(free)} free: free some space"
            )
        graphs = {name: graph.file for name, graph in form.graphs.items()}
        with tempfile.TemporaryDirectory(dir=folder, prefix=".scratch-") as scratch:
            job = Job(self.target, self.index, tune, str(bundle.path), str(folder), graphs)
            try:
                with self._problems(bundle, Path(scratch), tune) as problems:
                    compile_apart(job, Path(scratch), problems | self._settings(bundle), progress)
            except GumihoError as error:
                if not (self._device and _version() == _UNCOMPILABLE):
                    raise
                raise UnavailableError(
                    f"ROCm 7.0 cannot compile TopK for some sizes: install ROCm 7.1 or newer ({error})"
                ) from None

    @contextmanager
    def _problems(self, bundle: Bundle, scratch: Path, tune: bool) -> Iterator[dict[str, str]]:
        """Environment variables that let a compilation reuse and extend the tuning results of earlier ones on this
        device.

        MIGraphX writes the file in place, so it gets a copy. Results without ``tune`` are kept in a separate file,
        since MIGraphX would not search longer for a problem that it has already solved.
        """
        if not self._device or _PROBLEMS in os.environ:
            yield {}
            return
        digest = hashlib.sha256(json.dumps([self.versions(), tune]).encode()).hexdigest()[:12]
        solutions, copy = bundle.path / "engines" / f"migraphx-problems-{digest}.json", scratch / "problems.json"
        with suppress(OSError, ValueError):
            text = solutions.read_text("utf-8")
            json.loads(text)  # with a damaged file MIGraphX would refuse to compile anything
            copy.write_text(text, "utf-8")
        yield {_PROBLEMS: str(copy)}
        if copy.is_file():
            os.replace(copy, solutions)

    def _settings(self, bundle: Bundle) -> dict[str, str]:
        """Environment variables that keep products with int4 weights in MLIR on gfx9.

        By default larger products use hipBLASLt there, which cannot read int4, so every pass would unpack the weights
        (``is_mlir_dot``, src/targets/gpu/fuse_mlir.cpp).
        """
        int4 = any(how.startswith("int4") for how in bundle.manifest.weights.values())
        if not (self._device and self._device.architecture.startswith("gfx9") and int4) or _SPECIFIC in os.environ:
            return {}
        return {_SPECIFIC: "fused,dot"}

    def form(self, bundle: Bundle, folder: Path) -> Form:
        return bundle.manifest.form(self.NAME)

    def open(
        self, bundle: Bundle, folder: Path, threads: int = 0, streams: int = 1
    ) -> tuple[dict[str, "Engine"], Device]:
        accelerator = Hip(self.index) if self._device else None
        engines, form = {}, bundle.manifest.form(self.NAME)
        try:
            shared = SharedWeights(bundle, form, accelerator)
            for name, graph in form.graphs.items():
                before = accelerator.memory()[0] if accelerator else 0
                program, weights = self._load(bundle, folder / f"{name}.mxr"), form.inputs(name)
                engines[name] = Engine(program, graph, accelerator, shared, weights)
                if accelerator and not accelerator.unified and not weights:
                    # If the device is full, MIGraphX silently puts weights into the host's memory (allocate_gpu,
                    # src/targets/gpu/hip.cpp), and every pass would read them from there.
                    device_bytes = max(0, before - accelerator.memory()[0])
                    if device_bytes < _DEVICE_SHARE * graph.weights and not os.environ.get(IGNORE):
                        raise UnavailableError(
                            f"the weights of {name} take {size(graph.weights)}, of which {size(device_bytes)} fit on "
                            f"{accelerator.name} and the rest is in the host's memory: free memory on the device, or "
                            f"export again with --weights int4 or a smaller --capacity ({IGNORE}=1 runs it slowly)"
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
            raise DamageError(
                f"MIGraphX {migraphx.__version__} cannot load {file} ({_first_line(error)}): "
                f"run `gumiho compile {bundle.path} --backend migraphx` again"
            ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in migraphx.__version__.split(".")[:2])


def _output_parameters(program: Any, graph: Graph, weights: Set[str]) -> dict[str, str]:
    """The graph's output name for each parameter of a program that is an output. Programs of the reference target have
    none.

    weights: names of inputs besides the graph's. An output that is a constant, an input or the same as another output
    has no parameter (MIGraphX, src/replace_allocate.cpp and src/param_utils.cpp). Raises UnavailableError for a
    parameter that is neither an input nor an output of the graph, since the program would read or write the wrong
    memory.
    """
    inputs, names = {tensor.name for tensor in graph.inputs} | weights, dict[str, str]()
    parameters, outputs = program.get_parameter_shapes(), program.get_output_shapes()

    def wrong(interface: str) -> UnavailableError:
        return UnavailableError(f"MIGraphX {migraphx.__version__} gives {graph.file} {interface}: try another version")

    if len(outputs) != len(graph.outputs):
        raise wrong(f"{len(outputs)} outputs instead of {len(graph.outputs)}")
    for parameter, shape in ((name, shape) for name, shape in parameters.items() if name not in inputs):
        match = _OUTPUT.fullmatch(parameter)
        index = int(match[1]) if match else len(outputs)
        if index >= len(outputs):
            raise wrong(f"a parameter '{parameter}', which is neither an input nor an output")
        name = graph.outputs[index].name
        if (shape.lens(), shape.type_string()) != (outputs[index].lens(), outputs[index].type_string()):
            raise wrong(f"a parameter '{parameter}' of another shape than its output '{name}'")
        if name in names.values():
            raise wrong(f"two parameters for its output '{name}'")
        names[parameter] = name
    return names


def _run(run: Callable[..., Any], *arguments: object) -> Any:
    try:
        return run(*arguments)
    except RuntimeError as error:
        raise GumihoError(
            f"MIGraphX failed to run an engine ({_first_line(error)}): free memory or try another version"
        ) from None


def _require_layout(shape: Any, array: DeviceArray | np.ndarray | Weight, name: str) -> None:
    if (shape.bytes(), shape.standard()) != (array.nbytes, True):
        raise UnavailableError(
            f"MIGraphX {migraphx.__version__} lays out '{name}' differently from the bundle: try another version"
        )


class Engine:
    """A compiled program; see ``backends.Engine``."""

    def __init__(
        self,
        program: Any,
        graph: Graph,
        device: Accelerator | None,
        shared: SharedWeights,
        weights: Mapping[str, Weight],
    ) -> None:
        """weights: those that the program may take as inputs. Raises UnavailableError if its inputs or outputs are not
        the graph's."""
        self._program, self._device, self._shared = program, device, shared
        self._outputs = [tensor.name for tensor in graph.outputs]  # MIGraphX keeps their order but not their names
        self._shapes = program.get_parameter_shapes()
        self._output_parameters = _output_parameters(program, graph, weights.keys())
        self._weights = {}
        for name, address in shared.addresses(
            {name: weights[name] for name in weights.keys() & self._shapes.keys()}
        ).items():
            _require_layout(self._shapes[name], weights[name], name)
            self._weights[name] = migraphx.argument_from_pointer(self._shapes[name], address)
        self._inputs = self._shapes.keys() - self._output_parameters.keys() - self._weights.keys()

    def bind(self, buffers: Mapping[str, Array]) -> Call:
        if self._program is None:
            raise MisuseError("the model is closed: load the bundle again")
        require_buffers(self._inputs, buffers)
        return self._on_host(buffers) if self._device is None else self._on_device(buffers, self._device)

    def _on_host(self, buffers: Mapping[str, np.ndarray]) -> Call:
        """A call of the reference target, which copies its outputs to their buffers."""
        inputs, run = self._weights | {name: buffers[name] for name in self._inputs}, self._program.run
        outputs = [(i, buffers[name]) for i, name in enumerate(self._outputs) if name in buffers]
        for name in self._inputs:
            _require_layout(self._shapes[name], buffers[name], name)

        def call() -> None:
            results = _run(run, inputs)
            for i, buffer in outputs:
                buffer[...] = np.asarray(results[i]).reshape(buffer.shape)

        return call

    def _on_device(self, buffers: Mapping[str, Array], device: Accelerator) -> Call:
        """A call of a GPU's program. Outputs without a parameter (see ``_output_parameters``) are copied from the
        address that the program returns.
        """
        run, stream, with_parameter = self._program.run_async, device.stream, self._output_parameters.values()
        copied = [(i, name) for i, name in enumerate(self._outputs) if name in buffers and name not in with_parameter]

        def launch(arrays: Mapping[str, DeviceArray]) -> None:
            results = _run(run, arguments, stream, "ihipStream_t")
            for i, name in copied:
                _require_layout(results[i].get_shape(), arrays[name], name)
                device.copy(arrays[name].address, results[i].data_ptr(), arrays[name].nbytes)

        call = Staging(device, buffers, self._inputs, set(self._outputs), launch)
        arguments = dict(self._weights)
        for parameter, name in ({name: name for name in self._inputs} | self._output_parameters).items():
            shape = self._shapes[parameter]
            array = call.buffers[name] if name in call.buffers else device.zeros((shape.bytes(),), np.uint8)
            _require_layout(shape, array, name)
            arguments[parameter] = migraphx.argument_from_pointer(shape, array.address)
        return call

    def close(self) -> None:
        self._program = None
