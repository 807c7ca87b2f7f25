"""Reads and checks a bundle: the manifest's schema, the I/O contract of its graphs, sizes and hashes of its files."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .devices import Array, Device
from .errors import GumihoError

FORMAT = 2
MANIFEST = "gumiho.json"
_SAMPLED = "sample:"
_SAMPLE, _STRIDE = 64 << 10, 16 << 20  # bytes


@dataclass(frozen=True)
class Port:
    """An input or output of a graph. shape: sizes, or the names of symbolic axes."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Graph:
    """A graph of the bundle.

    file: relative to the bundle, as are the weights it names. weights: bytes of those. reads: bytes of weights that a pass reads,
    a matrix that is multiplied twice counted twice and an embedding not at all. precision: of its products, that of its weights, or
    int8 where the rows of a pass are rounded to meet quantized weights.
    """

    file: str
    weights: int
    reads: int
    precision: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def caches(self) -> tuple[Port, ...]:
        """The cache inputs: key and value of every layer in turn, each [1, kv heads, S, d]."""
        return tuple(p for p in self.inputs if p.name.startswith(("past_key.", "past_value.")))

    @property
    def appends(self) -> bool:
        """Whether the graph returns its rows' keys and values alone, instead of writing them into the caches."""
        return bool(self.fresh)

    @property
    def fresh(self) -> tuple[Port, ...]:
        """The rows' own keys and values, [1, kv heads, n, d], in the order of ``caches``, where the graph returns them alone."""
        return tuple(p for p in self.outputs if p.name.startswith(("new_key.", "new_value.")))

    def tree_buffers(self, device: Device) -> dict[str, Array]:
        """A zeroed buffer for each of the draft graph's ``tree_*`` outputs, whose shapes are static."""
        shapes = {p.name: (tuple(int(n) for n in p.shape), p.dtype) for p in self.outputs if p.name.startswith("tree_")}
        return {name: device.zeros(*port, mirrored=True) for name, port in shapes.items()}


@dataclass(frozen=True)
class Form:
    """The bundle's graphs as one backend wants them.

    dialect: how their operators are spelled. chunk: rows of a prefill pass. static: whether every pass of the target has that
    many rows, as of the draft graph all that can be accepted; else any number goes. graphs: ``target``, ``draft`` and
    ``extend``. spares: by dialect, the same graphs spelled for devices and versions that cannot do with the first.
    """

    dialect: str
    chunk: int
    static: bool
    graphs: Mapping[str, Graph]
    spares: Mapping[str, Mapping[str, Graph]]


@dataclass(frozen=True)
class Manifest:
    """What a bundle says of itself (``gumiho.json``).

    capacity: positions a text may take. rows: of the tree, root included. depth: drafted tokens on its longest path. tree: how
    it is grown, and of how many tokens, for the reader. dtype: of caches, hidden rows and logits. weights: how those of ``target``
    and ``draft`` are quantized, for the reader. eos_token_ids: all that end a text. forms: by backend. files: relative path ->
    bytes and sha256, of checkpoints' files that were linked and not packed ``sample_hash``.
    """

    capacity: int
    rows: int
    depth: int
    vocabulary: int
    hidden: int
    dtype: str
    weights: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    forms: Mapping[str, Form]
    tree: Mapping[str, Any]
    sources: Mapping[str, str]
    files: Mapping[str, tuple[int, str]]
    format: int = field(default=FORMAT)

    @property
    def default(self) -> str:
        """The backend that the bundle was exported for first."""
        return next(iter(self.forms))

    def form(self, backend: str) -> Form:
        """Raises GumihoError where the bundle was not exported for the backend."""
        if backend not in self.forms:
            raise GumihoError(
                f"the bundle has graphs for {', '.join(self.forms)} and none for {backend}: "
                f"export it again with `gumiho-export --backend {' '.join(self.forms)} {backend}`"
            )
        return self.forms[backend]

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
            forms = {name: _form(form) for name, form in raw.pop("forms").items()}
            files = {name: (int(size), str(digest)) for name, (size, digest) in raw.pop("files").items()}
            ends = tuple(raw.pop("eos_token_ids"))
            return Manifest(**raw, eos_token_ids=ends, forms=forms, files=files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GumihoError(f"{where} is damaged ({type(error).__name__}: {error}): copy the bundle again") from None


def _form(raw: Any) -> Form:
    spares = {dialect: _graphs(graphs) for dialect, graphs in raw["spares"].items()}
    return Form(raw["dialect"], int(raw["chunk"]), bool(raw["static"]), _graphs(raw["graphs"]), spares)


def _graphs(raw: Any) -> dict[str, Graph]:
    return {name: _graph(graph) for name, graph in raw.items()}


def _graph(raw: Any) -> Graph:
    return Graph(raw["file"], int(raw["weights"]), int(raw["reads"]), raw["precision"], *(tuple(Port(p["name"], p["dtype"], tuple(p["shape"])) for p in raw[k]) for k in ("inputs", "outputs")))  # fmt: skip


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
        """Reads every file, linked ones in samples, and compares its hash. Raises GumihoError at the first that differs."""
        for name, (_, expected) in self.manifest.files.items():
            digest = sample_hash if expected.startswith(_SAMPLED) else file_hash
            if digest(self.path / name) != expected:
                raise GumihoError(
                    f"{self.path / name} is damaged (its hash differs from the manifest's): copy the bundle again"
                )

    @cached_property
    def hash(self) -> str:
        """sha256 of the manifest, which holds the hash of every file."""
        return file_hash(self.path / MANIFEST)

    @property
    def has_tokenizer(self) -> bool:
        return (self.path / "tokenizer.json").is_file()

    @cached_property
    def tokenizer(self) -> Any:
        """The ``tokenizers.Tokenizer``. Raises GumihoError where the bundle has none."""
        from tokenizers import Tokenizer

        file = self.path / "tokenizer.json"
        if not self.has_tokenizer:
            raise GumihoError(f"bundle {self.path} has no tokenizer (its target had none): give token ids instead of text")
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare exceptions
            raise GumihoError(f"{file} is damaged ({error}): copy the bundle again") from None

    def weights(self) -> int:
        """Bytes of all weight files."""
        return sum(size for name, (size, _) in self.manifest.files.items() if name.startswith("weights/"))

    def caches(self, backend: str) -> int:
        """Bytes of the caches of target and drafter, and of the target's rows that the drafter reads later."""
        graphs, manifest = self.manifest.form(backend).graphs, self.manifest
        ports = [*graphs["target"].caches, *graphs["draft"].caches]
        kept = manifest.capacity * manifest.hidden * np.dtype(manifest.dtype).itemsize
        return kept + sum(prod(int(n) for n in port.shape) * np.dtype(port.dtype).itemsize for port in ports)

    def golden(self) -> dict[str, np.ndarray]:
        """The recorded run (``runtime.golden``)."""
        try:
            with np.load(self.path / "golden.npz", allow_pickle=False) as data:
                return dict(data)
        except (OSError, ValueError) as error:
            raise GumihoError(f"{self.path / 'golden.npz'} is damaged ({error}): copy the bundle again") from None


def sample_hash(path: Path) -> str:
    """``sample:`` and the sha256 of 64 KiB out of every 16 MiB, which 140 GB give away in a second or two.

    It tells checkpoints apart and shows what was cut off or copied by half, but not a few bytes that changed.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start in range(0, path.stat().st_size, _STRIDE):
            file.seek(start)
            digest.update(file.read(_SAMPLE))
    return _SAMPLED + digest.hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _slow_hash(file)


def _slow_hash(file: Any) -> str:
    digest = hashlib.sha256()  # Python 3.10 has no file_digest
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
