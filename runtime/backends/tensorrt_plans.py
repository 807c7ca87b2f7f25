"""What the backends of TensorRT and of TensorRT for RTX have in common.

Each file of graphs is compiled to one plan. Shapes are fixed. The target's plan has a set of shapes (a profile) with
its own context for each of its sizes, over one copy of the weights. Caches are updated in place. If the device has no
fused attention for these shapes, or a wrong one, graphs with decomposed attention are used instead.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..bundle.graphs import Form, Graph
from ..bundle.reader import Bundle
from ..engines.devices import Device
from ..errors import DamageError, GumihoError, InputError, UnavailableError
from .memory import Free
from .shared_weights import SharedWeights
from .tensorrt_engine import Engine, other
from .tensorrt_library import Library

if TYPE_CHECKING:
    import tensorrt

FUSED = "fused"  # the name of the form's first graphs; the others are named after their dialect
_CHOICE = "attention.json"
# By the library's name of a type, the bundle's.
_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "BOOL": "bool",
    "UINT8": "uint8",
    "INT8": "int8",
    "INT4": "int4",
    "FP8": "float8_e4m3fn",
}


class Plans(ABC):
    """A backend that runs plans. Devices: the index of an NVIDIA GPU."""

    NAME: ClassVar[str]
    THREADS: ClassVar[bool] = False
    LIBRARY: ClassVar[Library]
    ASKS: ClassVar[bool] = False  # whether contexts are asked if their runs can be recorded

    def __init__(self, device: str) -> None:
        if device and not device.isdigit():
            raise InputError(f"there is no device '{device}' of backend {self.NAME}: give the index of a GPU")
        from ..engines.devices.cuda import Cuda

        self._device = Cuda(int(device or 0))
        self._device.close()  # it was only needed for queries; ``open`` makes another one for the engines

    def details(self) -> dict[str, str]:
        return self._device.details()

    def free(self) -> Free | None:
        return Free(self._device.memory()[0], self._device.unified)

    @abstractmethod
    def spellings(self, bundle: Bundle) -> dict[str, Mapping[str, Graph]]:
        """The sets of graphs to try, by the name of their attention, in order of preference. Raises UnavailableError
        if there is none for this library or device."""

    @abstractmethod
    def build(self, bundle: Bundle, graphs: list[Graph], tune: bool, progress: Callable[[str], object]) -> bytes:
        """The plan of a file's graphs, one for each of its sizes."""

    def compile(
        self, bundle: Bundle, folder: Path, tune: bool, progress: Callable[[str], object], check: Callable[[], object]
    ) -> None:
        def build(graphs: list[Graph]) -> bytes:
            self._device.enter()
            return self.build(bundle, graphs, tune, progress)

        def proven(attention: str) -> None:
            progress(f"replaying the golden run with {attention} attention")
            check()

        build_first(self.spellings(bundle), folder, build, progress, proven)

    def form(self, bundle: Bundle, folder: Path) -> Form:
        form = bundle.manifest.form(self.NAME)
        try:
            attention = json.loads((folder / _CHOICE).read_text("utf-8"))["attention"]
            return form if attention == FUSED else replace(form, dialect=attention, graphs=form.spares[attention])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self.stale(bundle, folder / _CHOICE, str(error)) from None

    def open(
        self, bundle: Bundle, folder: Path, threads: int = 0, streams: int = 1
    ) -> tuple[dict[str, Engine], Device]:
        form = self.form(bundle, folder)
        self._device.enter()
        runtime = self.LIBRARY.trt.Runtime(self.LIBRARY.log)
        loaded = dict[str, tuple[Contexts, int]]()  # with the profile of each graph
        for file, sizes in by_file(form.graphs).items():
            plan = self._plan(runtime, bundle, form, sizes[0], plan_of(folder, file))
            contexts, last = self.contexts(plan, plan_of(folder, file)), plan.num_optimization_profiles - 1
            loaded |= {name: (contexts, min(i, last)) for i, name in enumerate(sizes)}
        device = type(self._device)(self._device.index)
        try:
            # Engines run one after another, so they share one block of scratch memory.
            largest = max(1, *(contexts.plan.device_memory_size_v2 for contexts, _ in loaded.values()))
            scratch, weights = device.zeros((largest,), np.uint8), SharedWeights(bundle, form, device)
            engines = {
                name: Engine(
                    self.LIBRARY,
                    contexts.create(),
                    form.graphs[name],
                    device,
                    scratch,
                    profile,
                    weights.addresses(form.inputs(name)),
                    self.ASKS,
                )
                for name, (contexts, profile) in loaded.items()
            }
        except GumihoError:
            device.close()
            raise
        for contexts in {contexts for contexts, _ in loaded.values()}:
            contexts.complete()
        return engines, device

    def contexts(self, plan: "tensorrt.ICudaEngine", file: Path) -> "Contexts":
        """file: the plan's."""
        return Contexts(self.LIBRARY, plan)

    @abstractmethod
    def fill(self, bundle: Bundle, plan: "tensorrt.ICudaEngine", graph: Graph, file: Path) -> None:
        """Gives a plan the weights that it lacks. file: the plan's. Raises DamageError if that fails."""

    def _plan(
        self, runtime: "tensorrt.Runtime", bundle: Bundle, form: Form, name: str, file: Path
    ) -> "tensorrt.ICudaEngine":
        """A plan that is ready for contexts. name: of a graph that it is for."""
        graph = form.graphs[name]
        try:
            plan = runtime.deserialize_cuda_engine(file.read_bytes())
        except OSError as error:
            raise self.stale(bundle, file, str(error)) from None
        if plan is None:
            raise self.stale(bundle, file, self.LIBRARY.error)
        self.fill(bundle, plan, graph, file)
        trt, weights = self.LIBRARY.trt, form.inputs(name)
        modes = {name: plan.get_tensor_mode(name) for name in map(plan.get_tensor_name, range(plan.num_io_tensors))}
        known = {tensor.name: tensor.dtype for tensor in (*graph.inputs, *graph.outputs)}
        known |= {name: weight.dtype for name, weight in weights.items()}
        if foreign := modes.keys() - known.keys():
            raise self.stale(bundle, file, f"it takes '{min(foreign)}', which the bundle does not have")
        for name in modes:  # the plan lacks inputs that nothing reads
            dtype, location = plan.get_tensor_dtype(name).name, plan.get_tensor_location(name)
            found = _DTYPES.get(dtype, dtype), location
            if found != (known[name], trt.TensorLocation.DEVICE):
                raise other(self.LIBRARY, name, found, (known[name], trt.TensorLocation.DEVICE))
            if name in weights and (shape := tuple(plan.get_tensor_shape(name))) != weights[name].shape:
                raise other(self.LIBRARY, name, list(shape), list(weights[name].shape))
        for tensor in () if graph.appends else graph.caches:
            output = tensor.name.replace("past", "present")
            if plan.get_aliased_input_tensor(output) != tensor.name:
                raise UnavailableError(
                    f"{self.LIBRARY.label} does not update cache '{tensor.name}' in place: try another version"
                )
        return plan

    def stale(self, bundle: Bundle, file: Path, reason: str) -> DamageError:
        return DamageError(
            f"{self.LIBRARY.label} cannot load {file} ({reason}): "
            f"run `gumiho compile {bundle.path} --backend {self.NAME}` again"
        )


class Contexts:
    """Creates the contexts of a plan, whose memory is not allocated yet."""

    def __init__(self, library: Library, plan: "tensorrt.ICudaEngine") -> None:
        self._library, self.plan = library, plan

    def create(self) -> "tensorrt.IExecutionContext":
        """Raises UnavailableError if memory is missing."""
        context = self._create()
        if context is None:
            raise UnavailableError(
                f"{self._library.label} cannot run an engine ({self._library.error}): free memory on the device"
            )
        return context

    def _create(self) -> "tensorrt.IExecutionContext | None":
        return self.plan.create_execution_context(self._library.trt.ExecutionContextAllocationStrategy.USER_MANAGED)

    def complete(self) -> None:
        """Called once all of them are created."""


def by_file(graphs: Mapping[str, Graph]) -> dict[str, list[str]]:
    """The names of graphs by the file they share: one plan, with a profile for each in this order."""
    names: dict[str, list[str]] = {}
    for name, graph in graphs.items():
        names.setdefault(graph.file, []).append(name)
    return names


def plan_of(folder: Path, file: str) -> Path:
    """The plan of a file of graphs in a folder of engines."""
    return folder / f"{Path(file).stem}.plan"


def build_first(
    spellings: Mapping[str, Mapping[str, Graph]],
    folder: Path,
    build: Callable[[list[Graph]], bytes],
    progress: Callable[[str], object],
    check: Callable[[str], object],
) -> None:
    """Writes the plans of the first graphs that work into a folder, and which ones they are, and why not those before
    them.

    spellings: graphs by the name of their attention, in order of preference. build: makes the plan of a file's graphs.
    check: gets that name once the plans are there. Both raise GumihoError for graphs that do not work; so does this for
    the last ones.
    """
    failure: GumihoError | None = None
    for attention, graphs in spellings.items():
        try:
            for file, sizes in by_file(graphs).items():
                plan_of(folder, file).write_bytes(build([graphs[name] for name in sizes]))
            (folder / _CHOICE).write_text(json.dumps({"attention": attention, "reason": str(failure or "")}), "utf-8")
            check(attention)
            return
        except GumihoError as error:
            failure = type(error)(*error.args)  # without the traceback, which would keep the failed build in memory
            progress(f"{attention} attention does not work here: {error}")
    assert failure
    raise failure
