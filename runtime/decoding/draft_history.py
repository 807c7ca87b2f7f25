"""What the drafter has read of the text, and the accepted tokens that it has still to read."""

from collections.abc import Callable, Sequence

import numpy as np

from .engine_passes import EnginePasses
from .kv_cache import runs

_MOST_DEFERRED = 32  # tokens that the drafter reads when it drafts again


class DraftHistory:
    """The drafter reads, for every accepted token, the target's hidden row before it (EAGLE's feature, arXiv 2401.15077).

    The rows of the last pass stay in ``EnginePasses.hidden`` and are read by the next draft: the accepted ones. Those of earlier
    passes are copied to ``hidden_history`` and read by ``catch_up``.

    hidden_history: [1, capacity, H], the target's hidden rows by position. pending_range: positions whose rows are there and not yet
    read. valid_length: rows of the drafter's cache, from the first, that follow the text without a gap.
    """

    def __init__(self, passes: EnginePasses) -> None:
        manifest = passes.manifest
        self._passes, self._device = passes, passes.device
        self._last_hidden = passes.hidden.reshape(1, len(passes.tokens), manifest.hidden)
        self.hidden_history = self._device.zeros((1, manifest.capacity, manifest.hidden), manifest.dtype)
        self.forget()

    def forget(self) -> None:
        """Nothing is to be read."""
        self.pending_range = range(0)
        self.valid_length = self._passes.manifest.capacity

    @property
    def length(self) -> int:
        """Rows of the drafter's cache that belong to the text from its beginning."""
        return min(self.valid_length, int(self._passes.draft_cache.length[0]))

    def record(self, position: int, rows: int, pending: range) -> None:
        """Keeps the first ``rows`` hidden rows of the last pass, which began at ``position``, for ``catch_up``. pending: positions
        that it is to read."""
        self._device.move(self.hidden_history, position, self._last_hidden, 0, rows)
        self.pending_range = pending

    def accept(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Leaves accepted rows of the target's last pass, and the token after each, for the next draft."""
        passes, n = self._passes, len(rows)
        passes.accepted_count[0] = n
        passes.accepted_rows[:n], passes.accepted_tokens[:n] = rows, tokens

    def defer(self, kept: int = 0) -> None:
        """The drafter reads what was accepted when it drafts again, and of that no more than the last few tokens: reading everything
        that plain decoding has added could take longer than drafting gains. The gap in its text costs acceptance only.

        kept: so many tokens, the last, stay accepted.
        """
        passes = self._passes
        rows, tokens = passes.accepted_rows, passes.accepted_tokens
        end, count = int(passes.target_cache.length[0]) - kept, int(passes.accepted_count[0]) - kept
        for at, row, n in runs(rows[:count].tolist(), True):
            self._device.move(self.hidden_history, end - count + at, self._last_hidden, row, n)
        begin = self.pending_range.start if self.pending_range else end - count
        if end - begin > _MOST_DEFERRED:
            self.valid_length, begin = self.length, end - _MOST_DEFERRED
        self.pending_range = range(begin, end)
        passes.accepted_count[0] = kept
        rows[:kept], tokens[:kept] = rows[count : count + kept], tokens[count : count + kept]

    def catch_up(self, text: Callable[[], Sequence[int]], interrupted: Callable[[], bool] = lambda: False) -> None:
        """Reads ``pending_range``, until interrupted between two chunks. What was accepted last stays for the next draft.

        text: gives all token ids so far.
        """
        if not self.pending_range:
            return
        passes, ids = self._passes, text()
        rows, tokens, count = passes.accepted_rows, passes.accepted_tokens, passes.accepted_count
        accepted = rows.copy(), tokens.copy(), int(count[0])
        while self.pending_range:
            at, n = self.pending_range.start, min(passes.form.chunk, len(self.pending_range))
            count[0] = n
            self._device.move(passes.history_chunk, 0, self.hidden_history, at, n)
            rows[:n], tokens[:n] = np.arange(n), ids[at + 1 : at + 1 + n]
            passes.run_draft(passes.extend(n))
            # It returns nothing to the host, which is about to change what it reads.
            passes.run_draft(self._device.synchronize)
            passes.draft_cache.commit(passes.graphs["extend"], range(n))
            self.pending_range = range(at + n, self.pending_range.stop)
            if self.pending_range and interrupted():
                break
        rows[:], tokens[:], count[0] = accepted
