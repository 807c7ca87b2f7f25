"""Speculative and plain decoding of the same prompts, side by side."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...api.generation import Generation
from ...api.model import Model
from ...decoding.stats import Stats
from .lossless import Difference, differences

NEAR_TIE = 3  # exit status if only rounding made a difference


@dataclass
class SideBySide:
    """Compares two ways of decoding the same prompts.

    outputs: their number. differ: how many differ. first: the lowest index at which any differs, None if none does.
    ours, other: the stats of each way.
    """

    outputs: int
    differ: int
    first: int | None
    ours: Stats
    other: Stats

    @staticmethod
    def of(ours: Sequence[Generation], other: Sequence[Generation]) -> "SideBySide":
        firsts = []
        for a, b in ((a.ids, b.ids) for a, b in zip(ours, other, strict=True)):
            if a != b:
                firsts.append(
                    next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
                )
        return SideBySide(len(ours), len(firsts), min(firsts, default=None), total(ours), total(other))

    def summary(self) -> dict[str, Any]:
        return {
            "identical": not self.differ,
            "outputs": self.outputs,
            "outputs_that_differ": self.differ,
            "first_difference": self.first,
            "speed_ratio": round(self.ours.tokens_per_second / (self.other.tokens_per_second or 1.0), 3),
            "tau": round(self.ours.tau, 3),
            "other_tau": round(self.other.tau, 3),
        }

    def describe(self, lossy: bool) -> str:
        s = self.summary()
        same = "identical tokens"
        if self.differ:
            same = (
                f"tokens differ in {self.differ} of {self.outputs} outputs, from token {self.first} on at the earliest"
            )
        if lossy:
            return (
                f"{same}; tau {s['tau']} instead of {s['other_tau']} of exact speculation, at {s['speed_ratio']} times "
                "its speed"
            )
        return f"{same}; speculative decoding runs at {s['speed_ratio']} times the speed of plain"


def total(generations: Sequence[Generation]) -> Stats:
    """The sum of several generations' stats, without their seeds and finish reasons."""
    if len(generations) == 1:
        return generations[0].stats
    stats = Stats(texts=0)
    for generation in generations:
        stats.add(generation.stats)
    return stats


def explain(model: Model, difference: Difference) -> str:
    def shown(token: int) -> str:
        text = model.bundle.tokenizer.decode([token], skip_special_tokens=False) if model.bundle.has_tokenizer else ""
        return f"{token} {text!r}"

    verdict = "a near-tie, decided by rounding" if difference.near else "too much for rounding"
    return (
        f"token {difference.index} at position {difference.position}: emitted {shown(difference.token)}, plain "
        f"decoding chooses {shown(difference.choice)}, margin {difference.margin:.1e} of the largest logit: {verdict}"
    )


def report_differences(model: Model, generations: Sequence[Generation]) -> int:
    """Prints where plain decoding chooses other tokens. Returns the exit status."""
    differing = [difference for generation in generations for difference in differences(model, generation)]
    for difference in differing:
        print(explain(model, difference), file=sys.stderr)
    if not differing:
        count = sum(len(generation.ids) for generation in generations)
        print(f"lossless: plain decoding chooses each of the {count} tokens", file=sys.stderr)
        return 0
    return NEAR_TIE if all(difference.near for difference in differing) else 1
