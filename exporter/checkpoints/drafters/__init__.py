"""Readers of drafters' checkpoints, one for each family: what they hold, and the graph parameters that it becomes."""

from collections.abc import Mapping

from runtime.errors import InputError

from ..checkpoint import Checkpoint
from ..families import EAGLE_3, GUMIHO, HYDRA, MEDUSA, SMALL, kind_of
from ..gguf_file import gguf_file
from ..target import target_checkpoint
from .eagle3 import Eagle3Reader
from .gumiho import GumihoReader
from .hydra import HydraReader
from .medusa import MedusaReader
from .reader import Overrides, Reader
from .small import SmallReader

_READERS: Mapping[str, type[Reader]] = {
    GUMIHO: GumihoReader, EAGLE_3: Eagle3Reader, SMALL: SmallReader, MEDUSA: MedusaReader, HYDRA: HydraReader,
}  # fmt: skip
__all__ = "Overrides", "Reader", "open_drafter", "reader_of"


def open_drafter(source: str) -> Checkpoint:
    """A drafter's checkpoint in a folder or on the hub; a small model may be in any format of targets. Raises what checkpoints raise."""
    if gguf_file(source):
        return target_checkpoint(source)
    drafter = Checkpoint(source, "drafter")
    return target_checkpoint(source) if kind_of(drafter) == SMALL else drafter


def reader_of(drafter: Checkpoint, target: Checkpoint, overrides: Overrides) -> Reader:
    """The reader of a drafter's family, told by its tensors. target: the one that it drafts for. Raises what ``Reader`` raises."""
    kind = kind_of(drafter)
    if kind != EAGLE_3 and (overrides.taps or overrides.normed is not None):
        where = f"drafter '{drafter.source}'"
        raise InputError(f"--taps and --norm-before-residual are for an EAGLE-3, and {where} is none: leave them out")
    return _READERS[kind](drafter, target, overrides)
