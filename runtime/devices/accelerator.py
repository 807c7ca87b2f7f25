"""Memory of an accelerator with one stream, over the few calls that CUDA's runtime and HIP share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from ..errors import GumihoError

_ALIGNMENT = 256  # bytes; what both runtimes' own allocations promise


class DeviceArray:
    """Memory of a device, seen as an array: what little of numpy's interface buffers need.

    address: of its first element. mirror: the host's copy of a mirrored array, or None.
    """

    __slots__ = ("address", "dtype", "mirror", "shape")

    def __init__(self, address: int, shape: tuple[int, ...], dtype: Any, mirror: np.ndarray | None = None) -> None:
        self.address, self.shape, self.dtype, self.mirror = address, shape, np.dtype(dtype), mirror

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: int | slice) -> "DeviceArray":
        """``array[i]``, or ``array[:n]``."""
        mirror = None if self.mirror is None else self.mirror[key]
        if isinstance(key, int):
            step = self.nbytes // self.shape[0]
            return DeviceArray(self.address + key * step, self.shape[1:], self.dtype, mirror)
        assert (key.start, key.step) == (None, None), key
        assert 0 <= key.stop <= self.shape[0], key
        return DeviceArray(self.address, (key.stop, *self.shape[1:]), self.dtype, mirror)

    def reshape(self, *shape: int) -> "DeviceArray":
        assert prod(shape) == prod(self.shape), (self.shape, shape)
        return DeviceArray(self.address, shape, self.dtype, None if self.mirror is None else self.mirror.reshape(shape))


class Accelerator(ABC):
    """One device and one stream on which everything is ordered: copies, engines, kept rows.

    Subclasses give the runtime's calls; every address is a plain int, every size in bytes, every failure a GumihoError.
    """

    name: str  # of the device, its architecture included
    index: int
    stream: int
    unified: bool  # whether its memory is the host's

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Bytes of device memory: free, and in all."""

    @abstractmethod
    def details(self) -> dict[str, str]:
        """Versions of driver and runtime, free memory: for a reader."""

    @abstractmethod
    def enter(self) -> None:
        """Makes the device the calling thread's current one: a stream takes work from no thread that is on another device."""

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Device memory."""

    @abstractmethod
    def allocate_pinned(self, nbytes: int) -> np.ndarray:
        """Host memory that the device reads and writes directly, uint8 [nbytes]."""

    @abstractmethod
    def fill(self, address: int, nbytes: int) -> None:
        """Zeroes device memory, on the stream."""

    @abstractmethod
    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copies between any two of host and device, on the stream."""

    @abstractmethod
    def copy_strided(self, destination: int, pitch: int, source: int, source_pitch: int, width: int, height: int) -> None:
        """Copies ``height`` runs of ``width`` bytes that lie a pitch apart, device to device, on the stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the stream has nothing left to do."""

    @abstractmethod
    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Records what a function puts on the stream, and returns a call that puts it there again at once."""

    @abstractmethod
    def close(self) -> None:
        """Frees every allocation and the stream."""

    def zeros(self, shape: tuple[int, ...], dtype: Any, mirrored: bool = False) -> DeviceArray:
        array = DeviceArray(0, shape, dtype)
        array.address = self.allocate(max(1, array.nbytes))
        self.fill(array.address, array.nbytes)
        if mirrored:
            array.mirror = self.pinned(shape, array.dtype)
        return array

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A zeroed array of pinned host memory."""
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        block = self.allocate_pinned(max(1, nbytes))
        block[:] = 0
        return block[:nbytes].view(dtype).reshape(shape)

    def read(self, array: DeviceArray) -> np.ndarray:
        if array.mirror is not None:
            return array.mirror
        out = np.zeros(array.shape, array.dtype)
        self.copy(out.ctypes.data, array.address, array.nbytes)
        self.synchronize()
        return out

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values)
        self.copy(array.address, values.ctypes.data, array.nbytes)
        self.synchronize()

    def move(self, destination: DeviceArray, at: int, source: DeviceArray, row: int, count: int) -> None:
        height, _, width = destination.shape
        width *= destination.dtype.itemsize
        self.copy_strided(
            destination.address + at * width, destination.shape[1] * width,
            source.address + row * width, source.shape[1] * width, count * width, height,
        )  # fmt: skip

    def fuse(self, first: Callable[[], None], second: Callable[[], None]) -> tuple[Callable[[], None], Callable[[], None]]:
        assert isinstance(first, Staging)
        assert isinstance(second, Staging)
        if not (first.capturable and second.capturable):
            return first, second
        fused = Fused(self, (first, second))
        return fused.start, fused.finish


class Staging:
    """A bound call of an engine on an accelerator: inputs of the host go in through one block, outputs come back through
    another, and what is on the device stays there.

    ``launch(buffers)`` is given by the engine; it puts the engine's own work on the stream. The host may change its inputs as
    soon as the call returns: they have been copied aside.
    """

    def __init__(
        self, device: Accelerator, buffers: Mapping[str, Any], inputs: set[str], outputs: set[str],
        launch: Callable[[Mapping[str, DeviceArray]], None], capturable: bool,
    ) -> None:  # fmt: skip
        """buffers: a numpy array or DeviceArray for each name; names that the engine does not have are left out. capturable:
        whether ``launch`` may be recorded and replayed. Raises GumihoError where an input has no buffer."""
        if missing := inputs - buffers.keys():
            raise GumihoError(f"the engine's input '{min(missing)}' has no buffer: the bundle does not fit this version")
        self.device, self.launch, self.capturable = device, launch, capturable
        bound = {name: buffer for name, buffer in buffers.items() if name in inputs | outputs}
        host = {name: buffer for name, buffer in bound.items() if isinstance(buffer, np.ndarray)}
        self.buffers: dict[str, DeviceArray] = {n: b for n, b in bound.items() if n not in host}
        self._into, self._up = self._block({n: b for n, b in host.items() if n in inputs})
        self._back, self._down = self._block({n: b for n, b in host.items() if n in outputs})
        self._mirrors = [b for n, b in self.buffers.items() if n in outputs and b.mirror is not None]

    def _block(self, arrays: Mapping[str, np.ndarray]) -> tuple[list[tuple[np.ndarray, np.ndarray]], tuple[int, int, int]]:
        """Lays arrays out in one block on each side. Returns (array, its place in the pinned block) of each, and the block's
        addresses on the device and the host and its bytes."""
        places, size = {}, 0
        for name, array in arrays.items():
            places[name] = size
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not size:
            return [], (0, 0, 0)
        block, pinned = self.device.zeros((size,), np.uint8), self.device.pinned((size,), np.uint8)
        pairs = []
        for name, array in arrays.items():
            at = places[name]
            self.buffers[name] = DeviceArray(block.address + at, array.shape, array.dtype)
            pairs.append((array, pinned[at : at + array.nbytes].view(array.dtype).reshape(array.shape)))
        return pairs, (block.address, pinned.ctypes.data, size)

    def stage(self) -> None:
        """Copies the host's inputs aside."""
        for array, place in self._into:
            place[...] = array

    def enqueue(self) -> None:
        """Everything that happens on the stream."""
        device, host, size = self._up
        if size:
            self.device.copy(device, host, size)
        self.launch(self.buffers)
        for array in self._mirrors:
            assert array.mirror is not None
            self.device.copy(array.mirror.ctypes.data, array.address, array.nbytes)
        device, host, size = self._down
        if size:
            self.device.copy(host, device, size)

    def finish(self) -> None:
        """Waits for what the host is to read, if anything."""
        if self._back:
            self.device.synchronize()
            for array, place in self._back:
                array[...] = place

    def __call__(self) -> None:
        self.stage()
        self.enqueue()
        self.finish()


class Fused:
    """Bound calls in turn, recorded once and put on the stream in one piece from then on."""

    def __init__(self, device: Accelerator, calls: tuple[Staging, ...]) -> None:
        self._device, self._calls = device, calls
        self._replay: Callable[[], None] | None = None

    def _enqueue(self) -> None:
        for call in self._calls:
            call.enqueue()

    def start(self) -> None:
        for call in self._calls:
            call.stage()
        if self._replay is None:
            self._enqueue()  # engines set themselves up in their first run, which must not be recorded
            self._device.synchronize()
            self._replay = self._device.capture(self._enqueue)
        else:
            self._replay()

    def finish(self) -> None:
        for call in self._calls:
            call.finish()
