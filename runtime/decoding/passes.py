"""What the passes of target and drafter have in common: a KV cache, bound calls, and the time that these take."""

from collections.abc import Callable
from time import perf_counter_ns
from typing import TypeVar

import numpy as np

from ..engines.devices import Call
from .kv_cache import KVCache

_MOST_BOUND = 32  # calls of a kind; cycles use fewer, but the last pass over a prompt may have any number of rows
K = TypeVar("K")


class Passes:
    """One model's passes. Only its own methods write its attributes.

    engine_ns: nanoseconds that the engines have worked so far. waited_ns: nanoseconds so far in which they worked for
    other streams.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.engine_ns = self.waited_ns = 0

    def run(self, call: Call) -> int:
        """Makes a call. Returns the nanoseconds that the engine worked for it."""
        started = perf_counter_ns()
        own, passed = call(), perf_counter_ns() - started
        worked = passed if own is None else int(own)
        self.engine_ns += worked
        self.waited_ns += passed - worked
        return worked

    @property
    def length(self) -> int:
        """Positions of the cache that are filled."""
        return int(self.cache.length[0])

    def keep(self, positions: int) -> None:
        """So many positions of the cache count as filled, from the first, whatever they hold."""
        self.cache.length[0] = positions

    def restore(self, rows: np.ndarray) -> None:
        """Fills the cache with rows as ``KVCache.rows`` returned them. Raises DamageError if they do not fit."""
        self.cache.fill(rows)

    def close(self) -> None:
        """Frees bindings and buffers."""
        self.__dict__.clear()


class CycleClock:
    """Splits the nanoseconds of a cycle into draft, target and host."""

    def __init__(self, draft: Passes, target: Passes) -> None:
        self._draft, self._target = draft, target
        self.start()

    def start(self) -> None:
        self._before = self._now()

    def times(self) -> tuple[int, int, int]:
        """Since ``start``, without the time in which the engines worked for other streams."""
        (draft, target, rest), (draft_before, target_before, rest_before) = self._now(), self._before
        return draft - draft_before, target - target_before, rest - rest_before

    def _now(self) -> tuple[int, int, int]:
        draft, target = self._draft, self._target
        in_calls = draft.engine_ns + target.engine_ns + draft.waited_ns + target.waited_ns
        return draft.engine_ns, target.engine_ns, perf_counter_ns() - in_calls


def bound_once(bound: dict[K, Call], key: K, bind: Callable[[], Call]) -> Call:
    """Binds at the first use, and again if many others were used since. Not ``functools.lru_cache``, which would keep
    the engines alive until garbage is collected."""
    call = bound.pop(key, None) or bind()
    bound[key] = call
    if len(bound) > _MOST_BOUND:
        del bound[next(iter(bound))]
    return call
