"""Runs plans of TensorRT and of TensorRT for RTX."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..bundle.graphs import Graph
from ..engines.devices import Array, Call, DeviceArray, Staging
from ..errors import GumihoError, MisuseError, UnavailableError
from .tensorrt_library import Library

if TYPE_CHECKING:
    import tensorrt

_ALIGNMENT = 256  # bytes; of every address passed to a context


class Engine:
    """A plan for one size of its inputs; see ``backends.Engine``."""

    def __init__(
        self,
        library: Library,
        context: "tensorrt.IExecutionContext",
        graph: Graph,
        device: Any,
        scratch: DeviceArray,
        profile: int,
        weights: Mapping[str, int],
        asks: bool,
    ) -> None:
        """context: a new one, that lacks its memory. profile: of the graph's size. weights: addresses of those that the
        plan takes as inputs. asks: whether the context is to be asked if its runs can be recorded; else they can.
        Raises UnavailableError if the plan's shapes are not the graph's."""
        engine = context.engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        inputs = {name for name in names if engine.get_tensor_mode(name) == library.trt.TensorIOMode.INPUT}
        self._inputs, self._outputs = inputs - weights.keys(), set(names) - inputs
        # Versions that cannot update caches in place lack this function.
        self._aliases = {
            name: None if graph.appends else engine.get_aliased_input_tensor(name) for name in self._outputs
        }
        self._library, self._device, self._asks = library, device, asks
        context.set_device_memory(scratch.address, scratch.nbytes)
        if profile:  # on the stream of every run, which therefore waits for it
            context.set_optimization_profile_async(profile, device.stream)
        for tensor in graph.inputs:
            if tensor.name in self._inputs and -1 in tuple(engine.get_tensor_shape(tensor.name)):
                context.set_input_shape(tensor.name, tuple(map(int, tensor.shape)))
        for tensor in (*graph.inputs, *graph.outputs):
            if tensor.name in names and (shape := tuple(context.get_tensor_shape(tensor.name))) != tensor.shape:
                raise other(library, tensor.name, list(shape), list(tensor.shape))
        self._sizes = {name: library.trt.volume(context.get_tensor_shape(name)) for name in self._outputs}
        self._context: tensorrt.IExecutionContext | None = context
        self._current: object = None  # the bound call whose addresses the context has
        for name in inputs & weights.keys():
            self._place(name, weights[name])

    def _place(self, name: str, address: int) -> None:
        assert self._context
        if not self._context.set_tensor_address(name, address):
            raise GumihoError(
                f"{self._library.label} refuses the address of '{name}' ({self._library.error}): try another version"
            )

    def bind(self, buffers: Mapping[str, Array]) -> Call:
        if self._context is None:
            raise MisuseError("the model is closed: load the bundle again")
        context, this_call = self._context, object()

        def launch(arrays: Mapping[str, DeviceArray]) -> None:
            if self._current is not this_call:
                for name, array in {**arrays, **dropped}.items():
                    self._place(name, array.address)
                self._current = this_call
            if not context.execute_async_v3(self._device.stream):
                raise GumihoError(
                    f"{self._library.label} failed to run an engine ({self._library.error}): free memory or try "
                    "another version"
                )

        def capturable() -> bool:
            return not self._asks or context.is_stream_capturable(self._device.stream)

        call = Staging(self._device, buffers, self._inputs, self._outputs, launch, capturable)
        dropped = {}
        for name in self._outputs - call.buffers.keys():
            alias = self._aliases[name]
            dropped[name] = call.buffers[alias] if alias else self._device.zeros((self._sizes[name],), np.int64)
        if unaligned := next((name for name, array in call.buffers.items() if array.address % _ALIGNMENT), None):
            raise GumihoError(
                f"{self._library.label} needs buffers at multiples of {_ALIGNMENT} bytes, and '{unaligned}' is not at "
                "one: export the bundle again with another --capacity"
            )
        return call

    def close(self) -> None:
        self._context = None


def other(library: Library, name: str, actual: object, expected: object) -> UnavailableError:
    """The error for a tensor that a plan takes otherwise than the bundle says."""
    return UnavailableError(
        f"{library.label} takes '{name}' as {actual}, but in the bundle it is {expected}: try another version"
    )
