"""The processor's own memory, and what any other kind must offer as well."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np

# numpy's on the host, ``DeviceArray`` elsewhere: both know shape, dtype, ``[i]``, ``[:n]`` and ``reshape``.
Array: TypeAlias = Any
Call: TypeAlias = Callable[[], None]


class Device(Protocol):
    """Memory that engines read and write.

    A numpy array given to an engine on any device is the host's: an input is copied there before the call, an output copied
    back after it. What is made by ``zeros`` stays on the device.
    """

    def zeros(self, shape: tuple[int, ...], dtype: Any, mirrored: bool = False) -> Array:
        """A zeroed array. mirrored: the host reads it after every call that writes it."""

    def read(self, array: Array) -> np.ndarray:
        """What an array holds; of a mirrored one, as of the last call that returned something to the host."""

    def write(self, array: Array, values: np.ndarray) -> None:
        """Sets all of an array, to values of its shape and dtype."""

    def move(self, destination: Array, at: int, source: Array, row: int, count: int) -> None:
        """Copies ``count`` rows from ``source[:, row]`` on to ``destination[:, at]``, both [n, rows, d] of one n and d; rows that are
        read and rows that are written do not overlap."""

    def fuse(self, first: Call, second: Call) -> tuple[Call, Call]:
        """Two calls in place of two bound ones that follow each other, with nothing the host writes in between: so a device
        may put both on its way in the first and wait in the second."""

    def enter(self) -> None:
        """Readies the calling thread, which may be another one than last time, for calls and copies."""

    def synchronize(self) -> None:
        """Waits for every call and copy made so far."""

    def close(self) -> None:
        """Frees what belongs to the device; its arrays are dead after it."""


class Host:
    """Arrays are numpy's, copies are assignments, and every call has ended when it returns."""

    def zeros(self, shape: tuple[int, ...], dtype: Any, mirrored: bool = False) -> np.ndarray:
        return np.zeros(shape, dtype)

    def read(self, array: np.ndarray) -> np.ndarray:
        return array

    def write(self, array: np.ndarray, values: np.ndarray) -> None:
        array[...] = values

    def move(self, destination: np.ndarray, at: int, source: np.ndarray, row: int, count: int) -> None:
        destination[:, at : at + count] = source[:, row : row + count]

    def fuse(self, first: Call, second: Call) -> tuple[Call, Call]:
        return first, second

    def enter(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass
