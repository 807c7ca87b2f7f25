"""How glibc keeps and returns memory, where the C library is glibc."""

import asyncio
import ctypes
import os
from contextlib import suppress

# of mallopt
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT = 128 << 20
_MAPPED = 32 << 20  # the largest threshold that glibc takes
_SECONDS = 30.0  # between two returns of free memory, each of which takes 20 to 50 ms (docs/reliability.md)


def _set(option: int, value: int, name: str) -> None:
    """Sets an option, unless the environment does."""
    variables = f"MALLOC_{name.upper()}", f"MALLOC_{name.upper()}_"
    if os.environ.keys().isdisjoint(variables) and f"malloc.{name}" not in os.environ.get("GLIBC_TUNABLES", ""):
        with suppress(OSError, AttributeError):  # other C libraries do not have it
            ctypes.CDLL(None).mallopt(option, value)


def keep_memory_of_passes() -> None:
    """Lets the process keep up to 128 MiB that passes free. By default glibc returns a few MB at once, and the next
    layer's pages must be mapped and cleared again."""
    _set(_M_TRIM_THRESHOLD, _KEPT, "trim_threshold")
    _set(_M_MMAP_THRESHOLD, _MAPPED, "mmap_threshold")


def share_arena() -> None:
    """Makes all threads share one arena. glibc gives each thread its own, and each grows to what all streams need
    (docs/reliability.md)."""
    _set(_M_ARENA_MAX, 1, "arena_max")


def return_free_memory() -> None:
    """Returns free memory to the system, also within the heap. Arrays of passes, whose sizes follow the texts, leave
    such gaps."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


async def return_regularly() -> None:
    """Calls ``return_free_memory`` regularly, in another thread."""
    while True:
        await asyncio.sleep(_SECONDS)
        await asyncio.to_thread(return_free_memory)
