"""Which family a drafter's checkpoint is of, told by the names of its tensors."""

import re
from typing import TYPE_CHECKING

from runtime.errors import InputError

from .json_config import shown

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

GUMIHO, EAGLE, EAGLE_3, SMALL, MEDUSA, HYDRA = "gumiho", "eagle", "eagle3", "small", "medusa", "hydra"
# i, j: head and block; k, l the same in vLLM's layout.
MEDUSA_BLOCK = re.compile(
    r"(?:medusa_heads?\.)?(?:(?P<i>\d{1,3})\.(?P<j>\d{1,3})\.linear|blocks\.(?P<k>\d{1,3})\.layers\.(?P<l>\d{1,3}))\.(?P<part>weight|bias)"
)
_EXAMPLES = {  # of the tensors that tell a family; the first layer of the others has no such norm as a small model's
    MEDUSA: "0.0.linear.weight",
    HYDRA: "hydra_mlp.0.0.linear.weight",
    EAGLE_3: "layers.0.hidden_norm.weight",
    SMALL: "layers.0.input_layernorm.weight",
    GUMIHO: "fc.weight",
    EAGLE: "fc.weight",
}
# of those below that have no names of their own
_PARTS = "embed_tokens.", "fc.", "layers.", "lm_head.", "mlp.", "norm."
HYDRA_PREFIX = "prefix_embeding_layer."  # so spelled


def family(layers: int, heads: int) -> str:
    """Of a drafter of so many serial layers and heads. EAGLE-1 and EAGLE-2 have the same checkpoints."""
    return EAGLE if layers == 1 and not heads else GUMIHO


def _has(drafter: "Checkpoint", family: str) -> bool:
    """Whether a drafter has a tensor that tells the family."""
    names = drafter.names()
    if family == MEDUSA:
        return any(map(MEDUSA_BLOCK.fullmatch, names))
    if family == HYDRA:
        return any(name.startswith("hydra_") for name in names)
    return _EXAMPLES[family] in names


def require(drafter: "Checkpoint", family: str) -> None:
    """Raises InputError if a drafter lacks the tensors that a family, named against what they tell, cannot do
    without."""
    if not _has(drafter, family):
        raise InputError(
            f"--family is {family}, but drafter '{drafter.source}' has no tensor such as '{_EXAMPLES[family]}': leave "
            "it out, or name another family"
        )


def kind_of(drafter: "Checkpoint") -> str:
    """The family, but GUMIHO for EAGLE too, which is read alike. Raises InputError for a checkpoint of no family that
    is known."""
    names = drafter.names()
    if told := next((family for family in (MEDUSA, HYDRA, EAGLE_3) if _has(drafter, family)), None):
        return told
    if not any(name.startswith(_PARTS) for name in names):
        shown_names = ", ".join(map(shown, sorted(names)[:3]))
        raise InputError(
            f"drafter '{drafter.source}' is of no family that is known, by its tensors ({shown_names} and others): "
            "give a Gumiho, EAGLE, Medusa, Hydra, or a small model"
        )
    return SMALL if _has(drafter, SMALL) and not _has(drafter, GUMIHO) else GUMIHO
