"""Log-probabilities of emitted tokens under the target, before any step of ``sampling`` changes its logits."""

from dataclasses import dataclass

import numpy as np


def log_softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities, float64 [V], of logits [V]. A temperature close to 0 may give -inf."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    with np.errstate(over="ignore"):
        shifted /= temperature
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


@dataclass(frozen=True)
class TokenLogprobs:
    """An emitted token and its most likely alternatives.

    token: its id. logprob: natural logarithm of the probability that the target gives it. top: (id, logprob) of the
    most likely tokens, the likeliest first; of equal ones the lower id.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    @staticmethod
    def of(row: np.ndarray, token: int, count: int) -> "TokenLogprobs":
        """row: the target's logits [V] at the token's position. count: how many alternatives, at most V."""
        logprobs = log_softmax(row)
        count = min(count, len(logprobs))
        if not count:
            return TokenLogprobs(token, float(logprobs[token]), ())
        threshold = np.partition(logprobs, len(logprobs) - count)[len(logprobs) - count]
        candidates = np.flatnonzero(logprobs >= threshold)
        top = candidates[np.argsort(-logprobs[candidates], kind="stable")][:count]
        return TokenLogprobs(
            token, float(logprobs[token]), tuple(zip(top.tolist(), logprobs[top].tolist(), strict=True))
        )
