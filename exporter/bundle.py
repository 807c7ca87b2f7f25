"""Writes a bundle: the whole of it, or nothing."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from tqdm import tqdm

from graphs.ops import Contrib, Plain, Standard
from graphs.tree import TreeConfig
from runtime.bundle import MANIFEST, Graph, Manifest, Port, file_hash
from runtime.errors import GumihoError

from . import golden
from .pair import Pair
from .trace import trace
from .weights import ALIGNMENT, Packer, Source

_CHUNK = 128
_BESIDE = 16 << 20  # bytes: graphs, golden run, tokenizer, engines
_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16"}
_TOKENIZER_FILES = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json", "special_tokens_map.json")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Plan:
    """What is to be written: a pair, the tree its draft graph grows, and how many positions the caches hold."""

    pair: Pair
    tree: TreeConfig
    capacity: int
    dtype: torch.dtype = torch.float32

    @property
    def positions(self) -> int:
        """Rows of the rotary tables: the drafter looks a few positions past the cache's end."""
        return self.capacity + self.tree.serial_steps

    def sources(self) -> dict[str, dict[str, Source]]:
        heads = max(0, self.tree.depth - self.tree.serial_steps)
        return {
            "weights/target.bin": self.pair.target_sources(self.positions),
            "weights/draft.bin": self.pair.draft_sources(heads, self.positions),
        }

    def sizes(self) -> dict[str, int]:
        """Bytes of each weight file before equal tensors are found: what the disk must hold at the worst."""
        return {file: sum(_aligned(s.nbytes(self.dtype)) for s in sources.values()) for file, sources in self.sources().items()}

    def disk(self) -> int:
        """Bytes the disk must hold at the worst: weights, and graphs, golden run and engines beside them."""
        return sum(self.sizes().values()) + _BESIDE

    def shared(self) -> int:
        """Bytes of the drafter's file that lie in the target's already (embedding and lm_head, tied ones once)."""
        one = self.sources()["weights/target.bin"]["embed_tokens.weight"].nbytes(self.dtype)
        return _aligned(one) * (1 + self.pair.embedding_shared + self.pair.target_config.tie_word_embeddings)

    def memory(self) -> int:
        """Bytes the export holds at its peak, weights being streamed: torch and one slice, then the golden run's mapped
        weights, which the system may drop again, are counted in full."""
        return 900 * 2**20 + sum(self.sizes().values()) - self.shared()


def dialect_for(backend: str, pair: Pair) -> type[Plain]:
    """The spelling that pays on a backend. ONNX Runtime's GroupQueryAttention rotates head sizes in steps of 16 only."""
    assert backend == "cpu", backend
    sizes = (pair.target_shape.head_dim, pair.draft_shape.head_dim)
    return Standard if any(size % 16 for size in sizes) else Contrib


def eos_token_ids(pair: Pair) -> tuple[int, ...]:
    """All end-of-text ids: generation_config.json's, else config.json's."""
    file = pair.target.folder / "generation_config.json"
    try:
        generation = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise GumihoError(f"{file} cannot be read as JSON ({error}): download it again") from None
    if not isinstance(generation, dict):
        raise GumihoError(f"{file} holds no JSON object: download it again")
    found = generation.get("eos_token_id", pair.target.config.get("eos_token_id"))
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(i, int) for i in ids):
        raise GumihoError(f"{file}: eos_token_id is {found!r}, expected a token id or a list of them")
    return tuple(ids)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def staged(out: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside ``out`` that becomes it when the block ends well, and vanishes when it does not.

    What a killed run left behind is removed by the next one. Raises GumihoError where ``out`` exists and may not go.
    """
    if out.name in ("", ".."):
        raise GumihoError(f"'{out}' has no name of its own to put the bundle under: name another folder with --out")
    if out.exists() and not overwrite:
        raise GumihoError(f"'{out}' exists: name another folder with --out, or replace it with --overwrite")
    if out.exists() and not (out / MANIFEST).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise GumihoError(f"'{out}' is no bundle, so it is not replaced: name another folder with --out")
    partial, old = out.with_name(f".{out.name}.partial"), out.with_name(f".{out.name}.old")
    previous = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, _interrupt)
    except ValueError:
        previous = None  # not in the main thread: the caller's signals are its own
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
            out.rename(old)
        partial.rename(out)
    except OSError as error:
        raise GumihoError(
            f"writing '{out}' failed ({error.strerror or error}): free some space, or name another folder"
        ) from None
    finally:
        if old.exists() and not out.exists():
            old.rename(out)  # stopped between the two renames, now or in a run that was killed
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)


def free_space(folder: Path) -> int:
    """Bytes free on the disk that a folder, which need not exist yet, will lie on."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_space(plan: Plan, out: Path) -> None:
    needed, free = plan.disk(), free_space(out)
    if free < needed:
        raise GumihoError(
            f"the bundle needs {needed / 1e9:.2f} GB and the disk of '{out}' has {free / 1e9:.2f} GB free: "
            "free some space, or name a folder on another disk with --out"
        )


def _ports(values: Any) -> tuple[Port, ...]:
    return tuple(
        Port(v.name, str(v.dtype.numpy()), tuple(d if isinstance(d, int) else str(d.value) for d in v.shape)) for v in values
    )


def write(plan: Plan, backend: str, folder: Path) -> Manifest:
    """Writes every file of a bundle for a backend into an empty folder."""
    pair, sizes, dialect = plan.pair, plan.sizes(), dialect_for(backend, plan.pair)
    modules = pair.modules(plan.tree, plan.capacity, plan.capacity, plan.positions, dialect)
    (folder / "graphs").mkdir()
    with tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, desc="weights", disable=None) as bar:
        packer = Packer(folder, plan.dtype, bar.update)
        places = {file: packer.pack(file, sources) for file, sources in plan.sources().items()}
    locations = {"target": places["weights/target.bin"], "draft": places["weights/draft.bin"]}
    locations["extend"] = locations["draft"]

    graphs = {}
    for name, module in tqdm(modules.items(), unit="graph", desc="graphs", disable=None):
        model = trace(module, locations[name], folder, plan.dtype)
        graphs[name] = Graph(f"graphs/{name}.onnx", _ports(model.graph.inputs), _ports(model.graph.outputs))
        (folder / graphs[name].file).write_bytes(ir.to_proto(model).SerializeToString())

    fresh = pair.modules(plan.tree, plan.capacity, plan.capacity, plan.positions)
    target, draft = (golden.eager(fresh[name], locations[name], folder, plan.dtype) for name in ("target", "draft"))
    np.savez(folder / "golden.npz", **golden.record(*target, *draft))  # type: ignore[arg-type]

    for name in _TOKENIZER_FILES:
        if (pair.target.folder / name).is_file():
            shutil.copyfile(pair.target.folder / name, folder / name)
    if pair.tokenizer is not None:
        pair.tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))

    files = dict(packer.hashes)
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        files.setdefault(str(file.relative_to(folder)), (file.stat().st_size, file_hash(file)))
    manifest = Manifest(
        capacity=plan.capacity,
        rows=plan.tree.rows,
        depth=plan.tree.depth,
        chunk=min(_CHUNK, plan.capacity),
        vocabulary=pair.target_shape.vocabulary,
        hidden=pair.target_shape.hidden,
        dtype=_DTYPE_NAMES[plan.dtype],
        dialect=dialect.__name__.lower(),
        eos_token_ids=eos_token_ids(pair),
        graphs=graphs,
        tree=asdict(plan.tree),
        sources={"target": pair.target.source, "drafter": pair.drafter.source},
        files=files,
    )
    (folder / MANIFEST).write_text(manifest.to_json(), "utf-8")
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    return manifest
