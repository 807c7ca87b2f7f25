"""Readers of drafters' checkpoints, one for each family: what they hold, and the graph parameters that it becomes."""

from ..checkpoint import Checkpoint
from ..families import is_eagle3
from .eagle3 import Eagle3Reader
from .gumiho import GumihoReader
from .reader import Overrides, Reader

__all__ = "Overrides", "Reader", "reader_of"


def reader_of(drafter: Checkpoint, target: Checkpoint, overrides: Overrides) -> Reader:
    """The reader of a drafter's family, told by its tensors. target: the one that it drafts for."""
    return (Eagle3Reader if is_eagle3(drafter) else GumihoReader)(drafter, target, overrides)
