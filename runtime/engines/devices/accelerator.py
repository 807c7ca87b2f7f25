"""Memory of an accelerator with one stream, based on the few calls that CUDA's runtime and HIP share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from .host import require_buffers

_ALIGNMENT = 256  # bytes; both runtimes align their own allocations to it


class DeviceArray:
    """An array in a device's memory, with the part of numpy's interface that buffers need.

    address: of its first element, on the device. mirror: the host's copy if the array is mirrored, else None.
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
            return DeviceArray(self.address + key * (self.nbytes // self.shape[0]), self.shape[1:], self.dtype, mirror)
        assert not key.start, key
        assert key.step is None, key
        assert 0 <= key.stop <= self.shape[0], key
        return DeviceArray(self.address, (key.stop, *self.shape[1:]), self.dtype, mirror)

    def reshape(self, *shape: int) -> "DeviceArray":
        assert prod(shape) == prod(self.shape), (self.shape, shape)
        return DeviceArray(self.address, shape, self.dtype, None if self.mirror is None else self.mirror.reshape(shape))


class Accelerator(ABC):
    """One device and one stream, which orders all copies and engine runs.

    Subclasses implement the runtime's calls. Addresses are plain ints and sizes are bytes; every failed call raises
    GumihoError.
    """

    name: str  # the device's, with its architecture
    index: int
    stream: int
    unified: bool  # whether device and host share one memory

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Bytes of device memory: free and total."""

    @abstractmethod
    def details(self) -> dict[str, str]:
        """Versions of driver and runtime, and free memory, as text for people."""

    @abstractmethod
    def enter(self) -> None:
        """Makes this the calling thread's current device; a stream refuses work from a thread whose current device is
        another one.
        """

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Allocates device memory and returns its address."""

    @abstractmethod
    def allocate_pinned(self, nbytes: int) -> np.ndarray:
        """Allocates host memory that the device reads and writes directly: uint8 [nbytes]."""

    @abstractmethod
    def fill(self, address: int, nbytes: int) -> None:
        """Zeroes device memory, on the stream."""

    @abstractmethod
    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copies between host and device, in any direction, or within either, on the stream."""

    @abstractmethod
    def copy_strided(
        self, destination: int, pitch: int, source: int, source_pitch: int, width: int, height: int
    ) -> None:
        """Copies ``height`` runs of ``width`` bytes within the device, on the stream; the pitches are the bytes from
        one run to the next.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until all work on the stream is done."""

    @abstractmethod
    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Records the work that a function puts on the stream. Returns a function that launches all of it in one
        call."""

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
            destination.address + at * width,
            destination.shape[1] * width,
            source.address + row * width,
            source.shape[1] * width,
            count * width,
            height,
        )


class Staging:
    """A bound call of an engine on an accelerator.

    All host inputs are copied to the device in one block and all host outputs are copied back in another; device arrays
    are used in place. The engine provides ``launch(buffers)``, which puts its work on the stream. The host may change
    its inputs as soon as the call returns, since they were copied to pinned memory.
    """

    def __init__(
        self,
        device: Accelerator,
        buffers: Mapping[str, Any],
        inputs: set[str],
        outputs: set[str],
        launch: Callable[[Mapping[str, DeviceArray]], None],
        capturable: Callable[[], bool] | None = None,
    ) -> None:
        """buffers: a numpy array or DeviceArray by name; names that the engine does not have are ignored. capturable:
        tells after the first run whether ``launch`` may be recorded and replayed; None if it never may. Raises
        DamageError if an input has no buffer."""
        require_buffers(inputs, buffers)
        self.device, self.launch = device, launch
        bound = {name: buffer for name, buffer in buffers.items() if name in inputs | outputs}
        host = {name: buffer for name, buffer in bound.items() if isinstance(buffer, np.ndarray)}
        self.buffers: dict[str, DeviceArray] = {name: buffer for name, buffer in bound.items() if name not in host}
        self._host_inputs, self._upload = self._block({name: array for name, array in host.items() if name in inputs})
        self._host_outputs, self._download = self._block(
            {name: array for name, array in host.items() if name in outputs}
        )
        self._run = Recorded(device, capturable) if capturable else None
        self._mirrored = [array for name, array in self.buffers.items() if name in outputs and array.mirror is not None]

    def _block(
        self, arrays: Mapping[str, np.ndarray]
    ) -> tuple[list[tuple[np.ndarray, np.ndarray]], tuple[int, int, int]]:
        """Allocates one block on the device and one of pinned host memory that hold all the arrays, one after another.

        Returns a pair (array, its part of the pinned block) for each array, and (device address, host address, bytes)
        of the blocks.
        """
        offsets, size = {}, 0
        for name, array in arrays.items():
            offsets[name] = size
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not size:
            return [], (0, 0, 0)
        block, pinned = self.device.zeros((size,), np.uint8), self.device.pinned((size,), np.uint8)
        pairs = []
        for name, array in arrays.items():
            offset = offsets[name]
            self.buffers[name] = DeviceArray(block.address + offset, array.shape, array.dtype)
            pairs.append((array, pinned[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)))
        return pairs, (block.address, pinned.ctypes.data, size)

    def stage(self) -> None:
        """Copies the host's inputs to pinned memory."""
        for array, pinned in self._host_inputs:
            pinned[...] = array

    def enqueue(self) -> None:
        """Puts the whole call on the stream: copies to the device, the engine's run, copies to the host."""
        device, host, size = self._upload
        if size:
            self.device.copy(device, host, size)
        self.launch(self.buffers)
        for array in self._mirrored:
            assert array.mirror is not None
            self.device.copy(array.mirror.ctypes.data, array.address, array.nbytes)
        device, host, size = self._download
        if size:
            self.device.copy(host, device, size)

    def finish(self) -> None:
        """Waits for the host's outputs, if there are any, and copies them from pinned memory."""
        if self._host_outputs:
            self.device.synchronize()
            for array, pinned in self._host_outputs:
                array[...] = pinned

    def __call__(self) -> None:
        self.stage()
        if self._run:
            self._run(self.enqueue)
        else:
            self.enqueue()
        self.finish()


class Recorded:
    """Work for the stream that the first run records, and later runs replay in one launch.

    capturable: whether it can be recorded; asked after the first run, which also sets engines up.
    """

    def __init__(self, device: Accelerator, capturable: Callable[[], bool] = lambda: True) -> None:
        self._device, self._capturable = device, capturable
        self._replay: Callable[[], None] | None = None

    def __call__(self, enqueue: Callable[[], None]) -> None:
        """enqueue: puts the work on the stream, the same each time."""
        if self._replay is None:
            enqueue()  # an engine's first run also sets it up, which must not be recorded
            self._device.synchronize()
            self._replay = self._device.capture(enqueue) if self._capturable() else enqueue
        else:
            self._replay()
