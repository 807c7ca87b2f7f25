"""Engines as one of several streams sees them: each run waits in the loop's queue."""

from collections.abc import Mapping
from time import perf_counter_ns
from typing import TYPE_CHECKING

from ..backends import Engine
from .devices import Array, Call
from .loop import EngineLoop

if TYPE_CHECKING:  # not every installation has ONNX Runtime
    from ..backends.onnxruntime_lanes import Lanes


class QueuedTarget:
    """The target, whose passes can take the rows of several streams. Implements ``backends.Engine``, with the buffers
    of the graph ``target``."""

    def __init__(self, lanes: "Lanes", loop: EngineLoop, stream: int) -> None:
        self._lanes, self._loop, self._stream = lanes, loop, stream

    def bind(self, buffers: Mapping[str, Array]) -> Call:
        """See ``backends.Engine``. The call returns the nanoseconds that count as this stream's: its share of the
        pass."""
        own, run, stream = self._lanes.bind(buffers), self._loop.run, self._stream

        def call() -> float:
            run(stream, lambda _: own(), own)
            return own.result()

        return call

    def close(self) -> None:
        self._lanes.close()


class QueuedEngine:
    """Any other graph. Implements ``backends.Engine``."""

    def __init__(self, engine: Engine, loop: EngineLoop, stream: int) -> None:
        self._engine, self._loop, self._stream = engine, loop, stream

    def bind(self, buffers: Mapping[str, Array]) -> Call:
        """See ``backends.Engine``. The call returns its nanoseconds without those that it waited."""
        own, run, stream = self._engine.bind(buffers), self._loop.run, self._stream
        beside = getattr(own, "beside", None) or own

        def timed(contended: bool) -> float:
            started = perf_counter_ns()
            (beside if contended else own)()
            return perf_counter_ns() - started

        return lambda: run(stream, timed)

    def close(self) -> None:
        self._engine.close()
