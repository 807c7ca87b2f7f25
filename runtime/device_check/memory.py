"""What a process and its device hold of memory."""

import sys
from typing import Any

from ..backends import Backend

try:
    import resource
except ImportError:  # no POSIX
    resource = None  # type: ignore[assignment]


def taken(backend: Backend) -> dict[str, Any]:
    """host: bytes that the process holds now; host_peak: at most so far, children included; device: as the driver tells it.

    None where the system does not tell.
    """
    return {"host": _resident(), "host_peak": _peak(), "device": backend.details().get("memory")}


def _resident() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, AttributeError):
        return None


def _peak() -> int | None:
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
