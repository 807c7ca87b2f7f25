"""A loaded bundle: the first stream of text, which owns the engines."""

from ..engines.loaded import LoadedBundle
from .stream import Stream


class Model(Stream):
    """A bundle with its engines loaded: one stream of text, and as many more as ``stream`` makes."""

    def __init__(self, loaded: LoadedBundle) -> None:
        """Use ``load`` to open a bundle on disk."""
        super().__init__(loaded)
        self._kept: tuple[Stream, ...] = ()  # streams that nobody else holds

    def close(self) -> None:
        """Frees the engines and all streams; waits for a running cycle. Closing twice is fine."""
        for stream in self.streams:
            if stream is not self:
                stream.close()
        super().close()

    def _free(self) -> None:
        self._kept = ()
        super()._free()
        self._loaded.close()
