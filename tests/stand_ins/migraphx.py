"""``migraphx`` with its gpu target over ONNX Runtime's CPU provider, and the device under it, whose stream is late.

It holds its caller to MIGraphX's rules: a program is compiled before it is saved, without copies of its own and without
fast math; a call has every parameter, the outputs' among them by the names MIGraphX gives them (``main:#output_0``, …,
from ten on as ``TENTH`` says, which differs between releases), each in memory of the device; its stream is alive, of
the type that is named, and the calling thread has entered its device. Outputs in ``LOOSE`` have no parameter and stay
in memory of the program's own. Ports in ``STRANGE`` are laid out in another way than the graph's. ``ODD`` gives
parameters that no graph has, by the name of the output they are like. ``ARRIVING`` is the share of weights that finds
room on the device; the rest goes to the host's memory in silence.

Programs are compiled in a child process, where the environment says what happens: ``STAND_IN_FATE`` is ``killed``,
``exits``, or ``waits`` with a process of its own; ``STAND_IN_LOG`` is told, a line a compilation, of the environment
and of the solutions found.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from threading import get_ident
from zlib import crc32

import numpy as np
import onnx

from tests.accelerator import Lazy
from tests.stand_ins.sessions import session

__version__ = "2.16.0"

LOOSE: set[str] = set()
ARRIVING = 1.0
ARCHITECTURE = "gfx1151"
HELD = 0  # bytes of weights on the device
TENTH = "main:#output_:{:05}"
ODD: dict[str, str] = {}
STRANGE: dict[str, str] = {}  # by name: "strided" or "half" as large
DEVICES: dict[int, "Hip"] = {}  # open, by stream
_NAMES = {
    "float32": "float_type",
    "float16": "half_type",
    "int64": "int64_type",
    "bool": "bool_type",
    "int8": "int8_type",
    "uint8": "uint8_type",
}
_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
}


class Hip(Lazy):
    """In place of ``runtime.engines.devices.hip.Hip``."""

    streams = 7

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.architecture = index, ARCHITECTURE
        self.name = f"Stand-in GPU ({ARCHITECTURE})"
        Hip.streams += 1
        self.stream = Hip.streams
        DEVICES[self.stream] = self

    def close(self) -> None:
        if self.stream:
            self.synchronize()
            del DEVICES[self.stream]
            super().close()
            self.stream = 0

    def memory(self) -> tuple[int, int]:
        free, total = super().memory()
        return free - HELD, total

    def has(self, address: int, nbytes: int) -> bool:
        return any(
            block.ctypes.data <= address and address + nbytes <= block.ctypes.data + block.nbytes
            for block in self.blocks
        )


class shape:
    def __init__(self, name: str, dtype: str, lengths: list[int]) -> None:
        self.name, self.dtype, self.sizes = name, np.dtype(_TYPES[dtype]), lengths

    def bytes(self) -> int:
        return int(np.prod(self.sizes)) * self.dtype.itemsize // (2 if STRANGE.get(self.name) == "half" else 1)

    def lens(self) -> list[int]:
        return self.sizes

    def type_string(self) -> str:
        return _NAMES[self.dtype.name]

    def standard(self) -> bool:
        return STRANGE.get(self.name) != "strided"


class argument:
    def __init__(self, shape: shape, address: int) -> None:
        self.shape, self.address = shape, address

    def data_ptr(self) -> int:
        return self.address

    def get_shape(self) -> shape:
        return self.shape


def argument_from_pointer(shape: shape, address: int) -> argument:
    return argument(shape, address)


def get_target(name: str) -> str:
    assert name == "gpu"
    return name


class program:
    def __init__(self, graph: bytes, folder: str) -> None:
        self.graph, self.folder, self.compiled = graph, folder, False

    def compile(
        self, target: str, offload_copy: bool = True, fast_math: bool = True, exhaustive_tune: bool = False
    ) -> None:
        assert target == "gpu"
        assert not offload_copy, "every call would copy its buffers"
        assert not fast_math
        _meet_fate()
        _solve(self.graph, exhaustive_tune)
        self.compiled = True

    def ready(self) -> "program":
        self.session = session(self.graph, self.folder)
        self.inputs = {v.name: shape(v.name, v.type, v.shape) for v in self.session.get_inputs()}
        self.outputs = {v.name: shape(v.name, v.type, v.shape) for v in self.session.get_outputs()}
        self.own = {name: np.zeros(s.sizes, s.dtype) for name, s in self.outputs.items() if name in LOOSE}
        return self

    def bound(self) -> dict[str, str]:
        """Outputs by their parameter."""
        names = [f"main:#output_{i}" if i < 10 else TENTH.format(i) for i in range(len(self.outputs))]
        return {parameter: name for parameter, name in zip(names, self.outputs, strict=True) if name not in self.own}

    def get_parameter_shapes(self) -> dict[str, shape]:
        odd = {parameter: self.outputs[name] for parameter, name in ODD.items() if name in self.outputs}
        return self.inputs | {parameter: self.outputs[name] for parameter, name in self.bound().items()} | odd

    def get_output_shapes(self) -> list[shape]:
        return list(self.outputs.values())

    def run_async(self, parameters: dict[str, argument], stream: int, kind: str) -> list[argument]:
        assert kind == "ihipStream_t"
        device = DEVICES.get(stream)
        assert device is not None, "the stream is dead"
        assert device.thread == get_ident(), "the thread has not entered the device"
        shapes, binding = self.get_parameter_shapes(), self.session.io_binding()
        assert parameters.keys() == shapes.keys(), "a parameter is missing, or there is none of that name"
        for name, given in parameters.items():
            assert device.has(given.address, shapes[name].bytes()), f"'{name}' is not where the device reaches it"
        places = {name: given.address for name, given in parameters.items() if name in self.inputs}
        places |= {name: parameters[parameter].address for parameter, name in self.bound().items()}
        places |= {name: own.ctypes.data for name, own in self.own.items()}
        for name, s in self.inputs.items():
            binding.bind_input(name, "cpu", 0, s.dtype, s.sizes, places[name])
        for name, s in self.outputs.items():
            binding.bind_output(name, "cpu", 0, s.dtype, s.sizes, places[name])
        device.queue.append(lambda: self.session.run_with_iobinding(binding))
        return [argument(s, places[name]) for name, s in self.outputs.items()]


def parse_onnx_buffer(graph: bytes, external_data_path: str = "") -> program:
    try:
        onnx.load_model_from_string(graph)
    except Exception as error:
        raise RuntimeError(f"no graph: {error}") from None
    return program(graph, external_data_path)


def save(compiled: program, path: str) -> None:
    assert compiled.compiled
    Path(path).write_bytes(compiled.folder.encode() + b"\0" + compiled.graph)


def load(path: str) -> program:
    folder, _, graph = Path(path).read_bytes().partition(b"\0")
    global HELD
    HELD += int(ARRIVING * _weights(graph))
    return program(graph, folder.decode()).ready()


def _weights(graph: bytes) -> int:
    """Bytes that a graph takes of the weight files."""
    places = set()
    for tensor in onnx.load_model_from_string(graph).graph.initializer:
        fields = {entry.key: entry.value for entry in tensor.external_data}
        if fields:
            places.add((fields["location"], fields["offset"], int(fields["length"])))
    return sum(length for *_, length in places)


def _meet_fate() -> None:
    fate = os.environ.get("STAND_IN_FATE", "")
    if fate == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "exits":
        os._exit(3)
    if fate == "waits":
        compiler = subprocess.Popen(["sleep", "600"])
        Path(tempfile.gettempdir(), "dump.mxr").touch()
        Path(os.environ["STAND_IN_LOG"]).write_text(f"{os.getpid()} {compiler.pid}\n")
        time.sleep(600)


def _solve(graph: bytes, tune: bool) -> None:
    """Looks up how a graph is best computed, and adds it where it is not known."""
    print("Problem cache not found.")  # as MIGraphX does, on standard output
    known = {}
    if problems := os.environ.get("MIGRAPHX_PROBLEM_CACHE"):
        if os.path.exists(problems):
            known = json.loads(Path(problems).read_text())
        Path(problems).write_text(json.dumps(known | {str(crc32(graph)): tune}))
    if log := os.environ.get("STAND_IN_LOG"):
        names = ("MIGRAPHX_PROBLEM_CACHE", "MIGRAPHX_MLIR_USE_SPECIFIC_OPS", "TMPDIR")
        with open(log, "a") as file:
            file.write(json.dumps([len(known), *(os.environ.get(name) for name in names)]) + "\n")
