"""``cuda.bindings.runtime`` over host memory: two devices, and streams that do nothing until they are waited for.

It holds its caller to CUDA's rules: a stream is alive, and takes work, launches and recordings from a thread on its own
device alone; nothing is allocated, freed or waited for while a stream is recorded; recordings are thread local, so that
another thread's allocations cannot break them; device memory that is filled, or copied in runs, has been allocated;
what is freed is freed once and with its device's streams idle, which is stricter than CUDA. Memory comes filled with a
pattern, at multiples of 256 bytes as CUDA promises. ``LIVE``, ``PINNED``, ``STREAMS`` and ``GRAPHS`` are what has not
been freed, ``CALLS`` counts.
"""

import ctypes
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from threading import local

import numpy as np

Work = Callable[[], object]


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidDevice = 101


class cudaMemcpyKind(IntEnum):
    cudaMemcpyDefault = 4


class cudaStreamCaptureMode(IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1


class cudaDeviceAttr(IntEnum):
    cudaDevAttrIntegrated = 18


class Handle:
    """Handles are objects that become addresses, as those of the bindings."""

    numbers = count(0x1000)

    def __init__(self) -> None:
        self.number = next(self.numbers)

    def __int__(self) -> int:
        return self.number


@dataclass
class Stream:
    device: int
    queue: list[Work] = field(default_factory=list)
    recording: list[Work] | None = None

    def put(self, work: Work) -> None:
        (self.queue if self.recording is None else self.recording).append(work)


class Properties:
    name = b"Stand-in GPU" + b"\0" * 244
    major, minor = 9, 0


OK = cudaError_t.cudaSuccess
cudaStreamNonBlocking = 1
ALIGNMENT = 256
DEVICES = 2
FREE = 1 << 34  # bytes
UNIFIED = False
LIVE: dict[int, tuple[int, int, np.ndarray]] = {}  # by address: its bytes, its device
PINNED: dict[int, tuple[int, int, np.ndarray]] = {}
STREAMS: dict[int, Stream] = {}
GRAPHS: dict[int, list[Work]] = {}
CALLS: Counter[str] = Counter()
_THREAD = local()


def current() -> int:
    """The calling thread's device."""
    return getattr(_THREAD, "device", 0)


def stream_of(handle: object) -> Stream:
    """A stream that takes work from the calling thread."""
    stream = STREAMS.get(int(handle))  # type: ignore[call-overload]
    assert stream is not None, "the stream is dead"
    assert stream.device == current(), f"a stream of device {stream.device}, and the thread is on {current()}"
    return stream


def allocated(address: int, nbytes: int) -> bool:
    """Whether it is memory of the current device."""
    return any(
        start <= address and address + nbytes <= start + size
        for start, (size, device, _) in LIVE.items()
        if device == current()
    )


def _not_recording(what: str) -> None:
    assert all(stream.recording is None for stream in STREAMS.values()), f"{what} while a stream is recorded"


def _block(nbytes: int) -> tuple[int, np.ndarray]:
    assert nbytes > 0, "CUDA gives no address for no bytes"
    block = np.full(nbytes + ALIGNMENT, 0xA5, np.uint8)
    return -(-block.ctypes.data // ALIGNMENT) * ALIGNMENT, block


def cudaGetErrorString(error: cudaError_t) -> tuple[cudaError_t, bytes]:
    return OK, error.name.encode()


def cudaGetDeviceCount() -> tuple[cudaError_t, int]:
    return OK, DEVICES


def cudaSetDevice(index: int) -> tuple[cudaError_t]:
    if not 0 <= index < DEVICES:
        return (cudaError_t.cudaErrorInvalidDevice,)
    _THREAD.device = index
    return (OK,)


def cudaGetDeviceProperties(index: int) -> tuple[cudaError_t, type[Properties]]:
    return OK, Properties


def cudaDriverGetVersion() -> tuple[cudaError_t, int]:
    return OK, 13000


def cudaDeviceGetAttribute(attribute: cudaDeviceAttr, index: int) -> tuple[cudaError_t, int]:
    assert 0 <= index < DEVICES
    return OK, int(UNIFIED)


def cudaMemGetInfo() -> tuple[cudaError_t, int, int]:
    return OK, FREE, 1 << 35


def cudaMalloc(nbytes: int) -> tuple[cudaError_t, int]:
    _not_recording("cudaMalloc")
    address, block = _block(nbytes)
    LIVE[address] = nbytes, current(), block
    return OK, address


def cudaMallocHost(nbytes: int) -> tuple[cudaError_t, int]:
    _not_recording("cudaMallocHost")
    address, block = _block(nbytes)
    PINNED[address] = nbytes, current(), block
    return OK, address


def _free(memory: dict[int, tuple[int, int, np.ndarray]], address: int) -> None:
    _not_recording("memory is freed")
    _, device, _ = memory.pop(address)
    assert not any(stream.queue for stream in STREAMS.values() if stream.device == device), (
        "a stream is still to use it"
    )


def cudaFree(address: int) -> tuple[cudaError_t]:
    _free(LIVE, address)
    return (OK,)


def cudaFreeHost(address: int) -> tuple[cudaError_t]:
    _free(PINNED, address)
    return (OK,)


def cudaStreamCreateWithFlags(flags: int) -> tuple[cudaError_t, Handle]:
    assert flags == cudaStreamNonBlocking, "the stream would wait for the default one, whoever uses that"
    handle = Handle()
    STREAMS[int(handle)] = Stream(current())
    return OK, handle


def cudaStreamSynchronize(handle: Handle) -> tuple[cudaError_t]:
    _not_recording("cudaStreamSynchronize")
    stream = STREAMS[int(handle)]
    queue, stream.queue = stream.queue, []
    for work in queue:
        work()
    return (OK,)


def cudaStreamDestroy(handle: Handle) -> tuple[cudaError_t]:
    del STREAMS[int(handle)]
    return (OK,)


def cudaMemsetAsync(address: int, value: int, nbytes: int, handle: Handle) -> tuple[cudaError_t]:
    assert nbytes == 0 or allocated(address, nbytes), "no memory of this device"
    stream_of(handle).put(lambda: ctypes.memset(address, value, nbytes))
    return (OK,)


def cudaMemcpyAsync(to: int, source: int, nbytes: int, kind: cudaMemcpyKind, handle: Handle) -> tuple[cudaError_t]:
    assert kind is cudaMemcpyKind.cudaMemcpyDefault
    assert allocated(to, nbytes) or allocated(source, nbytes), "neither side is memory of this device"
    stream_of(handle).put(lambda: ctypes.memmove(to, source, nbytes))
    return (OK,)


def cudaMemcpy2DAsync(
    to: int, pitch: int, source: int, source_pitch: int, width: int, height: int, kind: cudaMemcpyKind, handle: Handle
) -> tuple[cudaError_t]:
    assert width <= min(pitch, source_pitch)
    assert allocated(to, (height - 1) * pitch + width), "it writes where nothing was allocated"
    assert allocated(source, (height - 1) * source_pitch + width), "it reads where nothing was allocated"

    def copy() -> None:
        for i in range(height):
            ctypes.memmove(to + i * pitch, source + i * source_pitch, width)

    stream_of(handle).put(copy)
    return (OK,)


def cudaStreamBeginCapture(handle: Handle, mode: cudaStreamCaptureMode) -> tuple[cudaError_t]:
    assert mode is cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal, (
        "another thread's calls would break the recording"
    )
    stream = stream_of(handle)
    assert stream.recording is None
    stream.recording = []
    CALLS["capture"] += 1
    return (OK,)


def cudaStreamEndCapture(handle: Handle) -> tuple[cudaError_t, list[Work] | None]:
    stream = stream_of(handle)
    recorded, stream.recording = stream.recording, None
    return OK, recorded


def cudaGraphInstantiate(graph: list[Work], flags: int) -> tuple[cudaError_t, Handle]:
    handle = Handle()
    GRAPHS[int(handle)] = list(graph)
    return OK, handle


def cudaGraphDestroy(graph: list[Work]) -> tuple[cudaError_t]:
    graph.clear()
    return (OK,)


def cudaGraphLaunch(executable: Handle, handle: Handle) -> tuple[cudaError_t]:
    CALLS["launch"] += 1
    for work in GRAPHS[int(executable)]:
        stream_of(handle).put(work)
    return (OK,)


def cudaGraphExecDestroy(executable: Handle) -> tuple[cudaError_t]:
    del GRAPHS[int(executable)]
    return (OK,)
