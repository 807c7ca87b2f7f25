"""``onnxruntime`` with a CUDA provider: sessions compute on the processor, in the memory and on the streams of
``cuda_runtime``.

It holds its caller to the provider's rules: a session gets a device and a live stream of it; inputs and outputs are all
bound, to memory of that device, since a recorded run may not allocate any; a run has the number of a recording, and
runs of one number have the same binding; the first of them in a thread computes three times; nothing is computed before
the stream is waited for. ``RUNS`` counts the target's runs by their rows, ``RECORDED`` recordings by their number,
``ELSEWHERE`` are nodes that the provider leaves to another one.
"""

import os
import threading
from collections import Counter
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as real
from cuda.bindings import runtime as cuda

RUNS: Counter[int] = Counter()
RECORDED: Counter[str] = Counter()
ELSEWHERE: list[str] = []
ENTRIES: list[dict[str, str]] = []  # of every session
_NAME = "CUDAExecutionProvider"
_ITS_OWN = ("session.disable_cpu_ep_fallback", "session.record_ep_graph_assignment_info", "ep.cuda.fpa_intb_gemm")


def __getattr__(name: str) -> Any:
    return getattr(real, name)


def get_available_providers() -> list[str]:
    return [_NAME, "CPUExecutionProvider"]


def preload_dlls() -> None:
    pass


def set_default_logger_severity(severity: int) -> None:
    pass


class SessionOptions:
    def __init__(self) -> None:
        object.__setattr__(self, "real", real.SessionOptions())
        object.__setattr__(self, "entries", {})

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.real, name, value)

    def add_session_config_entry(self, name: str, value: str) -> None:
        self.entries[name] = value
        if name not in _ITS_OWN:
            self.real.add_session_config_entry(name, value)


class Binding:
    def __init__(self, session: real.InferenceSession) -> None:
        self.real, self.bound, self.rows = session.io_binding(), set[str](), 0

    def bind_input(self, *tensor: Any) -> None:
        self.real.bind_input(*self._of_device(*tensor))
        if tensor[0] == "mask":
            self.rows = tensor[4][0]

    def bind_output(self, *tensor: Any) -> None:
        self.real.bind_output(*self._of_device(*tensor))

    def _of_device(
        self, name: str, kind: str, index: int, dtype: Any, shape: tuple[int, ...], address: int
    ) -> tuple[Any, ...]:
        assert (kind, index) == ("cuda", cuda.current())
        assert cuda.allocated(address, prod(shape) * np.dtype(dtype).itemsize), f"{name} is not in the device's memory"
        assert name not in self.bound
        self.bound.add(name)
        return name, "cpu", 0, dtype, shape, address


class InferenceSession:
    def __init__(
        self, graph: bytes, options: SessionOptions, providers: list[tuple[str, dict[str, str]]], enable_fallback: int
    ) -> None:
        ((name, settings),) = providers
        assert (name, enable_fallback) == (_NAME, 0)
        assert settings["use_tf32"] == "0"
        assert os.environ["ORT_DISABLE_MEMORY_EFFICIENT_ATTENTION"] == "1"
        assert options.entries["session.disable_cpu_ep_fallback"] == "1"
        ENTRIES.append(options.entries)
        self._stream = int(settings.get("user_compute_stream", 0))
        assert not self._stream or settings["enable_cuda_graph"] == "1"
        assert not self._stream or cuda.STREAMS[self._stream].device == int(settings["device_id"])
        self._real = real.InferenceSession(graph, options.real, providers=["CPUExecutionProvider"])
        self._names = {value.name for value in (*self._real.get_inputs(), *self._real.get_outputs())}
        self._bindings: dict[str, Binding] = {}
        self._recorded = threading.local()  # its attributes are the numbers

    def get_inputs(self) -> Any:
        return self._real.get_inputs()

    def get_outputs(self) -> Any:
        return self._real.get_outputs()

    def get_providers(self) -> list[str]:
        return [_NAME]

    def get_provider_graph_assignment_info(self) -> list[SimpleNamespace]:
        parts = {_NAME: ["MatMul"], "CPUExecutionProvider": ELSEWHERE}
        return [
            SimpleNamespace(ep_name=name, get_nodes=lambda types=types: [SimpleNamespace(op_type=op) for op in types])
            for name, types in parts.items()
        ]

    def io_binding(self) -> Binding:
        return Binding(self._real)

    def run_with_iobinding(self, binding: Binding, options: real.RunOptions) -> None:
        assert self._stream, "a session that records nothing"
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        assert binding.bound == self._names, "a recorded run would allocate memory"
        number = options.get_run_config_entry("gpu_graph_id")
        times = 1 if hasattr(self._recorded, number) else 3
        setattr(self._recorded, number, True)
        RECORDED[number] += times == 3
        assert self._bindings.setdefault(number, binding) is binding, "two bindings under one number"
        if binding.rows:
            RUNS[binding.rows] += 1

        def run() -> None:
            for _ in range(times):
                self._real.run_with_iobinding(binding.real)

        cuda.stream_of(self._stream).put(run)
