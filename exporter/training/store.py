"""Training text on disk: token ids in records that are only ever appended, so that a killed process loses at most the
last ones."""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.bundle.files import replaced
from runtime.errors import DamageError, InputError, UnavailableError

ANSWER = np.uint32(1 << 31)  # the token is part of an answer, which is what a drafter drafts
GREEDY = np.uint32(1 << 30)  # the target chose it at temperature 0
TOKEN = np.uint32((1 << 30) - 1)

_INDEX = np.dtype([("end", "<i8"), ("source", "<i8")])
_FORMAT = 1


class Text:
    """Records of token ids in a folder.

    ``tokens.bin``: uint32, a token id with the flags above. ``index.bin``: for every record its end among the tokens
    and the number of the prompt that it answers, -1 if the target wrote that too. ``text.json``: the vocabulary and the
    target they belong to. A record counts once its index entry is complete, and the tokens are on disk before the entry
    is. Raises DamageError for files that contradict each other, InputError for text of another target.
    """

    def __init__(self, folder: Path, vocabulary: int, target: str) -> None:
        self.folder, self.target = folder, target
        folder.mkdir(parents=True, exist_ok=True)
        about = folder / "text.json"
        known = {"format": _FORMAT, "vocabulary": vocabulary, "target": target}
        if not about.exists():
            with replaced(about) as out:
                out.write(json.dumps(known).encode())
        try:
            found = json.loads(about.read_text("utf-8"))
        except (OSError, ValueError):
            raise DamageError(f"'{about}' cannot be read: delete '{folder}', and the text is written anew") from None
        if found != known:
            raise InputError(
                f"'{folder}' has text of another target: give another folder with --work, or delete that one"
            )
        self._tokens, self._index = folder / "tokens.bin", folder / "index.bin"
        self.refresh()

    def refresh(self) -> None:
        """Takes notice of what another process has appended."""
        for file in (self._tokens, self._index):
            file.touch(exist_ok=True)
        count = self._index.stat().st_size // _INDEX.itemsize
        index = np.fromfile(self._index, _INDEX, count)
        self.ends: NDArray[np.int64] = index["end"]
        self.sources: NDArray[np.int64] = index["source"]
        stored = self._tokens.stat().st_size // 4
        if count and (self.ends[-1] > stored or self.ends[0] <= 0 or (np.diff(self.ends) <= 0).any()):
            raise DamageError(
                f"'{self._index}' and '{self._tokens}' contradict each other: delete both, and the text is written anew"
            )
        empty: Any = np.zeros(0, np.uint32)
        self._map = np.memmap(self._tokens, np.uint32, "r", shape=(self.tokens,)) if count else empty

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def tokens(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every record."""
        return np.diff(self.ends, prepend=0)

    def start(self, record: int) -> int:
        """Where a record begins among the tokens."""
        return int(self.ends[record - 1]) if record else 0

    def record(self, record: int) -> NDArray[np.uint32]:
        """A record's ids with their flags, uint32 [n]."""
        return np.array(self._map[self.start(record) : int(self.ends[record])])

    def between(self, start: int, end: int) -> NDArray[np.uint32]:
        """Ids with their flags from one token to before another, whatever records they are in."""
        return np.array(self._map[start:end])

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Holds the right to append, which one process at a time has. Raises UnavailableError if another one has it."""
        with open(self.folder / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UnavailableError(
                    f"another process is writing text to '{self.folder}': wait for it, or stop it"
                ) from None
            self.refresh()
            with open(self._index, "r+b") as index, open(self._tokens, "r+b") as tokens:
                index.truncate(len(self) * _INDEX.itemsize)  # what a killed writer left half done
                tokens.truncate(self.tokens * 4)
            yield

    def append(self, records: Sequence[tuple[NDArray[np.uint32], int]]) -> None:
        """Appends records, each with the number of its prompt or -1. Only within ``writing``."""
        records = [record for record in records if len(record[0])]
        if not records:
            return
        ends = self.tokens + np.cumsum([len(ids) for ids, _ in records])
        entries = np.array(list(zip(ends, (source for _, source in records), strict=True)), _INDEX)
        _add(self._tokens, np.concatenate([ids for ids, _ in records]).astype("<u4").tobytes())
        _add(self._index, entries.tobytes())
        self.refresh()


def _add(file: Path, data: bytes) -> None:
    with open(file, "ab") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
