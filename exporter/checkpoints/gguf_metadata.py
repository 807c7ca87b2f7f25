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

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
# Value types, by number: how numpy reads them.
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
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
    """The fields by name, and the tensors. Raises ValueError, struct.error or OSError for a damaged file."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(data).read()


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def read(self) -> tuple[dict[str, Any], list[Tensor]]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if self._bytes(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        if (version := self._number(4)) not in _VERSIONS:
            raise ValueError(f"version {version}, expected one of {_VERSIONS}")
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
            infos[name] = shape, GGMLQuantizationType(self._number(4)), self._number(10)
        alignment = fields.get("general.alignment", 32)
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
