"""Opens a bundle on disk: its manifest, its files and its tokenizer."""

import hashlib
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import GumihoError
from .files import read_regular
from .hashes import first_damaged
from .manifest import MANIFEST
from .manifest_reader import parse_manifest
from .records import shown

_MOST = 64 << 20  # bytes of a manifest


class Bundle:
    """A bundle on disk. Opening checks the manifest and that every file is there with its size; ``verify`` reads contents."""

    def __init__(self, path: str | Path) -> None:
        """Raises GumihoError for what is missing or damaged."""
        self.path = folder(path)
        manifest = self.path / MANIFEST
        if not manifest.is_file():
            raise GumihoError(f"'{shown(str(path))}' is no bundle (it has no {MANIFEST}): make one with gumiho-export")
        try:
            self._text = read_regular(manifest, _MOST)
            self.manifest = parse_manifest(self._text.decode("utf-8"), manifest)
        except (OSError, UnicodeDecodeError) as error:
            raise GumihoError(f"{manifest} cannot be read ({error}): copy the bundle again") from None
        for name, expected in self.manifest.files.items():
            file = self.path / name
            if not file.is_file():
                raise GumihoError(f"bundle {self.path} lacks its file {name}: copy the bundle again")
            if not file.resolve().is_relative_to(self.path):
                raise GumihoError(f"{file} is a link that leaves the bundle: copy the bundle again, following links (cp -rL)")
            if file.stat().st_size != expected.size:
                raise GumihoError(f"{file} has {file.stat().st_size} bytes, expected {expected.size}: copy the bundle again")

    def verify(self, quick: bool = False) -> None:
        """Compares the files with their hashes. Raises GumihoError at the first that differs.

        quick: reads what a second allows: small files whole, and samples of large ones. Otherwise every byte is read, except of a
        checkpoint's files that were linked without being read, which are always sampled.
        """
        damaged = first_damaged(self.path, self.manifest.files, quick)
        if damaged:
            raise GumihoError(f"{self.path / damaged} is damaged (its hash differs from the manifest's): copy the bundle again")

    @cached_property
    def hash(self) -> str:
        """sha256 of the manifest, which holds the hash of every file."""
        return hashlib.sha256(self._text).hexdigest()

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.json" in self.manifest.files

    @cached_property
    def tokenizer(self) -> Any:
        """The ``tokenizers.Tokenizer``. Raises GumihoError where the bundle has none."""
        from tokenizers import Tokenizer

        file = self.path / "tokenizer.json"
        if not self.has_tokenizer:
            raise GumihoError(f"bundle {self.path} has no tokenizer (its target had none): give token ids instead of text")
        try:
            return Tokenizer.from_file(str(file))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare exceptions, and its panics are not even those
            raise GumihoError(f"{file} is damaged ({error}): copy the bundle again") from None

    def weights(self) -> int:
        """Bytes of all weight files."""
        return sum(file.size for name, file in self.manifest.files.items() if name.startswith("weights/"))

    def caches(self, backend: str) -> int:
        """Bytes of the caches of target and drafter, and of the target's rows that the drafter reads later."""
        graphs, manifest = self.manifest.form(backend).graphs, self.manifest
        tensors = [*graphs["target"].caches, *graphs["draft"].caches]
        kept = manifest.capacity * manifest.hidden * np.dtype(manifest.dtype).itemsize
        return kept + sum(prod(int(n) for n in tensor.shape) * np.dtype(tensor.dtype).itemsize for tensor in tensors)


def folder(path: str | Path) -> Path:
    """A folder that a user named. Raises GumihoError for a name that no file system takes."""
    try:
        found = Path(path).expanduser().resolve()
        found.exists()
        return found
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise GumihoError(f"'{shown(str(path))}' is no folder ({reason}): name another one") from None
