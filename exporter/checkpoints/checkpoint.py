"""Any checkpoint layout on disk -> named tensors, read lazily, a slice at a time.

Names come out in one spelling whatever the layout: a target's without their leading ``model.``, a drafter's as the official
repository writes them (``fc.weight``, ``layers.0.self_attn.q_proj.weight``, ``mlp.0.0.linear.weight``).
"""

import json
import re
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from runtime.errors import GumihoError

from ..weights.source import Stored, is_finite
from .hub import WEIGHT_FILES, locate
from .json_config import document, reason, shown

_SHARD = re.compile(r"(?!\.)[^/\\\x00]{1,200}\.[A-Za-z]+")
_STORED = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}  # by the names of safetensors
_DTYPES = {*_STORED, *map(str, _STORED.values())}
_SAFETENSORS_DTYPES = {"I8": "torch.int8", "U8": "torch.uint8", "F64": "torch.float64", "F8_E4M3": "torch.float8_e4m3fn"}


def _target_name(name: str) -> str | None:
    return None if "rotary_emb" in name else name.removeprefix("model.")


def _drafter_name(name: str) -> str | None:
    while name.startswith("model."):
        name = name.removeprefix("model.")
    name = re.sub(r"^mlp\.mlp\.", "mlp.", name)
    return None if "rotary_emb" in name else name


class Checkpoint:
    """A folder of tensors. ``config`` is its config.json; tensors are read when asked for, never all at once."""

    def __init__(self, source: str, kind: str) -> None:
        """source: folder or hub id; kind: "target" or "drafter", which decides how names are normalized."""
        self.source, self.kind = source, kind
        self.folder = locate(source)
        self.config = self._json("config.json")
        rename = _target_name if kind == "target" else _drafter_name
        self._files: dict[Path, Mapping[str, tuple[tuple[int, ...], str]]] = {}
        self._begins: dict[Path, Mapping[str, int]] = {}
        self._whole: dict[Path, dict[str, Tensor]] = {}  # of files that cannot be mapped
        self._where: dict[str, tuple[Path, str]] = {}
        for file in self._weight_files():
            for stored in self._open(file):
                name = rename(stored)
                if name is None:
                    continue
                if name in self._where:
                    raise GumihoError(
                        f"{self.kind} '{source}' holds '{name}' twice, in {self._where[name][0].name} and {file.name}"
                    )
                self._where[name] = file, stored

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return document(self.folder / name)
        except FileNotFoundError:
            raise GumihoError(f"{self.kind} '{self.source}' has no {name}: name a folder in the Hugging Face layout") from None

    def _weight_files(self) -> list[Path]:
        for name in WEIGHT_FILES:
            if not (self.folder / name).is_file():
                continue
            if not name.endswith(".index.json"):
                return [self.folder / name]
            index = self._json(name).get("weight_map")
            if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
                raise GumihoError(f"{self.folder / name} has no 'weight_map' of tensor to file: download it again")
            shards = sorted(set(index.values()))
            for shard in shards:
                if not _SHARD.fullmatch(shard):
                    raise GumihoError(
                        f"{self.folder / name} names the shard {shown(shard)}, expected a file of the checkpoint's own folder: "
                        "download it again"
                    )
                if not (self.folder / shard).is_file():
                    raise GumihoError(
                        f"{self.kind} '{self.source}' lacks the shard {shard} that its index names: download it again"
                    )
            return [self.folder / shard for shard in shards]
        kinds = (sorted(p for p in self.folder.glob(f"*.{kind}") if p.is_file()) for kind in ("safetensors", "bin"))
        loose = next(filter(None, kinds), [])
        if not loose:
            raise GumihoError(f"{self.kind} '{self.source}' holds no weights: expected one of {', '.join(WEIGHT_FILES[2:])}")
        return loose

    def _open(self, file: Path) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every tensor in a file, by stored name."""
        if file not in self._files:
            with self._sound(file):
                if file.suffix == ".safetensors":
                    with safe_open(file, framework="pt") as handle:
                        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
                        self._files[file] = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
                else:
                    state = self._load_pickle(file)
                    self._files[file] = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in state.items()}
        return self._files[file]

    @staticmethod
    @contextmanager
    def _sound(file: Path, what: str = "") -> Iterator[None]:
        try:
            yield
        except GumihoError:
            raise
        except Exception as error:  # damage makes the libraries raise whatever comes up
            raise GumihoError(f"{file} is truncated or damaged{what} ({reason(error)}): download it again") from None

    def _load_pickle(self, file: Path) -> dict[str, Tensor]:
        if file in self._whole:
            return self._whole[file]
        try:
            state, mapped = torch.load(file, map_location="cpu", weights_only=True, mmap=True), True
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            # The pre-1.6 container cannot be mapped; it is read whole.
            state, mapped = torch.load(file, map_location="cpu", weights_only=True), False
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise RuntimeError(f"it holds a {type(state).__name__}, expected tensors by name")
        tensors = {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
        for name, value in tensors.items():
            if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
                raise RuntimeError(f"'{name}' is no plain tensor")
        if not mapped:
            self._whole[file] = tensors
        return tensors

    def identity(self) -> list[tuple[str, int, int]]:
        """Path, size and time of change, in nanoseconds, of every file of weights."""
        files = sorted({file.resolve() for file, _ in self._where.values()})
        return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> set[str]:
        return set(self._where)

    def _place(self, name: str) -> tuple[Path, str]:
        try:
            return self._where[name]
        except KeyError:
            raise GumihoError(f"{self.kind} '{self.source}' lacks the tensor '{name}'") from None

    def shape(self, name: str) -> tuple[int, ...]:
        file, stored = self._place(name)
        return self._open(file)[stored][0]

    def dtypes(self) -> set[str]:
        """Of all tensors, as torch names them."""
        found = {self._open(file)[stored][1] for file, stored in self._where.values()}
        return {str(_STORED.get(name, name)).removeprefix("torch.") for name in found}

    def stored(self, name: str) -> Stored | None:
        """Where a tensor lies, None in files that do not say: pickled ones."""
        file, stored = self._place(name)
        if file.suffix != ".safetensors" or (dtype := _STORED.get(self._open(file)[stored][1])) is None:
            return None
        return Stored(file, self._offsets(file)[stored], dtype)

    def _offsets(self, file: Path) -> Mapping[str, int]:
        """Where the tensors of a .safetensors file begin: behind eight bytes that hold the header's length, and the header."""
        if file not in self._begins:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length))
            self._begins[file] = {n: 8 + length + e["data_offsets"][0] for n, e in header.items() if n != "__metadata__"}
        return self._begins[file]

    def check_dtype(self, name: str) -> None:
        """From the file's header alone, so that it is noticed before anything is written."""
        file, stored = self._place(name)
        found = self._open(file)[stored][1]
        if found not in _DTYPES:
            found = _SAFETENSORS_DTYPES.get(found, found)
            raise GumihoError(f"{self.kind} '{self.source}': tensor '{name}' is {found}, expected float16, bfloat16 or float32")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor, in its stored dtype (fp16, bf16 or fp32). Raises GumihoError where they are not finite."""
        file, stored = self._place(name)
        # Opened for every read: what has been read of a mapped file counts as memory until it is closed.
        with self._sound(file, f" at '{name}'"):
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as handle:
                    rows: Tensor = handle.get_slice(stored)[start:stop]
            else:
                rows = self._load_pickle(file)[stored][start:stop].clone()
        if rows.dtype in _STORED.values() and not is_finite(rows):
            raise GumihoError(
                f"{self.kind} '{self.source}': tensor '{name}' holds NaN or infinity, and nothing computed with it would mean "
                "anything: download it again, or train it again"
            )
        return rows

    def require(self, expected: dict[str, tuple[int, ...]], optional: Set[str] = frozenset()) -> None:
        """Every expected tensor is there with its shape, and no other tensor is, but for optional ones."""
        for name, shape in expected.items():
            if name not in self:
                raise GumihoError(f"{self.kind} '{self.source}' lacks the tensor '{name}', expected with shape {list(shape)}")
            if self.shape(name) != shape:
                found = list(self.shape(name))
                raise GumihoError(f"{self.kind} '{self.source}': tensor '{name}' has shape {found}, expected {list(shape)}")
            self.check_dtype(name)
        surplus = sorted(self.names() - set(expected) - optional)
        if surplus:
            raise GumihoError(
                f"{self.kind} '{self.source}' holds the tensor '{surplus[0]}' (and {len(surplus) - 1} more), which no Llama "
                f"{self.kind} of its configuration has: it is another architecture, or its config.json does not belong to it"
            )
