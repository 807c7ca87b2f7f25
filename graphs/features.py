"""What a row of the target's output ``hidden`` holds for the drafters that read it."""

from dataclasses import dataclass, replace

from .token_digits import DIGITS


@dataclass(frozen=True)
class Features:
    """normed: the row after the final norm, H numbers. taps: the layers whose inputs it holds, H numbers each, 0 to L, where L stands for the
    last layer's output before the final norm. digits: the row's token, as ``token_digits``. They are side by side in this order.
    """

    normed: bool = True
    taps: tuple[int, ...] = ()
    digits: bool = False

    def __or__(self, other: "Features") -> "Features":
        """What holds both."""
        taps = tuple(sorted({*self.taps, *other.taps})) if self.taps and other.taps else self.taps or other.taps
        return Features(self.normed or other.normed, taps, self.digits or other.digits)

    def within(self, layers: int) -> "Features":
        """Of a target of so many layers, the last of which stands for those after it."""
        return replace(self, taps=tuple(min(tap, layers) for tap in self.taps))

    def width(self, hidden: int) -> int:
        """Numbers of a row. hidden: H."""
        return hidden * (self.normed + len(self.taps)) + DIGITS * self.digits

    def _held(self) -> list[int | str]:
        return ["normed"] * self.normed + [*self.taps] + ["digits"] * self.digits

    def parts(self, hidden: int) -> list[slice]:
        """The columns of each layer's numbers, and of the digits: they differ in scale. hidden: H."""
        wide = hidden * (self.normed + len(self.taps))
        return [slice(at, at + hidden) for at in range(0, wide, hidden)] + [slice(wide, wide + DIGITS)] * self.digits

    def columns(self, own: "Features", hidden: int) -> tuple[slice, ...]:
        """Where the numbers of ``own`` are in these rows, in its order; () if they are all of them. hidden: H."""
        if own == self:
            return ()
        held = dict(zip(self._held(), self.parts(hidden), strict=True))
        return tuple(held[part] for part in own._held())


NORMED = Features()
