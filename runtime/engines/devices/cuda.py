"""CUDA's runtime through NVIDIA's Python bindings (``cuda-bindings``), whose calls return an error code followed by
their results.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from ...errors import UnavailableError
from .accelerator import Accelerator

try:
    from cuda.bindings import runtime as rt
except ImportError as error:
    raise UnavailableError(
        f"an NVIDIA GPU needs the package 'cuda-bindings' ({error}): pip install 'cuda-bindings>=13'"
    ) from None

_DEFAULT = rt.cudaMemcpyKind.cudaMemcpyDefault  # the runtime tells host and device addresses apart
_INTEGRATED = rt.cudaDeviceAttr.cudaDevAttrIntegrated


def _check(call: str, result: tuple[Any, ...]) -> Any:
    """The results of a call without its error code: the one result, or a tuple of none or several.

    call: its name, for the message. Raises UnavailableError if the call failed.
    """
    error, *values = result
    if int(error):
        reason = rt.cudaGetErrorString(error)[1].decode(errors="replace")
        raise UnavailableError(f"{call} failed ({reason}): check the driver and free memory with nvidia-smi")
    return values[0] if len(values) == 1 else tuple(values)


class Cuda(Accelerator):
    """An NVIDIA GPU."""

    def __init__(self, index: int) -> None:
        """Raises UnavailableError if the driver or the device is missing."""
        self.index = index
        self._allocated: list[int] = []
        self._pinned: list[int] = []
        self._recorded: list[Any] = []
        count = _check("cudaGetDeviceCount", rt.cudaGetDeviceCount())
        if index >= count:
            raise UnavailableError(
                f"there is no NVIDIA GPU {index}: this machine shows {count}, and indices start at 0"
            )
        self.enter()
        properties = _check("cudaGetDeviceProperties", rt.cudaGetDeviceProperties(index))
        self.capability = int(properties.major), int(properties.minor)
        model = properties.name.split(b"\0")[0].decode(errors="replace")
        self.name = f"{model} (sm_{properties.major}{properties.minor})"
        self.unified = bool(_check("cudaDeviceGetAttribute", rt.cudaDeviceGetAttribute(_INTEGRATED, index)))
        driver = _check("cudaDriverGetVersion", rt.cudaDriverGetVersion())
        self.driver = f"{driver // 1000}.{driver % 1000 // 10}"
        self._stream = _check("cudaStreamCreateWithFlags", rt.cudaStreamCreateWithFlags(rt.cudaStreamNonBlocking))
        self.stream = int(self._stream)

    def enter(self) -> None:
        _check("cudaSetDevice", rt.cudaSetDevice(self.index))

    def memory(self) -> tuple[int, int]:
        self.enter()
        free, total = _check("cudaMemGetInfo", rt.cudaMemGetInfo())
        return int(free), int(total)

    def details(self) -> dict[str, str]:
        free, total = self.memory()
        return {"driver": f"CUDA {self.driver}", "memory": f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"}

    def allocate(self, nbytes: int) -> int:
        address = int(_check(f"cudaMalloc of {nbytes} bytes", rt.cudaMalloc(nbytes)))
        self._allocated.append(address)
        return address

    def allocate_pinned(self, nbytes: int) -> np.ndarray:
        address = int(_check(f"cudaMallocHost of {nbytes} bytes", rt.cudaMallocHost(nbytes)))
        self._pinned.append(address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def fill(self, address: int, nbytes: int) -> None:
        _check("cudaMemsetAsync", rt.cudaMemsetAsync(address, 0, nbytes, self._stream))

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        _check("cudaMemcpyAsync", rt.cudaMemcpyAsync(destination, source, nbytes, _DEFAULT, self._stream))

    def copy_strided(
        self, destination: int, pitch: int, source: int, source_pitch: int, width: int, height: int
    ) -> None:
        result = rt.cudaMemcpy2DAsync(destination, pitch, source, source_pitch, width, height, _DEFAULT, self._stream)
        _check("cudaMemcpy2DAsync", result)

    def synchronize(self) -> None:
        _check("cudaStreamSynchronize", rt.cudaStreamSynchronize(self._stream))

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        mode = rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        _check("cudaStreamBeginCapture", rt.cudaStreamBeginCapture(self._stream, mode))
        try:
            enqueue()
        finally:
            captured = rt.cudaStreamEndCapture(self._stream)
        graph = _check("cudaStreamEndCapture", captured)
        executable = _check("cudaGraphInstantiate", rt.cudaGraphInstantiate(graph, 0))
        _check("cudaGraphDestroy", rt.cudaGraphDestroy(graph))
        self._recorded.append(executable)

        def replay() -> None:
            _check("cudaGraphLaunch", rt.cudaGraphLaunch(executable, self._stream))

        return replay

    def close(self) -> None:
        if not self.stream:
            return
        self.enter()
        # unchecked: an earlier failure was already reported, and memory is freed in any case
        rt.cudaStreamSynchronize(self._stream)
        for executable in self._recorded:
            rt.cudaGraphExecDestroy(executable)
        for address in self._allocated:
            rt.cudaFree(address)
        for address in self._pinned:
            rt.cudaFreeHost(address)
        rt.cudaStreamDestroy(self._stream)
        self._allocated, self._pinned, self._recorded, self.stream = [], [], [], 0
