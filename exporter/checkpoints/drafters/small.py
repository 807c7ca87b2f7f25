"""A small model as drafter: any checkpoint that could be a target, with the target's tokens."""

from dataclasses import replace

import torch

from graphs.dialects.plain import Plain
from graphs.dialects.quantization import EMBEDDING, UNQUANTIZED, Schemes
from graphs.drafters.small import Small
from graphs.features import Features
from graphs.tree import TreeConfig

from ...weights.source import Source
from ..checkpoint import Checkpoint, require_tensors, tensor_indices
from ..draft_vocabulary import DraftVocabulary
from ..families import SMALL
from .reader import LM_HEAD, TOKEN_MAP, Overrides, Reader

_NORM = "norm.weight"


class SmallReader(Reader):
    """Vocabularies of one tokenizer are padded to different sizes: tokens that only one of both models has are not
    drafted."""

    family, own_head, ahead = SMALL, True, Small.ahead
    reads = Features(normed=False, digits=True)
    optional = frozenset((LM_HEAD, TOKEN_MAP))

    def __init__(self, checkpoint: Checkpoint, target: Checkpoint, overrides: Overrides) -> None:
        super().__init__(checkpoint, target, overrides)
        self.shape = replace(self.shape, vocabulary=self.config.vocab_size)
        layers = ((i,) for i in range(self.shape.layers))
        require_tensors(
            checkpoint, "layers.{}.self_attn.q_proj.weight", tensor_indices(checkpoint, "layers.#."), layers
        )

    @property
    def _tied(self) -> bool:
        return self.config.tie_word_embeddings and LM_HEAD not in self.checkpoint

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """See ``Reader``."""
        matrix = self.shape.vocabulary, self.shape.hidden
        head = {} if self._tied else {LM_HEAD: matrix}
        return super()._expected() | {EMBEDDING: matrix, _NORM: (self.shape.hidden,)} | head

    def lm_heads(self, target: Source, count: int) -> dict[str, Source]:
        """See ``Reader``."""
        return {LM_HEAD: self.checkpoint.source_of(EMBEDDING if self._tied else LM_HEAD)}

    def vocabulary(self) -> DraftVocabulary | None:
        """See ``Reader``. Without one the tokens that both models have; None if those are all that both have."""
        own, targets = self.shape.vocabulary, self.target.vocab_size
        if own == targets:
            return super().vocabulary()
        return DraftVocabulary(torch.arange(min(own, targets)), "those that target and drafter have")

    def module(
        self,
        tree: TreeConfig | None,
        capacity: int,
        positions: int,
        ops: type[Plain] = Plain,
        schemes: Schemes = UNQUANTIZED,
        trimmed: int | None = None,
    ) -> Small:
        """See ``Reader``."""
        return Small(self.shape, capacity, positions, tree, ops, schemes, trimmed)
