"""The decoders of one stream: one for each of the bundle's drafters that its texts have used."""

from collections.abc import Callable
from contextlib import nullcontext

from ..backends import close
from ..decoding.decoder import Decoder
from ..decoding.settings import Settings
from .loaded import Loaded


class Decoders:
    """They share the target's cache, and one of them at a time goes on with it. drafter: the name of that one's, "" if the bundle has one
    drafter at most."""

    def __init__(self, loaded: Loaded, stream: int, others: Callable[[], bool]) -> None:
        """stream: its number. others: see ``Decoder``."""
        self._loaded, self._stream, self._others = loaded, stream, others
        self.drafter = loaded.bundle.manifest.each[0]
        self._made = dict[str, Decoder]()
        self._made[self.drafter] = self._make(self.drafter, None)

    def _make(self, drafter: str, sibling: Decoder | None) -> Decoder:
        teams = self._loaded.teams
        with nullcontext() if teams.mine else teams.of(self._stream):
            return self._loaded.decoder(drafter, self._stream, self._others, sibling)

    @property
    def current(self) -> Decoder:
        return self._made[self.drafter]

    def use(self, drafter: str) -> Decoder:
        """The decoder with this drafter, which takes over what the target has read."""
        if drafter != self.drafter:
            before = self.current
            if drafter not in self._made:
                self._made[drafter] = self._make(drafter, before)
            self._made[drafter].take(before)
            self.drafter = drafter
        return self.current

    def choose(self, settings: Settings) -> Decoder:
        """The decoder for a text: with the drafter that the settings name, or else the one that has been fastest."""
        return self.use(
            settings.drafter or (self._loaded.choices[settings.temperature > 0].next() if settings.speculate else self.drafter)
        )

    def close(self, engines: bool) -> None:
        """See ``Decoder.close``; engines: all of the bundle's."""
        for decoder in self._made.values():
            decoder.close(engines=False)
        if engines:
            close(self._loaded.engines, self._loaded.device)
