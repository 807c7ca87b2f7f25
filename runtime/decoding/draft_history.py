"""Which tokens of the text the drafter has read, and which accepted tokens it still has to read."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from .engine_passes import EnginePasses
from .kv_cache import runs

_MOST_DEFERRED = 32  # tokens that the drafter reads at most when it drafts again


class DraftHistory:
    """For every accepted token, the drafter reads the target's hidden row before it (EAGLE's feature, arXiv 2401.15077).
    Without a drafter, or with one that has no caches, it holds no hidden rows, and nothing is read but what a draft itself reads.

    The hidden rows of the last pass stay in ``EnginePasses.hidden``, and the next draft reads the accepted ones from there.
    Hidden rows of earlier passes are copied to ``hidden_history``, and ``catch_up`` reads them.

    Of a long prompt it reads the first few tokens and the last part: reading all of it would delay short answers, every draft reads the
    whole cache, and drafters are trained on short texts. The first tokens are there because attention that has nowhere else to go
    rests on them (attention sinks, arXiv 2309.17453). Which tokens it has read costs acceptance and nothing else.

    hidden_history: [1, capacity, H], the target's hidden rows by position. pending: positions in it that the drafter still has to read,
    ascending and behind those it has read.
    """

    FIRST: ClassVar[int] = 4  # tokens of a prompt that the drafter reads in any case
    LAST: ClassVar[int] = 252  # tokens behind those that it reads at most, the last ones

    def __init__(self, passes: EnginePasses) -> None:
        manifest = passes.manifest
        self._passes, self._device = passes, passes.device
        self._last_hidden = passes.hidden.reshape(1, len(passes.tokens), manifest.hidden)
        positions = manifest.capacity if passes.extends else 0
        self.hidden_history = self._device.zeros((1, positions, manifest.hidden), manifest.dtype)
        self.pending: list[int] = []
        self._positions = np.zeros(passes.draft_cache.capacity, np.int64)  # in the text, by row of the drafter's cache

    @property
    def positions(self) -> np.ndarray:
        """The positions in the text of the tokens that the drafter has read, int64, ascending."""
        return self._positions[: int(self._passes.draft_cache.length[0])]

    def keep(self, position: int) -> None:
        """Forgets what the drafter has read, or was to read, from a position of the text on."""
        self._passes.draft_cache.length[0] = self.positions.searchsorted(position)
        self.pending = [unread for unread in self.pending if unread < position]

    def restore(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Fills the drafter's cache with rows of a text, as ``KVCache.rows`` returned them, and leaves nothing to read. positions: of
        their tokens, int64 by row. Raises DamageError if they do not fit."""
        self.pending = []
        self._passes.draft_cache.fill(rows)
        self._positions[: len(positions)] = positions

    def committed(self, graph: str, positions: Sequence[int]) -> None:
        """The drafter has read so many tokens in the first rows of its last pass. positions: in the text."""
        cache, n = self._passes.draft_cache, len(positions)
        start = int(cache.length[0])
        self._positions[start : start + n] = positions
        cache.commit(self._passes.graphs[graph], range(n))

    def record(self, position: int, rows: int, pending: range, begin: int) -> None:
        """Copies ``rows`` hidden rows of the last pass, which began at ``position``, from ``begin`` on to ``hidden_history``. pending:
        those positions of a prompt that the drafter is to read. If they become more than LAST, it reads the last of them, and gives up what
        it has read before, all but the first tokens of the text."""
        self._device.move(self.hidden_history, position, self._last_hidden, begin, rows)
        self.pending += pending
        first = [unread for unread in self.pending if unread < self.FIRST]
        if len(self.pending) > len(first) + self.LAST:
            last = self.pending[-self.LAST :]
            self.keep(self.FIRST)
            self.pending = first + last

    def accept(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Sets what the next draft reads. rows: accepted ones of the target's last pass; tokens: the one after each row."""
        passes, n = self._passes, len(rows)
        passes.accepted_count[0] = n
        passes.accepted_rows[:n], passes.accepted_tokens[:n] = rows, tokens

    def defer(self, kept: int = 0) -> None:
        """Moves the accepted rows to ``hidden_history``, to be read when the drafter drafts again. It reads no more than the
        last few tokens: reading everything that plain decoding has added could take longer than drafting gains. The gap in its
        text costs acceptance and nothing else.

        kept: the number of last rows that stay for the next draft itself.
        """
        passes = self._passes
        rows, tokens = passes.accepted_rows, passes.accepted_tokens
        end, count = int(passes.target_cache.length[0]) - kept, int(passes.accepted_count[0]) - kept
        if passes.extends:
            for at, row, n in runs(rows[:count].tolist(), True):
                self._device.move(self.hidden_history, end - count + at, self._last_hidden, row, n)
            self.pending = [*self.pending, *range(end - count, end)][-_MOST_DEFERRED:]
        passes.accepted_count[0] = kept
        rows[:kept], tokens[:kept] = rows[count : count + kept], tokens[count : count + kept]

    def catch_up(self, text: Callable[[], Sequence[int]], once: bool = False) -> None:
        """The drafter reads what is pending. The rows that ``accept`` has set stay for the next draft.

        text: gives all token ids so far. once: one chunk only.
        """
        if not self.pending:
            return
        passes, token_ids = self._passes, text()
        rows, tokens, count = passes.accepted_rows, passes.accepted_tokens, passes.accepted_count
        accepted = rows.copy(), tokens.copy(), int(count[0])
        while self.pending:
            chunk = self.pending[: passes.form.chunk]
            n = len(chunk)
            count[0] = n
            for at, position, length in runs(chunk, True):
                self._device.move(passes.history_chunk, at, self.hidden_history, position, length)
            rows[:n], tokens[:n] = np.arange(n), [token_ids[position + 1] for position in chunk]
            passes.run_draft(passes.extend(n))
            # The pass returns nothing, so nothing else waits for it; its inputs change in the next turn.
            passes.run_draft(self._device.synchronize)
            self.committed("extend", chunk)
            self.pending = self.pending[n:]
            if once:
                break
        rows[:], tokens[:], count[0] = accepted
