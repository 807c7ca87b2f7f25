"""HIP's runtime through ctypes: each of its Python packages is tied to one ROCm release, but these calls are the same
in all releases.

Signatures: hip/hip_runtime_api.h of HIP 6.3.
"""

import ctypes
import os
import re
import sys
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from glob import glob
from pathlib import Path

import numpy as np

from ...errors import UnavailableError
from .accelerator import Accelerator

_DEFAULT = 4  # hipMemcpyDefault: the runtime tells host and device addresses apart
_NON_BLOCKING = 1
_INTEGRATED = 16  # hipDeviceAttributeIntegrated
# hipGetDevicePropertiesR0600 fills a struct of 1472 bytes; the symbol without the suffix is an older layout.
_PROPERTIES, _ARCHITECTURE = 4096, 1160

_MAPS = Path("/proc/self/maps")
_PYTHON = re.compile(r"(?:libmigraphx_py_|migraphx\.cpython-)(\d)\.?(\d+)\b")

_SIGNATURES: dict[str, tuple[object, ...]] = {
    "hipGetDeviceCount": (POINTER(c_int),),
    "hipSetDevice": (c_int,),
    "hipDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "hipGetDevicePropertiesR0600": (c_void_p, c_int),
    "hipRuntimeGetVersion": (POINTER(c_int),),
    "hipMemGetInfo": (POINTER(c_size_t), POINTER(c_size_t)),
    "hipMalloc": (POINTER(c_void_p), c_size_t),
    "hipFree": (c_void_p,),
    "hipHostMalloc": (POINTER(c_void_p), c_size_t, c_uint),
    "hipHostFree": (c_void_p,),
    "hipMemsetAsync": (c_void_p, c_int, c_size_t, c_void_p),
    "hipMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "hipMemcpy2DAsync": (c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_size_t, c_int, c_void_p),
    "hipStreamCreateWithFlags": (POINTER(c_void_p), c_uint),
    "hipStreamSynchronize": (c_void_p,),
    "hipStreamDestroy": (c_void_p,),
}


def roots() -> list[str]:
    """ROCm's folders on this machine, in order of preference."""
    configured = [os.environ[name] for name in ("ROCM_PATH",) if os.environ.get(name)]
    candidates = [*configured, "/opt/rocm", *sorted(glob("/opt/rocm-*"), reverse=True)]
    return [root for root in dict.fromkeys(candidates) if os.path.isdir(root)]


def advice() -> str:
    """How to get MIGraphX's Python module here; ROCm ships it only for the Python version of the Linux distribution."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    for root in roots():
        files = [*glob(f"{root}/lib/libmigraphx_py_*.so*"), *glob(f"{root}/lib/migraphx.cpython-*.so")]
        pythons = sorted(
            {f"{m[1]}.{m[2]}" for m in map(_PYTHON.search, files) if m}, key=lambda v: int(v.split(".")[1])
        )
        if here in pythons:
            return f"put {root}/lib on PYTHONPATH"
        if pythons:
            versions = " and ".join(pythons)
            return (
                f"{root} has it for Python {versions}, and this is {here}: "
                f"make an environment with that Python and put {root}/lib on PYTHONPATH"
            )
    return (
        "install ROCm's package migraphx (the package of that name on PyPI is unrelated) and put /opt/rocm/lib on "
        "PYTHONPATH"
    )


def mapped(maps: str) -> list[str]:
    """The HIP libraries that a process has loaded: a second one in it could not use the first one's memory.

    maps: the content of its ``/proc/self/maps``.
    """
    lines = (line.partition("/") for line in maps.splitlines())
    paths = [f"/{path}" for _, slash, path in lines if slash]
    return list(dict.fromkeys(path for path in paths if re.search(r"/libamdhip64\.so[.\d]*$", path)))


def candidates() -> list[str]:
    """Paths to try for HIP's library; the one that MIGraphX has loaded comes first."""
    try:
        loaded = mapped(_MAPS.read_text("utf-8"))
    except OSError:
        loaded = []
    installed = [f"{root}/lib/libamdhip64.so" for root in roots()]
    return [*loaded, *filter(os.path.exists, installed), "libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"]


def _library() -> ctypes.CDLL:
    for name in candidates():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        for function, arguments in _SIGNATURES.items():
            getattr(library, function).argtypes = arguments
            getattr(library, function).restype = c_int
        library.hipGetErrorString.argtypes, library.hipGetErrorString.restype = (c_int,), c_char_p
        return library
    raise UnavailableError("an AMD GPU needs ROCm's libamdhip64.so: install ROCm, or set ROCM_PATH to its folder")


class Hip(Accelerator):
    """An AMD GPU."""

    def __init__(self, index: int) -> None:
        """Raises UnavailableError if the library, the driver or the device is missing."""
        self._hip = _library()
        self.index = index
        self._allocated: list[int] = []
        self._pinned: list[int] = []
        count = c_int()
        self._check("hipGetDeviceCount", byref(count))
        if index >= count.value:
            raise UnavailableError(
                f"there is no AMD GPU {index}: this machine shows {count.value}, and indices start at 0"
            )
        self.enter()
        properties = ctypes.create_string_buffer(_PROPERTIES)
        self._check("hipGetDevicePropertiesR0600", properties, index)
        model = properties.raw[:256].split(b"\0")[0].decode(errors="replace")
        self.architecture = (
            properties.raw[_ARCHITECTURE : _ARCHITECTURE + 256].split(b"\0")[0].split(b":")[0].decode(errors="replace")
        )
        self.name = f"{model} ({self.architecture})"
        integrated = c_int()
        self._check("hipDeviceGetAttribute", byref(integrated), _INTEGRATED, index)
        self.unified = bool(integrated.value)
        version = c_int()
        self._check("hipRuntimeGetVersion", byref(version))
        self.runtime = f"{version.value // 10**7}.{version.value // 10**5 % 100}.{version.value % 10**5}"
        stream = c_void_p()
        self._check("hipStreamCreateWithFlags", byref(stream), _NON_BLOCKING)
        assert stream.value
        self.stream = stream.value

    def _check(self, function: str, *arguments: object) -> None:
        if error := getattr(self._hip, function)(*arguments):
            text = self._hip.hipGetErrorString(error).decode(errors="replace")
            raise UnavailableError(
                f"{function} failed ({text}): check the driver with rocminfo and free memory with rocm-smi"
            )

    def enter(self) -> None:
        self._check("hipSetDevice", self.index)

    def memory(self) -> tuple[int, int]:
        self.enter()
        free, total = c_size_t(), c_size_t()
        self._check("hipMemGetInfo", byref(free), byref(total))
        return free.value, total.value

    def details(self) -> dict[str, str]:
        free, total = self.memory()
        return {"runtime": f"HIP {self.runtime}", "memory": f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"}

    def allocate(self, nbytes: int) -> int:
        address = c_void_p()
        self._check("hipMalloc", byref(address), nbytes)
        assert address.value
        self._allocated.append(address.value)
        return address.value

    def allocate_pinned(self, nbytes: int) -> np.ndarray:
        address = c_void_p()
        self._check("hipHostMalloc", byref(address), nbytes, 0)
        assert address.value
        self._pinned.append(address.value)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address.value))

    def fill(self, address: int, nbytes: int) -> None:
        self._check("hipMemsetAsync", address, 0, nbytes, self.stream)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self._check("hipMemcpyAsync", destination, source, nbytes, _DEFAULT, self.stream)

    def copy_strided(
        self, destination: int, pitch: int, source: int, source_pitch: int, width: int, height: int
    ) -> None:
        self._check("hipMemcpy2DAsync", destination, pitch, source, source_pitch, width, height, _DEFAULT, self.stream)

    def synchronize(self) -> None:
        self._check("hipStreamSynchronize", self.stream)

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        raise NotImplementedError("MIGraphX does not promise that its calls can be recorded")

    def close(self) -> None:
        if not self.stream:
            return
        self.enter()
        # unchecked: an earlier failure was already reported, and memory is freed in any case
        self._hip.hipStreamSynchronize(self.stream)
        for address in self._allocated:
            self._hip.hipFree(address)
        for address in self._pinned:
            self._hip.hipHostFree(address)
        self._hip.hipStreamDestroy(self.stream)
        self._allocated, self._pinned, self.stream = [], [], 0
