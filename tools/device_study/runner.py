"""Runs graphs that have no weights: random ones, on the CPU or a CUDA device, through the runtime's own engines."""

import json
import os
import re
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime as ort

from runtime.backends import backend
from runtime.backends.onnxruntime_cuda import Engine as CudaEngine
from runtime.backends.onnxruntime_engine import Engine, open_session
from runtime.bundle.graphs import TensorSpec
from runtime.engines.devices import Accelerator, Array, Host

Entry = Mapping[str, Any]  # of study.json: a graph
_PERIOD = (1 << 20) + 7  # numbers after which random weights repeat
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_COPIED = 1 << 31  # bytes of the copy that measures the memory's bandwidth
_PROFILED = 5  # runs


class Bound:
    """A graph bound to buffers."""

    def __init__(self, runner: "Runner", entry: Entry, arrays: Mapping[str, Array], call: Callable[[], object]) -> None:
        self._runner, self._entry, self._arrays, self.call = runner, entry, arrays, call

    def put(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets inputs; those that the graph does not have are ignored."""
        for tensor in self._entry["inputs"]:
            if (name := tensor["name"]) in values:
                value = values[name].reshape(tensor["shape"]).astype(tensor["dtype"])
                self._runner.device.write(self._arrays[name], value)

    def fill_caches(self) -> None:
        """Fills the caches with the same random numbers each time."""
        for tensor in self._entry["inputs"]:
            if tensor["name"].startswith("past_") and tensor["name"] != "past_length":
                self._runner.fill(self._arrays[tensor["name"]], tensor["name"])

    def outputs(self, names: list[str] | None = None) -> dict[str, np.ndarray]:
        """Copies of outputs; by default of all but caches."""
        self._runner.wait()
        chosen = names or [t["name"] for t in self._entry["outputs"] if not t["name"].startswith("present_")]
        return {name: np.array(self._runner.device.read(self._arrays[name])) for name in chosen}


class Runner:
    """A device with the weights and buffers of all graphs that ran, by name and shape. bandwidth: bytes per second that
    the device's memory reads or writes in a copy, 0 for the CPU."""

    def __init__(self, study: Path, name: str, scratch: Path) -> None:
        """study: folder of the graphs; name: of the backend; scratch: folder for weights that are constants."""
        self._study, self._name, self._scratch = study, name, scratch
        self._backend: Any = backend(name)
        self.device: Any = Host()
        if name == "cuda":
            from runtime.engines.devices.cuda import Cuda

            self.device = Cuda(0)
        self._arrays: dict[tuple[Any, ...], Array] = {}
        self._written: dict[str, int] = {}  # the offsets of the constants in the file that is there
        self.bandwidth = self._copy() if name == "cuda" else 0.0

    def about(self) -> dict[str, Any]:
        return {**self._backend.versions(), **self._backend.details(), "bandwidth": self.bandwidth}

    def wait(self) -> None:
        self.device.synchronize()

    def _copy(self) -> float:
        address, times = self.device.allocate(2 * _COPIED), list[float]()
        for _ in range(6):
            self.wait()
            started = time.perf_counter()
            self.device.copy(address + _COPIED, address, _COPIED)
            self.wait()
            times.append(time.perf_counter() - started)
        return 2 * _COPIED / min(times)

    # --- weights ------------------------------------------------------------------------------------------------------

    def array(self, name: str, how: Mapping[str, Any]) -> Array:
        """A buffer, shared by all graphs. how: dtype and shape, and the parts of a joined weight."""
        key = name, how["dtype"], tuple(how["shape"])
        if key not in self._arrays:
            self._arrays[key] = self.device.zeros(key[2], how["dtype"])
            if not name.startswith(("past_", "present_")) and "." in name:
                self._fill_weight(self._arrays[key], name, how)
        return self._arrays[key]

    def _fill_weight(self, array: Array, name: str, how: Mapping[str, Any]) -> None:
        """Fills the parts of a joined weight, and of stacked matrices, as if each were a weight of its own."""
        parts, rows = how.get("parts", [name]), how.get("rows", [how["shape"][0]])
        if len(how["shape"]) == 3:
            parts, rows = [f"{name}.{i}" for i in range(how["shape"][0])], [1] * how["shape"][0]
        begin = 0
        for part, count in zip(parts, rows, strict=True):
            self.fill(array if len(parts) == 1 else _rows(array, begin, count), part)
            begin += count

    def fill(self, array: Array, name: str) -> None:
        """Fills a buffer with random numbers that depend on its name only."""
        values = _random(name, tuple(array.shape), np.dtype(array.dtype))
        if isinstance(array, np.ndarray):
            array.reshape(-1)[:] = np.resize(values, array.size)
            return
        done, nbytes = min(values.nbytes, array.nbytes), array.nbytes
        self.device.copy(array.address, values.ctypes.data, done)
        self.wait()  # it read pageable memory
        while done < nbytes:  # what is there already repeats after _PERIOD numbers, and so do its copies
            count = min(done, nbytes - done)
            self.device.copy(array.address + done, array.address, count)
            done += count
        self.wait()

    def _constants(self, entry: Entry) -> None:
        """Writes the file of the weights that are constants of a graph."""
        weights = {name: how for name, how in entry["weights"].items() if "offset" in how}
        places = {name: how["offset"] for name, how in weights.items()}
        if not weights or self._written == places:
            return
        with (self._scratch / "weights.bin").open("wb") as file:
            for name, how in weights.items():
                file.seek(how["offset"])
                size = prod(how["shape"])
                np.resize(_random(name, tuple(how["shape"]), np.dtype(how["dtype"])), size).tofile(file)
        self._written = places

    # --- sessions -----------------------------------------------------------------------------------------------------

    @contextmanager
    def session(self, entry: Entry, profile: str = "") -> Iterator[ort.InferenceSession]:
        """A session, for the block only. profile: the beginning of a file's name; the run is not recorded then."""
        self._constants(entry)
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, 1
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self._scratch))
        if profile:
            options.enable_profiling, options.profile_file_prefix = True, profile
        settings: dict[str, str] = {}
        if self._name == "cuda":
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            options.add_session_config_entry("ep.cuda.fpa_intb_gemm", os.environ.get("ORT_FPA_INTB_GEMM", "1"))
            settings = self._backend._settings(None if profile else self.device.stream)
        yield open_session(self._study / entry["file"], options, _PROVIDERS[self._name], settings)

    def _buffers(self, entry: Entry) -> dict[str, Array]:
        tensors = [*entry["inputs"], *entry["outputs"]]
        shared = {tensor["name"]: self.array(tensor["name"].replace("present_", "past_"), tensor) for tensor in tensors}
        inputs = {name: how for name, how in entry["weights"].items() if "offset" not in how}
        return shared | {name: self.array(name, how) for name, how in inputs.items()}

    def bind(self, entry: Entry, session: ort.InferenceSession) -> Bound:
        arrays = self._buffers(entry)
        outputs = tuple(TensorSpec(t["name"], t["dtype"], tuple(t["shape"])) for t in entry["outputs"])
        engine = CudaEngine(session, outputs, self.device, {}, {}) if self._name == "cuda" else Engine(session)
        return Bound(self, entry, arrays, engine.bind(arrays))

    def profile(self, entry: Entry, inputs: Mapping[str, np.ndarray]) -> list[tuple[str, str, float, float]]:
        """Microseconds per pass by node and kernel, the dearest first: node, kernel (or ``host`` for the time until it
        was launched, or computed on the CPU), microseconds, calls per pass. Layers are added up."""
        with tempfile.TemporaryDirectory() as folder, self.session(entry, f"{folder}/profile") as session:
            arrays, binding = self._buffers(entry), session.io_binding()
            Bound(self, entry, arrays, lambda: None).put(inputs)
            for bind, values in (
                (binding.bind_input, session.get_inputs()),
                (binding.bind_output, session.get_outputs()),
            ):
                for name in [value.name for value in values]:
                    array = arrays[name]
                    address = array.address if isinstance(self.device, Accelerator) else array.ctypes.data
                    bind(name, self._name, 0, np.dtype(array.dtype), array.shape, address)
            self.wait()
            for _ in range(_PROFILED):
                session.run_with_iobinding(binding)
            self.wait()
            events = json.loads(Path(session.end_profiling()).read_text())
        return _table(events)


def _rows(array: Array, begin: int, count: int) -> Array:
    """Rows of an array."""
    if isinstance(array, np.ndarray):
        return array[begin : begin + count]
    part = array[:count]
    part.address = array.address + begin * (array.nbytes // array.shape[0])
    return part


def _random(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Numbers of a weight or cache, at most ``_PERIOD``, after which they repeat; rotary tables are true ones."""
    if name.startswith("rotary."):
        positions, half = shape
        angles = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(half) / half)
        return (np.cos if name.endswith("cos") else np.sin)(angles).astype(dtype).reshape(-1)
    count, draw = min(prod(shape), _PERIOD), np.random.default_rng(zlib.crc32(name.encode()))
    if dtype.kind in "iu":
        return draw.integers(0, 256, count).astype(dtype)
    numbers = draw.standard_normal(count, np.float32)
    if "norm" in name:
        numbers = 1 + 0.1 * numbers
    elif name.endswith("scale"):  # of codes of 4 bits in rows of as many blocks
        numbers = 0.02 * (1 + 0.1 * numbers) / np.sqrt(shape[-1])
    elif name.endswith("bias") or ".bias." in name:
        numbers *= 0.1
    elif not name.startswith(("past_", "embed")):
        numbers *= (8 if name.startswith("lm_head") else 1.2) / np.sqrt(shape[-1])
    return numbers.astype(dtype)


def _label(node: str) -> str:
    """A node's name without its layer's number and counters."""
    return re.sub(r"\.\d+(?=\.|$)", "", node.removesuffix("_kernel_time"))


def _table(events: list[dict[str, Any]]) -> list[tuple[str, str, float, float]]:
    found: defaultdict[tuple[str, str], defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        own = event.get("args", {})
        if event.get("cat") == "Kernel":
            node = str(own.get("parent_name") or own.get("op_name") or "")
            kernel = re.sub(r"<.*|\(.*", "", str(event["name"]))[-60:]
            found[_label(node), kernel][node].append(event["dur"])
        elif event.get("cat") == "Node" and str(event["name"]).endswith("_kernel_time"):
            found[_label(str(event["name"])), "host"][str(event["name"])].append(event["dur"])
    rows = []
    for (node, kernel), durations in found.items():
        calls = {name: len(each) / _PROFILED for name, each in durations.items()}
        spent = sum(median(each) * calls[name] for name, each in durations.items())
        rows.append((node, kernel, round(spent, 1), sum(calls.values())))
    return sorted(rows, key=lambda row: (row[1] == "host", -row[2]))[:80]
