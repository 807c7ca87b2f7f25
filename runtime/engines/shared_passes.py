"""The engines of a stream that shares the target's passes with others."""

from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING

from ..backends import Engine
from .devices import Array, Call
from .teams import Teams
from .turns import Place

if TYPE_CHECKING:  # not every installation has ONNX Runtime
    from ..backends.onnxruntime_lanes import Lanes, Pass

_PATIENCE = 0.005  # seconds; longer than a cycle takes outside its passes
_MANY = 32  # rows
_SHARE = 0.25  # of the last pass, if that is less: waiting must cost less than it can save


class SharedTarget:
    """The target as one of several streams over the same engine sees it: a pass takes the rows of all streams that wait for one. Implements
    ``backends.Engine``, with the buffers of the graph ``target``."""

    def __init__(self, lanes: "Lanes", teams: Teams, stream: int) -> None:
        self._lanes, self._teams, self._stream = lanes, teams, stream

    def bind(self, buffers: Mapping[str, Array]) -> Call:
        """See ``backends.Engine``. The call returns the nanoseconds that count as this stream's: its share of the pass."""
        own = self._lanes.bind(buffers)

        def call() -> float:
            own.done = False
            while not own.done:
                self._run(own)
            return own.result()

        return call

    def _run(self, own: "Pass") -> None:
        """Runs the pass, or has another stream's thread run it. If that one is interrupted, the pass is not done."""
        turns, lanes = self._teams.turns(self._stream), self._lanes
        if turns.mine:
            lanes.run([own])
        elif turns.take(self._stream, own):
            claimed: Sequence[Place] | None = None
            try:
                patience = min(_PATIENCE, _SHARE * lanes.seconds)
                claimed = turns.claim(lanes.count - 1, patience, lambda others: _fit([own, *others]))
                if claimed is not None:
                    lanes.run([own, *(place.wanted for place in claimed)], self._teams.shared(self._stream))
            finally:
                if claimed is not None:
                    turns.did(self._stream, claimed)
                turns.give()

    def close(self) -> None:
        self._lanes.close()


def _fit(passes: "Sequence[Pass]") -> bool:
    """Whether passes may be one: not several over many rows, which would gain little, and delay all the others for longer."""
    return sum(one.rows > _MANY for one in passes) <= 1


class InTurn:
    """An engine that the streams of a team use one after the other. Implements ``backends.Engine``."""

    def __init__(self, engine: Engine, teams: Teams, stream: int) -> None:
        self._engine, self._teams, self._stream = engine, teams, stream

    def bind(self, buffers: Mapping[str, Array]) -> Call:
        """See ``backends.Engine``. The call returns its nanoseconds without those that it waited."""
        own = self._engine.bind(buffers)
        beside = getattr(own, "beside", None) or own

        def timed() -> float:
            started = perf_counter_ns()
            (beside if self._teams.shared(self._stream) else own)()
            return perf_counter_ns() - started

        def call() -> float:
            turns = self._teams.turns(self._stream)
            if turns.mine:
                return timed()
            with turns.of(self._stream):
                took = timed()
                turns.expect(self._stream)
                return took

        return call

    def close(self) -> None:
        self._engine.close()
