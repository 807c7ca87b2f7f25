"""Batches of text with the target's hidden states, and the anchors in them."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import parallel
from .store import ANSWER, TOKEN, Text

SPAN = 32  # consecutive anchors, which share the target's distributions
_TOGETHER = 16  # records of one pass when hidden states are computed beforehand
_HELD_OUT = 50  # one record in so many is never trained on


@dataclass
class Batch:
    """ids: int64 [B, T]; answer: bool [B, T], tokens that a drafter would have drafted; hidden: [B, T, H]; read: [B, T,
    K], what the drafter reads, ``hidden`` or taps; lengths: [B]."""

    ids: Tensor
    answer: Tensor
    hidden: Tensor
    read: Tensor
    lengths: list[int]


@dataclass
class Anchors:
    """Spans of positions to draft from: ``record`` int64 [N], the text of the batch; ``place`` int64 [N, S],
    consecutive positions."""

    record: Tensor
    place: Tensor

    def of(self, x: Tensor, ahead: int = 0) -> Tensor:
        """x: [B, T, ...] -> [N, S, ...], its rows at the anchors or so many positions after them."""
        return x[self.record[:, None], self.place + ahead]

    def first(self, count: int) -> "Anchors":
        return Anchors(self.record[:count], self.place[:count])


class Features:
    """The target's hidden states of every record, computed once and kept on disk in bf16: [tokens, H], or [tokens, H +
    taps * H], and a byte for each record.

    Processes share the files: each writes only bytes of the records that it has computed, and a record's own byte last.
    A target that is split over them is called by all at once, so its hidden states are computed beforehand (``fill``).
    """

    def __init__(self, folder: Path | None, text: Text, decoder: Any, taps: tuple[int, ...] = ()) -> None:
        """folder: where to keep them, None for nowhere. decoder: transformers' model without its lm_head. taps: the
        layers whose inputs are kept besides, see ``graphs.target.Target``."""
        self.text, self.decoder, self.taps = text, decoder, taps
        self.hidden: int = decoder.config.hidden_size
        self.width = self.hidden * (1 + len(taps))
        self.states = self.done = None
        self.complete = False
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.states, self.done = folder / "hidden.bin", folder / "done.bin"
            for file in (self.states, self.done):
                file.touch()

    def of(self, records: Sequence[int]) -> list[Tensor]:
        """bf16 [n, H], or [n, H + taps * H], of each record."""
        if self.states is None or self.done is None:
            return self._compute(records)
        missing = self._missing(records)
        if missing:
            self._store(missing, self._compute(missing))
        found, row = [], self.width * 2
        with open(self.states, "rb") as states:
            for record in records:
                start, end = self.text.start(record), int(self.text.ends[record])
                states.seek(start * row)
                read = np.frombuffer(states.read((end - start) * row), np.int16).reshape(-1, self.width)
                found.append(torch.from_numpy(read.copy()).view(torch.bfloat16))
        return found

    def fill(self, stopped: Callable[[], bool], report: Callable[[str], None]) -> bool:
        """Computes what is missing, in all processes with the same number of passes. Returns whether it is all there.

        What is appended to the text later is not seen. Raises UnavailableError if text is being written.
        """
        with nullcontext() if parallel.rank() else self.text.writing():
            parallel.wait()
            self.text.refresh()  # all processes see the same
            parallel.wait()
        missing = parallel.same(self._missing(np.argsort(self.text.lengths, kind="stable").tolist()))
        rank, ranks = parallel.rank(), parallel.ranks()
        for begin in range(0, len(missing), _TOGETHER * ranks):
            if stopped():
                return False
            report(f"hidden states  {begin:,} of {len(missing):,} texts")
            own = missing[begin + rank : begin + _TOGETHER * ranks : ranks]
            hidden = self._compute(own or missing[:1])  # who has none left calls the target with the others
            if own:
                self._store(own, hidden)
        parallel.wait()
        self.complete = True
        return True

    def refresh(self) -> None:
        """Takes notice of text that another process has appended, if its hidden states can still be computed."""
        if not self.complete:
            self.text.refresh()

    def _missing(self, records: Sequence[int]) -> list[int]:
        assert self.done is not None
        known = set(np.flatnonzero(np.fromfile(self.done, np.uint8)).tolist())
        return [record for record in records if record not in known]

    def _store(self, records: Sequence[int], hidden: Sequence[Tensor]) -> None:
        assert self.states is not None
        assert self.done is not None
        # Without a buffer, which might write back what lies between two records' bytes.
        with open(self.states, "r+b") as states, open(self.done, "r+b", buffering=0) as done:
            for record, own in zip(records, hidden, strict=True):
                states.seek(self.text.start(record) * self.width * 2)
                states.write(own.view(torch.int16).cpu().numpy().tobytes())
            states.flush()
            for record in records:
                done.seek(record)
                done.write(b"\1")

    @torch.no_grad()
    def _compute(self, records: Sequence[int]) -> list[Tensor]:
        texts = [(self.text.record(record) & TOKEN).astype(np.int64) for record in records]
        ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
        for row, own in zip(ids, texts, strict=True):
            row[: len(own)] = torch.from_numpy(own)
        device = self.decoder.embed_tokens.weight.device
        # Without a mask: attention is causal, so what pads a text at its end is seen by nothing that counts.
        found = self.decoder(ids.to(device), use_cache=False, output_hidden_states=bool(self.taps))
        parts = [found.last_hidden_state, *(found.hidden_states[tap] for tap in self.taps)]
        hidden = torch.cat([part.to(torch.bfloat16) for part in parts], -1)
        return [hidden[row, : len(own)].clone() for row, own in enumerate(texts)]


def usable(text: Text, depths: int, training: bool) -> NDArray[np.int64]:
    """Records that are long enough for a span of anchors, of those to train on or of those held out."""
    held = np.arange(len(text)) % _HELD_OUT == 0
    return np.flatnonzero((text.lengths >= SPAN + depths + 2) & (held != training))


def choose(text: Text, records: NDArray[np.int64], positions: int, rng: np.random.Generator) -> list[int]:
    """Records of similar length for about so many positions, padding included."""
    drawn = rng.choice(records, min(len(records), 256), replace=False)
    lengths = text.lengths[drawn]
    order = np.argsort(lengths, kind="stable")
    begin = int(rng.integers(len(order)))
    chosen: list[int] = []
    longest = 0
    for place in [*order[begin:], *order[:begin][::-1]]:
        longest = max(longest, int(lengths[place]))
        if chosen and longest * (len(chosen) + 1) > positions:
            break
        chosen.append(int(drawn[place]))
    return chosen


def batch(text: Text, features: Features, records: Sequence[int], device: str = "cpu") -> Batch:
    stored = [text.record(record) for record in records]
    lengths = [len(own) for own in stored]
    ids = torch.zeros(len(stored), max(lengths), dtype=torch.int64)
    answer = torch.zeros(ids.shape, dtype=torch.bool)
    kept = torch.zeros(*ids.shape, features.width, dtype=torch.bfloat16)
    for row, (own, states) in enumerate(zip(stored, features.of(records), strict=True)):
        ids[row, : len(own)] = torch.from_numpy((own & TOKEN).astype(np.int64))
        answer[row, : len(own)] = torch.from_numpy((own & ANSWER) != 0)
        kept[row, : len(own)] = states
    kept = kept.to(device)
    hidden = kept[..., : features.hidden]
    read = kept[..., features.hidden :] if features.taps else hidden
    return Batch(ids.to(device), answer.to(device), hidden, read, lengths)


def anchors(batch: Batch, spans: int, depths: int, rng: np.random.Generator) -> Anchors:
    """Spans that begin somewhere before a random answer token, each token as likely as another."""
    rows, places = (x.cpu().numpy() for x in batch.answer.nonzero(as_tuple=True))
    drawn = rng.choice(len(rows), spans, replace=len(rows) < spans)
    last = np.array(batch.lengths)[rows[drawn]] - SPAN - depths - 1
    begin = np.clip(places[drawn] - 2 - rng.integers(0, SPAN, spans), 0, last)
    device = batch.ids.device
    place = torch.from_numpy(begin).to(device)[:, None] + torch.arange(SPAN, device=device)
    return Anchors(torch.from_numpy(rows[drawn].astype(np.int64)).to(device), place)


def wanted(batch: Batch, at: Anchors, depths: int) -> tuple[Tensor, Tensor]:
    """The target's hidden states from one position after the anchors, [N, SPAN + depths - 1, H], and whether what
    follows each is an answer token, bool of that shape without H."""
    after = torch.arange(1, SPAN + depths, device=at.place.device)
    place = at.place[:, :1] + after
    return batch.hidden[at.record[:, None], place], batch.answer[at.record[:, None], place + 1]
