"""Which tokens of the text the drafter has read, and which accepted tokens it still has to read."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from ..bundle.manifest import Manifest
from ..engines.devices import Device
from .cycle import Accepted
from .draft_passes import DraftPasses
from .kv_cache import runs
from .target_passes import TargetPasses

_MOST_DEFERRED = 32  # tokens that the drafter reads at most when it drafts again


class DraftHistory:
    """For every accepted token, the drafter reads the target's hidden row before it (EAGLE's feature, arXiv
    2401.15077). Without a drafter, or if it has no cache, there are no hidden rows here, and only drafts read.

    The hidden rows of the last pass stay in ``TargetPasses.hidden``, and the next draft reads the accepted ones from
    there. Hidden rows of earlier passes are copied to ``hidden_history``, and ``catch_up`` reads them.

    Of a long prompt it reads the first few tokens and the last part: reading all of it would delay short answers, every
    draft reads the whole cache, and drafters are trained on short texts. The first tokens serve as attention sinks
    (arXiv 2309.17453). Which tokens it has read changes what is accepted and nothing else.

    hidden_history: [1, capacity, H], the target's hidden rows by position. pending: positions in it that the drafter
    still has to read, ascending and behind those it has read. accepted: what the next draft reads.
    """

    FIRST: ClassVar[int] = 4  # tokens of a prompt that the drafter reads in any case
    LAST: ClassVar[int] = 252  # tokens of the prompt's end that it reads at most

    def __init__(self, manifest: Manifest, device: Device, target: TargetPasses, draft: DraftPasses) -> None:
        self._device, self._target, self._draft = device, target, draft
        self._last_hidden = target.hidden.reshape(1, *target.hidden.shape)
        positions = manifest.capacity if draft.extends else 0
        self.hidden_history = device.zeros((1, positions, manifest.hidden), manifest.dtype)
        self.pending: list[int] = []
        self._prompt_end = 0  # the position behind the prompt
        self.accepted = Accepted()
        self._positions = np.zeros(draft.cache.capacity, np.int64)  # in the text, by row of the drafter's cache

    @property
    def positions(self) -> np.ndarray:
        """The positions in the text of the tokens that the drafter has read, int64, ascending."""
        return self._positions[: self._draft.length]

    def keep(self, position: int) -> None:
        """Forgets what the drafter has read, or was to read, from a position of the text on."""
        self._draft.keep(int(self.positions.searchsorted(position)))
        self.pending = [unread for unread in self.pending if unread < position]
        self._prompt_end = min(self._prompt_end, position)

    def restore(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Fills the drafter's cache with rows of a text, as ``KVCache.rows`` returned them, and leaves nothing to read.
        positions: of their tokens, int64 by row. Raises DamageError if they do not fit."""
        self.pending = []
        self._draft.restore(rows)
        self._positions[: len(positions)] = positions

    @property
    def behind(self) -> bool:
        """Whether the drafter has yet to read some of the prompt."""
        return bool(self.pending) and self.pending[0] < self._prompt_end

    def committed(self, graph: str, positions: Sequence[int]) -> None:
        """The drafter has read so many tokens in the first rows of its last pass. positions: in the text."""
        start, n = self._draft.length, len(positions)
        self._positions[start : start + n] = positions
        self._draft.commit(graph, n)

    def record(self, position: int, rows: int, pending: range, begin: int) -> None:
        """Copies ``rows`` hidden rows of the last pass, which began at ``position``, from ``begin`` on to
        ``hidden_history``. pending: those positions of a prompt that the drafter is to read. If they become more than
        LAST, it reads the last of them, and gives up what it has read before, all but the first tokens of the text."""
        self._device.move(self.hidden_history, position, self._last_hidden, begin, rows)
        self._prompt_end = position + rows
        self.pending += pending
        first = [unread for unread in self.pending if unread < self.FIRST]
        if len(self.pending) > len(first) + self.LAST:
            last = self.pending[-self.LAST :]
            self.keep(self.FIRST)
            self.pending = first + last

    def accept(self, accepted: Accepted) -> None:
        """Sets what the next draft reads."""
        self.accepted = accepted

    def defer(self, kept: int = 0) -> None:
        """Moves the accepted rows to ``hidden_history``, to be read when the drafter drafts again. Besides what
        it has yet to read of the prompt, it reads no more than the last few tokens: reading everything that plain
        decoding has added could take longer than drafting gains. The gap in its text costs acceptance and nothing else.

        kept: the number of last rows that stay for the next draft itself.
        """
        rows = self.accepted.rows[: len(self.accepted.rows) - kept]
        if self._draft.extends:
            end = self._target.length - kept
            begin = end - len(rows)
            for at, row, count in runs(rows, True):
                self._device.move(self.hidden_history, begin + at, self._last_hidden, row, count)
            of_prompt = bisect_left(self.pending, self._prompt_end)
            self.pending[of_prompt:] = [*self.pending[of_prompt:], *range(begin, end)][-_MOST_DEFERRED:]
        self.accepted = self.accepted.last(kept)

    def catch_up(self, text: Callable[[], Sequence[int]], once: bool = False) -> int:
        """The drafter reads what is pending. What ``accept`` has set stays for the next draft.

        text: gives all token ids so far. once: one chunk only. Returns the nanoseconds of the passes.
        """
        if not self.pending:
            return 0
        token_ids, took = text(), 0
        while self.pending:
            chunk = self.pending[: self._draft.chunk]
            took += self._draft.extend(self.hidden_history, chunk, [token_ids[position + 1] for position in chunk])
            self.committed("extend", chunk)
            self.pending = self.pending[len(chunk) :]
            if once:
                break
        return took
