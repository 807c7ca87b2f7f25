"""Opens a bundle on disk: its manifest, its files and its tokenizer."""

import hashlib
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DamageError, InputError, reason, unreadable
from .files import read_arrays, read_regular
from .hashes import first_damaged
from .manifest import MANIFEST, Manifest
from .manifest_reader import parse_manifest
from .records import shown

_MOST = 64 << 20  # bytes of a manifest


GOLDEN = "golden.npz"


def golden_of(suffix: str) -> str:
    """The file of a drafter's golden run. suffix: of its graphs' names."""
    return GOLDEN.replace(".", f"{suffix}.")


def draft_tokens_of(suffix: str) -> str:
    """The file of a draft vocabulary that is not the target's: ``ids``, int32 [V]. suffix: of the drafter's graphs'
    names."""
    return f"draft_tokens{suffix}.npz"


def known(manifest: Manifest) -> str:
    """The advice in a message about an unknown drafter: the names that the bundle has."""
    return (
        f"give one of {', '.join(manifest.drafters)}"
        if manifest.drafters
        else "it has one at most, so leave the name out"
    )


class Bundle:
    """A bundle on disk. Opening checks the manifest and that every file exists with its size; ``verify`` compares
    contents."""

    def __init__(self, path: str | Path) -> None:
        """Raises InputError if the path is not a bundle or needs another version, DamageError if a file is missing or
        damaged, and UnavailableError if this user may not read it.
        """
        self.path, self.golden, self._draft_tokens = folder(path), GOLDEN, draft_tokens_of("")
        manifest = self.path / MANIFEST
        if not manifest.is_file():
            raise InputError(
                f"'{shown(str(path))}' is not a bundle (it has no {MANIFEST}): make one with gumiho-export"
            )
        try:
            self._text = read_regular(manifest, _MOST)
            self.manifest = parse_manifest(self._text.decode("utf-8"), manifest)
        except (OSError, UnicodeDecodeError) as error:
            raise unreadable(manifest, error, "copy the bundle again") from None
        try:
            self._check_files()
        except PermissionError as error:
            raise unreadable(error.filename, error) from None

    def _check_files(self) -> None:
        for name, expected in self.manifest.files.items():
            file = self.path / name
            if not file.is_file():
                raise DamageError(f"bundle {self.path} lacks its file {name}: copy the bundle again")
            if not file.resolve().is_relative_to(self.path):
                raise DamageError(
                    f"{file} is a link that leaves the bundle: copy the bundle again, following links (cp -rL)"
                )
            if file.stat().st_size != expected.size:
                raise DamageError(
                    f"{file} has {file.stat().st_size} bytes, expected {expected.size}: copy the bundle again"
                )

    def of(self, drafter: str) -> "Bundle":
        """The bundle with only this drafter; "" for the first. Raises InputError if it has none of that name."""
        if drafter and drafter not in self.manifest.drafters:
            raise InputError(f"the bundle has no drafter '{shown(drafter)}': {known(self.manifest)}")
        own = copy(self)
        own.manifest, own.golden = self.manifest.of(drafter), golden_of(self.manifest.suffix(drafter))
        own._draft_tokens = draft_tokens_of(self.manifest.suffix(drafter))
        return own

    def verify(self, quick: bool = False) -> None:
        """Compares the files with their hashes. Raises DamageError naming the first file that differs.

        quick: reads only small files completely and samples of large ones, which takes about a second. Otherwise every
        byte is read, except in a checkpoint's files that were linked without being read: these are always sampled.
        """
        damaged = first_damaged(self.path, self.manifest.files, quick)
        if damaged:
            raise DamageError(
                f"{self.path / damaged} is damaged (its hash differs from the manifest's): copy the bundle again"
            )

    @cached_property
    def hash(self) -> str:
        """sha256 of the manifest, which holds the hash of every file."""
        return hashlib.sha256(self._text).hexdigest()

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.json" in self.manifest.files

    @cached_property
    def tokenizer(self) -> Any:
        """The ``tokenizers.Tokenizer``. Raises InputError if the bundle has none and DamageError if its file cannot be
        used."""
        from tokenizers import Tokenizer

        file = self.path / "tokenizer.json"
        if not self.has_tokenizer:
            raise InputError(
                f"bundle {self.path} has no tokenizer (its target had none): give token ids instead of text"
            )
        try:
            return Tokenizer.from_str(file.read_text("utf-8"))
        except (KeyboardInterrupt, SystemExit):
            raise
        except PermissionError as error:
            raise unreadable(file, error) from None
        except BaseException as error:  # the library raises plain Exception, and its panics derive from BaseException
            raise DamageError(f"{file} is damaged ({reason(error)}): copy the bundle again") from None

    def draft_tokens(self) -> np.ndarray:
        """The target's ids of the first drafter's vocabulary, int64 [V]. Raises DamageError if its file is damaged."""
        manifest, file = self.manifest, self.path / self._draft_tokens
        count = manifest.tree.vocabulary if manifest.tree else 0
        if self._draft_tokens not in manifest.files:
            return np.arange(count)
        try:
            ids = read_arrays(file, 8 * count).get("ids", np.zeros(0, np.int32))
        except PermissionError as error:
            raise unreadable(file, error) from None
        except OSError as error:
            raise DamageError(f"{file} is damaged ({reason(error)}): copy the bundle again") from None
        if ids.shape != (count,) or ids.dtype != np.int32 or ids.min() < 0:
            raise DamageError(f"{file} is damaged (it does not hold {count} token ids): copy the bundle again")
        return ids.astype(np.int64)

    def weights(self) -> int:
        """Bytes of all weight files."""
        return sum(file.size for name, file in self.manifest.files.items() if name.startswith("weights/"))

    def caches(self, backend: str) -> int:
        """Bytes of the KV caches and of the hidden rows kept for a drafter."""
        graphs, manifest = self.manifest.form(backend).graphs, self.manifest
        kept = manifest.capacity if manifest.has_drafter else 0
        hidden_rows = kept * manifest.hidden * np.dtype(manifest.dtype).itemsize * len(manifest.each)
        cached = (graph for name, graph in graphs.items() if name.partition(".")[0] in ("target", "draft"))
        return hidden_rows + sum(graph.cache_bytes(manifest.capacity) for graph in cached)


def folder(path: str | Path) -> Path:
    """The absolute path of a folder that a user named. Raises InputError for a name that the file system refuses."""
    try:
        resolved = Path(path).expanduser().resolve()
        resolved.exists()
        return resolved
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"'{shown(str(path))}' cannot be used as a folder ({reason}): name another one") from None
