"""Which tokens are trained and drafted, if not all."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.draft_vocabulary import by_age, choose, require_size
from . import parallel
from .evaluate import Vocabulary
from .store import TOKEN, Text

_PIECE = 1 << 22  # tokens counted at once


def vocabulary(
    size: int | None, stored: dict[str, Any] | None, text: Text, tokenizer: Any, ends: Sequence[int], lm_head: Tensor
) -> Vocabulary:
    """The draft vocabulary of a run: that of its state, or the ``size`` most frequent tokens of the text, None for all.

    lm_head: the target's, [V, H]. Raises InputError for more tokens than the target has.
    """
    everything = lm_head.shape[0]
    if size is None or size == everything:
        return Vocabulary(lm_head, None)
    require_size(size, everything, ends)
    ids = (
        stored["vocabulary"]
        if stored and stored.get("vocabulary") is not None
        else torch.tensor(_frequent(size, text, tokenizer, ends, everything))
    )
    ids = parallel.same(ids).to(lm_head.device)  # another process may have seen more of a text that is being written
    return Vocabulary(lm_head[ids].contiguous(), ids)


def _frequent(size: int, text: Text, tokenizer: Any, ends: Sequence[int], everything: int) -> list[int]:
    counts = np.zeros(everything, np.int64)
    for begin in range(0, text.tokens, _PIECE):
        counts += np.bincount(text.between(begin, begin + _PIECE) & TOKEN, minlength=everything)
    found = {int(i): int(counts[i]) for i in np.flatnonzero(counts)}
    return choose(size, found, by_age(tokenizer, everything), ends)
