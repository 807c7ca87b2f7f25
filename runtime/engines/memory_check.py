"""Whether what engines take of memory is free here."""

import os
from typing import TYPE_CHECKING

from ..backends import memory
from ..backends.memory import Free, Space, size
from ..errors import GumihoError

if TYPE_CHECKING:
    from ..backends import Backend
    from ..bundle.reader import Bundle

IGNORE = "GUMIHO_IGNORE_MEMORY"


def require(bundle: "Bundle", backend: "Backend", compiling: bool = False) -> Space:
    """What loading, or compiling and then loading, takes at its peak.

    Raises GumihoError where that is more than can be had here, unless the environment has ``GUMIHO_IGNORE_MEMORY``: what GPUs take
    was read in the libraries' sources, so that a user must be able to try.
    """
    needs = backend.memory(bundle)
    need = needs.running
    if compiling:
        need = Space(max(need.host, needs.compiling.host), max(need.device, needs.compiling.device))
    reason = _lack(need, memory.host_free(), backend.free())
    if reason and not os.environ.get(IGNORE):
        raise GumihoError(
            f"{'compiling' if compiling else 'loading'} for {backend.NAME} needs about {reason}: free some, add swap, or export "
            f"again with --weights int4 or a smaller --capacity ({IGNORE}=1 tries all the same)"
        )
    return need


def _lack(need: Space, host: int | None, device: Free | None) -> str:
    """What does not fit, for a reader; "" where all does. host: bytes that are free, None where it is not known."""
    if host is not None and need.host > host:
        return f"{size(need.host)} of memory, and {size(host)} are free, swap included"
    if device is None or not need.device:
        return ""
    room = max(device.device, host or 0) if device.unified else device.device
    if need.device > room:
        return f"{size(need.device)} on the device, and {size(room)} are free there"
    if device.unified and need.host + need.device > room:
        both = f"{size(need.host)} for the host and {size(need.device)} for the device"
        return f"{both}, and {size(room)} of the memory that they share are free, swap included"
    return ""
