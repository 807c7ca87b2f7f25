"""The metadata of a GGUF file (ggml's docs/gguf.md, versions 2 and 3).

The ``gguf`` package's reader makes numpy arrays of every token and every merge, which takes seconds.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.errors import InputError

from .json_config import is_whole, shown

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
# Value types, by number: how numpy reads them.
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_LEAST = {_STRING: 8, **{kind: np.dtype(name).itemsize for kind, name in _NUMBERS.items()}}  # bytes of a value


@dataclass(frozen=True)
class Tensor:
    """shape: rows first, as in torch. offset, size: bytes in the file."""

    name: str
    kind: "GGMLQuantizationType"
    shape: tuple[int, ...]
    offset: int
    size: int


def metadata(file: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """The fields by name, and the tensors. Raises InputError for what is not supported, and ValueError, struct.error or
    OSError for a damaged file."""
    if file.stat().st_size == 0:
        raise ValueError("it is empty")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(data, file).read()


def is_gguf(file: Path) -> bool:
    """Whether a file begins as a GGUF file does, whatever its name is. Raises OSError."""
    with file.open("rb") as opened:
        return opened.read(len(_MAGIC)) == _MAGIC


class _Reader:
    def __init__(self, data: mmap.mmap, file: Path) -> None:
        self._data, self._at, self._file = data, 0, file

    def read(self) -> tuple[dict[str, Any], list[Tensor]]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        file = self._file
        if self._bytes(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        if (version := self._number(4)) not in _VERSIONS:
            if version & 0xFFFF == 0:
                raise InputError(
                    f"'{file}' has its bytes in big-endian order: convert it (gguf-convert-endian '{file}' little)"
                )
            raise InputError(
                f"'{file}' has version {version} of GGUF, expected {' or '.join(map(str, _VERSIONS))}: convert the "
                "model again"
            )
        tensor_count, field_count = self._number(10), self._number(10)
        fields = dict[str, Any]()
        for _ in range(field_count):
            name = self._text()
            if name in fields:
                raise ValueError(f"it has the field {name} twice")
            fields[name] = self._value(self._number(4))
        infos = dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]]()
        for _ in range(tensor_count):
            name = self._text()
            if name in infos:
                raise ValueError(f"it has the tensor {name} twice")
            shape = tuple(reversed(self._numbers(10, self._number(4))))
            if (kind := self._number(4)) not in GGML_QUANT_SIZES:
                raise InputError(
                    f"'{file}' holds '{name}' in the type {kind} of tensors, which is not supported: convert the model "
                    "again, to Q8_0 for example"
                )
            infos[name] = shape, GGMLQuantizationType(kind), self._number(10)
        alignment = fields.get("general.alignment", 32)
        if not is_whole(alignment, 1, 1 << 31) or alignment & (alignment - 1):
            raise InputError(
                f"'{file}' has general.alignment {shown(alignment)}, expected a power of two: convert the model again"
            )
        start = self._at + -self._at % alignment
        found = []
        for name, (shape, kind, offset) in infos.items():
            block, size = GGML_QUANT_SIZES[kind]
            if shape[-1:] and shape[-1] % block:
                raise ValueError(f"rows of {name} have {shape[-1]} numbers, expected a multiple of {block}")
            tensor = Tensor(name, kind, shape, start + offset, prod(shape) // block * size)
            if tensor.offset + tensor.size > len(self._data):
                raise ValueError(f"it ends within {name}")
            found.append(tensor)
        return fields, found

    def _bytes(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if len(found) != size:
            raise ValueError("it ends within its metadata")
        self._at += size
        return found

    def _number(self, kind: int) -> Any:
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        return np.frombuffer(self._bytes(count * _LEAST[kind]), _NUMBERS[kind]).tolist()

    def _text(self) -> str:
        return self._texts(1)[0]

    def _texts(self, count: int) -> list[str]:
        found, data, at, length = list[str](), self._data, self._at, struct.Struct("<Q")
        for _ in range(count):
            (size,) = length.unpack_from(data, at)
            end = at + 8 + size
            if end > len(data):
                raise ValueError("it ends within its metadata")
            found.append(data[at + 8 : end].decode("utf-8"))
            at = end
        self._at = at
        return found

    def _value(self, kind: int) -> Any:
        if kind == _ARRAY:
            kind, count = self._number(4), self._number(10)
            return self._values(kind, count)
        return self._values(kind, 1)[0]

    def _values(self, kind: int, count: int) -> list[Any]:
        if kind not in _LEAST:
            raise ValueError(f"it has a field of the unsupported type {kind}")
        return self._texts(count) if kind == _STRING else self._numbers(kind, count)
