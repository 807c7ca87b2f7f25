"""Parameters whose rows and columns are multiplied by factors, as they are read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from .source import Source


@dataclass(frozen=True)
class Factors:
    """What a parameter is multiplied by. rows: fp32 [N]; columns: fp32 [K], of matrices only; None for 1."""

    rows: Tensor | None = None
    columns: Tensor | None = None


def scaled(sources: Mapping[str, Source], factors: Mapping[str, Factors]) -> dict[str, Source]:
    """The sources, those with factors multiplied by them, in fp32. factors: by name; names without a source are
    ignored."""
    return {name: _multiplied(source, factors[name]) if name in factors else source for name, source in sources.items()}


def _multiplied(source: Source, by: Factors) -> Source:
    """Neither the checkpoint's file nor its codes hold these values."""

    def slices() -> Iterator[Tensor]:
        start = 0
        for part in source.slices():
            # one copy in fp32 at most, which is changed in place
            values = part.float() if by.columns is None else part * by.columns
            if by.rows is not None:
                rows = by.rows[start : start + len(part)].view(-1, *[1] * (part.ndim - 1))
                values = values * rows if values is part else values.mul_(rows)
            start += len(part)
            yield values

    return Source(source.shape, slices, source.fixed)
