"""A target and its drafter: checks that they belong together, and maps checkpoint tensors to graph parameters."""

from collections.abc import Iterable, Mapping
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from graphs.dialects.plain import Plain
from graphs.dialects.quantization import EMBEDDING, UNQUANTIZED, Schemes
from graphs.drafter import Drafter
from graphs.features import Features
from graphs.layer import LlamaShape
from graphs.shared_target import SharedTarget
from graphs.target import Target
from graphs.tree import TreeConfig
from runtime.decoding.text.template_files import special_tokens
from runtime.errors import InputError

from ..weights.source import Coded, Source, is_matrix
from .checkpoint import Checkpoint, require_tensors, tensor_indices
from .draft_vocabulary import DraftVocabulary
from .drafters import Overrides, reader_of
from .drafters.reader import LM_HEAD
from .json_config import document, end_ids, shown
from .llama import LlamaConfig, llama_config, llama_shape, rotary_sources
from .tokenizer import damaged, has_tokenizer, load_tokenizer, surely_loads

_NO_SCHEMES: Mapping[str, Schemes] = {}
_AS_IT_SAYS = Overrides()


class Pair:
    """A target and a drafter that belong together.

    Raises InputError if they do not, or lack tensors.
    """

    has_drafter = True

    def __init__(self, target: Checkpoint, drafter: Checkpoint, overrides: Overrides = _AS_IT_SAYS) -> None:
        self.target, self.drafter = target, drafter
        self.target_config = llama_config(target)
        self.target_shape: LlamaShape = llama_shape(self.target_config)
        self.reader = reader_of(drafter, target, overrides)
        self._check()

    @cached_property
    def returns(self) -> Features:
        """What the target's rows hold: what this drafter reads, unless ``returning`` says more."""
        return self.reader.reads

    def returning(self, returns: Features) -> "Pair":
        """The same pair with rows of the target that hold ``returns``, because other drafters read them too."""
        return self._with(returns=returns)

    def drafting(self, vocabulary: DraftVocabulary | None) -> "Pair":
        """The same pair with another draft vocabulary."""
        return self._with(draft_vocabulary=vocabulary)

    def _with(self, **values: object) -> "Pair":
        changed = copy(self)
        vars(changed).update(values)  # in place of what the cached properties found
        return changed

    @property
    def stateful(self) -> bool:
        """Whether the drafter has layers, and with them caches and a graph that extends them."""
        return self.draft_shape.layers > 0

    @property
    def ahead(self) -> int:
        """See ``Drafter``."""
        return self.reader.ahead

    @property
    def features(self) -> int:
        """Numbers of a row of the target's output ``hidden``."""
        return self.returns.width(self.target_shape.hidden)

    @property
    def family(self) -> str:
        """The drafter's."""
        return self.reader.family

    @property
    def heads(self) -> int:
        """The drafter's parallel heads."""
        return self.reader.heads

    def used_heads(self, tree: TreeConfig) -> int:
        """How many of the drafter's heads draft the levels of a tree; those of Hydra are serial."""
        return tree.depth if self.reader.levels else max(0, tree.depth - tree.serial_steps)

    @property
    def draft_shape(self) -> LlamaShape:
        """That of the drafter's layers."""
        return self.reader.shape

    @property
    def draft_config(self) -> LlamaConfig:
        """That of the drafter's layers."""
        return self.reader.config

    def _check(self) -> None:
        # Checked first, because configurations may hold any number and the modules are built from them.
        layers = ((i,) for i in range(self.target_shape.layers))
        require_tensors(
            self.target, "layers.{}.self_attn.q_proj.weight", tensor_indices(self.target, "layers.#."), layers
        )
        self.target.require(self._expected_target)
        self.drafter.require(self.reader.expected, self.reader.optional)
        own, full = self._tokenizer_in(self.drafter.folder), self._tokens
        draft = own and own.get_vocab()
        if draft is not None and full is not None and draft != full:
            token = next((t for t in draft if full.get(t) != draft[t]), None) or next(t for t in full if t not in draft)
            raise InputError(
                f"drafter '{self.drafter.source}' does not belong to target '{self.target.source}': its tokenizer "
                f"gives {token!r} the id {draft.get(token)}, expected {full.get(token)}"
            )

    @cached_property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        """The draft vocabulary: the one that the drafter comes with, unless ``drafting`` says another; None for all
        tokens."""
        return self.reader.vocabulary()

    @property
    def drafted(self) -> int:
        """Size of the draft vocabulary."""
        return len(self.draft_vocabulary.ids) if self.draft_vocabulary else self.target_shape.vocabulary

    @cached_property
    def _file(self) -> Any:
        """The ``tokenizers.Tokenizer`` in the target's tokenizer.json; None without one."""
        return self._tokenizer_in(self.target.folder)

    @cached_property
    def _tokens(self) -> dict[str, int] | None:
        """Ids by token in the target's tokenizer.json; None without one."""
        return self._file and self._file.get_vocab()

    def _tokenizer_in(self, folder: Path) -> Any:
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            tokenizer = Tokenizer.from_str(file.read_text("utf-8"))
        # the library raises Exception itself, and BaseException when its Rust code panics
        except BaseException as error:
            raise damaged(error, f"{file} is damaged") from None
        self._check_ids(tokenizer, folder)
        return tokenizer

    def _check_ids(self, tokenizer: Any, folder: Path) -> None:
        # Some targets have a token for padding without a row, which no text holds; the runtime refuses it by name.
        most = self.target_shape.vocabulary
        too_large = {i: t for t, i in tokenizer.get_vocab().items() if i >= most and "pad" not in t.lower()}
        if not too_large:
            return
        largest = max(too_large)
        where = (
            f"the tokenizer in {folder} gives {shown(too_large[largest])} the id {largest}, but target "
            f"'{self.target.source}' has"
        )
        if largest in tokenizer.get_added_tokens_decoder():
            raise InputError(
                f"{where} a vocabulary of {most}: remove the token from the tokenizer's files, or give the checkpoint "
                "that knows it"
            )
        raise InputError(f"{where} a vocabulary of {most}: it belongs to another model")

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
    def embedding_shared(self) -> bool:
        """Whether the drafter's embedding is identical to the target's."""
        if EMBEDDING not in self.drafter:
            return True
        if self.target.shape(EMBEDDING) != self.drafter.shape(EMBEDDING):
            return False
        slices = (checkpoint.source_of(EMBEDDING).slices() for checkpoint in (self.target, self.drafter))
        return all(torch.equal(a.float(), b.float()) for a, b in zip(*slices, strict=True))

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of the target, or None if its folder has no file of one."""
        folder = self.target.folder
        if not has_tokenizer(folder):
            return None
        tokenizer = load_tokenizer(folder, self.target_config)
        self._check_ids(tokenizer.backend_tokenizer, folder)
        return tokenizer

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All end-of-text ids of the target: generation_config.json's, else config.json's, and the tokenizer's own."""
        file, vocabulary = self.target.folder / "generation_config.json", self.target_shape.vocabulary
        generation = document(file) if file.exists() else {}
        if "eos_token_id" not in generation:
            generation, file = self.target.config, self.target.folder / "config.json"
        named, own = end_ids(generation.get("eos_token_id"), vocabulary, file), self._own_end()
        return named if own is None or own >= vocabulary else tuple(dict.fromkeys((*named, own)))

    def _own_end(self) -> int | None:
        """The token that the tokenizer itself calls the end of a text, if possible without importing transformers."""
        folder = self.target.folder
        if "tokenizer" not in self.__dict__ and surely_loads(folder, self.target_shape.vocabulary):
            text = document(folder / "tokenizer_config.json").get("eos_token")
            return None if text is None else (self._tokens or {}).get(text)
        found: int | None = self.tokenizer.eos_token_id if self.tokenizer else None
        return found

    @property
    def special_tokens(self) -> tuple[Any, Mapping[str, str]]:
        """The target's ``tokenizers.Tokenizer`` and its special tokens by name, if possible without importing
        transformers; None without a tokenizer."""
        if "tokenizer" not in self.__dict__ and surely_loads(self.target.folder, self.target_shape.vocabulary):
            found = special_tokens(self.target.folder)
            self._file.add_special_tokens(list(found.values()))  # as transformers does; they are in the vocabulary
            return self._file, found
        if self.tokenizer is None:
            return None, {}
        named = self.tokenizer.special_tokens_map.items()
        return self.tokenizer.backend_tokenizer, {name: token for name, token in named if isinstance(token, str)}

    def spelled(self, ids: Iterable[int]) -> list[str]:
        """Tokens as messages name them."""
        vocabulary = self.tokenizer.get_vocab() if self.__dict__.get("tokenizer") else self._tokens or {}
        texts = {i: text for text, i in vocabulary.items()}
        return [f"{shown(texts[i])} ({i})" if i in texts else str(i) for i in ids]

    def check_tokenizer(self) -> None:
        """Raises what ``tokenizer`` raises for a damaged or unsuitable one, if possible without importing
        transformers."""
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
        """The modules of a bundle's graphs, without weights (on the meta device); without a drafter only ``target`` and
        ``shared``.

        ops: their dialect; drafting: the drafter's, if it is another. schemes: how the weights of ``target`` and
        ``draft`` are quantized; models without an entry are not.
        """
        of_target, of_draft = (schemes.get(name, UNQUANTIZED) for name in ("target", "draft"))
        draft_ops = drafting or ops
        trimmed = self.drafted if self.draft_vocabulary else None
        with torch.device("meta"):
            modules: dict[str, Target | Drafter] = {
                name: kind(self.target_shape, capacity, positions, ops, of_target, self.returns)
                for name, kind in (("target", Target), ("shared", SharedTarget))
            }
            if self.has_drafter:
                for name, t in (("draft", tree), ("extend", None)):
                    modules[name] = drafter = self.reader.module(t, capacity, positions, draft_ops, of_draft, trimmed)
                    drafter.columns = self.returns.columns(self.reader.reads, self.target_shape.hidden)
                    drafter.width = self.features
        return {name: module.eval() for name, module in modules.items()}

    def target_sources(self, positions: int) -> dict[str, Source]:
        """The target's parameters, in the order in which they are packed. positions: rows of the rotary tables."""
        sources = {name: self.target.source_of(name) for name in self._expected_target}
        if self.target_config.tie_word_embeddings:
            sources["lm_head.weight"] = sources[EMBEDDING]
        return sources | rotary_sources(self.target_config, positions)

    def coded(self) -> dict[str, Coded]:
        """The target's matrices that its checkpoint holds as codes, by parameter name."""
        sources = self.target_sources(positions=1).items()
        return {name: source.coded for name, source in sources if source.coded and is_matrix(name, source)}

    def draft_sources(self, heads: int, positions: int, schemes: Schemes = UNQUANTIZED) -> dict[str, Source]:
        """The drafter's parameters; those that it shares with the target are read from the target.

        heads: how many the graph uses (``used_heads``); positions: rows of the rotary tables; schemes: how they will be
        quantized.
        """
        target = self.target_sources(positions)
        sources = {EMBEDDING: target[EMBEDDING]} if self.reader.embeds else {}
        sources |= {**self.reader.sources(heads, schemes), **self._draft_heads(target["lm_head.weight"], heads)}
        return sources | (rotary_sources(self.draft_config, positions) if self.stateful else {})

    def _draft_heads(self, target_head: Source, count: int) -> dict[str, Source]:
        """The drafter's lm_heads, and with a draft vocabulary the token ids of their rows."""
        heads, drafted = self.reader.lm_heads(target_head, count), self.draft_vocabulary
        if drafted is None:
            return heads
        if drafted.own_rows and self.reader.one_head:
            heads = {LM_HEAD: self.drafter.source_of(LM_HEAD)}
        elif not drafted.own_rows:
            heads = {name: source.rows(drafted.ids) for name, source in heads.items()}
        return heads | {"token_ids": Source((len(drafted.ids),), lambda: iter((drafted.ids,)), torch.int64)}
