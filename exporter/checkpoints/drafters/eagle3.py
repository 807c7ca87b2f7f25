"""EAGLE-3's checkpoints, in the layouts of SafeAILab, SpecForge and SGLang, vLLM, and speculators.

``Checkpoint`` has given their tensors the same names: ``layers.0.`` for SafeAILab's ``midlayer.``, ``d2t`` for vLLM's
``draft_id_to_target_id``. ``t2d``, the inverse map, is used in training only.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from graphs.dialects.plain import Plain
from graphs.dialects.quantization import EMBEDDING, UNQUANTIZED, Schemes
from graphs.drafters.eagle3 import Eagle3
from graphs.features import Features
from graphs.tree import TreeConfig
from runtime.errors import DamageError, InputError

from ..checkpoint import Checkpoint, require_tensors, tensor_indices
from ..draft_vocabulary import DraftVocabulary, token_map
from ..families import EAGLE_3
from ..json_config import is_whole, shown
from .reader import LM_HEAD, Overrides, Reader

_TAP_IDS = "eagle_aux_hidden_state_layer_ids"
_UNSUPPORTED = "norm_output", "norm_before_fc"  # of speculators, EAGLE-3.1


def official_taps(layers: int) -> tuple[int, ...]:
    """The layers whose inputs the official code reads of a target of so many layers."""
    return 2, layers // 2, layers - 3


class Eagle3Reader(Reader):
    """fc_bias: whether ``fc`` has a bias. normed: see ``graphs.drafters.eagle3.WideLayer``."""

    family = EAGLE_3
    optional = frozenset((LM_HEAD, "norm.weight", "d2t", "t2d"))

    def __init__(self, checkpoint: Checkpoint, target: Checkpoint, overrides: Overrides) -> None:
        super().__init__(checkpoint, target, overrides)
        layers = tensor_indices(checkpoint, "layers.#.")
        require_tensors(checkpoint, "layers.{}.self_attn.q_proj.weight", layers, ((i,) for i in range(len(layers))))
        self.require_size("vocab_size", self.config.vocab_size, self.target.vocab_size)
        heads, rows = self.shape.heads, (*checkpoint.shape("layers.0.self_attn.q_proj.weight"), 0)[0]
        if rows and rows % (2 * heads) == 0:  # configurations need not say how long heads are
            self.config = replace(self.config, head_dim=rows // heads)
        self.shape = replace(
            self.shape,
            layers=len(layers),
            head_dim=self.config.head_dim,
            qk_norm="layers.0.self_attn.q_norm.weight" in checkpoint,
        )
        self.fc_bias, fc = "fc.bias" in checkpoint, checkpoint.shape("fc.weight")
        if len(fc) != 2 or fc[1] % self.target.hidden_size or not fc[1]:
            raise InputError(
                f"{self.where}: its fc reads {list(fc)[1:]} numbers, not rows of the target of "
                f"{self.target.hidden_size} each: it belongs to another target"
            )
        # Without a vocabulary of its own it may read its target's lm_head, as it may its embedding.
        self.own_head = LM_HEAD in checkpoint or "d2t" in checkpoint
        if EMBEDDING not in checkpoint or not self.own_head:
            self.require_size("hidden_size", self.config.hidden_size, self.target.hidden_size)
        self.reads = Features(False, self._taps(fc[1] // self.target.hidden_size, self.target.num_hidden_layers))
        self.normed = self._normed()
        for key in _UNSUPPORTED:
            if self._said(key):
                raise InputError(f"{self.where} has {key}, which is not supported: give an EAGLE-3 without it")

    def _said(self, key: str) -> Any:
        """A field of config.json, or of the part that some layouts nest."""
        config: Mapping[str, Any] = self.checkpoint.config
        nested = config.get("eagle_config")
        return config.get(key, nested.get(key) if isinstance(nested, dict) else None)

    def _taps(self, count: int, layers: int) -> tuple[int, ...]:
        """The layers whose inputs ``fc`` reads: those of the options, else config.json's, else those of the official
        code."""
        asked, said = self.overrides.taps, self._said(_TAP_IDS)
        if isinstance(asked, tuple) and asked:
            taps, origin = asked, "--taps are"
        elif not said:
            if asked:
                raise InputError(
                    f"{self.where} does not number its taps, so --taps output says nothing: give their numbers"
                )
            origin = f"{self.where} does not say what it reads, and the official code's taps are"
            taps = official_taps(layers)
        elif not isinstance(said, list) or not all(is_whole(tap, 0, 1 << 16) for tap in said):
            raise InputError(f"{self.where} has {_TAP_IDS} {shown(said)}, expected a list of layers: give --taps")
        else:
            taps, origin = tuple(tap + (asked == "output") for tap in said), f"{self.where} reads layers"
        if len(taps) != count or not all(0 <= tap <= layers for tap in taps):
            raise InputError(
                f"{origin} {', '.join(map(str, taps))}, but its fc reads {count} rows of a target of {layers} layers: "
                f"give --taps with {count} numbers from 0 to {layers}"
            )
        return taps

    def _normed(self) -> bool:
        said, asked = self._said("norm_before_residual"), self.overrides.normed
        if asked is not None:
            return asked
        if said is None and "transformer_layer_config" in self.checkpoint.config:
            raise InputError(
                f"{self.where} does not say norm_before_residual, for which readers have different defaults: "
                "give --norm-before-residual yes or no, whichever accepts more"
            )
        if not isinstance(said, bool | None):
            raise InputError(
                f"{self.where} has norm_before_residual {shown(said)}, expected true or false: correct it, or "
                "give --norm-before-residual"
            )
        return bool(said)

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """See ``Reader``."""
        expected = super()._expected() | {"norm.weight": (self.shape.hidden,)}
        if not self.own_head:
            return expected
        rows = self.checkpoint.shape(LM_HEAD)[:1] if LM_HEAD in self.checkpoint else (self.shape.vocabulary,)
        return expected | {LM_HEAD: (*rows, self.shape.hidden)}

    def vocabulary(self) -> DraftVocabulary | None:
        """That of its ``d2t``, what to add to a drafted token to have the target's."""
        if not self.own_head:
            return None
        rows = self.checkpoint.shape(LM_HEAD)[0]
        if "d2t" not in self.checkpoint:
            self.require_size("lm_head's number of rows without a d2t", rows, self.shape.vocabulary)
            return None
        added = self.checkpoint.read("d2t")
        if added.ndim != 1 or added.dtype not in (torch.int32, torch.int64):
            raise DamageError(
                f"{self.where}: its d2t is {added.dtype} of shape {list(added.shape)}, expected integers: download it "
                "again"
            )
        if len(added) != rows:
            raise DamageError(
                f"{self.where}: its d2t has {len(added)} tokens and its lm_head {rows} rows: download it again"
            )
        order = torch.arange(rows)
        found = token_map(order + added, self.shape.vocabulary, rows, self.checkpoint.source, "d2t")
        return found or (
            DraftVocabulary(order + added, "in the order of the drafter's d2t", own_rows=True) if added.any() else None
        )

    def module(
        self,
        tree: TreeConfig | None,
        capacity: int,
        positions: int,
        ops: type[Plain] = Plain,
        schemes: Schemes = UNQUANTIZED,
        trimmed: int | None = None,
    ) -> Eagle3:
        """See ``Reader``."""
        features = self.reads.width(self.target.hidden_size)
        return Eagle3(self.shape, capacity, positions, tree, features, self.fc_bias, self.normed, ops, schemes, trimmed)
