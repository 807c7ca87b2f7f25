"""What the readers of all families have in common."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from graphs.dialects.plain import Plain
from graphs.dialects.quantization import EMBEDDING, UNQUANTIZED, Schemes
from graphs.drafter import Drafter
from graphs.features import NORMED
from graphs.layer import LlamaShape
from graphs.tree import TreeConfig
from runtime.errors import InputError

from ...weights.source import Source
from ..checkpoint import Checkpoint
from ..draft_vocabulary import DraftVocabulary, token_map
from ..llama import llama_config, llama_shape

LM_HEAD, TOKEN_MAP = "lm_head.weight", "token_map"


@dataclass(frozen=True)
class Overrides:
    """What the options of an export say about a drafter against its config.json, or because that does not say it.

    taps: see ``graphs.features.Features``, or "output" if the checkpoint's own numbers are of layers whose output is
    meant. rope_theta: base of the drafter's rotary embedding. normed: ``norm_before_residual``. family: against what
    its tensors tell.
    """

    taps: tuple[int, ...] | str = ()
    rope_theta: float | None = None
    normed: bool | None = None
    family: str | None = None


class Reader(ABC):
    """A drafter's checkpoint. Raises InputError if it does not belong to the target or lacks tensors.

    family: its name. config: of its layers. shape: of its layers, with the target's vocabulary. heads: parallel ones.
    reads: of the target's rows. levels: serial ones, at most, if that is fixed. ahead: see ``Drafter``. embeds: whether
    it reads tokens. target: the target's configuration. own_head: whether its ``lm_head`` is its own, instead of the
    target's. one_head: whether it has one, and not one for each level. optional: tensors that it may have. where: its
    name, for messages.
    """

    family: str
    heads = 0
    levels: int | None = None
    embeds = True
    reads = NORMED
    ahead = 0
    own_head, one_head = False, True
    optional: frozenset[str]

    def __init__(self, checkpoint: Checkpoint, target: Checkpoint, overrides: Overrides) -> None:
        self.checkpoint, self.target, self.overrides = checkpoint, llama_config(target), overrides
        self.where, self._target = f"drafter '{checkpoint.source}'", f"target '{target.source}'"
        layers = self._layers()
        config = llama_config(checkpoint) if layers is None else self.target
        if overrides.rope_theta is not None:
            config = replace(config, rope_parameters={**config.rope_parameters, "rope_theta": overrides.rope_theta})
        self.config = config
        shape, attention = llama_shape(config), "layers.0.self_attn."
        # EAGLE's configurations for Qwen2 do not name these biases, which its layers have.
        self.shape: LlamaShape = replace(
            shape,
            vocabulary=self.target.vocab_size,
            layers=shape.layers if layers is None else layers,
            qkv_bias=shape.qkv_bias or f"{attention}q_proj.bias" in checkpoint,
            o_bias=shape.o_bias or f"{attention}o_proj.bias" in checkpoint,
        )

    def _layers(self) -> int | None:
        """How many it has that are as the target's, None if it has a configuration of its own."""
        return None

    def require_size(self, field: str, size: int, expected: int) -> None:
        """Raises InputError if a size differs from the target's."""
        if size != expected:
            raise InputError(
                f"{self.where} does not belong to {self._target}: its {field} is {size}, expected {expected}"
            )

    def require_heads(self, wanted: Iterable[str], stored: Mapping[str, str], heads: int) -> None:
        """Raises InputError if a parameter of its heads has no tensor, or the first one has another width than the
        target. wanted: parameters; stored: tensors by parameter."""
        names = list(wanted)
        if missing := next((name for name in names if name not in stored), None):
            raise InputError(
                f"{self.where} lacks what would be '{missing}' of its {heads} heads, without which it is not "
                "supported: name another"
            )
        self.require_size("hidden size", (*self.checkpoint.shape(stored[names[0]]), 0)[0], self.shape.hidden)

    @cached_property
    def expected(self) -> dict[str, tuple[int, ...]]:
        """The tensors that the checkpoint must have, with their shapes."""
        return self._expected()

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """Those of the graph ``extend``."""
        with torch.device("meta"):
            module: nn.Module = self.module(None, 1, 1)
        expected = {n: tuple(p.shape) for n, p in module.named_parameters() if not n.startswith("rotary.")}
        if EMBEDDING not in self.checkpoint:
            expected.pop(EMBEDDING, None)
        return expected

    def lm_heads(self, target: Source, count: int) -> dict[str, Source]:
        """Its parameters with a row for each token that it knows. target: the target's lm_head; count: of heads, if
        each has its own."""
        return {LM_HEAD: self.checkpoint.source_of(LM_HEAD) if self.own_head else target}

    def all_targets(self, names: Iterable[str], target: Checkpoint) -> bool:
        """Whether these lm_heads all equal the target's, as at the beginning of a training that leaves them as they
        are."""
        if LM_HEAD not in target:
            return False
        theirs = target.shape(LM_HEAD)

        def equal(name: str) -> bool:
            slices = (source.source_of(own).slices() for source, own in ((self.checkpoint, name), (target, LM_HEAD)))
            return self.checkpoint.shape(name) == theirs and all(
                torch.equal(a.float(), b.float()) for a, b in zip(*slices, strict=True)
            )

        return all(equal(name) for name in names)

    def vocabulary(self) -> DraftVocabulary | None:
        """The draft vocabulary that the checkpoint comes with, its ``token_map``; None for all tokens."""
        if TOKEN_MAP not in self.checkpoint:
            return None
        return token_map(self.checkpoint.read(TOKEN_MAP), self.shape.vocabulary, self._rows(), self.checkpoint.source)

    def _rows(self) -> int | None:
        """Of its own lm_head, None if it has none."""
        return None

    @abstractmethod
    def module(
        self,
        tree: TreeConfig | None,
        capacity: int,
        positions: int,
        ops: type[Plain] = Plain,
        schemes: Schemes = UNQUANTIZED,
        trimmed: int | None = None,
    ) -> Drafter:
        """The drafter's graph; see ``Drafter``."""

    def sources(self, heads: int, schemes: Schemes) -> Mapping[str, Source]:
        """Its parameters but the rotary tables, ``lm_head`` and an embedding that it has not. heads: how many the graph
        uses; schemes: how they will be quantized."""
        return {name: self.checkpoint.source_of(name) for name in self.expected if name != LM_HEAD}
