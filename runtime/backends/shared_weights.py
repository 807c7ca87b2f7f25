"""Weights that engines take as inputs. All engines share one copy in memory."""

from collections.abc import Iterator, Mapping
from mmap import ACCESS_READ, mmap
from os import SEEK_END
from pathlib import Path

import numpy as np

from ..bundle.graphs import Form, Weight
from ..bundle.reader import Bundle
from ..engines.devices import Accelerator
from ..errors import DamageError

_ALIGNMENT = 256  # bytes
_STAGING = 16 << 20  # bytes of each of two pinned blocks that files are read into


def nbytes(form: Form) -> int:
    """Bytes of a form's shared weights on a device."""
    return sum(_padded(length) for _, _, length in _places(form))


class SharedWeights:
    """A form's weights: on the host mapped from the bundle's files, on a device copied to one block of its memory."""

    def __init__(self, bundle: Bundle, form: Form, device: Accelerator | None) -> None:
        """Raises DamageError if a file is gone or has become shorter, and GumihoError if the device's memory does not
        suffice."""
        places = _places(form)
        try:
            if device is None:
                self._files = {name: _mapped(bundle.path, name, end) for name, end in _ends(places).items()}
                self._addresses = {(name, offset): self._files[name].ctypes.data + offset for name, offset, _ in places}
            else:
                self._addresses = dict(_copied(bundle.path, places, device))
        except OSError as error:
            raise DamageError(f"{error.filename} cannot be read ({error.strerror}): copy the bundle again") from None

    def addresses(self, weights: Mapping[str, Weight]) -> dict[str, int]:
        """The addresses of weights, by name."""
        return {name: self._addresses[weight.file, weight.offset] for name, weight in weights.items()}


def _places(form: Form) -> list[tuple[str, int, int]]:
    """The file, offset and size in bytes of every distinct weight, sorted by file."""
    longest: dict[tuple[str, int], int] = {}
    for weights in form.weights.values():
        for weight in weights.values():
            at = weight.file, weight.offset
            longest[at] = max(longest.get(at, 0), weight.nbytes)
    return sorted((file, offset, length) for (file, offset), length in longest.items())


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _ends(places: list[tuple[str, int, int]]) -> dict[str, int]:
    """For each file, the end of its last weight in bytes."""
    ends: dict[str, int] = {}
    for name, offset, length in places:
        ends[name] = max(ends.get(name, 0), offset + length)
    return ends


def _mapped(folder: Path, name: str, end: int) -> np.ndarray:
    with (folder / name).open("rb") as file:
        if file.seek(0, SEEK_END) < end:
            raise _too_short(folder, name)
        return np.frombuffer(mmap(file.fileno(), 0, access=ACCESS_READ), np.uint8)


def _too_short(folder: Path, name: str) -> DamageError:
    return DamageError(f"{folder / name} ends before its weights do: copy the bundle again")


def _copied(
    folder: Path, places: list[tuple[str, int, int]], device: Accelerator
) -> Iterator[tuple[tuple[str, int], int]]:
    """Copies weights to the device and yields their file, offset and address. Reading a block overlaps with copying the
    previous one."""
    if not places:
        return
    address = device.allocate(sum(_padded(length) for _, _, length in places))
    staging = device.pinned((2, _STAGING), np.uint8)
    pieces = 0
    for name, offset, length in places:
        with (folder / name).open("rb", buffering=0) as file:
            file.seek(offset)
            for at in range(0, length, _STAGING):
                piece = staging[pieces % 2, : min(_STAGING, length - at)]
                if file.readinto(piece.data) != len(piece):
                    raise _too_short(folder, name)
                device.synchronize()  # the other block is free now
                device.copy(address + at, piece.ctypes.data, len(piece))
                pieces += 1
        yield (name, offset), address
        address += _padded(length)
    device.synchronize()
