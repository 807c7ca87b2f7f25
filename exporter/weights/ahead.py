"""Work on slices in several threads: in order, and in constant memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from runtime.backends.processor import physical_cores

_T = TypeVar("_T")
_R = TypeVar("_R")
_MOST = 16  # workers, each of which holds a few slices


def ahead(work: Callable[[_T], _R], items: Iterable[_T], workers: int = 0) -> Iterator[_R]:
    """``work`` of each item, in their order. Items are read, in the caller's thread, no further ahead than the workers
    need.

    workers: by default one for each core.
    """
    workers = workers or min(physical_cores(), _MOST)
    waiting = deque[Future[_R]]()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


@contextmanager
def one_thread() -> Iterator[int]:
    """Keeps torch from splitting each operation among its own threads, as many as it yields, where workers share the
    work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
