"""A target that is exported without a drafter."""

from collections.abc import Mapping

import torch

from graphs.dialects.plain import Plain
from graphs.dialects.quantization import UNQUANTIZED, Schemes
from graphs.drafter import Drafter
from graphs.target import Target
from graphs.tree import TreeConfig

from .checkpoint import Checkpoint
from .llama import llama_config, llama_shape
from .pair import _NO_SCHEMES, Pair, _require, _tensor_indices


class LoneTarget(Pair):
    """The target's half of a pair: it has none of the attributes about a drafter.

    Raises InputError and DamageError for a checkpoint of another architecture, or that lacks tensors.
    """

    has_drafter = False
    draft_vocabulary = None

    def __init__(self, target: Checkpoint) -> None:
        self.target, self.target_config = target, llama_config(target)
        self.target_shape = llama_shape(self.target_config)
        self._check()

    def _check(self) -> None:
        layers = ((i,) for i in range(self.target_shape.layers))
        _require(self.target, "layers.{}.self_attn.q_proj.weight", _tensor_indices(self.target, "layers.#."), layers)
        self.target.require(self._expected_target)
        self._vocabulary(self.target.folder)

    def modules(
        self,
        tree: TreeConfig,
        capacity: int,
        positions: int,
        ops: type[Plain] = Plain,
        drafting: type[Plain] | None = None,
        schemes: Mapping[str, Schemes] = _NO_SCHEMES,
    ) -> dict[str, Target | Drafter]:
        """``target`` only; see ``Pair.modules``."""
        with torch.device("meta"):
            return {"target": Target(self.target_shape, capacity, positions, ops, schemes.get("target", UNQUANTIZED)).eval()}
