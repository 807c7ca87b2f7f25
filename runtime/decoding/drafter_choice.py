"""Chooses among several drafters of a bundle, text by text, by how fast each has been."""

from collections.abc import Sequence

from .stats import Stats

_DECAY = 0.8  # weight of a text in the speed of its drafter, relative to the next text
_TRIAL = 8  # one text in so many gets another drafter than the fastest


class DrafterChoice:
    """Every drafter gets a text first; then texts get the fastest, and now and then one of the others, in rotation,
    since what is asked may have changed. Which drafter a text gets never changes it. All streams over the engines use
    one choice.
    """

    def __init__(self, drafters: Sequence[str]) -> None:
        self._spent = dict.fromkeys(drafters, (0.0, 0.0))  # tokens and seconds
        self._texts = self._trials = 0

    def speeds(self) -> dict[str, float]:
        """Tokens a second so far, by drafter; 0 for those without a text."""
        return {drafter: tokens / seconds if seconds else 0.0 for drafter, (tokens, seconds) in self._spent.items()}

    def next(self) -> str:
        """The drafter for the next text."""
        speeds = self.speeds()
        if len(speeds) == 1 or not all(speeds.values()):
            return min(speeds, key=lambda drafter: speeds[drafter])
        self._texts += 1
        fastest = max(speeds, key=lambda drafter: speeds[drafter])
        if self._texts % _TRIAL:
            return fastest
        others = [drafter for drafter in speeds if drafter != fastest]
        self._trials += 1
        return others[(self._trials - 1) % len(others)]

    def record(self, drafter: str, stats: Stats) -> None:
        """What a drafter's text took after its first token."""
        if stats.cycles:
            tokens, seconds = self._spent[drafter]
            self._spent[drafter] = _DECAY * tokens + stats.cycle_tokens, _DECAY * seconds + stats.seconds
