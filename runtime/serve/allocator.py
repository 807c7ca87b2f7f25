"""Keeps a long-running server's memory from growing under glibc."""

import asyncio
import ctypes
import os
from contextlib import suppress

_M_ARENA_MAX = -8  # of mallopt
_SECONDS = 30.0  # between two returns of free memory, each of which takes 20 to 50 ms (docs/reliability.md)


def share_arena() -> None:
    """Makes all threads share one arena. glibc gives each thread its own, and each grows to what all streams need
    (docs/reliability.md)."""
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(OSError, AttributeError):  # other C libraries do not have it
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def return_free_memory() -> None:
    """Returns free memory within the heap to the system. Arrays of passes, whose sizes follow the texts, leave such
    gaps."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


async def return_regularly() -> None:
    """Calls ``return_free_memory`` regularly, in another thread."""
    while True:
        await asyncio.sleep(_SECONDS)
        await asyncio.to_thread(return_free_memory)
