"""Reads and checks a bundle: the manifest's schema, the I/O contract of its graphs, sizes and hashes of its files."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .errors import GumihoError

FORMAT = 1
MANIFEST = "gumiho.json"


@dataclass(frozen=True)
class Port:
    """An input or output of a graph. shape: sizes, or the names of symbolic axes."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Graph:
    """A graph of the bundle. file: relative to the bundle; weights are named relative to the bundle as well."""

    file: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def caches(self) -> tuple[Port, ...]:
        """The cache inputs: key and value of every layer in turn, each [1, kv heads, S, d]."""
        return tuple(p for p in self.inputs if p.name.startswith(("past_key.", "past_value.")))

    def tree_buffers(self) -> dict[str, np.ndarray]:
        """A zeroed buffer for each of the draft graph's ``tree_*`` outputs, whose shapes are static."""
        return {p.name: np.zeros([int(n) for n in p.shape], p.dtype) for p in self.outputs if p.name.startswith("tree_")}


@dataclass(frozen=True)
class Manifest:
    """What a bundle says of itself (``gumiho.json``).

    capacity: positions the target's cache holds. rows: of the tree, root included. depth: drafted tokens on its longest path.
    chunk: rows of a prefill pass. tree: how it is grown, for the reader. eos_token_ids: all that end a text. files: relative
    path -> bytes and sha256.
    """

    capacity: int
    rows: int
    depth: int
    chunk: int
    vocabulary: int
    hidden: int
    dtype: str
    dialect: str
    eos_token_ids: tuple[int, ...]
    graphs: Mapping[str, Graph]
    tree: Mapping[str, Any]
    sources: Mapping[str, str]
    files: Mapping[str, tuple[int, str]]
    format: int = field(default=FORMAT)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str, where: Path) -> "Manifest":
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                raise GumihoError(
                    f"{where} has bundle format {raw['format']} and this version reads {FORMAT}: "
                    "export it again, or install the version that wrote it"
                )
            graphs = {
                name: Graph(g["file"], *(tuple(Port(p["name"], p["dtype"], tuple(p["shape"])) for p in g[k]) for k in ("inputs", "outputs")))
                for name, g in raw.pop("graphs").items()
            }  # fmt: skip
            files = {name: (int(size), str(digest)) for name, (size, digest) in raw.pop("files").items()}
            return Manifest(**{**raw, "eos_token_ids": tuple(raw["eos_token_ids"])}, graphs=graphs, files=files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GumihoError(f"{where} is damaged ({type(error).__name__}: {error}): copy the bundle again") from None


class Bundle:
    """A bundle on disk. Opening checks the manifest and that every file is there with its size; hashes take ``verify``."""

    def __init__(self, path: str | Path) -> None:
        """Raises GumihoError for what is missing or damaged."""
        self.path = Path(path).expanduser().resolve()
        manifest = self.path / MANIFEST
        if not manifest.is_file():
            raise GumihoError(f"'{path}' is no bundle (it has no {MANIFEST}): make one with gumiho-export")
        try:
            self.manifest = Manifest.from_json(manifest.read_text("utf-8"), manifest)
        except (OSError, UnicodeDecodeError) as error:
            raise GumihoError(f"{manifest} cannot be read ({error}): copy the bundle again") from None
        for name, (size, _) in self.manifest.files.items():
            file = self.path / name
            if not file.is_file():
                raise GumihoError(f"bundle {self.path} lacks its file {name}: copy the bundle again")
            if file.stat().st_size != size:
                raise GumihoError(f"{file} has {file.stat().st_size} bytes, expected {size}: copy the bundle again")

    def verify(self) -> None:
        """Reads every file and compares its hash. Raises GumihoError at the first that differs."""
        for name, (_, expected) in self.manifest.files.items():
            if file_hash(self.path / name) != expected:
                raise GumihoError(
                    f"{self.path / name} is damaged (its hash differs from the manifest's): copy the bundle again"
                )

    @cached_property
    def tokenizer(self) -> Any:
        """The ``tokenizers.Tokenizer``. Raises GumihoError where the bundle has none."""
        from tokenizers import Tokenizer

        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise GumihoError(f"bundle {self.path} has no tokenizer (its target had none): give token ids instead of text")
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare exceptions
            raise GumihoError(f"{file} is damaged ({error}): copy the bundle again") from None

    def golden(self) -> dict[str, np.ndarray]:
        """The recorded run (``runtime.golden``)."""
        try:
            with np.load(self.path / "golden.npz", allow_pickle=False) as data:
                return dict(data)
        except (OSError, ValueError) as error:
            raise GumihoError(f"{self.path / 'golden.npz'} is damaged ({error}): copy the bundle again") from None


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _slow_hash(file)


def _slow_hash(file: Any) -> str:
    digest = hashlib.sha256()  # Python 3.10 has no file_digest
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
