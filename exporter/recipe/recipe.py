"""The recipe of an export: its files, their sizes, trace specs, and the memory and disk that it needs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from graphs.dialects.quantization import EMBEDDING, FP8, INTEGER_CODES, UNQUANTIZED, Scheme, Schemes, first_part
from graphs.tree import TreeConfig
from runtime.errors import InputError

from ..backends.specs import BACKENDS, Codes, TraceSpec, tables, trace_spec
from ..checkpoints.pair import Pair
from ..config import AS_IS, INTEGERS, ExportConfig
from ..weights.joined import joined
from ..weights.packer import ALIGNMENT
from ..weights.quantize import Rounding, carried, quantized, scale_of, signed
from ..weights.scaled import Factors, scaled
from ..weights.source import CODED_BLOCK, Source, is_matrix
from .calibration_text import usual_text

# by bits, the largest of which ONNX Runtime's CPU sums each row alike (docs/decisions.md)
_EXACT_BLOCKS = {4: 32, 8: 64}
_EXACT_HEADS = 128
_OTHER_FILES = 16 << 20  # bytes: graphs, golden run, tokenizer, engines
_BASE_MEMORY = 1200 << 20  # bytes: torch, and slices of weights (docs/benchmarks.md)
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
RECODED = "weights/{}-signed.bin"


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Recipe:
    """Everything that an export is, resolved once from what was asked for and from the checkpoints.

    config: what was asked for, with ``weights`` and ``draft_weights`` as presets and checkpoints decide them. tree: of
    the draft graph; without a drafter a chain, whose rows are the most that a pass verifies. quantized: the scheme of
    the weights of ``target`` and ``draft`` (``int8``, ``int4``, ``w8a8``, ``fp8``, and for the target ``as-is``);
    models without an entry are not quantized. text: token ids of the file to calibrate with. importance: of the columns
    of the target's matrices, by name; see ``quantize``. factors: of the target's parameters, by name, applied before
    quantizing; see ``smoothing``. name: of the drafter, if there are several. further: recipes of the same target with
    the other drafters, by name.
    """

    config: ExportConfig
    pair: Pair
    tree: TreeConfig
    capacity: int
    dtype: torch.dtype
    quantized: Mapping[str, str]
    text: tuple[int, ...] = ()
    importance: Mapping[str, torch.Tensor] = field(default_factory=dict)
    factors: Mapping[str, Factors] = field(default_factory=dict)
    name: str = ""
    further: Mapping[str, "Recipe"] = field(default_factory=dict)

    @property
    def backends(self) -> tuple[str, ...]:
        return self.config.backend

    @property
    def link(self) -> bool:
        """Whether checkpoints' files are hard-linked instead of copying tensors that backends can read directly."""
        return self.config.link_weights

    @property
    def others(self) -> str:
        """The scheme of the matrices that a target ``as-is`` does not hold in codes, ``int8`` or ``none``."""
        return self.config.other_weights or "int8"

    @cached_property
    def calibration(self) -> tuple[int, ...]:
        """The token ids to calibrate with; () for other targets. Without a file the tokenizer is loaded for them, which
        takes seconds."""
        return (self.text or usual_text(self.pair, self.capacity)) if self.calibrates else ()

    @property
    def models(self) -> tuple[str, ...]:
        """The models that have weights."""
        return ("target", "draft") if self.pair.has_drafter else ("target",)

    @property
    def trace_specs(self) -> dict[str, TraceSpec]:
        settings = (self.pair, self.tree, self.capacity, self.dtype, self.quantized.keys(), self.exact)
        return {name: trace_spec(name, *settings) for name in self.backends}

    @property
    def exact(self) -> bool:
        """Whether the CPU gives a row of the target the same bits in passes of any size. It does if all its matrices
        are quantized, in blocks of at most ``_EXACT_BLOCKS``, and its heads have at most
        ``_EXACT_HEADS`` numbers (docs/decisions.md)."""
        if self.pair.target_shape.head_dim > _EXACT_HEADS:
            return False
        schemes = self.schemes(self.codes[0]).get("target", UNQUANTIZED)
        sources = self.pair.target_sources(positions=1).items()
        found = [schemes.of(name, source.shape[-1]) for name, source in sources if is_matrix(name, source)]
        return all(scheme is not None and scheme.block <= _EXACT_BLOCKS[scheme.bits] for scheme in found)

    @property
    def positions(self) -> int:
        """Rows of the rotary tables."""
        return tables(self.trace_specs, self.tree, self.capacity, self.pair.ahead)

    @property
    def codes(self) -> tuple[Codes, ...]:
        """The dtypes in which the backends read codes, those with more unsigned ones first."""
        return tuple(
            sorted({BACKENDS[name].codes for name in self.backends}, key=lambda codes: codes.count(torch.int8))
        )

    @property
    def joined(self) -> bool:
        """Whether quantized matrices that read the same rows are one: if that is so for all backends."""
        return all(BACKENDS[name].joins for name in self.backends)

    @cached_property
    def blocks(self) -> Mapping[int, int]:
        """How many numbers share a scale, by their bits. It is the same for all backends, so that they compute the
        same. The CPU reads larger blocks of 8 bits faster, if all rows consist of them (docs/decisions.md)."""
        block = max(BACKENDS[name].block for name in self.backends)
        if self.backends != ("cpu",):
            return {4: block, 8: block}
        draft = self.pair.draft_sources(1, positions=1) if self.pair.has_drafter else {}
        sources = [*self.pair.target_sources(positions=1).items(), *draft.items()]
        larger = Scheme(_EXACT_BLOCKS[8], torch.uint8, 8)
        fits = all(larger.fits(source.shape[-1]) for name, source in sources if is_matrix(name, source))
        return {4: block, 8: larger.block if fits else block}

    def schemes(self, codes: Codes) -> dict[str, Schemes]:
        """The schemes of the quantized models' matrices."""
        schemes = {
            "fp8": Scheme(0, FP8),
            "w8a8": Scheme(0, torch.int8, 8),
            "w8a8-unsigned": Scheme(0, torch.uint8, 8),
            "int8": Scheme(self.blocks[8], codes.eight, 8),
            "int4": Scheme(self.blocks[4], codes.four),
        }
        found = {name: Schemes(schemes[to], joined=self.joined) for name, to in self.quantized.items() if to != AS_IS}
        if self.quantized.get("target") == AS_IS:
            coded = self.pair.coded().items()
            own = {n: Scheme(CODED_BLOCK, codes.of(held.bits), held.bits, held.zeros) for n, held in coded}
            found["target"] = Schemes(schemes.get(self.others), own, self.joined)
        if self.zeros:
            found["target"] = Schemes(
                replace(schemes["int4"], zeros=True), {"lm_head.weight": schemes["int8"]}, self.joined
            )
        for name in self.models:
            if embedding := self._embedding(name):
                chosen = found.get(name, UNQUANTIZED)
                found[name] = replace(chosen, own={**chosen.own, EMBEDDING: embedding})
        return found

    def _embedding(self, model: str) -> Scheme | None:
        """The scheme of a model's embedding: 8 bits if the target is quantized, which loses a fiftieth of what int8
        does (docs/quality.md), or the codes that the checkpoint holds; None where it is linked, or a backend cannot
        read codes."""
        if "target" not in self.quantized or self.link or self.backends != ("cpu",):
            return None
        if self.quantized["target"] != AS_IS or (model == "draft" and EMBEDDING in self.pair.drafter):
            return Scheme(self.blocks[8], torch.uint8, 8)
        coded = self.pair.target.coded(EMBEDDING)
        return Scheme(CODED_BLOCK, torch.uint8, coded.bits) if coded and not coded.zeros else None

    @property
    def zeros(self) -> bool:
        """Whether the target is int4 with zero points and an lm_head of 8 bits, which halves the loss
        (docs/quality.md)."""
        return self.quantized.get("target") == "int4" and all(BACKENDS[name].zeros for name in self.backends)

    @property
    def calibrates(self) -> bool:
        """Whether the target's numbers depend on a text: its codes, or how its inputs are smoothed, if the CPU rounds
        them to 8 bits and no other backend shares the weights (docs/decisions.md)."""
        return self.zeros or (self.quantized.get("target") in ("int8", *INTEGERS) and self.backends == ("cpu",))

    def how(self, model: str) -> str:
        """How a model's weights are quantized, for messages."""
        to = self.quantized[model]
        if to == AS_IS:
            to += ", " + " and ".join(sorted({f"int{coded.bits}" for coded in self.pair.coded().values()}))
        if to in ("fp8", *INTEGERS):
            return f"{to}, a scale a row"
        block = CODED_BLOCK if self.quantized[model] == AS_IS else self.blocks[int(to.removeprefix("int"))]
        return f"{to}, blocks of {block}" + (
            " with zero points, lm_head int8" if model == "target" and self.zeros else ""
        )

    def _unquantized_sources(self) -> dict[str, dict[str, Source]]:
        """The parameters of the models before quantization."""
        target = scaled(self.pair.target_sources(self.positions), self.factors)
        if not self.pair.has_drafter:
            return {"target": target}
        scheme = self.schemes(self.codes[0]).get("draft", UNQUANTIZED)
        draft = self.pair.draft_sources(self.pair.used_heads(self.tree), self.positions, scheme)
        return {"target": target, "draft": draft}

    def sources(self, apart: bool = False, rounding: Rounding | None = None) -> dict[str, dict[str, Source]]:
        """The parameters by weight file, without the copies of codes in a second dtype. Only linked ones have
        ``stored``. apart: as if no matrices were joined, by their names in checkpoints. rounding: see
        ``quantize.quantized``, of the matrices that a target ``as-is`` does not hold in codes."""
        schemes, files = self.schemes(self.codes[0]), dict[str, dict[str, Source]]()
        for model, parameters in self._unquantized_sources().items():
            chosen, file = schemes.get(model, UNQUANTIZED), files.setdefault(f"weights/{model}.bin", {})
            importance = self.importance if model == "target" else {}
            for name, source in (parameters if apart else joined(parameters, chosen)).items():
                scheme = chosen.of(name, source.shape[-1]) if name == EMBEDDING or is_matrix(name, source) else None
                shares = name == EMBEDDING and (model == "target" or EMBEDDING not in self.pair.drafter)
                as_is = self.quantized.get("target" if shares else model) == AS_IS
                if scheme is None:
                    file[name] = source if self.link and source.linkable(self.dtype) else replace(source, stored=None)
                elif as_is and source.coded:
                    file |= carried(source, name, scheme, self.dtype)
                else:
                    errors = rounding if self.quantized.get(model) == AS_IS else None
                    file |= quantized(source, name, scheme, self.dtype, importance.get(first_part(name)), errors)
        others = {name: own.sources(apart)["weights/draft.bin"] for name, own in self.further.items()}
        return files | {f"weights/draft.{name}.bin": parameters for name, parameters in others.items()}

    def signed(self, model: str, names: Mapping[str, torch.dtype]) -> dict[str, int]:
        """``quantize.signed`` for the other backends than the first. names: dtypes of a model's parameters."""
        return signed(names, [self.schemes(codes)[model] for codes in self.codes[1:]])

    def linked(self) -> int:
        """Bytes that stay in the checkpoints' files."""
        sizes = {s.stored: s.nbytes(self.dtype) for file in self.sources().values() for s in file.values() if s.stored}
        return sum(sizes.values())

    def require_links(self) -> None:
        """Raises InputError if the target has no tensor that --link-weights can link."""
        target = self.pair.target
        if not self.link or any(source.stored for source in self.sources()["weights/target.bin"].values()):
            return
        where, stored = f"target '{target.source}'", ", ".join(sorted(target.dtypes()))
        if all(target.stored(name) is None for name in target.names()):
            raise InputError(
                f"{where} is stored in pickled files, but only .safetensors files can be linked: leave --link-weights "
                "out"
            )
        raise InputError(
            f"{where} is stored in {stored} and the bundle in {DTYPE_NAMES[self.dtype]}, so nothing of it can be "
            "linked: choose the target's dtype with --dtype if the backend supports it, or leave --link-weights out"
        )

    def unquantized(self) -> list[str]:
        """The matrices of quantized models that are not quantized, because their rows are not a multiple of the
        block."""
        schemes, parameters = self.schemes(self.codes[0]), self._unquantized_sources()
        return [
            f"{model} {name}"
            for model, chosen in schemes.items()
            if self.quantized.get(model) != AS_IS
            for name, source in parameters[model].items()
            if is_matrix(name, source) and chosen[name] and chosen.of(name, source.shape[-1]) is None
        ]

    def uncoded(self) -> list[str]:
        """The matrices of a target ``as-is`` that it does not hold in codes that a bundle can keep."""
        if self.quantized.get("target") != AS_IS:
            return []
        coded = self.pair.coded()
        return [n for n, source in self.pair.target_sources(1).items() if is_matrix(n, source) and n not in coded]

    def sizes(self) -> dict[str, int]:
        """Upper bounds of the weight files' sizes in bytes: equal tensors, which are stored once, are counted each
        time."""
        sources, sizes = self.sources(), dict[str, int]()
        for file, parameters in sources.items():
            sizes[file] = sum(_aligned(s.nbytes(self.dtype)) for s in parameters.values() if not s.stored)
        for name in self.quantized:
            own = sources[f"weights/{name}.bin"]
            if again := self.signed(name, {n: s.dtype(self.dtype) for n, s in own.items()}):
                sizes[RECODED.format(name)] = sum(_aligned(own[n].nbytes(self.dtype)) for n in again)
        for drafter, other in self.further.items():
            recodes = other.sizes().get(RECODED.format("draft"), 0)
            sizes |= {RECODED.format(f"draft.{drafter}"): recodes} if recodes else {}
        return sizes

    def fingerprint(self) -> str:
        """Equal for two recipes only if they write the same weight files: parameters, dtypes, and the checkpoints'
        files."""
        parameters = {
            file: [
                (n, source.shape, str(source.dtype(self.dtype)), bool(source.stored)) for n, source in sources.items()
            ]
            for file, sources in self.sources().items()
        }
        drafted = self.pair.draft_vocabulary and [
            self.pair.draft_vocabulary.ids.tolist(),
            self.pair.draft_vocabulary.own_rows,
        ]
        drafter = self.pair.drafter.identity() if self.pair.has_drafter else None
        configs = [self.pair.target_config, *([self.pair.draft_config] if self.pair.has_drafter else [])]
        how = dict(self.quantized), self.others, self.calibration, [dict(config.rope_parameters) for config in configs]
        further = {name: own.fingerprint() for name, own in self.further.items()}
        return json.dumps([parameters, self.blocks, drafted, self.pair.target.identity(), drafter, *how, further])

    def disk(self) -> int:
        """Upper bound of the bytes of disk space: weights, graphs, golden run and engines."""
        return sum(self.sizes().values()) + _OTHER_FILES

    def shared(self) -> int:
        """Bytes of embeddings and lm_heads that equal others, which are stored once; of further drafters none are
        counted."""
        tied, seen, repeated = self.pair.target_config.tie_word_embeddings, set[str](), 0
        files = self.sources()
        table = files["weights/target.bin"][EMBEDDING]
        for file, sources in ((file, files[file]) for file in files if Path(file).stem in self.models):
            trimmed = file == "weights/draft.bin" and (
                self.pair.draft_vocabulary is not None or self.pair.reader.own_head
            )
            heads = set[str]() if trimmed else {"lm_head.weight", "lm_head.scale"}
            for name in ({EMBEDDING, scale_of(EMBEDDING)} | heads) & sources.keys():
                size, content = _aligned(sources[name].nbytes(self.dtype)) * (not sources[name].stored), name
                if name in heads and "lm_head.scale" in sources:
                    codes, smoothed = sources["lm_head.weight"], "lm_head.weight" in self.factors
                    same = tied and not smoothed and (codes.fixed, codes.shape) == (table.fixed, table.shape)
                    quantized = f"{name} quantized {self.quantized[Path(file).stem]} {codes.fixed} {codes.shape}"
                    content = name.replace("lm_head", "embed_tokens") if same else quantized
                    size *= 1 + len(self.signed(Path(file).stem, {name: sources[name].dtype(self.dtype)}))
                elif name == "lm_head.weight" and tied and scale_of(EMBEDDING) not in sources:
                    content = EMBEDDING
                elif name not in heads and file == "weights/draft.bin" and not self.pair.embedding_shared:
                    content = f"{file} {name}"
                repeated += size * (content in seen)
                seen.add(content)
        return repeated

    def memory(self) -> int:
        """Bytes of memory at the export's peak, about. Codes stored input-major are packed a whole matrix at a time."""
        schemes = self.schemes(self.codes[0]).get("target", UNQUANTIZED)
        coded = ((schemes[n], s) for n, s in self.sources()["weights/target.bin"].items() if s.fixed in INTEGER_CODES)
        return _BASE_MEMORY + max(
            (s.nbytes(self.dtype) for scheme, s in coded if scheme and scheme.input_major), default=0
        )
