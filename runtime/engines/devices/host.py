"""The interface of a device's memory, and its implementation for the host."""

from collections.abc import Callable, Mapping, Set
from typing import Any, Protocol, TypeAlias

import numpy as np

from ...errors import DamageError

# A numpy array on the host, a ``DeviceArray`` elsewhere: both have shape, dtype, ``[i]``, ``[:n]`` and ``reshape``.
Array: TypeAlias = Any
Call: TypeAlias = Callable[[], float | None]  # see ``backends.Engine.bind``


def require_buffers(inputs: Set[str], buffers: Mapping[str, Array]) -> None:
    """Raises DamageError if an input of an engine has no buffer."""
    if missing := inputs - buffers.keys():
        raise DamageError(
            f"the engine's input '{min(missing)}' has no buffer, since the bundle fits another version: export it again"
        )


class Device(Protocol):
    """Memory that engines read and write.

    If an engine is bound to a numpy array, each call copies an input to the device before the run and an output back
    after it. Arrays made by ``zeros`` stay on the device.
    """

    def zeros(self, shape: tuple[int, ...], dtype: Any, mirrored: bool = False) -> Array:
        """A zeroed array. mirrored: the host reads it after every call that writes it."""

    def read(self, array: Array) -> np.ndarray:
        """An array's content; a mirrored array has the content of the last call that returned output to the host."""

    def write(self, array: Array, values: np.ndarray) -> None:
        """Overwrites an array with values of the same shape and dtype."""

    def move(self, destination: Array, at: int, source: Array, row: int, count: int) -> None:
        """Copies ``count`` rows, starting at ``source[:, row]``, to ``destination[:, at]``.

        Both arrays are [n, rows, d] with the same n and d. The rows read and the rows written must not overlap.
        """

    def enter(self) -> None:
        """Prepares the calling thread for calls and copies; needed whenever the thread changes."""

    def synchronize(self) -> None:
        """Waits until all calls and copies so far are done."""

    def close(self) -> None:
        """Frees the device's memory; its arrays must not be used afterwards."""


class Host:
    """The host's memory: arrays are numpy arrays, copies are assignments, and every call is done when it returns."""

    def zeros(self, shape: tuple[int, ...], dtype: Any, mirrored: bool = False) -> np.ndarray:
        return np.zeros(shape, dtype)

    def read(self, array: np.ndarray) -> np.ndarray:
        return array

    def write(self, array: np.ndarray, values: np.ndarray) -> None:
        array[...] = values

    def move(self, destination: np.ndarray, at: int, source: np.ndarray, row: int, count: int) -> None:
        destination[:, at : at + count] = source[:, row : row + count]

    def enter(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass
