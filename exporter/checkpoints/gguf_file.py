"""A GGUF file, or several of one model, as a target checkpoint: llama.cpp's tensors and metadata under the names of a
Hugging Face folder.

Tensors are read a slice at a time and dequantized by the ``gguf`` package. The configuration, the tokenizer and the
chat template come from the file's metadata and are written to a temporary folder, which the rest of the export reads
like any other checkpoint's.
"""

import json
import re
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from runtime.errors import DamageError, InputError, UnavailableError

from ..weights.source import Coded, Part, Stored, is_finite
from . import gguf_codes, gguf_config, gguf_metadata
from .architectures import ARCHITECTURES
from .checkpoint import Checkpoint
from .gguf_tokenizer import write_tokenizer
from .hub import locate_file
from .json_config import is_whole, shown

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

SUFFIX = ".gguf"
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(\.gguf)", re.IGNORECASE)
_MOST_PARTS = 1000
_SLICE_ELEMENTS = 1 << 22
_ROW = 1 << 14
_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_ARCHITECTURES = tuple(name for name in ARCHITECTURES if name != "mistral")  # which GGUF files call llama
_NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROTARY_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Table:
    """A tensor's place in a file. shape: rows first, as in torch. row_bytes: bytes of one row. heads: of q and k rows,
    whose order llama.cpp permutes; 0 for other tensors."""

    file: Path
    offset: int
    kind: "GGMLQuantizationType"
    shape: tuple[int, ...]
    row_bytes: int
    heads: int = 0

    @staticmethod
    def of(tensor: gguf_metadata.Tensor, file: Path) -> "_Table":
        rows = tensor.shape[0] if tensor.shape else 1
        return _Table(file, tensor.offset, tensor.kind, tensor.shape, tensor.size // max(1, rows))


def _parts(file: Path) -> list[Path]:
    """All files of the model that a file, named as llama.cpp names parts, is a part of; else the file alone."""
    if (match := _PART.fullmatch(file.name)) is None:
        return [file]
    name, _, count, suffix = match.groups()
    return [
        file.with_name(f"{name}-{i:05}-of-{count}{suffix}") for i in range(1, min(int(count), _MOST_PARTS) + 1)
    ] or [file]


def gguf_file(source: str) -> Path | None:
    """The GGUF file that a source names: itself, the only one of a folder without a config.json, or a file of a hub
    model; None if there is none. Of a model in several parts any one.

    Raises InputError for a file that does not exist or a folder with several models, and as ``hub.locate_file``.
    """
    try:
        path = Path(source).expanduser()
        if path.suffix.lower() == SUFFIX:
            if path.is_file():
                return path
            if (
                source.count("/") >= 2
                and not source.startswith((".", "/", "~"))
                and not Path(source.partition("/")[0]).exists()
            ):
                *_, found = (locate_file(f"{source.rpartition('/')[0]}/{part.name}") for part in _parts(path))
                return found
            if not path.exists():
                raise InputError(f"there is no file '{source}': check --ckpt and --target")
        elif path.is_file() and gguf_metadata.is_gguf(path):
            return path
        if not path.is_dir() or (path / "config.json").exists():
            return None
        files = sorted({_parts(file)[0] for file in path.iterdir() if file.suffix.lower() == SUFFIX})
    except (OSError, RuntimeError, ValueError):  # not the name of a file or folder, which ``locate`` reports
        return None
    if len(files) > 1:
        lacking = next((part.name for file in files for part in _parts(file) if not part.is_file()), None)
        more = f", or give the part '{lacking}' of one its name again" if lacking else ""
        raise InputError(f"'{source}' holds {len(files)} models in GGUF files: name one, such as '{files[0]}'{more}")
    return files[0] if files else None


class GgufCheckpoint(Checkpoint):
    """A target in a GGUF file, of architecture ``llama`` (Llama and Mistral), ``qwen2`` or ``qwen3``."""

    def __init__(self, source: str, file: Path) -> None:
        """Raises DamageError for a damaged file, InputError for an unsupported architecture or tensor type, and
        UnavailableError without the ``gguf`` package."""
        try:
            import gguf  # noqa: F401
        except ImportError:
            raise UnavailableError("reading GGUF files needs the package gguf: pip install 'gguf>=0.17'") from None
        self.source, self.kind, self.files = source, "target", _parts(file)
        fields, tables = self._read()
        architecture = fields.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise InputError(
                f"'{source}' has architecture {shown(architecture)}, but Gumiho supports only "
                f"{', '.join(map(repr, _ARCHITECTURES))}: name another target"
            )
        odd = next((table.kind.name for table in tables.values() if table.kind.name not in _TYPES), None)
        if odd:
            raise InputError(
                f"'{source}' holds tensors of type {odd}, which is not supported: give one of {', '.join(_TYPES)}"
            )
        with self._damage_errors(self.files[0], " in its metadata"):
            self.called = {field: f"{architecture}.{key}" for field, key in gguf_config.KEYS.items()}
            self.config = gguf_config.config(architecture, fields, tables.keys(), self._factors(tables), source)
        permuted = self._permuted if architecture == "llama" else lambda _, table: table
        self._tables = {
            _name(name, source): permuted(name, table) for name, table in tables.items() if name != _ROTARY_FACTORS
        }
        folder = tempfile.TemporaryDirectory(prefix="gguf-")
        self.folder = Path(folder.name)
        weakref.finalize(self, folder.cleanup)
        (self.folder / "config.json").write_text(json.dumps(self.config), "utf-8")
        with self._damage_errors(self.files[0], " in its tokenizer"):
            try:
                self.notes = write_tokenizer(fields, self.folder)
            except (InputError, DamageError) as error:
                raise type(error)(f"'{source}': {error}") from None

    def _read(self) -> tuple[dict[str, Any], dict[str, _Table]]:
        """The metadata of the first part, and the tensors of all."""
        tables, metadata = dict[str, _Table](), dict[str, Any]()
        for i, file in enumerate(self.files):
            if not file.is_file():
                raise InputError(
                    f"'{self.source}' lacks the part '{file.name}' of a model in {len(self.files)} files: put all of "
                    "them into one folder, under the names that they had"
                )
            with self._damage_errors(file):
                fields, tensors = gguf_metadata.metadata(file)
            number, count = fields.get("split.no", 0), fields.get("split.count") or 1
            if (number, count) != (i, len(self.files)):
                raise InputError(
                    f"'{file}' says that it is part {shown(number)} (from 0) of {shown(count)}, and has another name: "
                    "name parts as llama.cpp does, NAME-00001-of-00003.gguf"
                )
            metadata = metadata or fields
            tables |= {tensor.name: _Table.of(tensor, file) for tensor in tensors}
        if len(tables) != (count := metadata.get("split.tensors.count", len(tables))):
            raise DamageError(f"'{self.source}' has {len(tables)} tensors and says {count}: download it again")
        return metadata, tables

    def _permuted(self, name: str, table: _Table) -> _Table:
        keys = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        key = keys.get(name.split(".")[2] if name.startswith("blk.") else "")
        if key is None:
            return table
        heads = self.config[key]
        if not is_whole(heads, 1, 1 << 16):
            return table  # ``json_config`` refuses it
        if not table.shape or table.shape[0] % (2 * heads):
            raise DamageError(
                f"'{self.source}' has {heads} heads and shape {list(table.shape)} of '{name}': download it again"
            )
        return replace(table, heads=heads)

    def _factors(self, tables: Mapping[str, _Table]) -> np.ndarray | None:
        if _ROTARY_FACTORS not in tables:
            return None
        table = tables[_ROTARY_FACTORS]
        if table.kind.name != "F32" or len(table.shape) != 1:
            raise InputError(
                f"'{self.source}' has '{_ROTARY_FACTORS}' in {table.kind.name} and shape {list(table.shape)}, expected "
                "one row in F32: convert the model again"
            )
        return np.fromfile(table.file, np.float32, table.shape[0], offset=table.offset)

    def identity(self) -> list[tuple[str, int, int]]:
        return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in self.files]

    def __contains__(self, name: str) -> bool:
        return name in self._tables

    def names(self) -> set[str]:
        return set(self._tables)

    def _table(self, name: str) -> _Table:
        if name not in self._tables:
            raise InputError(
                f"{self.kind} '{self.source}' lacks the tensor '{name}', which is not supported: name another file"
            )
        return self._tables[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._table(name).shape

    def dtype(self, name: str) -> str:
        return self._table(name).kind.name

    def stored(self, name: str) -> Stored | None:
        table = self._table(name)
        dtype = _NUMBERS.get(table.kind.name)
        return None if dtype is None or table.heads else Stored(table.file, table.offset, dtype)

    def check_dtype(self, name: str) -> None:
        """Every type was checked when the file was opened."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor: fp16 and bf16 as stored, other types dequantized to fp32."""
        from gguf import dequantize

        table, raw = self._table(name), self._rows(name, start, stop)
        shape = len(raw), *table.shape[1:]
        if dtype := _NUMBERS.get(table.kind.name):
            return self._finite(name, torch.from_numpy(raw).view(dtype).reshape(shape))
        if not len(raw):
            return torch.empty(shape)
        with self._damage_errors(table.file, f" at '{name}'"), np.errstate(all="ignore"):  # such numbers are refused
            # The library takes sixteen rows at a time: short ones are joined to rows of about _ROW numbers, which takes
            # half the time.
            joined = gcd(len(raw), 1 << max(1, _ROW // table.shape[-1]).bit_length() - 1)
            values = torch.from_numpy(dequantize(raw.reshape(len(raw) // joined, -1), table.kind).reshape(shape))
        return self._finite(name, values)

    def coded(self, name: str) -> Coded | None:
        """Blocks of Q8_0 and Q4_0 are ours in another order; those of other types are none that a bundle has."""
        table = self._table(name)
        bits = gguf_codes.BITS.get(table.kind.name)
        if bits is None or len(table.shape) != 2:
            return None
        rows = max(1, _SLICE_ELEMENTS // table.shape[1])

        def parts() -> Iterator[Part]:
            for start in range(0, table.shape[0], rows):
                codes, scale = gguf_codes.parts(self._rows(name, start, start + rows), bits)
                yield codes, self._finite(name, scale), None

        return Coded(bits, False, torch.float16, parts)

    def _rows(self, name: str, start: int, stop: int | None) -> np.ndarray:
        """The bytes of rows [start, stop) in the order of a Hugging Face checkpoint: uint8 [rows, bytes of a row]."""
        table = self._table(name)
        rows = table.shape[0]
        start = min(start, rows)
        stop = max(start, min(rows if stop is None else stop, rows))
        # Whole heads, since llama.cpp permutes the rows within each.
        size = rows // table.heads if table.heads else 1
        first, last = start // size * size, -(-stop // size) * size
        with self._damage_errors(table.file, f" at '{name}'"), table.file.open("rb") as opened:
            opened.seek(table.offset + first * table.row_bytes)
            raw = np.fromfile(opened, np.uint8, (last - first) * table.row_bytes).reshape(last - first, table.row_bytes)
        if table.heads:
            raw = raw.reshape(-1, size // 2, 2, table.row_bytes).swapaxes(1, 2).reshape(last - first, table.row_bytes)
        return np.ascontiguousarray(raw[start - first : stop - first])

    def _finite(self, name: str, values: Tensor) -> Tensor:
        if not is_finite(values):
            raise DamageError(f"{self.kind} '{self.source}': tensor '{name}' holds NaN or infinity: download it again")
        return values


def _name(stored: str, source: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d{1,6})\.)?([a-z_]+)\.(weight|bias)", stored)
    if match is None or match[2] not in _NAMES:
        raise InputError(
            f"'{source}' holds the tensor {shown(stored)}, which no supported model has: name another target"
        )
    return f"{f'layers.{match[1]}.' if match[1] else ''}{_NAMES[match[2]]}.{match[3]}"
