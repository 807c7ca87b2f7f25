"""Keeps the memory of a process that serves for long from growing, where the C library is glibc."""

import asyncio
import ctypes
import os
from contextlib import suppress

_M_ARENA_MAX = -8  # of mallopt
_SECONDS = 30.0  # between two times that free memory is returned, which take 20 to 50 ms each (docs/reliability.md)


def share_arena() -> None:
    """glibc gives threads memory arenas of their own, each of which grows to what all streams need: a soak grew steadily (docs/reliability.md)."""
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(OSError, AttributeError):  # other C libraries have other ways
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def return_free_memory() -> None:
    """Gives the system back what is free between what is used: the arrays of passes, whose sizes follow the texts, leave such gaps."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


async def return_regularly() -> None:
    """Calls ``return_free_memory`` again and again, in another thread."""
    while True:
        await asyncio.sleep(_SECONDS)
        await asyncio.to_thread(return_free_memory)
