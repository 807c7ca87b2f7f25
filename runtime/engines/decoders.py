"""The decoders of one stream: one for each of the bundle's drafters that its texts have used."""

from contextlib import nullcontext

from ..decoding.decoder import Decoder
from ..decoding.settings import Settings
from .loaded import LoadedBundle


class Decoders:
    """They share the target's cache, and one of them at a time goes on with it. drafter: the name of that one's, "" if
    the bundle has one drafter at most."""

    def __init__(self, loaded: LoadedBundle, stream: int) -> None:
        """stream: its number."""
        self._loaded, self._stream = loaded, stream
        self.drafter = loaded.bundle.manifest.each[0]
        self._made = dict[str, Decoder]()
        self._made[self.drafter] = self._make(self.drafter, None)

    def _make(self, drafter: str, sibling: Decoder | None) -> Decoder:
        loop = self._loaded.loop
        with nullcontext() if loop.mine else loop.exclusive():
            return self._loaded.decoder(drafter, self._stream, sibling)

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
            settings.drafter
            or (self._loaded.choices[settings.temperature > 0].next() if settings.speculate else self.drafter)
        )

    def close(self) -> None:
        """Frees buffers."""
        for decoder in self._made.values():
            decoder.close(engines=False)
