"""The contents of a row of the target's output ``hidden``, which drafters read."""

from dataclasses import dataclass, replace

from .token_digits import DIGITS


@dataclass(frozen=True)
class Features:
    """The parts of a row, concatenated in this order.

    normed: whether it has the row after the final norm, H numbers. taps: the layers whose inputs it has, H numbers
    each; of 0 to L, where L is the last layer's output before the final norm. digits: whether it has the row's token as
    ``token_digits``.
    """

    normed: bool = True
    taps: tuple[int, ...] = ()
    digits: bool = False

    def __or__(self, other: "Features") -> "Features":
        """The union of both."""
        taps = tuple(sorted({*self.taps, *other.taps})) if self.taps and other.taps else self.taps or other.taps
        return Features(self.normed or other.normed, taps, self.digits or other.digits)

    def within(self, layers: int) -> "Features":
        """The features for a target with this many layers. Taps after its last layer become that layer's."""
        return replace(self, taps=tuple(min(tap, layers) for tap in self.taps))

    def width(self, hidden: int) -> int:
        """Numbers of a row. hidden: H."""
        return hidden * (self.normed + len(self.taps)) + DIGITS * self.digits

    def _held(self) -> list[int | str]:
        return ["normed"] * self.normed + [*self.taps] + ["digits"] * self.digits

    def parts(self, hidden: int) -> list[slice]:
        """The columns of each part, which differ in scale. hidden: H."""
        wide = hidden * (self.normed + len(self.taps))
        return [slice(at, at + hidden) for at in range(0, wide, hidden)] + [slice(wide, wide + DIGITS)] * self.digits

    def columns(self, own: "Features", hidden: int) -> tuple[slice, ...]:
        """The columns of ``own`` in these rows, in its order; () if the two are equal. hidden: H."""
        if own == self:
            return ()
        held = dict(zip(self._held(), self.parts(hidden), strict=True))
        return tuple(held[part] for part in own._held())


NORMED = Features()
