"""Named tensors -> aligned weight files, quantized on the way, streamed a slice at a time; equal tensors are stored once."""

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

from runtime.bundle.hashes import File
from runtime.errors import GumihoError

from ..staging import NOTES
from .source import Location, Source, Stored, _bytes, require_fp16

ALIGNMENT = 4096
_HEAD = 64  # numbers that two tensors are told apart by, before all of them are compared
_BLOCK = 16 << 20  # bytes read at once when a file is hashed again


def _goes_on(file: BinaryIO, data: memoryview) -> bool:
    """Whether the next bytes of a file are these. numpy compares them several times as fast as Python."""
    return np.array_equal(np.frombuffer(file.read(len(data)), np.uint8), np.frombuffer(data, np.uint8))


class Packer:
    """Writes weight files, and remembers across files what is already there: equal content is stored once.

    Sources that say where they are stored are not written: the file is hard-linked into the bundle.

    Every finished tensor is noted under ``NOTES``, with the hash of its file so far. A packer in the same folder goes
    on behind the last note that still holds.
    """

    def __init__(self, bundle: Path, dtype: torch.dtype, progress: Callable[[int], object]) -> None:
        """progress is told the bytes of every slice that has been dealt with."""
        self.bundle, self.dtype, self.progress = bundle, dtype, progress
        self._known: dict[tuple[torch.dtype, int], list[Location]] = {}
        self.hashes: dict[str, File] = {}
        self._links: dict[Path, str] = {}  # a checkpoint's file -> its name in the bundle

    def pack(self, file: str, sources: Mapping[str, Source]) -> dict[str, Location]:
        """Writes one file. Returns where each parameter lies, which may be an earlier file, or a linked one.

        Raises GumihoError where a file cannot be linked.
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
        locations, whole = self._resume(file, sources)
        # Hashing takes about as long as writing, and both let go of the interpreter.
        with path.open("ab") as out, self._journal(file).open("a", encoding="utf-8") as journal, ThreadPoolExecutor(1) as pool:
            for name, source in sources.items():
                if name in locations:
                    continue
                slices = source.slices()
                first = next(slices)
                place = self._equal(source, first)
                if place is None:
                    place = self._write(file, name, source, chain([first], slices), out, whole, pool)
                locations[name] = replace(place, shape=source.shape)
                journal.write(json.dumps([name, place.file, place.offset, place.length, out.tell(), whole.hexdigest()]) + "\n")
                journal.flush()
        self.hashes[file] = File.of(path, whole.hexdigest())
        return links | locations

    def _link(self, file: str, name: str, source: Source, stored: Stored) -> Location:
        if len(source.shape) == 1 or name == "embed_tokens.weight":
            for _ in source.slices():  # reading checks them; what the golden run multiplies with is read and checked there
                pass
        if stored.file not in self._links:
            link = f"{file.removesuffix('.bin')}/{stored.file.name}"
            self._links[stored.file] = link
            self.hashes[link] = self._linked(stored.file.resolve(), self.bundle / link)
        place = Location(
            self._links[stored.file], stored.offset, source.nbytes(self.dtype), source.dtype(self.dtype), source.shape
        )
        self._known.setdefault((place.dtype, place.length), []).append(place)
        return place

    @staticmethod
    def _linked(file: Path, link: Path) -> File:
        """Links a file; it may be linked already, by a run that was interrupted."""
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            if not (link.exists() and link.samefile(file)):
                os.link(file, link)
        except OSError as error:
            raise GumihoError(
                f"'{file}' cannot be hard-linked to where the bundle is written ({error.strerror}): "
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
        whole: Any,
        pool: ThreadPoolExecutor,
    ) -> Location:
        start, dtype = out.tell(), source.dtype(self.dtype)
        hashing: Future[None] | None = None
        for values in slices:
            kept = values.to(dtype)
            if dtype == torch.float16 != values.dtype:
                require_fp16(kept, f"{file}: the parameter '{name}'")
            data = _bytes(kept, dtype)
            if hashing:
                hashing.result()
            hashing = pool.submit(whole.update, data)
            out.write(data)
            self.progress(len(data))
        length = out.tell() - start
        padding = bytes(-length % ALIGNMENT)
        out.write(padding)
        out.flush()
        if hashing:
            hashing.result()
        whole.update(padding)
        place = Location(file, start, length, dtype, source.shape)
        self._known.setdefault((dtype, length), []).append(place)
        return place

    def _resume(self, file: str, sources: Mapping[str, Source]) -> tuple[dict[str, Location], Any]:
        """Where the parameters lie that were noted and are still what was written, and the hash of the file up to there.

        What else is in the file goes.
        """
        path, journal = self.bundle / file, self._journal(file)
        notes = journal.read_text("utf-8").splitlines() if journal.is_file() and path.is_file() else []
        path.touch()
        locations, whole, good, held = dict[str, Location](), hashlib.sha256(), 0, list[str]()
        with path.open("r+b") as stored:
            for note, (name, source) in zip(notes, sources.items(), strict=False):
                try:
                    noted, where, offset, length, end, digest = json.loads(note)
                except ValueError:
                    break  # it was being written
                ahead = whole.copy()
                while stored.tell() < end and (block := stored.read(min(_BLOCK, end - stored.tell()))):
                    ahead.update(block)
                if (noted, length, stored.tell(), ahead.hexdigest()) != (name, source.nbytes(self.dtype), end, digest):
                    break
                place = Location(where, offset, length, source.dtype(self.dtype), source.shape)
                if end > good:
                    self._known.setdefault((place.dtype, length), []).append(place)
                locations[name], whole, good = place, ahead, end
                held.append(note + "\n")
                self.progress(length)
            stored.truncate(good)
        journal.write_text("".join(held), "utf-8")
        return locations, whole

    def _equal(self, source: Source, first: Tensor) -> Location | None:
        """Where the same bytes lie already, as the same type. first: the first slice."""
        dtype = source.dtype(self.dtype)
        head = _bytes(first.reshape(-1)[:_HEAD], dtype)
        for place in self._known.get((dtype, source.nbytes(self.dtype)), []):
            # Read, not mapped: what has been looked at of a map is held until it goes.
            with (self.bundle / place.file).open("rb") as stored:
                stored.seek(place.offset)
                if not _goes_on(stored, head):
                    continue
                stored.seek(place.offset)
                if all(_goes_on(stored, _bytes(values, dtype)) for values in source.slices()):
                    self.progress(place.length)
                    return place
        return None

    def _journal(self, file: str) -> Path:
        return self.bundle / NOTES / f"{Path(file).stem}.jsonl"
