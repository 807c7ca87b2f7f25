"""Readers of drafters' checkpoints, one for each family: what they hold, and the graph parameters that it becomes."""

from collections.abc import Mapping

from runtime.errors import InputError

from ..checkpoint import Checkpoint
from ..families import EAGLE, EAGLE_3, GUMIHO, HYDRA, MEDUSA, SMALL, kind_of, require
from ..gguf_file import gguf_file
from ..target import target_checkpoint
from .eagle3 import Eagle3Reader
from .gumiho import GumihoReader
from .hydra import HydraReader
from .medusa import MedusaReader
from .reader import Overrides, Reader
from .small import SmallReader

_READERS: Mapping[str, type[Reader]] = {
    GUMIHO: GumihoReader,
    EAGLE_3: Eagle3Reader,
    SMALL: SmallReader,
    MEDUSA: MedusaReader,
    HYDRA: HydraReader,
}
__all__ = "Overrides", "Reader", "open_drafter", "reader_of"


def open_drafter(source: str, family: str | None = None) -> Checkpoint:
    """A drafter's checkpoint in a folder or on the hub; a small model may be in any format of targets. family: what its
    tensors do not tell. Raises what checkpoints raise."""
    if gguf_file(source):
        return target_checkpoint(source)
    drafter = Checkpoint(source, "drafter")
    return target_checkpoint(source) if (family or kind_of(drafter)) == SMALL else drafter


def reader_of(drafter: Checkpoint, target: Checkpoint, overrides: Overrides) -> Reader:
    """The reader of a drafter's family, told by its tensors. target: the one that it drafts for. Raises what ``Reader``
    raises."""
    if overrides.family:
        require(drafter, overrides.family)
    kind = overrides.family or kind_of(drafter)
    kind = GUMIHO if kind == EAGLE else kind
    if kind != EAGLE_3 and (overrides.taps or overrides.normed is not None):
        where = f"drafter '{drafter.source}'"
        raise InputError(f"--taps and --norm-before-residual are for an EAGLE-3, and {where} is none: leave them out")
    reader = _READERS[kind](drafter, target, overrides)
    if overrides.family not in (None, reader.family):
        raise InputError(
            f"--family is {overrides.family}, but drafter '{drafter.source}' has {reader.shape.layers} serial layers "
            f"and {reader.heads} heads, and is a {reader.family}: leave it out"
        )
    return reader
