"""A target and its drafter: do they fit, and which checkpoint tensors make up which graph parameter."""

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from graphs.dialects.plain import Plain
from graphs.dialects.quantization import Scheme
from graphs.drafter import Drafter
from graphs.layer import LlamaShape
from graphs.target import Target
from graphs.tree import TreeConfig
from runtime.errors import GumihoError

from ..weights.source import Source
from .checkpoint import Checkpoint
from .draft_vocabulary import DraftVocabulary, token_map
from .json_config import reason, shown
from .llama import llama_config, llama_shape, rotary_tables

_SLICE_ELEMENTS = 16 << 20
_NUMBERS: Mapping[str, Scheme] = {}
_OPTIONAL = frozenset(("lm_head.weight", "token_map"))  # of a drafter; a whole lm_head is the target's own, so no copy is read


def _numbers(checkpoint: Checkpoint, pattern: str) -> set[tuple[int, ...]]:
    """The numbers in the names of a checkpoint's tensors that begin with a pattern, in which # is a number."""
    spelled = re.compile(re.escape(pattern).replace(r"\#", "([0-9]{1,9})"))
    return {tuple(map(int, m.groups())) for name in checkpoint.names() if (m := spelled.match(name))}


def _require(checkpoint: Checkpoint, name: str, found: Set[tuple[int, ...]], expected: Iterable[tuple[int, ...]]) -> None:
    """Raises GumihoError for the first of the expected numbers that no tensor has."""
    missing = next((numbers for numbers in expected if numbers not in found), None)
    if missing is not None:
        raise GumihoError(f"{checkpoint.kind} '{checkpoint.source}' lacks the tensor '{name.format(*missing)}'")


def _damaged(error: BaseException, sentence: str) -> BaseException:
    """What to raise for a library's error: the sentence, unless it is an interruption."""
    return error if isinstance(error, KeyboardInterrupt | SystemExit) else GumihoError(sentence)


class Pair:
    """A target and a drafter that belong together; ``GumihoError`` says how they do not."""

    def __init__(self, target: Checkpoint, drafter: Checkpoint) -> None:
        self.target, self.drafter = target, drafter
        self.target_config, self.draft_config = llama_config(target), llama_config(drafter)
        self.target_shape: LlamaShape = llama_shape(self.target_config)
        layers = _numbers(drafter, "layers.#.")
        blocks = _numbers(drafter, "mlp.#.#.")
        self.heads = 1 + max((h for h, _ in blocks), default=-1)
        self.blocks = max((b for _, b in blocks), default=0)
        self.fc_bias = "fc.bias" in drafter  # the official JSONs say false where the tensor is there
        self.draft_shape: LlamaShape = replace(
            llama_shape(self.draft_config), layers=len(layers), vocabulary=self.target_shape.vocabulary
        )
        self._check()

    def _check(self) -> None:
        target, drafter = self.target_shape, self.draft_config
        for what, size, expected in (
            ("hidden_size", drafter.hidden_size, target.hidden),
            ("vocab_size", drafter.vocab_size, target.vocabulary),
        ):
            if size != expected:
                raise GumihoError(
                    f"drafter '{self.drafter.source}' does not belong to target '{self.target.source}': "
                    f"its {what} is {size}, expected {expected}"
                )
        if not self.draft_shape.layers:
            raise GumihoError(f"drafter '{self.drafter.source}' lacks the tensor 'layers.0.self_attn.q_proj.weight'")
        # Before anything is made of these numbers: a configuration, and a name, may hold any.
        found, wanted = _numbers(self.target, "layers.#."), ((i,) for i in range(target.layers))
        _require(self.target, "layers.{}.self_attn.q_proj.weight", found, wanted)
        found, wanted = _numbers(self.drafter, "layers.#."), ((i,) for i in range(self.draft_shape.layers))
        _require(self.drafter, "layers.{}.self_attn.q_proj.weight", found, wanted)
        found, each = _numbers(self.drafter, "mlp.#.#."), range(self.blocks + 1)
        _require(self.drafter, "mlp.{}.{}.linear.weight", found, ((h, b) for h in range(self.heads) for b in each))
        self.target.require(self._expected_target())
        self.drafter.require(self._expected_drafter(), _OPTIONAL)
        theirs, ours = self._vocabulary(self.drafter.folder), self._vocabulary(self.target.folder)
        if theirs is not None and ours is not None and theirs != ours:
            token = next((t for t in theirs if ours.get(t) != theirs[t]), None) or next(t for t in ours if t not in theirs)
            raise GumihoError(
                f"drafter '{self.drafter.source}' does not belong to target '{self.target.source}': its tokenizer gives "
                f"{token!r} the id {theirs.get(token)}, expected {ours.get(token)}"
            )

    @cached_property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        """What the drafter may draft, None for all tokens: what its ``token_map`` says, unless something else is assigned."""
        if "token_map" not in self.drafter:
            return None
        name, hidden, rows = "lm_head.weight", self.target_shape.hidden, None
        if name in self.drafter:
            shape = self.drafter.shape(name)
            if len(shape) != 2 or shape[1] != hidden:
                raise GumihoError(
                    f"drafter '{self.drafter.source}': tensor '{name}' has shape {list(shape)}, expected {hidden} columns"
                )
            rows = shape[0]
            self.drafter.check_dtype(name)
        return token_map(self.drafter.read("token_map"), self.target_shape.vocabulary, rows, self.drafter.source)

    @property
    def drafted(self) -> int:
        """How many tokens the drafter may draft."""
        return len(self.draft_vocabulary.ids) if self.draft_vocabulary else self.target_shape.vocabulary

    def _vocabulary(self, folder: Path) -> dict[str, int] | None:
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except (
            BaseException
        ) as error:  # the library raises bare exceptions, and for what its authors did not foresee BaseException
            raise _damaged(error, f"{file} is damaged ({reason(error)}): download it again") from None
        self._check_ids(tokenizer, folder)
        return tokenizer.get_vocab()

    def _check_ids(self, tokenizer: Any, folder: Path) -> None:
        # Added tokens are left out: some targets have one for padding, which no text holds and the runtime refuses.
        beyond = {i: t for t, i in tokenizer.get_vocab(with_added_tokens=False).items() if i >= self.target_shape.vocabulary}
        if beyond:
            raise GumihoError(
                f"the tokenizer in {folder} gives {shown(beyond[max(beyond)])} the id {max(beyond)}, and target "
                f"'{self.target.source}' has a vocabulary of {self.target_shape.vocabulary}: it belongs to another model"
            )

    def _expected_target(self) -> dict[str, tuple[int, ...]]:
        with torch.device("meta"):
            module = Target(self.target_shape, capacity=1, positions=1)
        expected = {n: tuple(p.shape) for n, p in module.named_parameters() if not n.startswith("rotary.")}
        # A tied checkpoint has no lm_head of its own, or a copy of the embedding under its name.
        if self.target_config.tie_word_embeddings and "lm_head.weight" not in self.target:
            del expected["lm_head.weight"]
        return expected

    def _expected_drafter(self) -> dict[str, tuple[int, ...]]:
        with torch.device("meta"):
            module = Drafter(self.draft_shape, 1, 1, None, self.fc_bias)
        h = self.draft_shape.hidden
        expected = {n: tuple(p.shape) for n, p in module.named_parameters() if not n.startswith("rotary.")}
        if "embed_tokens.weight" not in self.drafter:
            del expected["embed_tokens.weight"]
        for head in range(self.heads):
            for block in range(self.blocks + 1):
                expected[f"mlp.{head}.{block}.linear.weight"] = (h, h if block else 2 * h)
                expected[f"mlp.{head}.{block}.linear.bias"] = (h,)
        return expected

    @cached_property
    def embedding_shared(self) -> bool:
        """Whether the drafter's embedding is the target's, number by number."""
        name = "embed_tokens.weight"
        if name not in self.drafter:
            return True
        ours, theirs = (self._tensor(c, name).slices() for c in (self.target, self.drafter))
        return all(torch.equal(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True))

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of the target, or None where its folder has none. Needs tokenizer.json or tokenizer.model."""
        folder = self.target.folder
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            return None
        try:
            # With a configuration, so that config.json is not read again, and without code of the checkpoint's.
            found = AutoTokenizer.from_pretrained(
                folder, config=self.target_config, use_fast=True, trust_remote_code=False, local_files_only=True
            )
        except BaseException as error:  # a missing converter, a damaged file: the library raises whatever comes up
            raise _damaged(error, f"the tokenizer in {folder} cannot be loaded: {reason(error)}") from None
        self._check_ids(found.backend_tokenizer, folder)
        return found

    def modules(
        self,
        tree: TreeConfig,
        capacity: int,
        positions: int,
        ops: type[Plain] = Plain,
        drafting: type[Plain] | None = None,
        schemes: Mapping[str, Scheme] = _NUMBERS,
    ) -> dict[str, Target | Drafter]:
        """The graphs of a bundle, without weights (on the meta device).

        ops: their dialect; drafting: the drafter's, where it is another. schemes: how the weights of ``target`` and ``draft`` are
        quantized, where they are.
        """
        own, scheme = drafting or ops, schemes.get("draft")
        trimmed = self.drafted if self.draft_vocabulary else None
        with torch.device("meta"):
            grown, cut = (
                Drafter(self.draft_shape, capacity, positions, t, self.fc_bias, self.blocks, own, scheme, trimmed)
                for t in (tree, None)
            )
            return {
                "target": Target(self.target_shape, capacity, positions, ops, schemes.get("target")).eval(),
                "draft": grown.eval(),
                "extend": cut.eval(),
            }

    def target_sources(self, positions: int) -> dict[str, Source]:
        """The target's parameters, in the order they are packed."""
        sources = {name: self._tensor(self.target, name) for name in self._expected_target()}
        if self.target_config.tie_word_embeddings:
            sources["lm_head.weight"] = sources["embed_tokens.weight"]
        return sources | self._rotary(self.target_config, positions)

    def draft_sources(self, heads: int, positions: int, scheme: Scheme | None = None) -> dict[str, Source]:
        """The drafter's parameters; what it shares with the target is read from there. scheme: how they will be quantized."""
        names = [name for name in self._expected_drafter() if not name.startswith("mlp.")]
        sources = {name: self._tensor(self.drafter, name) for name in names}
        target = self.target_sources(positions)
        sources.setdefault("embed_tokens.weight", target["embed_tokens.weight"])
        sources |= self._draft_head(target["lm_head.weight"])
        h = self.draft_shape.hidden
        input_major = scheme is None or not scheme.fits(h)
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
        return sources | self._rotary(self.draft_config, positions)

    def _draft_head(self, whole: Source) -> dict[str, Source]:
        """The drafter's lm_head, and which tokens its rows stand for where they are not all. whole: the target's lm_head."""
        if self.draft_vocabulary is None:
            return {"lm_head.weight": whole}
        ids = self.draft_vocabulary.ids

        def rows() -> Iterator[Tensor]:
            start = 0
            for part in whole.slices():
                inside = ids[(ids >= start) & (ids < start + len(part))] - start
                start += len(part)
                if len(inside):
                    yield part[inside]

        trimmed = Source((len(ids), whole.shape[1]), rows)
        return {
            "token_ids": Source((len(ids),), lambda: iter((ids,)), torch.int64),
            "lm_head.weight": self._tensor(self.drafter, "lm_head.weight") if self.draft_vocabulary.own_rows else trimmed,
        }

    @staticmethod
    def _tensor(checkpoint: Checkpoint, name: str) -> Source:
        shape = checkpoint.shape(name)
        rows = max(1, _SLICE_ELEMENTS // max(1, int(torch.Size(shape[1:]).numel())))

        def slices() -> Iterator[Tensor]:
            for start in range(0, shape[0], rows):
                yield checkpoint.read(name, start, start + rows)

        return Source(shape, slices, stored=checkpoint.stored(name))

    def _stack(self, names: list[str], transposed: bool) -> Iterator[Tensor]:
        for name in names:
            tensor = self.drafter.read(name)
            yield tensor.T if transposed else tensor

    @staticmethod
    def _rotary(config: Any, positions: int) -> dict[str, Source]:
        cos, sin = rotary_tables(config, positions)
        return {
            "rotary.cos": Source(tuple(cos.shape), lambda: iter((cos,)), torch.float32),
            "rotary.sin": Source(tuple(sin.shape), lambda: iter((sin,)), torch.float32),
        }
