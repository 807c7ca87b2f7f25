"""The noise of the target's draws, for the drafter: it ranks tokens by its own logits and that noise, and so guesses
the very draw.

``Sampler`` draws the argmax of logits / T + noise, and the noise depends on (seed, position, token) only. So the
drafter's guess is the argmax of its logits + T * noise. Which tokens it guesses costs acceptance and never changes a
text (docs/decoding.md).
"""

from math import inf, log
from typing import Any

import numpy as np

from ..engines.devices import Array, Device
from .noise import blocks, high_bits, products
from .sampling import Sampler
from .settings import Settings

_MOST = 1e6  # largest number that is added to a logit; adding more would round the logit away
_SMALL = 2.0**-10  # below it 1 - x loses digits of x in fp32


def rounded_noise(seed: int, position: int, products: np.ndarray) -> np.ndarray:
    """``noise.noise`` in fp32, from 32 of the 52 bits: five times as fast. products: of n ids -> fp32 [n]."""
    noise = np.empty(len(products), np.float32)
    for block in blocks(len(products)):
        noise[block] = _rounded(~high_bits(seed, position, products[block]))
    return noise


def _rounded(below: np.ndarray) -> np.ndarray:
    """below: uint32 [n], how far the bits are from all ones."""
    rest = below.astype(np.float32)
    # Noise is large where the uniform number is close to 1, so its distance from 1 must keep its digits.
    rest += np.float32(0.5)
    rest *= np.float32(2.0**-32 * (1 - 2.0**-23))  # never 1
    small = np.flatnonzero(rest < _SMALL)
    tiny = rest[small]
    np.subtract(np.float32(1), rest, out=rest)
    np.log(rest, out=rest)
    np.negative(rest, out=rest)
    rest[small] = tiny * (1 + tiny / 2)
    np.log(rest, out=rest)
    return np.negative(rest, out=rest)


def _useful(settings: Settings) -> float:
    """The most noise that is worth drafting: with more, most tokens that win are rare ones, which top-k, top-p and
    min-p remove."""
    share = max(1 - settings.top_p, settings.min_p, 1 / settings.top_k if settings.top_k else 0.0)
    return 1 - log(share) if share > 0 else inf


class DraftNoise:
    """Fills a draft graph's input ``noise``, a row for each level."""

    def __init__(self, rows: Array, device: Device, ids: np.ndarray) -> None:
        """rows: fp32 [depth, V], zeroed. ids: int64 [V], the target's ids of the draft vocabulary."""
        self._rows, self._device, self._ids = rows, device, ids
        self._depth, self._width = rows.shape
        self._products = products(ids)
        self._sampler: Sampler | None = None
        self._first, self._zero = 0, True  # the position of level 1; whether all rows are 0

    def put(self, sampler: Sampler, position: int) -> None:
        """For the next tree of a sampler's text. position: of the tokens of level 1 in that text."""
        if sampler.settings.accept == "typical" or sampler.settings.tree != "exact" or sampler.most_likely:
            if not self._zero:
                self._device.write(self._rows, np.zeros((self._depth, self._width), np.float32))
            self._sampler, self._zero = None, True
            return
        advance = position - self._first if self._sampler is sampler else self._depth
        kept = range(self._depth - advance) if advance >= 0 else range(0)
        rows = self._rows.reshape(1, self._depth, self._width)
        for level in kept if advance else ():
            self._device.move(rows, level, rows, level + advance, 1)
        for level in range(len(kept), self._depth):
            self._device.write(self._rows[level], self._row(sampler, position + level))
        self._sampler, self._first, self._zero = sampler, position, False

    def _row(self, sampler: Sampler, position: int) -> np.ndarray:
        temperature, seed = sampler.settings.temperature, sampler.seed
        if temperature:
            row: Any = rounded_noise(seed, position, self._products)
            np.minimum(row, _useful(sampler.settings), out=row)
            row *= np.float32(min(temperature, _MOST))
        else:
            row = np.zeros(self._width, np.float32)
        if (added := sampler.added(position)) is not None:
            row += added[self._ids]
        return np.clip(row, -_MOST, _MOST, out=row)
