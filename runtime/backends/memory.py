"""What engines take of memory, and what is free."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..bundle.reader import Bundle

_MEMINFO, _CGROUP, _CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Space:
    """Bytes of the host's memory and of the device's, at the peak."""

    host: int
    device: int = 0


@dataclass(frozen=True)
class MemoryNeeds:
    """compiling: of making engines. running: of loading them and generating. Lower bounds, so that a refusal is never a guess."""

    compiling: Space
    running: Space


@dataclass(frozen=True)
class Free:
    """Bytes that are free on a device. unified: its memory is the host's, so that both share what is free."""

    device: int
    unified: bool


def size(nbytes: int) -> str:
    """Bytes for a reader."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def buffers(bundle: "Bundle", backend: str) -> int:
    """Bytes of caches and outputs, those of symbolic sizes left out."""
    tensors = [tensor for graph in bundle.manifest.form(backend).graphs.values() for tensor in graph.outputs]
    fixed = [
        tensor for tensor in tensors if not tensor.name.startswith("present_") and all(isinstance(n, int) for n in tensor.shape)
    ]
    return bundle.caches(backend) + sum(prod(map(int, p.shape)) * np.dtype(p.dtype).itemsize for p in fixed)


def host_free() -> int | None:
    """Bytes that this process can have, swap included: as Linux estimates it, and as its control groups allow. None elsewhere."""
    known = {}
    for line in _read(_MEMINFO).splitlines():
        name, _, rest = line.partition(":")
        known[name] = 1024 * int(rest.split()[0])
    if "MemAvailable" not in known:
        return None
    swap = known.get("SwapFree", 0)
    return max(0, min(known["MemAvailable"] + swap, *_allowed(swap)))


def _allowed(swap: int) -> Iterator[int]:
    """What every control group (v2) around the process leaves it. swap: bytes free of the machine's."""
    yield 1 << 62
    own = next((line[3:].strip("/") for line in _read(_CGROUP).splitlines() if line.startswith("0::")), None)
    if own is None:
        return
    folder = _CGROUPS / own
    for group in (folder, *folder.parents):
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is not None and used is not None:
            stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
            cached = sum(int(stat.get(name, 0)) for name in ("active_file", "inactive_file"))  # goes where memory is wanted
            most, swapped = _number(group / "memory.swap.max"), _number(group / "memory.swap.current")
            yield limit - used + cached + (swap if most is None else max(0, min(swap, most - (swapped or 0))))
        if group == _CGROUPS:
            return


def _number(file: Path) -> int | None:
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text("ascii")
    except (OSError, ValueError):
        return ""
