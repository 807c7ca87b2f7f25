"""A target that is exported without a drafter."""

from graphs.features import NORMED

from .checkpoint import Checkpoint, require_tensors, tensor_indices
from .llama import llama_config, llama_shape
from .pair import Pair


class LoneTarget(Pair):
    """The target's half of a pair: it has none of the attributes about a drafter.

    Raises InputError and DamageError for a checkpoint of another architecture, or that lacks tensors.
    """

    has_drafter = False
    draft_vocabulary = None
    returns, ahead = NORMED, 0

    def __init__(self, target: Checkpoint) -> None:
        self.target, self.target_config = target, llama_config(target)
        self.target_shape = llama_shape(self.target_config)
        self._check()

    def _check(self) -> None:
        layers = ((i,) for i in range(self.target_shape.layers))
        require_tensors(
            self.target, "layers.{}.self_attn.q_proj.weight", tensor_indices(self.target, "layers.#."), layers
        )
        self.target.require(self._expected_target)
        _ = self._tokens
