"""Log-probabilities of emitted tokens under the target, before any step of ``sampling`` changes its logits."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenLogprobs:
    """An emitted token and its most likely alternatives.

    token: its id. logprob: natural logarithm of the probability that the target gives it. top: (id, logprob) of the most likely
    tokens, the likeliest first; of equal ones the lower id.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    @staticmethod
    def of(row: np.ndarray, token: int, count: int) -> "TokenLogprobs":
        """row: the target's logits [V] at the token's position. count: how many alternatives, at most V."""
        logits = row.astype(np.float64)
        logits -= logits.max()
        logits -= np.log(np.exp(logits).sum())
        count = min(count, len(logits))
        if not count:
            return TokenLogprobs(token, float(logits[token]), ())
        threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
        candidates = np.flatnonzero(logits >= threshold)
        top = candidates[np.argsort(-logits[candidates], kind="stable")][:count]
        return TokenLogprobs(token, float(logits[token]), tuple(zip(top.tolist(), logits[top].tolist(), strict=True)))
