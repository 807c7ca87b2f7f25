"""Passes of the target over rows of several streams at once, with ONNX Runtime on the CPU
(``graphs.shared_target``)."""

import weakref
from collections.abc import Mapping, Sequence
from time import perf_counter

import numpy as np

from ..bundle.graphs import BLOCK, Graph
from ..engines.devices import Array, require_buffers
from ..errors import GumihoError, MisuseError
from .onnxruntime_engine import Call, Engine, failed_run, ort

_SAME = 16  # a pass of one row takes about as long as so many more rows of it
_MOST_BINDINGS = 32
_CLOSED = "the model is closed: load the bundle again"
_OUTPUTS = "choice", "logits", "hidden"


class Pass:
    """One stream's pass: its rows and its buffers, named as in the graph ``target``. Calling it runs it alone.

    alone: runs it in the engine of the graph ``target``, None if that is not loaded. done: whether the buffers hold its
    results. ns: nanoseconds of the pass that count as this stream's. failure: why there are none.
    """

    __slots__ = "_lanes", "alone", "buffers", "done", "failure", "key", "ns", "rows"

    def __init__(self, lanes: "Lanes", buffers: Mapping[str, Array], alone: Call | None) -> None:
        self._lanes, self.buffers, self.rows, self.alone = lanes, buffers, len(buffers["tokens"]), alone
        self.key = buffers["past_key.0"]  # a cache has other buffers whenever it is laid out anew
        self.done, self.ns = False, 0.0
        self.failure: Exception | None = None

    def __call__(self) -> float:
        self._lanes.run([self])
        return self.result()

    def result(self) -> float:
        """The nanoseconds. Raises GumihoError if the pass failed."""
        if self.failure:
            raise self.failure
        return self.ns


class Lanes:
    """The engine of the graph ``shared``. Implements ``backends.Engine``, with the buffers of the graph ``target``.

    count: streams that a pass may have. at_once: passes that may run at once.
    """

    def __init__(
        self, session: ort.InferenceSession, shared: Graph, target: Graph, alone: Engine | None, at_once: int = 1
    ) -> None:
        """alone: the engine of ``target``, if passes of a single stream are to use it."""
        self._alone = alone
        self._session: ort.InferenceSession | None = session
        self.count, self.at_once = shared.lanes, at_once
        self._inputs = [tensor.name for tensor in target.inputs]
        caches = [tensor.name for tensor in target.caches]
        self._caches = [
            (
                name,
                [
                    (kind := name.replace(".", f".{lane}."), kind.replace("past", "present"))
                    for lane in range(self.count)
                ],
            )
            for name in caches
        ]
        key = target.caches[0]
        _, kv_heads, positions, head_dim = key.shape
        unused = np.zeros((int(kv_heads), BLOCK if target.open_caches else int(positions), int(head_dim)), key.dtype)
        # Every cache of lanes without rows.
        self._unused = {
            cache.name: unused.reshape(1, int(cache.shape[1]), -1, int(cache.shape[3])) for cache in target.caches
        }
        self._no_rows, self._none = np.zeros((0, 0), np.bool_), np.zeros(1, np.int64)
        self._bindings: dict[tuple[int, ...], tuple[list[weakref.ref[Array]], ort.IOBinding]] = {}

    def bind(self, buffers: Mapping[str, Array]) -> Pass:
        """See ``backends.Engine``."""
        if self._session is None:
            raise MisuseError(_CLOSED)
        require_buffers(set(self._inputs), buffers)
        return Pass(self, buffers, self._alone.bind(buffers) if self._alone else None)

    def run(self, passes: Sequence[Pass], beside: bool = False) -> None:
        """Runs the passes of up to ``count`` streams as one. Whether each is done, and what it took, is in the passes.
        beside: others may run at once."""
        if self._session is None:
            raise MisuseError(_CLOSED)
        failure: GumihoError | None = None
        started = perf_counter()
        try:
            if passes[0].alone and len(passes) == 1 and not (beside and self.at_once > 1):
                passes[0].alone()
            else:
                self._run(self._session, sorted(passes, key=lambda one: one.key.ctypes.data))
        except Exception as error:  # ONNX Runtime's exceptions share no public base class
            failure = error if isinstance(error, GumihoError) else failed_run(error)
        seconds, weight = perf_counter() - started, sum(_SAME + one.rows for one in passes)
        for one in passes:
            one.done, one.failure, one.ns = True, failure, seconds * 1e9 * (_SAME + one.rows) / weight

    def _run(self, session: ort.InferenceSession, passes: Sequence[Pass]) -> None:
        """passes: in an order that does not depend on which came first, so that there are few bindings."""
        binding, counts = self._binding(session, passes), [one.rows for one in passes]
        own = [one.buffers for one in passes]
        begins = np.cumsum([0, *counts])
        wanted = np.concatenate([buffers["wanted"] + begin for buffers, begin in zip(own, begins, strict=False)])
        inputs = {
            "tokens": np.concatenate([buffers["tokens"] for buffers in own]),
            "depth": np.concatenate([buffers["depth"] for buffers in own]),
            "counts": np.array(counts + [0] * (self.count - len(counts))),
            "wanted": wanted,
        }
        outputs: dict[str, Array] = {}
        for name in _OUTPUTS:
            first = own[0][name]
            rows = len(wanted) if name != "hidden" else sum(counts)
            outputs[name] = first if len(own) == 1 else np.empty((rows, *first.shape[1:]), first.dtype)
        for lane, buffers in enumerate(own):
            inputs |= {f"mask.{lane}": buffers["mask"], f"past_length.{lane}": buffers["past_length"]}
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        session.run_with_iobinding(binding)
        if len(own) > 1:
            chosen = np.cumsum([0, *(len(buffers["wanted"]) for buffers in own)])
            for name, array in outputs.items():
                at = begins if name == "hidden" else chosen
                for lane, buffers in enumerate(own):
                    buffers[name][:] = array[at[lane] : at[lane + 1]]

    def _binding(self, session: ort.InferenceSession, passes: Sequence[Pass]) -> ort.IOBinding:
        """A binding to the caches of the passes' streams. Binding hundreds of caches takes longer than the rest, so it
        is kept as long as they are where they are."""
        key = tuple(id(one.key) for one in passes)
        known = self._bindings.get(key)
        if known and all(ref() is one.key for ref, one in zip(known[0], passes, strict=True)):
            return known[1]
        if len(self._bindings) >= _MOST_BINDINGS:
            self._bindings.clear()
        binding = session.io_binding()
        for lane in range(self.count):
            for name, lanes in self._caches:
                array = passes[lane].buffers[name] if lane < len(passes) else self._unused[name]
                past, present = lanes[lane]
                binding.bind_input(past, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
                binding.bind_output(present, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            if lane >= len(passes):
                mask, length = self._no_rows, self._none
                binding.bind_input(f"mask.{lane}", "cpu", 0, mask.dtype, mask.shape, mask.ctypes.data)
                binding.bind_input(f"past_length.{lane}", "cpu", 0, length.dtype, length.shape, length.ctypes.data)
        self._bindings[key] = [weakref.ref(one.key) for one in passes], binding
        return binding

    def close(self) -> None:
        self._session = self._alone = None
        self._bindings.clear()
