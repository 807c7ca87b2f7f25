"""Reads the tensors of a checkpoint, in any layout, by name, a slice at a time.

Tensor names do not depend on the layout: those of a target have no leading ``model.``, those of a drafter are as the
official repository writes them (``fc.weight``, ``layers.0.self_attn.q_proj.weight``, ``mlp.0.0.linear.weight``).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from runtime.errors import DamageError, GumihoError, InputError, UnavailableError, reason, unreadable

from ..weights.source import Coded, Source, Stored, is_finite
from . import pickled
from .hub import WEIGHT_FILES, locate
from .json_config import document, shown

_SLICE_ELEMENTS = 16 << 20
_POINTER = b"version https://git-lfs"
_SMALL = 1 << 24  # bytes up to which a pickled file is read whole, since opening it for every tensor takes longer
_SHARD = re.compile(r"(?!\.)[^/\\\x00]{1,200}\.[A-Za-z]+")
# by their names in safetensors files
_TORCH_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_DTYPES = {*_TORCH_DTYPES, *map(str, _TORCH_DTYPES.values())}
_SAFETENSORS_DTYPES = {"I8": "int8", "U8": "uint8", "F64": "float64", "F8_E4M3": "float8_e4m3fn"}


def _target_name(name: str) -> str | None:
    # Medusa's version 1.0 holds a target and its heads.
    return None if "rotary_emb" in name or name.startswith("medusa_head.") else name.removeprefix("model.")


def _drafter_name(name: str) -> str | None:
    while name.startswith("model."):
        name = name.removeprefix("model.")
    name = re.sub(r"^mlp\.mlp\.", "mlp.", name)
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    name = {"draft_id_to_target_id": "d2t"}.get(name, name)
    return None if "rotary_emb" in name else name


class Checkpoint:
    """A folder of tensors. ``config`` is its config.json; ``notes``, what its user should know, as clauses. Tensors are
    only read by ``read``, never all at once."""

    notes: Sequence[str] = ()
    called: Mapping[str, str] | None = None  # as ``json_config.llama_fields``

    def __init__(self, source: str, kind: str) -> None:
        """source: folder or hub id; kind: "target" or "drafter", which decides how names are normalized.

        Raises InputError if the source cannot be found or has no weights, and DamageError for damaged or incomplete
        files.
        """
        self.source, self.kind = source, kind
        self.folder = locate(source)
        self.config = self._json("config.json")
        rename = _target_name if kind == "target" else _drafter_name
        self._headers: dict[Path, Mapping[str, tuple[tuple[int, ...], str]]] = {}
        self._offsets_of: dict[Path, Mapping[str, int]] = {}
        self._whole: dict[Path, dict[str, Tensor]] = {}  # tensors of pickled files that are small or cannot be mapped
        self._locations: dict[str, tuple[Path, str]] = {}
        for file in self._weight_files():
            for stored in self._open(file):
                name = rename(stored)
                if name is None:
                    continue
                if name in self._locations:
                    files = f"{self._locations[name][0].name} and {file.name}"
                    raise DamageError(
                        f"{self.kind} '{source}' has '{name}' twice, in {files}: remove one, or download it again"
                    )
                self._locations[name] = file, stored

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return document(self.folder / name)
        except FileNotFoundError:
            raise InputError(
                f"{self.kind} '{self.source}' has no {name}: name a folder in the Hugging Face layout"
            ) from None

    def _weight_files(self) -> list[Path]:
        for name in WEIGHT_FILES:
            if not (self.folder / name).is_file():
                continue
            if not name.endswith(".index.json"):
                return [self.folder / name]
            index = self._json(name).get("weight_map")
            if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
                raise DamageError(f"{self.folder / name} has no 'weight_map' from tensors to files: download it again")
            shards = sorted(set(index.values()))
            for shard in shards:
                if not _SHARD.fullmatch(shard):
                    raise DamageError(
                        f"{self.folder / name} lists the shard {shown(shard)}, which is not a file name in the same "
                        "folder: download it again"
                    )
                if not (self.folder / shard).is_file():
                    raise DamageError(
                        f"{self.kind} '{self.source}' lacks the shard {shard}, which its index lists: download it again"
                    )
            return [self.folder / shard for shard in shards]
        by_suffix = (
            sorted(p for p in self.folder.glob(f"*.{suffix}") if p.is_file()) for suffix in ("safetensors", "bin", "pt")
        )
        files = next(filter(None, by_suffix), [])
        if not files:
            raise InputError(
                f"{self.kind} '{self.source}' holds no weights: name a folder with {' or '.join(WEIGHT_FILES[2:])}"
            )
        return files

    def _open(self, file: Path) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every tensor in a file, by the name in the file."""
        if file not in self._headers:
            with self._damage_errors(file):
                with file.open("rb") as opened:  # safetensors says of a file that may not be read that there is none
                    if opened.read(len(_POINTER)) == _POINTER:
                        raise InputError(
                            f"{file} is Git LFS's pointer to the file, not the file itself: run git lfs pull"
                        )
                if file.suffix == ".safetensors":
                    with safe_open(file, framework="pt") as handle:
                        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
                        self._headers[file] = {
                            name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()
                        }
                else:
                    state = self._load_pickle(file)
                    self._headers[file] = {
                        name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in state.items()
                    }
        return self._headers[file]

    @staticmethod
    @contextmanager
    def _damage_errors(file: Path, where: str = "") -> Iterator[None]:
        """Turns what libraries raise for a damaged file into DamageError, and for a missing package into
        UnavailableError."""
        try:
            yield
        except GumihoError:
            raise
        except ImportError as error:
            raise UnavailableError(f"reading {file} needs a package ({reason(error)}): install it") from None
        except PermissionError as error:
            raise unreadable(file, error) from None
        except Exception as error:  # libraries raise exceptions of any type for damaged files
            raise DamageError(f"{file} is truncated or damaged{where} ({reason(error)}): download it again") from None

    def _load_pickle(self, file: Path) -> dict[str, Tensor]:
        if file in self._whole:
            return self._whole[file]
        tensors, mapped = pickled.load(file, file.stat().st_size > _SMALL)
        if not mapped:
            self._whole[file] = tensors
        return tensors

    def identity(self) -> list[tuple[str, int, int]]:
        """Path, size and modification time (nanoseconds) of every weight file."""
        files = sorted({file.resolve() for file, _ in self._locations.values()})
        return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]

    def __contains__(self, name: str) -> bool:
        return name in self._locations

    def names(self) -> set[str]:
        return set(self._locations)

    def _location(self, name: str) -> tuple[Path, str]:
        try:
            return self._locations[name]
        except KeyError:
            raise self.lacking(name) from None

    def lacking(self, name: str, more: str = "") -> InputError:
        """What to raise for a tensor that is not there. more: of what was expected."""
        return InputError(
            f"{self.kind} '{self.source}' lacks the tensor '{name}'{more}, without which it is not supported: name "
            "another checkpoint"
        )

    def shape(self, name: str) -> tuple[int, ...]:
        file, stored = self._location(name)
        return self._open(file)[stored][0]

    def dtype(self, name: str) -> str:
        """The dtype of a tensor, by torch's name without ``torch.``, or what the checkpoint's format calls its
        codes."""
        file, stored = self._location(name)
        dtype = self._open(file)[stored][1]
        return str(_TORCH_DTYPES.get(dtype, dtype)).removeprefix("torch.")

    def dtypes(self) -> set[str]:
        """The dtypes of all tensors."""
        return {self.dtype(name) for name in self.names()}

    def coded(self, name: str) -> Coded | None:
        """The codes of a matrix, without reading them; None if it is not stored as codes that a bundle can keep."""
        return None

    def stored(self, name: str) -> Stored | None:
        """The location of a tensor in its file; None in a pickled file, and for dtypes that are not read."""
        file, stored = self._location(name)
        if file.suffix != ".safetensors" or (dtype := _TORCH_DTYPES.get(self._open(file)[stored][1])) is None:
            return None
        return Stored(file, self._offsets(file)[stored], dtype)

    def _offsets(self, file: Path) -> Mapping[str, int]:
        """Byte offsets of the tensors in a .safetensors file: eight bytes with the header's length, the header, the
        tensors."""
        if file not in self._offsets_of:
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
            self._offsets_of[file] = {
                n: 8 + length + e["data_offsets"][0] for n, e in header.items() if n != "__metadata__"
            }
        return self._offsets_of[file]

    def check_dtype(self, name: str) -> None:
        """Raises InputError unless a tensor is fp16, bf16 or fp32. Reads only the file's header."""
        file, stored = self._location(name)
        dtype = self._open(file)[stored][1]
        if dtype not in _DTYPES:
            dtype = _SAFETENSORS_DTYPES.get(dtype, dtype).removeprefix("torch.")
            raise InputError(
                f"{self.kind} '{self.source}': tensor '{name}' is {dtype}, expected float16, bfloat16 or float32: "
                "convert it, or name the checkpoint it was made from"
            )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor, in its stored dtype: fp16, bf16 or fp32. Raises DamageError for NaN and
        infinity."""
        return self.cut(name, (slice(start, stop),))

    def cut(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """The part of a stored tensor between bounds on each axis, in its stored dtype. Raises DamageError for NaN and
        infinity."""
        file, stored = self._location(name)
        # Opened for every read: pages read from a mapped file count as memory until it is closed.
        with self._damage_errors(file, f" at '{name}'"):
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as handle:
                    rows: Tensor = handle.get_slice(stored)[part]
            else:
                rows = self._load_pickle(file)[stored][part].clone()
        if rows.dtype in _TORCH_DTYPES.values() and not is_finite(rows):
            raise DamageError(
                f"{self.kind} '{self.source}': tensor '{name}' holds NaN or infinity, which makes every output "
                "meaningless: download it again, or train it again"
            )
        return rows

    def source_of(self, name: str) -> Source:
        """A tensor to read when it is packed, a slice at a time."""
        shape = self.shape(name)
        rows = max(1, _SLICE_ELEMENTS // max(1, prod(shape[1:])))

        def slices() -> Iterator[Tensor]:
            for start in range(0, shape[0], rows):
                yield self.read(name, start, start + rows)

        return Source(shape, slices, stored=self.stored(name), coded=self.coded(name))

    def require(self, expected: dict[str, tuple[int, ...]], optional: Set[str] = frozenset()) -> None:
        """Checks that the checkpoint has every expected tensor with its shape, and no others except optional ones.

        Raises DamageError for other shapes, and InputError for missing and surplus tensors and other dtypes.
        """
        for name, shape in expected.items():
            if name not in self:
                raise self.lacking(name, f", expected with shape {list(shape)}")
            if self.shape(name) != shape:
                raise DamageError(
                    f"{self.kind} '{self.source}': tensor '{name}' has shape {list(self.shape(name))}, expected "
                    f"{list(shape)}: download it again"
                )
            self.check_dtype(name)
        surplus = sorted(name for name in self.names() - set(expected) - optional if not self._adds_nothing(name))
        if surplus:
            more = f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""
            raise InputError(
                f"{self.kind} '{self.source}' has the tensor '{surplus[0]}'{more}, which no {self.kind} with its "
                "config.json has, so that it is not supported: name a checkpoint of that architecture, or download it "
                "again"
            )

    def _adds_nothing(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros, as AutoGPTQ and others write it where a model has none."""
        return name.endswith(".bias") and not self.read(name).any()


def tensor_indices(checkpoint: Checkpoint, pattern: str) -> set[tuple[int, ...]]:
    """The numbers at each # of ``pattern``, from all tensor names that begin with the pattern."""
    prefix = re.compile(re.escape(pattern).replace(r"\#", "([0-9]{1,9})"))
    return {tuple(map(int, m.groups())) for name in checkpoint.names() if (m := prefix.match(name))}


def require_tensors(
    checkpoint: Checkpoint, name: str, indices: Set[tuple[int, ...]], expected: Iterable[tuple[int, ...]]
) -> None:
    """Raises InputError for the first expected index that no tensor has. name: a format string for the tensor's
    name."""
    missing = next((index for index in expected if index not in indices), None)
    if missing is not None:
        raise checkpoint.lacking(name.format(*missing))
