"""The noise with which tokens are drawn.

The draw is an argmax over logits with Gumbel noise, which samples from the softmax (arXiv 1411.0030). The noise of a
token depends only on (seed, position, token). So equal logits give the same token whichever pass computed them, and
nearly equal logits nearly always do: two rows choose differently about as often as their distributions differ.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

GOLDEN, A, B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MOST = (1 << 64) - 1
_BLOCK = 1 << 14


def _mixed(x: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ x >> 30) * A & _MOST
    x = (x ^ x >> 27) * B & _MOST
    return x ^ x >> 31


def state(seed: int, position: int) -> int:
    """The part of the random bits that depends only on seed and position, 64 bits; it is added to ``products``."""
    return _mixed((_mixed((seed + GOLDEN) & _MOST) + position * GOLDEN) & _MOST)


def products(ids: np.ndarray) -> np.ndarray:
    """The part of the random bits that depends only on the token ids: int64 [n] -> uint64 [n], for ``high_bits``."""
    return (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)


_all_products = lru_cache(maxsize=2)(lambda vocabulary: products(np.arange(vocabulary)))


def blocks(count: int) -> Iterator[slice]:
    """Splits a row of so many numbers into blocks, whose intermediate results stay in the processor's cache."""
    return (slice(start, start + _BLOCK) for start in range(0, count, _BLOCK))


def _bits(seed: int, position: int, products: np.ndarray) -> np.ndarray:
    """Random bits, uint64 [n]. products: of n ids."""
    x = products + np.uint64(state(seed, position))
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= np.uint64(A)
    np.right_shift(x, np.uint64(27), out=shifted)
    x ^= shifted
    x *= np.uint64(B)
    np.right_shift(x, np.uint64(31), out=shifted)
    x ^= shifted
    return x


def high_bits(seed: int, position: int, products: np.ndarray) -> np.ndarray:
    """The first 32 of the bits of which ``noise`` makes its number between 0 and 1, uint32 [n]. products: of a block of
    ids."""
    return (_bits(seed, position, products) >> np.uint64(32)).astype(np.uint32)


def noise(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """Gumbel noise, float64 [n], for token ids (int64 [n]) at a position of the text."""
    # With one more bit the 0.5 would be rounded away, and a value of 1 would make the noise infinite.
    uniform = ((_bits(seed, position, products(ids)) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log(uniform))


def winners(row: np.ndarray, temperature: float, seed: int, position: int) -> np.ndarray:
    """Ascending ids of the tokens that a draw from all of a row can give, int64 [n]: all others have too little noise.
    row: float32 [V].

    A token beats the likeliest one only if its value v and its noise are together at least L, which that one has. Noise
    is
    -log(-log u), so 1 - u <= -log u <= exp(v - L).
    """
    best = np.array([row.argmax()])
    highest, least = row[best], np.float32(noise(seed, position, best)[0])
    divisor = np.float32(max(temperature, 1e-30))  # a larger temperature leaves more
    all_products, found = _all_products(len(row)), list[np.ndarray]()
    for block in blocks(len(row)):
        bounds = row[block] - highest
        with np.errstate(over="ignore"):
            bounds /= divisor
        bounds -= least
        np.exp(bounds, out=bounds)
        bounds *= np.float32(2.0**32 * (1 + 1e-4))  # more than rounding takes away
        rest = ~high_bits(seed, position, all_products[block])
        found.append(np.flatnonzero(rest.astype(np.float32) <= bounds) + block.start)
    ids = np.concatenate(found)
    return ids[row[ids] > -np.inf]
