"""Perplexity of bundles on a text, and how far their probabilities are from a reference's."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, inf, sqrt
from typing import Any

import numpy as np

from ...api.model import Model
from ...bundle.reader import Bundle
from ...decoding.logprobs import log_softmax
from ...decoding.text.encode import encode
from ...errors import DamageError


@dataclass
class Mean:
    """A running mean with its standard error (Welford 1962)."""

    count: int = 0
    value: float = 0.0
    _squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        difference = value - self.value
        self.value += difference / self.count
        self._squares += difference * (value - self.value)

    @property
    def error(self) -> float:
        """The standard error, as of independent values; infinite below two."""
        return sqrt(self._squares / (self.count - 1) / self.count) if self.count > 1 else inf


@dataclass
class Quality:
    """A bundle's results over the tokens of a text. The first three are in nats per token.

    loss: negative log-probability of the text's tokens. lost: ``loss`` minus the reference's. divergence:
    Kullback-Leibler divergence of the bundle's probabilities from the reference's, over all tokens that could follow.
    agreement: share of positions with the reference's most likely token. All but ``loss`` are empty for the reference
    itself.
    """

    loss: Mean = field(default_factory=Mean)
    lost: Mean = field(default_factory=Mean)
    divergence: Mean = field(default_factory=Mean)
    agreement: Mean = field(default_factory=Mean)

    @property
    def perplexity(self) -> float:
        return exp(self.loss.value) if self.loss.value < 700 else inf

    def add(self, token: int, row: np.ndarray, expected: np.ndarray | None = None) -> None:
        """Counts a position of the text. token: the next one; row, expected: log-probabilities [V] of the next token
        under the bundle and, unless it is the reference itself, under the reference."""
        self.loss.add(-float(row[token]))
        if expected is not None:
            self.lost.add(float(expected[token] - row[token]))
            self.divergence.add(float(np.exp(expected) @ (expected - row)))
            self.agreement.add(float(int(row.argmax()) == int(expected.argmax())))

    def summary(self) -> dict[str, Any]:
        """For JSON: infinite numbers as null."""
        numbers = {"perplexity": self.perplexity, "nats_per_token": self.loss.value}
        for name, mean in (("nats_lost", self.lost), ("kl_divergence", self.divergence), ("agreement", self.agreement)):
            numbers |= {name: mean.value, f"{name}_error": mean.error} if mean.count else {}
        return {name: value if value < inf else None for name, value in numbers.items()}


def windows(bundle: Bundle, text: str, window: int, most: int) -> list[list[int]]:
    """The first ``most`` tokens of a text in windows, each read without what precedes it.

    Every window begins with the special tokens that the tokenizer puts before a text, if any; these count towards
    ``window``, not towards ``most``. A last window that predicts nothing is left out.
    """
    plain, whole = encode(bundle, "a", special=False), encode(bundle, "a")
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    before, ids = whole[:at], encode(bundle, text, special=False)[:most]
    step = max(1, window - len(before))
    return [part for i in range(0, len(ids), step) if len(part := before + ids[i : i + step]) > 1]


def log_probabilities(models: Sequence[Model], window: Sequence[int]) -> Iterator[list[np.ndarray]]:
    """Reads a window and yields, for each of its tokens but the last, the log-probabilities [V] of the next one under
    each of the models, as float64. The models advance together, so no more than one pass of each is held.

    Raises DamageError if logits hold NaN or infinity.
    """
    step = min(model.decoder.form.chunk for model in models)
    for model in models:
        with model.exclusive() as decoder:
            decoder.clear()
    for start in range(0, len(window), step):
        part = window[start : start + step]
        for model in models:
            with model.exclusive() as decoder:
                decoder.feed(part)
        for row in range(min(len(part), len(window) - 1 - start)):
            yield [_row(model, row) for model in models]


def _row(model: Model, row: int) -> np.ndarray:
    with model.exclusive() as decoder:
        found = log_softmax(decoder.target.row(row))
    if not np.isfinite(found).all():
        raise DamageError(
            f"the logits of {model.bundle.path} hold NaN or infinity: the weights or engines are damaged, or values "
            "overflow; run `gumiho doctor` on the bundle"
        )
    return found


def measure(
    reference: Model,
    others: Sequence[Model],
    texts: Sequence[Sequence[int]],
    progress: Callable[[int], object] = lambda _: None,
) -> list[Quality]:
    """Quality of the reference and of each of the others. texts: windows of token ids. progress: gets the tokens done,
    window by window."""
    models, found = [reference, *others], [Quality() for _ in range(1 + len(others))]
    for window in texts:
        for position, rows in enumerate(log_probabilities(models, window), 1):
            found[0].add(window[position], rows[0])
            for quality, row in zip(found[1:], rows[1:], strict=True):
                quality.add(window[position], row, rows[0])
        progress(found[0].loss.count)
    return found
