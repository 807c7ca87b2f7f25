"""A text that grows over several turns, read once."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import GumihoError
from .files import replaced
from .settings import Settings

if TYPE_CHECKING:
    from .model import Generation, Model


class Session:
    """Several turns over one cache. ``Model.session`` makes one.

    A prompt is the whole text so far; what it shares with the text in the caches is not read again. The model has one pair of
    caches: when something else was generated in between, the next turn reads its whole prompt, and the result is the same.
    """

    def __init__(self, model: "Model") -> None:
        self._model = model
        self._ids: list[int] = []
        self._turn: Generation | None = None

    @property
    def ids(self) -> list[int]:
        """The token ids of the text so far, last prompt and what it was continued by."""
        return [*self._ids, *(self._turn.ids if self._turn else ())]

    def generate(
        self, prompt: str | Sequence[int], max_new_tokens: int = 256, speculate: bool = True, **settings: Any
    ) -> "Generation":
        """The next turn; see ``Model.generate``. prompt: the whole text, which usually begins with ``ids``."""
        return self.start(prompt, Settings(max_new_tokens, speculate, **settings))

    def start(self, prompt: str | Sequence[int], settings: Settings) -> "Generation":
        """``generate`` by settings that are made already."""
        turn = self._model.start(prompt, settings, resume=True)
        self._ids, self._turn = turn.prompt, turn
        return turn

    def rewind(self, length: int) -> None:
        """Goes back to the text's first ``length`` tokens. Raises GumihoError where there are fewer."""
        if not 0 <= length <= len(self.ids):
            raise GumihoError(
                f"the session has {len(self.ids)} tokens and cannot go back to {length}: give 0 to {len(self.ids)}"
            )
        self._ids, self._turn = self.ids[:length], None

    def save(self, path: str | Path) -> None:
        """Writes the text and what the caches hold of it to a file, whole or not at all."""
        with self._model.idle() as decoder:
            decoder.catch_up()
            shared, drafted = decoder.shared(self.ids)
            content = {
                "bundle": np.array(self._model.bundle.hash),
                "ids": np.array(self.ids, np.int64),
                "target": decoder.target.rows(shared),
                "drafter": decoder.drafter.rows(drafted),
            }
            with replaced(Path(path)) as file:
                np.savez(file, **content)  # type: ignore[arg-type]

    def restore(self, path: str | Path) -> None:
        """Takes up what ``save`` wrote. Raises GumihoError where the file is damaged or of another bundle."""
        try:
            with np.load(io.BytesIO(Path(path).read_bytes()), allow_pickle=False) as data:
                if damaged := data.zip.testzip():  # numpy looks at no more of a part than it reads
                    raise ValueError(f"{damaged} is damaged")
                bundle, ids, target, drafter = (data[name] for name in ("bundle", "ids", "target", "drafter"))
        except Exception as error:  # damage leads numpy and zipfile to raise all kinds of things
            raise GumihoError(f"'{path}' cannot be read as a saved session ({error}): save it again") from None
        if str(bundle) != self._model.bundle.hash:
            raise GumihoError(
                f"'{path}' was saved with another bundle than {self._model.bundle.path}: load that one, or begin anew"
            )
        text = [int(token) for token in ids]
        with self._model.idle() as decoder:
            decoder.restore(text, target, drafter)
        self._ids, self._turn = text, None
