"""Named tensors -> aligned weight files, quantized on the way, streamed a slice at a time; equal tensors are stored once."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from graphs.ops import FP8, Scheme, turned
from runtime.bundle import File
from runtime.errors import GumihoError

from .staging import NOTES

ALIGNMENT = 4096
_SLICE_ELEMENTS = 1 << 18  # what quantizing makes of so many stays in a core's cache: half the time of four times as many
_HEAD = 64  # numbers that two tensors are told apart by, before all of them are compared
_BLOCK = 16 << 20  # bytes read at once when a file is hashed again
_STEPS = 7.0, 7.5, 8.0, 8.5  # that a block's largest number may be long; codes reach from -8 to 7


@dataclass(frozen=True)
class Stored:
    """Where a file keeps a tensor, number behind number: ``offset`` in bytes."""

    file: Path
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Source:
    """Where a parameter's values come from. ``slices()`` yields them in storage order, whatever their stored dtype.

    fixed: what they are kept in, whatever the bundle's dtype: fp32 for the rotary tables, bytes for codes. stored: where they lie
    already, if they do in one piece.
    """

    shape: tuple[int, ...]
    slices: Callable[[], Iterator[Tensor]]
    fixed: torch.dtype | None = None
    stored: Stored | None = None

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.fixed or dtype

    def whole(self) -> Tensor:
        """All values at once, in their stored dtype."""
        return torch.cat([part.reshape(-1) for part in self.slices()]).reshape(self.shape)

    def linkable(self, dtype: torch.dtype) -> bool:
        """Whether the values lie in a file as a bundle wants them."""
        stored = self.stored
        # Old files have headers of any length, and not every processor reads numbers at odd addresses.
        return stored is not None and stored.dtype == self.dtype(dtype) and stored.offset % stored.dtype.itemsize == 0

    def nbytes(self, dtype: torch.dtype) -> int:
        return prod(self.shape) * self.dtype(dtype).itemsize


@dataclass(frozen=True)
class Location:
    """Where a parameter lies: ``file`` relative to the bundle, ``offset`` and ``length`` in bytes."""

    file: str
    offset: int
    length: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def mapped(self, bundle: Path) -> Tensor:
        """The values, mapped from the file (copy on write), not read."""
        array = np.memmap(bundle / self.file, np.uint8, "c", self.offset, (self.length,))
        return torch.from_numpy(array).view(self.dtype).reshape(self.shape)


def scale_of(weight: str) -> str:
    """The name of the scales that belong to a matrix' codes."""
    return weight.replace("weight", "scale")


def quantize(values: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of dtype, as ``Scheme`` has them, for matrices [..., N, K]. Scales are positive, as TensorRT wants them."""
    if scheme.codes == FP8:
        most = torch.finfo(FP8).max
        scale = (values.float().abs().amax(-1, keepdim=True) / most).to(dtype)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        return (values.float() / scale.float()).clamp_(-most, most).to(FP8), scale[..., 0]
    if scheme.input_major:
        codes, scale = _quantize8(values.float(), dtype)
        return codes.T, scale
    blocks = values.float().unflatten(-1, (-1, scheme.block))
    codes, scale = (_quantize8 if scheme.bits == 8 else _quantize4)(blocks, dtype)
    return (codes if scheme.codes == torch.int8 else turned(codes, scheme.bits)).view(scheme.codes), scale


def _quantize8(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two's complement codes, and scales by which a block's largest number is 127 long."""
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).to(dtype)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (blocks / scale.float()).round_().clamp_(-127, 127).to(torch.int8), scale[..., 0]


def _quantize4(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two's complement codes, two to a byte, and scales.

    A block's scale is the one of ``_STEPS`` with the smallest squared error: over a matrix a fifth less than with 7 steps
    alone, for trained weights as for Gaussian ones.
    """
    largest = blocks.abs().amax(-1, keepdim=True)
    scale, least = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    for steps in _STEPS:
        tried = (largest / steps).to(dtype).float()
        tried = torch.where(tried > 0, tried, 1.0)
        error = _codes(blocks, tried).mul_(tried).sub_(blocks).square_().sum(-1, keepdim=True)
        scale, least = torch.where(error < least, tried, scale), torch.minimum(error, least)
    codes = _codes(blocks, scale).to(torch.int8).view(torch.uint8)
    return codes[..., 0::2] & 15 | codes[..., 1::2] << 4, scale[..., 0].to(dtype)


def _codes(blocks: Tensor, scale: Tensor) -> Tensor:
    return (blocks / scale).round_().clamp_(-8, 7)


def quantized(source: Source, name: str, scheme: Scheme, dtype: torch.dtype) -> dict[str, Source]:
    """Codes and scales of a matrix, made in one pass over it: the codes' slices must be read before the scales'. Input-major codes are
    held whole, since their first row has a number of every slice."""
    shapes = scheme.shapes(source.shape)
    rows, made = max(1, _SLICE_ELEMENTS // source.shape[-1]), list[Tensor]()

    def parts() -> Iterator[Tensor]:
        # In one piece: small ones would lie between what is freed, and hold it.
        made[:], at = [torch.empty(shapes[1], dtype=dtype)], 0
        flat = made[0].view(-1)
        for values in source.slices():
            for part in values.split(rows):
                codes, scale = quantize(part, scheme, dtype)
                flat[at : at + scale.numel()] = scale.view(-1)
                at += scale.numel()
                yield codes
        if dtype == torch.float16:
            require_fp16(made[0], f"a scale of the quantized '{name}'")

    def codes() -> Iterator[Tensor]:
        if not scheme.input_major:
            yield from parts()
            return
        whole, at = torch.empty(shapes[0], dtype=scheme.codes), 0
        for part in parts():
            whole[:, at : at + part.shape[1]] = part
            at += part.shape[1]
        yield from whole.split(max(1, _SLICE_ELEMENTS // source.shape[0]))

    def scales() -> Iterator[Tensor]:
        if not made:  # the codes were packed in a run that was interrupted
            for _ in codes():
                pass
        yield from made
        made.clear()

    return {name: Source(shapes[0], codes, scheme.codes), scale_of(name): Source(shapes[1], scales, dtype)}


def recoded(place: Location, bundle: Path, bits: int) -> Source:
    """Packed codes, of so many bits, as the other type has them."""
    other = torch.int8 if place.dtype == torch.uint8 else torch.uint8
    rows = max(1, _SLICE_ELEMENTS // prod(place.shape[1:]))

    def slices() -> Iterator[Tensor]:
        for part in place.mapped(bundle).view(torch.uint8).split(rows):
            yield turned(part, bits).view(other)

    return Source(place.shape, slices, other)


def is_finite(values: Tensor) -> bool:
    """Whether no number is NaN or infinite. values: fp16, bf16, fp32 or fp64, of any shape."""
    # A tenth of what hashing them takes; torch.isfinite takes several times as long as hashing.
    return values.numel() == 0 or all(math.isfinite(float(end)) for end in values.aminmax())


def require_fp16(converted: Tensor, what: str) -> None:
    """Raises GumihoError where finite values became infinite by conversion to fp16. what: whose they are, for the error."""
    if not is_finite(converted):
        raise GumihoError(
            f"{what} holds a value too large for fp16, whose largest is 65504: keep it in bf16 or fp32, see --dtype"
        )


def _bytes(values: Tensor, dtype: torch.dtype) -> memoryview:
    return memoryview(values.to(dtype).contiguous().view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


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
