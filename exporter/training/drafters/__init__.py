"""Drafters in the form that is trained, one file for each family."""

from typing import Any

from ...checkpoints.families import EAGLE_3, HYDRA, MEDUSA, SMALL
from ..model import Drafter
from ..start import config
from .eagle3 import Eagle3, usual_taps
from .gumiho import Gumiho
from .hydra import Hydra
from .medusa import Medusa
from .small import Small


def made(family: str, layers: int, heads: int, target: Any) -> Drafter:
    """A drafter without weights. layers, heads: as many as the family has of them; target: transformers' model."""
    shape = config(target, layers)
    if family == EAGLE_3:
        return Eagle3(shape, usual_taps(target.config.num_hidden_layers))
    if family == MEDUSA:
        return Medusa(shape, heads)
    if family == HYDRA:
        return Hydra(shape, heads)
    if family == SMALL:
        return Small(shape, target.lm_head.weight is target.model.embed_tokens.weight)
    return Gumiho(shape, heads)
