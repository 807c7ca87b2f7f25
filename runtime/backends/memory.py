"""The memory that engines need, and the memory that is free."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .control_groups import groups, text

if TYPE_CHECKING:
    from ..bundle.reader import Bundle

IGNORE = "GUMIHO_IGNORE_MEMORY"  # environment variable that skips the memory checks
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Space:
    """Peak memory in bytes, of the host and of the device."""

    host: int
    device: int = 0


@dataclass(frozen=True)
class MemoryNeeds:
    """Memory for compiling engines, and for loading them and generating. Both are lower bounds, so nothing that fits is
    refused.
    """

    compiling: Space
    running: Space


@dataclass(frozen=True)
class Free:
    """Free memory of a device in bytes. unified: whether device and host share one memory."""

    device: int
    unified: bool


def size(nbytes: int) -> str:
    """A number of bytes as text, in GB or MB."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def buffers(bundle: "Bundle", backend: str) -> int:
    """Bytes of caches and outputs; outputs with symbolic sizes are not counted."""
    graphs = bundle.manifest.form(backend).graphs
    # The target's graphs of fewer rows use the buffers of the largest one.
    tensors = [p for name, graph in graphs.items() if not name.startswith("target-") for p in graph.outputs]
    fixed = [
        tensor
        for tensor in tensors
        if not tensor.name.startswith("present_") and all(isinstance(n, int) for n in tensor.shape)
    ]
    return bundle.caches(backend) + sum(prod(map(int, p.shape)) * np.dtype(p.dtype).itemsize for p in fixed)


def host_free() -> int | None:
    """Bytes that this process can still allocate, swap included: Linux's estimate, bounded by control groups. None on
    other systems.
    """
    meminfo = {}
    for line in text(_MEMINFO).splitlines():
        name, _, rest = line.partition(":")
        meminfo[name] = 1024 * int(rest.split()[0])
    if "MemAvailable" not in meminfo:
        return None
    swap = meminfo.get("SwapFree", 0)
    return max(0, min(meminfo["MemAvailable"] + swap, *_group_limits(swap)))


def _group_limits(swap: int) -> Iterator[int]:
    """Bytes that each control group (v2) around the process still allows. swap: free bytes of the machine's swap."""
    yield 1 << 62
    for group in groups():
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is not None and used is not None:
            stat = dict(line.split() for line in text(group / "memory.stat").splitlines())
            # Linux frees it when memory is needed
            cached = sum(int(stat.get(name, 0)) for name in ("active_file", "inactive_file"))
            swap_limit, swapped = _number(group / "memory.swap.max"), _number(group / "memory.swap.current")
            yield (
                limit - used + cached + (swap if swap_limit is None else max(0, min(swap, swap_limit - (swapped or 0))))
            )


def _number(file: Path) -> int | None:
    number = text(file).strip()
    return int(number) if number.isdigit() else None
