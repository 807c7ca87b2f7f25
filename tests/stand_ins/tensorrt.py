"""``tensorrt`` over ONNX Runtime's CPU provider, on the stand-in for CUDA's runtime.

It holds its caller to TensorRT's rules: subclasses of loggers and monitors call their base's ``__init__``, and there is
one logger in a process; exceptions of a monitor are swallowed and cancel the build; plans without weights run once they
are refitted with what they were built from; a context is made and run on the device its engine was loaded on, with
scratch memory of its own; every tensor has an address, at a multiple of 256 bytes, in memory of the device; aliased
outputs are at their inputs'; a context runs once with its addresses before it is recorded; what has symbolic shapes is
built and run with profiles, one for each context. Failures are None or False, and their reason is in the log.

What is wrong with this TensorRT is set in ``UNBUILDABLE``, ``UNSIZED``, ``WRONG``, ``ON_HOST``, ``ALIASES`` and
``SIGNAL``.
"""

import ctypes
import json
import os
from collections.abc import Callable
from enum import Enum
from math import prod
from typing import Any, ClassVar

import numpy as np
import onnx
import onnxruntime as ort
from cuda.bindings import runtime as cuda

from tests.stand_ins.sessions import session

__version__ = "10.15.1.29"

UNBUILDABLE: set[str] = set()  # attention, "fused" or "decomposed", that no plan is built with
UNSIZED: set[str] = set()  # attention that takes no optimization profiles
WRONG: set[str] = set()  # attention that computes something else
ON_HOST: set[str] = set()  # tensors that have to be in the host's memory
ALIASES = True  # whether caches are updated in place
SIGNAL: int | None = None  # arrives in the middle of a build

STEPS = 20
TIMINGS = b"timings of " + cuda.Properties.name
LOGGERS: list["ILogger"] = []
BUILT: list[str] = []  # attention of every plan that was built
CONTEXTS = 0  # alive
LATE: list[str] = []  # what was freed behind the memory it works in


class _Enum(Enum):
    def __int__(self) -> int:
        return int(self.value)


class Severity(_Enum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class NetworkDefinitionCreationFlag(_Enum):
    STRONGLY_TYPED = 1


class BuilderFlag(_Enum):
    TF32 = 5
    STRIP_PLAN = 18
    REFIT_IDENTICAL = 19


class TensorIOMode(_Enum):
    NONE, INPUT, OUTPUT = range(3)


class TensorLocation(_Enum):
    DEVICE, HOST = range(2)


class ExecutionContextAllocationStrategy(_Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class ILogger:
    Severity = Severity
    ERROR = Severity.ERROR

    def __init__(self) -> None:
        self.base = True

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


class IProgressMonitor:
    def __init__(self) -> None:
        self.base = True


def _use(logger: ILogger) -> ILogger:
    assert logger.base
    if logger not in LOGGERS:
        LOGGERS.append(logger)
    assert len(LOGGERS) == 1, "a second logger is never told anything"
    return logger


def _swallowing(method: Callable[..., Any], *arguments: object) -> Any:
    try:
        return method(*arguments)
    except BaseException:
        return False


class DataType(_Enum):
    FLOAT, HALF, INT64, BOOL = range(4)


_TYPES = {
    "tensor(float)": DataType.FLOAT,
    "tensor(float16)": DataType.HALF,
    "tensor(int64)": DataType.INT64,
    "tensor(bool)": DataType.BOOL,
}


def nptype(dtype: DataType) -> type:
    return {"FLOAT": np.float32, "HALF": np.float16, "INT64": np.int64, "BOOL": np.bool_}[dtype.name]


def volume(shape: list[int]) -> int:
    return prod(shape)


def _attention(graph: bytes) -> str:
    """How a graph is spelled. Raises what protobuf raises where it is no graph."""
    operators = {node.op_type for node in onnx.load_model_from_string(graph).graph.node}
    return "fused" if "Attention" in operators else "decomposed" if "TensorScatter" in operators else "basic"


def _old() -> bool:
    """Whether caches cannot be updated in place: neither in graphs, nor can engines be asked for it."""
    return tuple(map(int, __version__.split(".")[:2])) < (10, 15)


def _is_graph(graph: bytes) -> bool:
    try:
        _attention(graph)
    except Exception:
        return False
    return True


class ITensor:
    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, shape


class INetworkDefinition:
    graph: bytes
    folder: str  # of the weights

    def _inputs(self) -> list[ITensor]:
        graph = onnx.load_model_from_string(self.graph).graph
        shapes = [[-1 if dim.dim_param else dim.dim_value for dim in v.type.tensor_type.shape.dim] for v in graph.input]
        return [ITensor(value.name, tuple(shape)) for value, shape in zip(graph.input, shapes, strict=True)]

    @property
    def num_inputs(self) -> int:
        return len(self._inputs())

    def get_input(self, index: int) -> ITensor:
        return self._inputs()[index]


class IOptimizationProfile:
    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def set_shape(self, name: str, least: tuple[int, ...], usual: tuple[int, ...], most: tuple[int, ...]) -> None:
        assert least == usual == most, "kernels would be chosen for sizes that are never run"
        assert all(type(size) is int for size in least)
        self.shapes[name] = least


class ITimingCache:
    def __init__(self, taken: bytes) -> None:
        self.taken = taken

    def serialize(self) -> bytes:
        return TIMINGS


class IBuilderConfig:
    def __init__(self, builder: "Builder") -> None:
        self.builder = builder
        self.flags = {BuilderFlag.TF32}
        self.cache: ITimingCache | None = None
        self.progress_monitor: Any = None
        self.builder_optimization_level = 3
        self.profiles: list[IOptimizationProfile] = []

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        attention = _attention(self.builder.network.graph)
        if attention in UNSIZED:
            self.builder.logger.log(Severity.ERROR, f"[optimizationProfile.cpp] no profile for {attention} attention")
            return -1
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.flags.discard(flag)

    def create_timing_cache(self, taken: bytes) -> ITimingCache | None:
        return ITimingCache(taken) if not taken or taken.startswith(b"timings of ") else None

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        if cache.taken not in (b"", TIMINGS):
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        return self.cache


class Builder:
    FLAGS: ClassVar[set[Any]] = {BuilderFlag.STRIP_PLAN, BuilderFlag.REFIT_IDENTICAL}

    def __init__(self, logger: ILogger) -> None:
        self.logger = _use(logger)
        self.network = INetworkDefinition()

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        assert flags == 1 << int(NetworkDefinitionCreationFlag.STRONGLY_TYPED), "types would be chosen, not kept"
        return self.network

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig(self)

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> bytes | None:
        assert config.flags == self.FLAGS
        monitor, attention = config.progress_monitor, _attention(network.graph)
        symbolic = {tensor.name for tensor in network._inputs() if -1 in tensor.shape}
        if symbolic and not config.profiles:
            self.logger.log(
                Severity.ERROR, "network has dynamic or shape inputs, but no optimization profile has been defined"
            )
            return None
        assert all(profile.shapes.keys() == symbolic for profile in config.profiles), "a profile lacks an input"
        assert symbolic or not config.profiles
        assert monitor.base
        _swallowing(monitor.phase_start, "Building", None, STEPS)
        for step in range(STEPS):
            if SIGNAL is not None and step == STEPS // 2:
                os.kill(os.getpid(), SIGNAL)
            if _swallowing(monitor.step_complete, "Building", step) is not True:
                self.logger.log(Severity.ERROR, "cancelled")
                return None
        _swallowing(monitor.phase_finish, "Building")
        if attention in UNBUILDABLE:
            self.logger.log(Severity.ERROR, f"no kernel for {attention} attention\n")
            return None
        BUILT.append(attention)
        about = {"profiles": [profile.shapes for profile in config.profiles], **self.about(network, config)}
        return b"plan" + json.dumps(about).encode() + b"\n" + network.graph

    def about(self, network: INetworkDefinition, config: IBuilderConfig) -> dict[str, Any]:
        return {}


class OnnxParser:
    num_errors = 0

    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self.network, self.logger = network, _use(logger)

    def parse(self, graph: bytes, path: str) -> bool:
        assert os.path.isdir(os.path.join(os.path.dirname(path), "weights")), (
            "weights are named relative to the path's folder"
        )
        self.network.graph, self.network.folder = graph, os.path.dirname(path)
        if _is_graph(graph) and _old() and _attention(graph) != "basic":
            self.logger.log(Severity.ERROR, "no importer for TensorScatter")
            return False
        return _is_graph(graph)


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self.logger = _use(logger)

    def deserialize_cuda_engine(self, plan: bytes) -> "ICudaEngine | None":
        about, _, graph = plan[4:].partition(b"\n")
        if plan[:4] != b"plan" or not _is_graph(graph):
            self.logger.log(Severity.ERROR, "the magic tag does not match")
            return None
        return self.engine(graph, json.loads(about))

    def engine(self, graph: bytes, about: dict[str, Any]) -> "ICudaEngine | None":
        return ICudaEngine(graph, about["profiles"])


class ICudaEngine:
    device_memory_size_v2 = 4096

    def __init__(self, graph: bytes, profiles: list[dict[str, list[int]]]) -> None:
        self.graph, self.device, self.attention = graph, cuda.current(), _attention(graph)
        self.profiles, self.taken = profiles, set[int]()  # profiles of living contexts
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        self.session: ort.InferenceSession | None = None

    def refit(self, folder: str) -> None:
        self.session = session(self.graph, folder)
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = {value.name: value for value in self.session.get_outputs()}

    @property
    def tensors(self) -> dict[str, Any]:
        return self.inputs | self.outputs

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        if name in self.inputs:
            return TensorIOMode.INPUT
        return TensorIOMode.OUTPUT if name in self.outputs else TensorIOMode.NONE

    @property
    def num_optimization_profiles(self) -> int:
        return max(1, len(self.profiles))

    def get_tensor_dtype(self, name: str) -> DataType:
        return _TYPES[self.tensors[name].type]

    def get_tensor_shape(self, name: str) -> list[int]:
        return [size if isinstance(size, int) else -1 for size in self.tensors[name].shape]

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if name in ON_HOST else TensorLocation.DEVICE

    def get_aliased_input_tensor(self, name: str) -> str | None:
        assert not _old(), "ICudaEngine has no such attribute"
        return self.alias(name)

    def alias(self, name: str) -> str | None:
        return name.replace("present", "past") if ALIASES and name.startswith("present") else None

    def create_execution_context(self, strategy: ExecutionContextAllocationStrategy) -> "IExecutionContext":
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        assert cuda.current() == self.device, "the engine is another device's"
        return IExecutionContext(self)


class Refitter:
    def __init__(self, engine: ICudaEngine, logger: ILogger) -> None:
        self.engine, self.logger = engine, _use(logger)

    def refit_cuda_engine(self) -> bool:
        return self.engine.session is not None


class OnnxParserRefitter:
    def __init__(self, refitter: Refitter, logger: ILogger) -> None:
        self.refitter, self.logger = refitter, _use(logger)

    def refit_from_bytes(self, graph: bytes, path: str) -> bool:
        assert graph == self.refitter.engine.graph, "the plan promises to work with the weights it was built from alone"
        self.refitter.engine.refit(os.path.dirname(path))
        return True


class IExecutionContext:
    def __init__(self, engine: ICudaEngine) -> None:
        global CONTEXTS
        CONTEXTS += 1
        self.engine, self.scratch, self.profile, self.sizes = engine, 0, 0, dict[str, int]()
        self.addresses: dict[str, int] = {}
        self.ran = False  # with these addresses

    def __del__(self) -> None:
        global CONTEXTS
        CONTEXTS -= 1
        if self.scratch not in cuda.LIVE:
            LATE.append("a context")

    def set_device_memory(self, address: int, nbytes: int) -> None:
        assert address % cuda.ALIGNMENT == 0
        assert nbytes >= self.engine.device_memory_size_v2
        assert cuda.allocated(address, nbytes)
        self.scratch = address

    def set_optimization_profile_async(self, index: int, handle: int) -> bool:
        assert cuda.stream_of(handle).device == self.engine.device
        if not 0 <= index < len(self.engine.profiles):
            raise RuntimeError("Error in set optimization profile async.")
        assert not self.sizes, "the shapes of inputs come behind their profile"
        self.profile = index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if not self.sizes:
            assert self.profile not in self.engine.taken, "two contexts use one profile"
            self.engine.taken.add(self.profile)
        if list(shape) != self.engine.profiles[self.profile].get(name):
            return False
        named = zip(self.engine.inputs[name].shape, shape, strict=True)
        self.sizes |= {axis: size for axis, size in named if not isinstance(axis, int)}
        return True

    def get_tensor_shape(self, name: str) -> list[int]:
        return [size if isinstance(size, int) else self.sizes.get(size, -1) for size in self.engine.tensors[name].shape]

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address % cuda.ALIGNMENT == 0, f"'{name}' is not aligned"
        if name not in self.engine.tensors:
            return False
        nbytes = volume(self.get_tensor_shape(name)) * np.dtype(nptype(self.engine.get_tensor_dtype(name))).itemsize
        assert cuda.allocated(address, nbytes), f"'{name}' is not where the device reaches it"
        self.addresses[name], self.ran = address, False
        return True

    def execute_async_v3(self, handle: int) -> bool:
        engine, stream, own = self.engine, cuda.stream_of(handle), self.engine.session
        assert own is not None
        assert stream.device == engine.device, "the stream is another device's"
        assert self.scratch in cuda.LIVE
        assert self.addresses.keys() == engine.tensors.keys(), "a tensor has no address"
        for name in engine.outputs:
            if alias := engine.alias(name):
                assert self.addresses[name] == self.addresses[alias], f"'{name}' is apart from '{alias}'"
        assert self.ran or stream.recording is None, (
            "a context sets itself up in its first run, which must not be recorded"
        )
        binding = own.io_binding()
        for name, address in self.addresses.items():
            bind = binding.bind_input if name in engine.inputs else binding.bind_output
            shape = self.get_tensor_shape(name)
            assert -1 not in shape, f"'{name}' has no shape yet"
            bind(name, "cpu", 0, np.dtype(nptype(engine.get_tensor_dtype(name))), shape, address)
        stream.put(lambda: own.run_with_iobinding(binding))
        if engine.attention in WRONG and (logits := self.addresses.get("logits")):
            stream.put(lambda: ctypes.memset(logits, 0, 4 * volume(self.get_tensor_shape("logits"))))
        self.ran = True
        return True
