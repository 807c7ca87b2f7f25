"""What an export is going to write: files, sizes, trace specs and the memory it takes, before anything is written."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from graphs.dialects.quantization import FP8, Scheme
from graphs.tree import TreeConfig
from runtime.errors import GumihoError

from .backends.specs import BACKENDS, TraceSpec, tables, trace_spec
from .checkpoints.json_config import document, end_ids
from .checkpoints.pair import Pair
from .weights.packer import ALIGNMENT
from .weights.quantize import quantized
from .weights.source import Source

_BESIDE = 16 << 20  # bytes: graphs, golden run, tokenizer, engines
_HELD = 1200 << 20  # bytes: torch, and slices of weights (docs/benchmarks.md)
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
RECODED = "weights/{}-signed.bin"


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _is_matrix(name: str, source: Source) -> bool:
    """Whether a parameter is multiplied with, and may be quantized."""
    return len(source.shape) > 1 and "weight" in name and name != "embed_tokens.weight"


@dataclass(frozen=True)
class Plan:
    """What is to be written: a pair, the tree its draft graph grows, the positions a text may take, and for which backends.

    quantized: whose weights are, of ``target`` and ``draft``, and to what: ``int8``, ``int4``, ``w8a8`` or ``fp8``. link: leave what can be
    left in the checkpoints' own files.
    """

    pair: Pair
    tree: TreeConfig
    capacity: int
    dtype: torch.dtype = torch.float32
    backends: tuple[str, ...] = ("cpu",)
    quantized: Mapping[str, str] = field(default_factory=dict)
    link: bool = False

    @property
    def trace_specs(self) -> dict[str, TraceSpec]:
        wanted = (self.pair, self.tree, self.capacity, self.quantized.keys(), self.exact)
        return {name: trace_spec(name, *wanted) for name in self.backends}

    @property
    def exact(self) -> bool:
        """Whether the CPU adds up each row of the target's products alike: all are of codes, in blocks of up to 32 where these are of
        4 bits, and 64 of 8 (docs/decisions.md)."""
        how = self.schemes(self.codes[0]).get("target")
        if how is None or how.block > {4: 32, 8: 64}[how.bits]:
            return False
        sources = self.pair.target_sources(positions=1).items()
        return all(how.fits(source.shape[-1]) for name, source in sources if _is_matrix(name, source))

    @property
    def positions(self) -> int:
        """Rows of the rotary tables."""
        return tables(self.trace_specs, self.tree, self.capacity)

    @property
    def codes(self) -> tuple[torch.dtype, ...]:
        """How the backends want codes of 4 and 8 bits kept: one way, or both."""
        return tuple(c for c in (torch.uint8, torch.int8) if any(BACKENDS[name].codes == c for name in self.backends))

    @property
    def block(self) -> int:
        """Numbers of 4 or 8 bits that share a scale, the same for all backends, so that they compute the same."""
        return max(BACKENDS[name].block for name in self.backends)

    def schemes(self, codes: torch.dtype) -> dict[str, Scheme]:
        """codes: how those of 4 and 8 bits are kept."""
        known = {
            "fp8": Scheme(0, FP8),
            "w8a8": Scheme(0, torch.int8, 8),
            "int8": Scheme(self.block, codes, 8),
            "int4": Scheme(self.block, codes),
        }
        return {name: known[to] for name, to in self.quantized.items()}

    def how(self, model: str) -> str:
        """How a model's weights are quantized, for the reader."""
        to, block = self.quantized[model], self.schemes(self.codes[0])[model].block
        return f"{to}, blocks of {block}" if block else f"{to}, a scale a row"

    def _numbers(self) -> dict[str, dict[str, Source]]:
        """What the models are made of, before any of it is quantized."""
        heads, schemes = max(0, self.tree.depth - self.tree.serial_steps), self.schemes(self.codes[0])
        draft = self.pair.draft_sources(heads, self.positions, schemes.get("draft"))
        return {"target": self.pair.target_sources(self.positions), "draft": draft}

    def sources(self) -> dict[str, dict[str, Source]]:
        """What is packed, by file, but for codes that are kept a second way. Of what is linked, and of nothing else, it says where it
        is stored.
        """
        schemes, made = self.schemes(self.codes[0]), dict[str, dict[str, Source]]()
        for model, numbers in self._numbers().items():
            how, own = schemes.get(model), made.setdefault(f"weights/{model}.bin", {})
            for name, source in numbers.items():
                whole = how is not None and _is_matrix(name, source) and how.fits(source.shape[-1])
                own |= quantized(source, name, how, self.dtype) if how and whole else {name: self._left(source)}
        return made

    def _left(self, source: Source) -> Source:
        return source if self.link and source.linkable(self.dtype) else replace(source, stored=None)

    def linked(self) -> int:
        """Bytes that stay in the checkpoints' files."""
        places = {s.stored: s.nbytes(self.dtype) for own in self.sources().values() for s in own.values() if s.stored}
        return sum(places.values())

    def require_links(self) -> None:
        """Raises GumihoError where links are wanted and nothing of the target can be linked, saying why."""
        target = self.pair.target
        if not self.link or any(source.stored for source in self.sources()["weights/target.bin"].values()):
            return
        where, kept = f"target '{target.source}'", ", ".join(sorted(target.dtypes()))
        if all(target.stored(name) is None for name in target.names()):
            raise GumihoError(
                f"{where} is kept in pickled files, and only .safetensors can be linked: leave --link-weights out"
            )
        raise GumihoError(
            f"{where} is kept in {kept} and the bundle in {DTYPE_NAMES[self.dtype]}, so nothing of it can be linked: "
            "choose the target's own with --dtype where the backend computes in it, or leave --link-weights out"
        )

    def kept(self) -> list[str]:
        """Names of the matrices that are not quantized though the others of their model are: their rows are no whole blocks."""
        schemes, numbers = self.schemes(self.codes[0]), self._numbers()
        return [
            f"{model} {name}"
            for model, how in schemes.items()
            for name, source in numbers[model].items()
            if _is_matrix(name, source) and not how.fits(source.shape[-1])
        ]

    def sizes(self) -> dict[str, int]:
        """Bytes of each weight file before equal tensors are found: what the disk must hold at the worst."""
        sources, sizes = self.sources(), dict[str, int]()
        for file, own in sources.items():
            sizes[file] = sum(_aligned(s.nbytes(self.dtype)) for s in own.values() if not s.stored)
        for name in self.quantized if len(self.codes) > 1 else ():
            codes = (s for s in sources[f"weights/{name}.bin"].values() if s.fixed == self.codes[0])
            sizes[RECODED.format(name)] = sum(_aligned(s.nbytes(self.dtype)) for s in codes)
        return sizes

    def same(self) -> str:
        """What decides the content of the weight files: parameters, how they are kept, and the checkpoints' files."""
        kept = {
            file: [(n, source.shape, str(source.dtype(self.dtype)), bool(source.stored)) for n, source in own.items()]
            for file, own in self.sources().items()
        }
        drafted = self.pair.draft_vocabulary and [self.pair.draft_vocabulary.ids.tolist(), self.pair.draft_vocabulary.own_rows]
        return json.dumps([kept, self.block, drafted, self.pair.target.identity(), self.pair.drafter.identity()])

    def disk(self) -> int:
        """Bytes the disk must hold at the worst: weights, and graphs, golden run and engines beside them."""
        return sum(self.sizes().values()) + _BESIDE

    def shared(self) -> int:
        """Bytes that are the same in another place, and stored once: of embeddings, and of lm_head however it is kept."""
        tied, met, again = self.pair.target_config.tie_word_embeddings, set[str](), 0
        for file, sources in self.sources().items():
            trimmed = file == "weights/draft.bin" and self.pair.draft_vocabulary is not None
            heads = set[str]() if trimmed else {"lm_head.weight", "lm_head.scale"}
            for name in ({"embed_tokens.weight"} | heads) & sources.keys():
                size, content = _aligned(sources[name].nbytes(self.dtype)) * (not sources[name].stored), name
                if name != "embed_tokens.weight" and "lm_head.scale" in sources:
                    codes = sources["lm_head.weight"]
                    content = f"{name} of codes {codes.fixed} {codes.shape}"
                    size *= len(self.codes) if name == "lm_head.weight" else 1
                elif name == "lm_head.weight" and tied:
                    content = "embed_tokens.weight"
                elif name == "embed_tokens.weight" and file == "weights/draft.bin" and not self.pair.embedding_shared:
                    content = file
                again += size * (content in met)
                met.add(content)
        return again

    def memory(self) -> int:
        """Bytes the export holds at its peak, about: torch and slices, and of codes that are kept input-major a matrix."""
        how = self.schemes(self.codes[0]).get("target")
        if how is None or not how.input_major:
            return _HELD
        codes = (s.nbytes(self.dtype) for s in self.sources()["weights/target.bin"].values() if s.fixed == how.codes)
        return _HELD + max(codes, default=0)


def eos_token_ids(pair: Pair) -> tuple[int, ...]:
    """All end-of-text ids: generation_config.json's, else config.json's."""
    file, vocabulary = pair.target.folder / "generation_config.json", pair.target_shape.vocabulary
    generation = document(file) if file.exists() else {}
    if "eos_token_id" in generation:
        return end_ids(generation["eos_token_id"], vocabulary, file)
    return end_ids(pair.target.config.get("eos_token_id"), vocabulary, pair.target.folder / "config.json")


def free_space(folder: Path) -> int:
    """Bytes free on the disk that a folder, which need not exist yet, will lie on."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_space(needed: int, out: Path) -> None:
    free = free_space(out)
    if free < needed:
        raise GumihoError(
            f"the export needs {needed / 1e9:.2f} GB and the disk of '{out}' has {free / 1e9:.2f} GB free: "
            "free some space, or name a folder on another disk with --out"
        )
