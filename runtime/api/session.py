"""A text that grows over several turns, read once."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..bundle.files import HEADERS, read_regular, replaced, unpacked
from ..bundle.hashes import file_hash
from ..bundle.manifest import Manifest
from ..bundle.reader import Bundle
from ..bundle.records import Damage
from ..decoding.decoder import Decoder
from ..decoding.settings import Options, Settings
from ..engines.decoders import Decoders
from ..errors import DamageError, InputError
from .generation import Generation

if TYPE_CHECKING:
    from typing_extensions import Unpack

_DIGEST = 64  # bytes of a SHA-256 in hexadecimal
_PARTS = ("bundle", "ids", "target", "drafter")


class _Model(Protocol):
    """The part of a model that a session uses."""

    bundle: Bundle

    def start(self, prompt: str | Sequence[int], settings: Settings, resume: bool = False) -> Generation: ...
    @property
    def decoders(self) -> Decoders: ...
    def exclusive(self) -> AbstractContextManager[Decoder]: ...


class Session:
    """Several turns over one cache, created by ``Model.session``.

    A prompt is the whole text so far; the prefix that is still in the caches is not read again. A stream has one pair
    of caches: if it generated something else in between, the next turn reads its whole prompt, with the same result.
    """

    def __init__(self, model: _Model) -> None:
        self._model = model
        self._ids: list[int] = []
        self._turn: Generation | None = None

    def __repr__(self) -> str:
        return f"<Session, {len(self.ids)} tokens>"

    @property
    def ids(self) -> list[int]:
        """The token ids of the text so far: the last prompt and its continuation."""
        return [*self._ids, *(self._turn.ids if self._turn else ())]

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 256,
        speculate: bool = True,
        **options: "Unpack[Options]",
    ) -> Generation:
        """The next turn; see ``Model.generate``. prompt: the whole text, which usually begins with ``ids``."""
        return self.start(prompt, Settings.of(max_new_tokens, speculate, options))

    def start(self, prompt: str | Sequence[int], settings: Settings) -> Generation:
        """``generate`` with ready-made settings."""
        turn = self._model.start(prompt, settings, resume=True)
        self._ids, self._turn = turn.prompt, turn
        return turn

    def rewind(self, length: int) -> None:
        """Goes back to the text's first ``length`` tokens. Raises InputError if there are fewer."""
        if not 0 <= length <= len(self.ids):
            raise InputError(
                f"the session has {len(self.ids)} tokens and cannot go back to {length}: give 0 to {len(self.ids)}"
            )
        self._ids, self._turn = self.ids[:length], None

    def save(self, path: str | Path) -> None:
        """Writes the text and its cached rows to a file, followed by their SHA-256. The file is written whole or not at
        all."""
        with self._model.exclusive() as decoder:
            decoder.catch_up()
            _, target, drafter, positions = decoder.saved(self.ids)
            content: dict[str, Any] = {
                "bundle": np.array(self._model.bundle.hash),
                "ids": np.array(self.ids, np.int64),
                "target": target,
                "drafter": drafter,
                "positions": positions,
                "of": np.array(self._model.decoders.drafter),
            }
            with replaced(Path(path)) as file:
                np.savez(file, **content)
                file.flush()
                file.write(file_hash(Path(file.name)).encode())

    def restore(self, path: str | Path) -> None:
        """Continues from a file that ``save`` wrote.

        Raises DamageError if the file cannot be read and InputError if it belongs to another bundle; the session is
        then unchanged.
        """
        bundle = self._model.bundle
        with self._model.exclusive() as decoder:
            try:
                parts = _read(Path(path), _size(decoder, bundle.manifest))
                if str(parts["bundle"]) != bundle.hash:
                    raise InputError(
                        f"'{path}' was saved with another bundle than {bundle.path}: load that one, or start a new "
                        "session"
                    )
                _check(parts, bundle.manifest)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise DamageError(f"'{path}' cannot be read as a saved session ({reason}): save it again") from None
            text = parts["ids"].tolist()
            decoder = self._model.decoders.use(str(parts["of"]))
            decoder.restore(text, parts["target"], parts["drafter"], parts["positions"])
        self._ids, self._turn = text, None


def _size(decoder: Decoder, manifest: Manifest) -> int:
    """The most bytes that the arrays of a saved session can have."""
    target, capacity = decoder.target.graphs["target"], manifest.capacity
    drafts = [
        graph.cache_bytes(capacity)
        for form in manifest.forms.values()
        for name, graph in form.graphs.items()
        if name.partition(".")[0] == "draft"
    ]
    ids = 2 * (capacity + 1) * np.dtype(np.int64).itemsize  # with the drafter's positions
    return ids + target.cache_bytes(capacity) + max(drafts, default=0)


def _read(path: Path, most: int) -> dict[str, np.ndarray]:
    """Raises OSError and Damage."""
    content = memoryview(read_regular(path, most + HEADERS))
    archive, digest = content[:-_DIGEST], bytes(content[-_DIGEST:])
    if hashlib.sha256(archive).hexdigest().encode() != digest:
        raise Damage("its content does not match its checksum")
    parts = unpacked(archive, most)
    if missing := [name for name in _PARTS if name not in parts]:
        raise Damage(f"it holds no {missing[0]}")
    older = {"positions": np.arange(parts["drafter"].shape[1] if parts["drafter"].ndim > 1 else 0), "of": np.array("")}
    return older | parts


def _check(parts: Mapping[str, np.ndarray], manifest: Manifest) -> None:
    """Raises Damage if the contents are impossible, which a checksum does not exclude."""
    ids, target, drafter, positions = (parts[name] for name in ("ids", "target", "drafter", "positions"))
    if str(parts["of"]) not in manifest.each:
        raise Damage("it names a drafter that the bundle does not have")
    if ids.dtype != np.int64 or ids.ndim != 1 or len(ids) > manifest.capacity + 1:
        raise Damage(f"ids are {ids.dtype} {list(ids.shape)}, expected int64 [{manifest.capacity + 1}] at most")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < manifest.vocabulary:
        raise Damage(f"ids are {ids.min()} to {ids.max()}, expected 0 to {manifest.vocabulary - 1}")
    for name, rows in (("target", target), ("drafter", drafter)):
        if rows.ndim != 3 or rows.dtype != manifest.dtype:
            raise Damage(
                f"rows of the {name} are {rows.dtype} {list(rows.shape)}, expected {manifest.dtype} of three dimensions"
            )
        if not np.isfinite(rows).all():
            raise Damage(f"rows of the {name} hold NaN or infinity")
    if target.shape[1] > len(ids):
        raise Damage(f"it has {len(ids)} tokens and {target.shape[1]} rows of the target")
    if positions.dtype != np.int64 or positions.shape != drafter.shape[1:2]:
        raise Damage(f"positions are {positions.dtype} {list(positions.shape)}, expected int64 [{drafter.shape[1]}]")
    ascending = bool((positions[1:] > positions[:-1]).all())
    if positions.size and not (ascending and positions[0] >= 0 and positions[-1] < target.shape[1] - 1):
        raise Damage(f"positions are not ascending from 0 to {target.shape[1] - 2} at most")
