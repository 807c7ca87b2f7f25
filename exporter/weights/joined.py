"""Matrices that read the same rows, as one: a product of all columns at once takes less time than one of each part."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from graphs.dialects.quantization import JOINED, Schemes

from .source import Coded, Part, Source


def joined(sources: Mapping[str, Source], schemes: Schemes) -> dict[str, Source]:
    """The sources, with one in place of several for every matrix of ``JOINED`` that ``schemes`` joins, and for its
    bias."""
    found = dict(sources)
    for whole, parts in JOINED.items():
        for name in sources:
            module, is_first, kind = name.rpartition(f"{parts[0]}.")
            inputs = sources[f"{module}{parts[0]}.weight"].shape[-1] if is_first else 0
            if is_first and schemes.within(module.rstrip(".")).joins(whole, inputs):
                found[f"{module}{whole}.{kind}"] = _rows([found.pop(f"{module}{part}.{kind}") for part in parts])
    return found


def _rows(parts: Sequence[Source]) -> Source:
    """The rows of all parts, in turn."""

    def slices() -> Iterator[Tensor]:
        for part in parts:
            yield from part.slices()

    held = [part.coded for part in parts if part.coded]

    def codes() -> Iterator[Part]:
        for coded in held:
            yield from coded.parts()

    coded: Coded | None = replace(held[0], parts=codes) if len(held) == len(parts) else None
    return Source((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), slices, parts[0].fixed, coded=coded)
