"""``tensorrt_rtx_bindings``: what is otherwise than in the stand-in for TensorRT, whose settings hold here too.

Plans are for one compute capability, have no refit, and take weights as inputs. Contexts are made with a configuration
that has a cache of kernels, and tell whether their runs can be recorded. ``COMPILED`` counts the kernels that no cache
had.
"""

import json
from typing import Any, ClassVar

from tests.stand_ins import tensorrt as base
from tests.stand_ins.tensorrt import *  # noqa: F403
from tests.stand_ins.tensorrt import cuda

__version__ = "1.7.1.116"
CAPTURABLE = True  # whether runs can be recorded
COMPILED: list[str] = []


class BuilderFlag(base._Enum):
    TF32 = 5
    REQUIRE_USER_ALLOCATION = 24


class ComputeCapability(base._Enum):
    SM75, SM80, SM86, SM89, SM120, SM121 = range(6)


class DynamicShapesKernelSpecializationStrategy(base._Enum):
    LAZY, EAGER, NONE = range(3)


class IBuilderConfig(base.IBuilderConfig):
    num_compute_capabilities = 0

    def __init__(self, builder: "Builder") -> None:
        super().__init__(builder)
        self.flags, self.capability = {BuilderFlag.TF32}, ""

    def set_compute_capability(self, capability: ComputeCapability, index: int) -> bool:
        assert (self.num_compute_capabilities, index) == (1, 0)
        self.capability = capability.name
        return True


class Builder(base.Builder):
    FLAGS: ClassVar[set[Any]] = {BuilderFlag.REQUIRE_USER_ALLOCATION}

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig(self)

    def about(self, network: base.INetworkDefinition, config: Any) -> dict[str, Any]:
        assert config.capability, "the plan would be for a GPU of this machine"
        return {"capability": config.capability, "folder": network.folder}


class Runtime(base.Runtime):
    def engine(self, graph: bytes, about: dict[str, Any]) -> "ICudaEngine | None":
        major, minor = cuda.Properties.major, cuda.Properties.minor
        if about["capability"] != f"SM{major}{minor}":
            self.logger.log(base.Severity.ERROR, "the plan is for another compute capability")
            return None
        engine = ICudaEngine(graph, about["profiles"])
        engine.refit(about["folder"])
        return engine


class IRuntimeCache:
    def __init__(self) -> None:
        self.kernels: list[str] = []

    def serialize(self) -> bytes:
        return json.dumps(self.kernels).encode()

    def deserialize(self, blob: bytes) -> bool:
        try:
            self.kernels = json.loads(blob)
        except ValueError:
            return False
        return True


class IRuntimeConfig:
    strategy: Any = None
    cache: IRuntimeCache | None = None
    dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache()

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        self.cache = cache
        return True


class ICudaEngine(base.ICudaEngine):
    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, config: IRuntimeConfig) -> "IExecutionContext":  # type: ignore[override]
        assert config.strategy is base.ExecutionContextAllocationStrategy.USER_MANAGED
        kernels = config.dynamic_shapes_kernel_specialization_strategy
        assert kernels is DynamicShapesKernelSpecializationStrategy.EAGER, "they would change between two passes"
        assert cuda.current() == self.device, "the engine is another device's"
        assert config.cache
        kernel = f"{self.attention} {len(self.graph)}"
        if kernel not in config.cache.kernels:
            COMPILED.append(kernel)
            config.cache.kernels.append(kernel)
        return IExecutionContext(self)


class IExecutionContext(base.IExecutionContext):
    def is_stream_capturable(self, handle: int) -> bool:
        assert cuda.stream_of(handle).device == self.engine.device
        assert self.ran, "kernels are set up in the first run"
        return CAPTURABLE
