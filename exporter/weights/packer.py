"""Writes named tensors into aligned weight files, a slice at a time; equal tensors are stored once."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from graphs.dialects.quantization import EMBEDDING
from runtime.bundle.hashes import File
from runtime.errors import InputError

from .ahead import one_thread
from .notes import NOTES
from .source import Location, Source, Stored, _bytes, require_fp16

ALIGNMENT = 4096
_PREFIX = 64  # numbers of two tensors to compare before comparing all
_BLOCK = 16 << 20  # bytes read at once to hash a file again


def _continues_with(file: BinaryIO, data: memoryview) -> bool:
    """Whether the next bytes of a file are ``data``. numpy compares them several times as fast as Python."""
    return np.array_equal(np.frombuffer(file.read(len(data)), np.uint8), np.frombuffer(data, np.uint8))


class Packer:
    """Writes weight files. Tensors with equal content, in the same file or in several, are stored once.

    Sources with a ``stored`` location are not written: their file is hard-linked into the bundle.

    Every finished tensor is noted under ``NOTES``, with the hash of its file up to there. A new packer in the same
    folder resumes after the last note that is still valid.
    """

    def __init__(self, bundle: Path, dtype: torch.dtype, progress: Callable[[int], object]) -> None:
        """progress: called with the number of bytes of every slice that is done."""
        self.bundle, self.dtype, self.progress = bundle, dtype, progress
        self._by_size: dict[tuple[torch.dtype, int], list[Location]] = {}
        self.hashes: dict[str, File] = {}
        self._links: dict[Path, str] = {}  # a checkpoint's file -> its name in the bundle

    def pack(self, file: str, sources: Mapping[str, Source]) -> dict[str, Location]:
        """Writes one file. Returns the location of each parameter, which may be in an earlier file or a linked one.

        Raises InputError if a file cannot be linked, or a value is too large for fp16.
        """
        links = {
            name: self._link(file, name, source, source.stored)
            for name, source in sources.items()
            if source.stored and source.linkable(self.dtype)
        }
        sources = {name: source for name, source in sources.items() if name not in links}
        path = self.bundle / file
        path.parent.mkdir(parents=True, exist_ok=True)
        self._journal(file).parent.mkdir(exist_ok=True)
        locations, digest = self._resume(file, sources)
        # Hashed in another thread: it takes about as long as writing, and both release the interpreter lock.
        with (
            path.open("ab") as out,
            self._journal(file).open("a", encoding="utf-8") as journal,
            ThreadPoolExecutor(1) as pool,
            one_thread(),
        ):
            for name, source in sources.items():
                if name in locations:
                    continue
                slices = source.slices()
                first = next(slices)
                location = self._equal(source, first)
                if location is None:
                    location = self._write(file, name, source, chain([first], slices), out, digest, pool)
                locations[name] = replace(location, shape=source.shape)
                journal.write(
                    json.dumps([name, location.file, location.offset, location.length, out.tell(), digest.hexdigest()])
                    + "\n"
                )
                journal.flush()
        self.hashes[file] = File.of(path, digest.hexdigest())
        return links | locations

    def _link(self, file: str, name: str, source: Source, stored: Stored) -> Location:
        if len(source.shape) == 1 or name == EMBEDDING:
            for _ in source.slices():  # reading checks them; the golden run reads and checks all other matrices
                pass
        if stored.file not in self._links:
            link = f"{file.removesuffix('.bin')}/{stored.file.name}"
            self._links[stored.file] = link
            self.hashes[link] = self._linked(stored.file.resolve(), self.bundle / link)
        location = Location(
            self._links[stored.file], stored.offset, source.nbytes(self.dtype), source.dtype(self.dtype), source.shape
        )
        self._by_size.setdefault((location.dtype, location.length), []).append(location)
        return location

    @staticmethod
    def _linked(file: Path, link: Path) -> File:
        """Links a file unless an interrupted run has linked it already."""
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            if not (link.exists() and link.samefile(file)):
                os.link(file, link)
        except OSError as error:
            raise InputError(
                f"'{file}' cannot be hard-linked into the bundle's folder ({error.strerror}): "
                "name a folder on the same disk with --out, or leave --link-weights out"
            ) from None
        return File.of(link, "")

    def _write(
        self,
        file: str,
        name: str,
        source: Source,
        slices: Iterator[Tensor],
        out: BinaryIO,
        digest: Any,
        pool: ThreadPoolExecutor,
    ) -> Location:
        start, dtype = out.tell(), source.dtype(self.dtype)
        hashing: Future[None] | None = None
        for values in slices:
            converted = values.to(dtype)
            if dtype == torch.float16 != values.dtype:
                require_fp16(converted, f"{file}: the parameter '{name}'")
            data = _bytes(converted, dtype)
            if hashing:
                hashing.result()
            hashing = pool.submit(digest.update, data)
            out.write(data)
            self.progress(len(data))
        length = out.tell() - start
        padding = bytes(-length % ALIGNMENT)
        out.write(padding)
        out.flush()
        if hashing:
            hashing.result()
        digest.update(padding)
        location = Location(file, start, length, dtype, source.shape)
        self._by_size.setdefault((dtype, length), []).append(location)
        return location

    def _resume(self, file: str, sources: Mapping[str, Source]) -> tuple[dict[str, Location], Any]:
        """The locations of parameters whose notes still match the file, and the file's hash up to there.

        The rest of the file is removed.
        """
        path, journal = self.bundle / file, self._journal(file)
        notes = journal.read_text("utf-8").splitlines() if journal.is_file() and path.is_file() else []
        path.touch()
        locations, digest, valid_end, valid_notes = dict[str, Location](), hashlib.sha256(), 0, list[str]()
        with path.open("r+b") as stored:
            for note, (name, source) in zip(notes, sources.items(), strict=False):
                try:
                    noted_name, noted_file, offset, length, end, noted_digest = json.loads(note)
                except ValueError:
                    break  # the note is incomplete
                ahead = digest.copy()
                while stored.tell() < end and (block := stored.read(min(_BLOCK, end - stored.tell()))):
                    ahead.update(block)
                expected = name, source.nbytes(self.dtype), end, noted_digest
                if (noted_name, length, stored.tell(), ahead.hexdigest()) != expected:
                    break
                location = Location(noted_file, offset, length, source.dtype(self.dtype), source.shape)
                if end > valid_end:
                    self._by_size.setdefault((location.dtype, length), []).append(location)
                locations[name], digest, valid_end = location, ahead, end
                valid_notes.append(note + "\n")
                self.progress(length)
            stored.truncate(valid_end)
        journal.write_text("".join(valid_notes), "utf-8")
        return locations, digest

    def _equal(self, source: Source, first: Tensor) -> Location | None:
        """The location of the same bytes of the same dtype, if they are packed already. first: the first slice."""
        dtype = source.dtype(self.dtype)
        head = _bytes(first.reshape(-1)[:_PREFIX], dtype)
        for location in self._by_size.get((dtype, source.nbytes(self.dtype)), []):
            # Read, not mapped: pages read from a map stay in memory until it is closed.
            with (self.bundle / location.file).open("rb") as stored:
                stored.seek(location.offset)
                if not _continues_with(stored, head):
                    continue
                stored.seek(location.offset)
                if all(_continues_with(stored, _bytes(values, dtype)) for values in source.slices()):
                    self.progress(location.length)
                    return location
        return None

    def _journal(self, file: str) -> Path:
        return self.bundle / NOTES / f"{Path(file).stem}.jsonl"
