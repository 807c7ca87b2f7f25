"""The memory that this process and its device use."""

import sys
from typing import Any

from ..backends import Backend

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]


def memory_in_use(backend: Backend) -> dict[str, Any]:
    """host: bytes that the process uses now; host_peak: the most so far, with child processes; device: the driver's
    report.

    Each is None if the system does not provide it.
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
