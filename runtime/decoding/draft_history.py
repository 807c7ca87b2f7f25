"""Which tokens of the text the drafter has read, and which accepted tokens it still has to read."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from .engine_passes import EnginePasses
from .kv_cache import runs

_MOST_DEFERRED = 32  # tokens that the drafter reads at most when it drafts again


class DraftHistory:
    """For every accepted token, the drafter reads the target's hidden row before it (EAGLE's feature, arXiv 2401.15077).
    Without a drafter it holds no hidden rows, and nothing is read.

    The hidden rows of the last pass stay in ``EnginePasses.hidden``, and the next draft reads the accepted ones from there.
    Hidden rows of earlier passes are copied to ``hidden_history``, and ``catch_up`` reads them.

    Of a long prompt it reads the last part only: reading all of it would delay short answers, every draft reads the whole cache,
    and drafters are trained on short texts. Which tokens it has read costs acceptance and nothing else.

    hidden_history: [1, capacity, H], the target's hidden rows by position. pending_range: positions in it that the drafter
    still has to read. begin: the text's position of the drafter's first row. valid_rows: rows of the drafter's cache, from the
    first, that follow the text without a gap.
    """

    WINDOW: ClassVar[int] = 1024  # tokens of a prompt that the drafter reads at most, the last ones

    def __init__(self, passes: EnginePasses) -> None:
        manifest = passes.manifest
        self._passes, self._device = passes, passes.device
        self._last_hidden = passes.hidden.reshape(1, len(passes.tokens), manifest.hidden)
        positions = manifest.capacity if manifest.has_drafter else 0
        self.hidden_history = self._device.zeros((1, positions, manifest.hidden), manifest.dtype)
        self.begin = self.valid_rows = 0
        self.keep(0)

    def keep(self, position: int, begin: int = 0) -> None:
        """Keeps the drafter's rows of tokens before a position, and leaves nothing to read. begin: where the drafter begins if there are
        none."""
        rows = max(0, min(position, self.position) - self.begin)
        self.begin = self.begin if rows else begin
        self._passes.draft_cache.length[0] = rows
        self.pending_range, self.valid_rows = range(0), self._passes.manifest.capacity

    @property
    def rows(self) -> int:
        """Rows of the drafter's cache, from the first, that belong to the text without a gap."""
        return min(self.valid_rows, int(self._passes.draft_cache.length[0]))

    @property
    def position(self) -> int:
        """The text's position behind those rows; 0 without any."""
        return self.begin + self.rows if self.rows else 0

    def record(self, position: int, rows: int, pending: range) -> None:
        """Copies the first ``rows`` hidden rows of the last pass, which began at ``position``, to ``hidden_history``. pending:
        what the drafter still has to read; of more than WINDOW positions it reads the last, and gives up what it has read before."""
        self._device.move(self.hidden_history, position, self._last_hidden, 0, rows)
        if len(pending) > self.WINDOW:
            pending = range(pending.stop - self.WINDOW, pending.stop)
            self.keep(0, pending.start)
        self.pending_range = pending

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
        for at, row, n in runs(rows[:count].tolist(), True):
            self._device.move(self.hidden_history, end - count + at, self._last_hidden, row, n)
        begin = self.pending_range.start if self.pending_range else end - count
        if end - begin > _MOST_DEFERRED:
            self.valid_rows, begin = self.rows, end - _MOST_DEFERRED
        self.pending_range = range(begin, end)
        passes.accepted_count[0] = kept
        rows[:kept], tokens[:kept] = rows[count : count + kept], tokens[count : count + kept]

    def catch_up(self, text: Callable[[], Sequence[int]], interrupted: Callable[[], bool] = lambda: False) -> None:
        """The drafter reads ``pending_range``, until it is interrupted between two chunks. The rows that ``accept`` has set
        stay for the next draft.

        text: gives all token ids so far.
        """
        if not self.pending_range:
            return
        passes, token_ids = self._passes, text()
        rows, tokens, count = passes.accepted_rows, passes.accepted_tokens, passes.accepted_count
        accepted = rows.copy(), tokens.copy(), int(count[0])
        while self.pending_range:
            at, n = self.pending_range.start, min(passes.form.chunk, len(self.pending_range))
            count[0] = n
            self._device.move(passes.history_chunk, 0, self.hidden_history, at, n)
            rows[:n], tokens[:n] = np.arange(n), token_ids[at + 1 : at + 1 + n]
            passes.run_draft(passes.extend(n))
            # The pass returns nothing, so nothing else waits for it; its inputs change in the next turn.
            passes.run_draft(self._device.synchronize)
            passes.draft_cache.commit(passes.graphs["extend"], range(n))
            self.pending_range = range(at + n, self.pending_range.stop)
            if self.pending_range and interrupted():
                break
        rows[:], tokens[:], count[0] = accepted
