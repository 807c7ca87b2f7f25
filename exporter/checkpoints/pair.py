"""A target and its drafter: checks that they belong together, and maps checkpoint tensors to graph parameters."""

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphs.dialects.plain import Plain
from graphs.dialects.quantization import EMBEDDING, UNQUANTIZED, Schemes
from graphs.drafter import Drafter
from graphs.layer import LlamaShape
from graphs.shared_target import SharedTarget
from graphs.target import Target
from graphs.tree import TreeConfig
from runtime.errors import DamageError, InputError

from ..weights.source import Coded, Source, is_matrix
from .checkpoint import Checkpoint
from .draft_vocabulary import DraftVocabulary, token_map
from .families import family, require_supported
from .json_config import reason, shown
from .llama import llama_config, llama_shape, rotary_sources
from .tokenizer import damaged, has_tokenizer, load_tokenizer, surely_loads

_SLICE_ELEMENTS = 16 << 20
_NO_SCHEMES: Mapping[str, Schemes] = {}
_OPTIONAL = frozenset(
    ("lm_head.weight", "token_map")
)  # of a drafter; a whole lm_head is a copy of the target's, so it is not read


def tensor_indices(checkpoint: Checkpoint, pattern: str) -> set[tuple[int, ...]]:
    """The numbers at each # of ``pattern``, from all tensor names that begin with the pattern."""
    prefix = re.compile(re.escape(pattern).replace(r"\#", "([0-9]{1,9})"))
    return {tuple(map(int, m.groups())) for name in checkpoint.names() if (m := prefix.match(name))}


def require_tensors(
    checkpoint: Checkpoint, name: str, indices: Set[tuple[int, ...]], expected: Iterable[tuple[int, ...]]
) -> None:
    """Raises DamageError for the first expected index that no tensor has. name: a format string for the tensor's name."""
    missing = next((index for index in expected if index not in indices), None)
    if missing is not None:
        raise DamageError(
            f"{checkpoint.kind} '{checkpoint.source}' lacks the tensor '{name.format(*missing)}': download it again"
        )


class Pair:
    """A target and a drafter that belong together.

    Raises InputError if they do not, and DamageError for checkpoints that lack tensors.
    """

    has_drafter = True

    def __init__(self, target: Checkpoint, drafter: Checkpoint) -> None:
        require_supported(drafter)
        self.target, self.drafter = target, drafter
        self.target_config, self.draft_config = llama_config(target), llama_config(drafter)
        self.target_shape: LlamaShape = llama_shape(self.target_config)
        layers = tensor_indices(drafter, "layers.#.")
        blocks = tensor_indices(drafter, "mlp.#.#.")
        self.heads = 1 + max((h for h, _ in blocks), default=-1)
        self.blocks = max((b for _, b in blocks), default=0)
        self.fc_bias = "fc.bias" in drafter  # the official config.json files say false even if the tensor exists
        shape, attention = llama_shape(self.draft_config), "layers.0.self_attn."
        self.draft_shape: LlamaShape = replace(
            shape, layers=len(layers), vocabulary=self.target_shape.vocabulary,
            # EAGLE's configurations for Qwen2 do not name these biases, which its layers have.
            qkv_bias=shape.qkv_bias or f"{attention}q_proj.bias" in drafter,
            o_bias=shape.o_bias or f"{attention}o_proj.bias" in drafter,
        )  # fmt: skip
        self._check()

    def _check(self) -> None:
        target, drafter = self.target_shape, self.draft_config
        for field, size, expected in (
            ("hidden_size", drafter.hidden_size, target.hidden),
            ("vocab_size", drafter.vocab_size, target.vocabulary),
        ):
            if size != expected:
                raise InputError(
                    f"drafter '{self.drafter.source}' does not belong to target '{self.target.source}': "
                    f"its {field} is {size}, expected {expected}"
                )
        # Checked first, because configurations and tensor names may hold any number and the modules are built from them.
        layer, block = "layers.{}.self_attn.q_proj.weight", "mlp.{}.{}.linear.weight"
        for checkpoint, layers in ((self.target, target.layers), (self.drafter, max(1, self.draft_shape.layers))):
            require_tensors(checkpoint, layer, tensor_indices(checkpoint, "layers.#."), ((i,) for i in range(layers)))
        blocks = ((h, b) for h in range(self.heads) for b in range(self.blocks + 1))
        require_tensors(self.drafter, block, tensor_indices(self.drafter, "mlp.#.#."), blocks)
        self.target.require(self._expected_target)
        self.drafter.require(self._expected_drafter, _OPTIONAL)
        draft, full = self._vocabulary(self.drafter.folder), self._vocabulary(self.target.folder)
        if draft is not None and full is not None and draft != full:
            token = next((t for t in draft if full.get(t) != draft[t]), None) or next(t for t in full if t not in draft)
            raise InputError(
                f"drafter '{self.drafter.source}' does not belong to target '{self.target.source}': its tokenizer gives "
                f"{token!r} the id {draft.get(token)}, expected {full.get(token)}"
            )

    @cached_property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        """The draft vocabulary, by default that of the drafter's ``token_map``; None for all tokens. Can be assigned."""
        if "token_map" not in self.drafter:
            return None
        name, hidden, rows = "lm_head.weight", self.target_shape.hidden, None
        if name in self.drafter:
            shape = self.drafter.shape(name)
            if len(shape) != 2 or shape[1] != hidden:
                raise DamageError(
                    f"drafter '{self.drafter.source}': tensor '{name}' has shape {list(shape)}, expected {hidden} columns: "
                    "download it again"
                )
            rows = shape[0]
            self.drafter.check_dtype(name)
        return token_map(self.drafter.read("token_map"), self.target_shape.vocabulary, rows, self.drafter.source)

    @property
    def family(self) -> str:
        """The drafter's."""
        return family(self.draft_shape.layers, self.heads)

    @property
    def drafted(self) -> int:
        """Size of the draft vocabulary."""
        return len(self.draft_vocabulary.ids) if self.draft_vocabulary else self.target_shape.vocabulary

    def _vocabulary(self, folder: Path) -> dict[str, int] | None:
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except BaseException as error:  # the library raises Exception itself, and BaseException when its Rust code panics
            raise damaged(error, f"{file} is damaged ({reason(error)}): download it again") from None
        self._check_ids(tokenizer, folder)
        return tokenizer.get_vocab()

    def _check_ids(self, tokenizer: Any, folder: Path) -> None:
        # Added tokens are ignored: some targets have one for padding, which no text contains and the runtime refuses.
        too_large = {i: t for t, i in tokenizer.get_vocab(with_added_tokens=False).items() if i >= self.target_shape.vocabulary}
        if too_large:
            raise InputError(
                f"the tokenizer in {folder} gives {shown(too_large[max(too_large)])} the id {max(too_large)}, but target "
                f"'{self.target.source}' has a vocabulary of {self.target_shape.vocabulary}: it belongs to another model"
            )

    @cached_property
    def _expected_target(self) -> dict[str, tuple[int, ...]]:
        with torch.device("meta"):
            module = Target(self.target_shape, capacity=1, positions=1)
        expected = {n: tuple(p.shape) for n, p in module.named_parameters() if not n.startswith("rotary.")}
        # A checkpoint with tied embeddings has no lm_head, or has a copy of the embedding under that name.
        if self.target_config.tie_word_embeddings and "lm_head.weight" not in self.target:
            del expected["lm_head.weight"]
        return expected

    @cached_property
    def _expected_drafter(self) -> dict[str, tuple[int, ...]]:
        with torch.device("meta"):
            module = Drafter(self.draft_shape, 1, 1, None, self.fc_bias)
        h = self.draft_shape.hidden
        expected = {n: tuple(p.shape) for n, p in module.named_parameters() if not n.startswith("rotary.")}
        if EMBEDDING not in self.drafter:
            del expected[EMBEDDING]
        for head in range(self.heads):
            for block in range(self.blocks + 1):
                expected[f"mlp.{head}.{block}.linear.weight"] = (h, h if block else 2 * h)
                expected[f"mlp.{head}.{block}.linear.bias"] = (h,)
        return expected

    @cached_property
    def embedding_shared(self) -> bool:
        """Whether the drafter's embedding is identical to the target's."""
        if EMBEDDING not in self.drafter:
            return True
        slices = (self._tensor(checkpoint, EMBEDDING).slices() for checkpoint in (self.target, self.drafter))
        return all(torch.equal(a.float(), b.float()) for a, b in zip(*slices, strict=True))

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of the target, or None if its folder has neither tokenizer.json nor tokenizer.model."""
        folder = self.target.folder
        if not has_tokenizer(folder):
            return None
        tokenizer = load_tokenizer(folder, self.target_config)
        self._check_ids(tokenizer.backend_tokenizer, folder)
        return tokenizer

    def check_tokenizer(self) -> None:
        """Raises what ``tokenizer`` raises for a damaged or unsuitable one, if possible without importing transformers."""
        if not surely_loads(self.target.folder, self.target_shape.vocabulary):
            _ = self.tokenizer

    def modules(
        self,
        tree: TreeConfig,
        capacity: int,
        positions: int,
        ops: type[Plain] = Plain,
        drafting: type[Plain] | None = None,
        schemes: Mapping[str, Schemes] = _NO_SCHEMES,
    ) -> dict[str, Target | Drafter]:
        """The modules of a bundle's graphs, without weights (on the meta device); without a drafter only ``target`` and ``shared``.

        ops: their dialect; drafting: the drafter's, if it is another. schemes: how the weights of ``target`` and ``draft`` are
        quantized; models without an entry are not.
        """
        draft_ops, of_draft = drafting or ops, schemes.get("draft", UNQUANTIZED)
        trimmed = self.drafted if self.draft_vocabulary else None
        with torch.device("meta"):
            modules: dict[str, Target | Drafter] = {
                name: kind(self.target_shape, capacity, positions, ops, schemes.get("target", UNQUANTIZED))
                for name, kind in (("target", Target), ("shared", SharedTarget))
            }
            if self.has_drafter:
                modules |= {
                    name: Drafter(
                        self.draft_shape, capacity, positions, t, self.fc_bias, self.blocks, draft_ops, of_draft, trimmed
                    )
                    for name, t in (("draft", tree), ("extend", None))
                }
        return {name: module.eval() for name, module in modules.items()}

    def target_sources(self, positions: int) -> dict[str, Source]:
        """The target's parameters, in the order in which they are packed. positions: rows of the rotary tables."""
        sources = {name: self._tensor(self.target, name) for name in self._expected_target}
        if self.target_config.tie_word_embeddings:
            sources["lm_head.weight"] = sources[EMBEDDING]
        return sources | rotary_sources(self.target_config, positions)

    def coded(self) -> dict[str, Coded]:
        """The target's matrices that its checkpoint holds as codes, by parameter name."""
        sources = self.target_sources(positions=1).items()
        return {name: source.coded for name, source in sources if source.coded and is_matrix(name, source)}

    def draft_sources(self, heads: int, positions: int, schemes: Schemes = UNQUANTIZED) -> dict[str, Source]:
        """The drafter's parameters; those that it shares with the target are read from the target.

        heads: how many heads the graph uses; positions: rows of the rotary tables; schemes: how they will be quantized.
        """
        names = [name for name in self._expected_drafter if not name.startswith("mlp.")]
        sources = {name: self._tensor(self.drafter, name) for name in names}
        target = self.target_sources(positions)
        sources.setdefault(EMBEDDING, target[EMBEDDING])
        sources |= self._draft_head(target["lm_head.weight"])
        h = self.draft_shape.hidden
        input_major = schemes.of("heads.weight.0", h) is None
        if heads:
            for block in range(self.blocks + 1):
                weights = [f"mlp.{head}.{block}.linear.weight" for head in range(heads)]
                biases = [f"mlp.{head}.{block}.linear.bias" for head in range(heads)]
                stacked = Source((heads, 1, h), partial(self._stack, biases, transposed=False))
                if block:
                    sources[f"heads.weight.{block - 1}"] = Source(
                        (heads, h, h), partial(self._stack, weights, transposed=input_major)
                    )
                    sources[f"heads.bias.{block - 1}"] = stacked
                else:
                    sources["heads.first.weight"] = Source((heads * h, 2 * h), partial(self._stack, weights, transposed=False))
                    sources["heads.first.bias"] = replace(stacked, shape=(heads * h,))
        return sources | rotary_sources(self.draft_config, positions)

    def _draft_head(self, target_head: Source) -> dict[str, Source]:
        """The drafter's lm_head, and with a draft vocabulary the token ids of its rows."""
        if self.draft_vocabulary is None:
            return {"lm_head.weight": target_head}
        ids, own = self.draft_vocabulary.ids, self.draft_vocabulary.own_rows
        return {
            "token_ids": Source((len(ids),), lambda: iter((ids,)), torch.int64),
            "lm_head.weight": self._tensor(self.drafter, "lm_head.weight") if own else target_head.rows(ids),
        }

    @staticmethod
    def _tensor(checkpoint: Checkpoint, name: str) -> Source:
        shape = checkpoint.shape(name)
        rows = max(1, _SLICE_ELEMENTS // max(1, int(torch.Size(shape[1:]).numel())))

        def slices() -> Iterator[Tensor]:
            for start in range(0, shape[0], rows):
                yield checkpoint.read(name, start, start + rows)

        return Source(shape, slices, stored=checkpoint.stored(name), coded=checkpoint.coded(name))

    def _stack(self, names: list[str], transposed: bool) -> Iterator[Tensor]:
        for name in names:
            tensor = self.drafter.read(name)
            yield tensor.T if transposed else tensor
