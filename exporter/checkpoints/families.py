"""Which family a drafter's checkpoint is of, told by the names of its tensors."""

from typing import TYPE_CHECKING

from runtime.errors import InputError

from .json_config import shown

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

GUMIHO, EAGLE, EAGLE_3 = "gumiho", "eagle", "eagle3"
_UNSUPPORTED = {
    "medusa_head.": "Medusa", "0.0.linear.": "Medusa", "blocks.0.": "Medusa", "hydra_mlp.": "Hydra", "hydra_lm_head.": "Hydra",
}  # fmt: skip


def family(layers: int, heads: int) -> str:
    """Of a drafter of so many serial layers and heads. EAGLE-1 and EAGLE-2 have the same checkpoints."""
    return EAGLE if layers == 1 and not heads else GUMIHO


def is_eagle3(drafter: "Checkpoint") -> bool:
    """Told by the norm of its layer that no other family has."""
    return "layers.0.hidden_norm.weight" in drafter


def require_supported(drafter: "Checkpoint") -> None:
    """Raises InputError for a drafter of a family that cannot be exported."""
    for name in drafter.names():
        for prefix, kind in _UNSUPPORTED.items():
            if name.startswith(prefix):
                raise InputError(
                    f"drafter '{drafter.source}' is of the family {kind}, by its tensor {shown(name)}, which is not supported: "
                    "give a Gumiho or an EAGLE"
                )
