"""Checks that this machine has enough free memory for engines."""

import os
from typing import TYPE_CHECKING

from ..backends import memory
from ..backends.memory import IGNORE, Free, Space, buffers, size
from ..errors import UnavailableError

if TYPE_CHECKING:
    from ..backends import Backend
    from ..bundle.reader import Bundle


def require(bundle: "Bundle", backend: "Backend", compiling: bool = False, streams: int = 1) -> Space:
    """The peak memory of loading engines, with the caches of so many streams, or of compiling and then loading them.

    Raises UnavailableError if less memory is free. The environment variable ``GUMIHO_IGNORE_MEMORY`` skips this check,
    since the needs of GPUs were derived from the libraries' sources and never measured.
    """
    needs = backend.memory(bundle)
    need = needs.running
    if compiling:
        need = Space(max(need.host, needs.compiling.host), max(need.device, needs.compiling.device))
    if streams > 1:
        one = of_stream(bundle, backend)
        need = Space(need.host + (streams - 1) * one.host, need.device + (streams - 1) * one.device)
    shortage = _shortage(need, memory.host_free(), backend.free())
    if shortage and not os.environ.get(IGNORE):
        raise UnavailableError(
            f"{'compiling' if compiling else 'loading'} for {backend.NAME} needs about {shortage}: free some, add "
            "swap, or export again with --weights int4 or a smaller "
            f"--capacity{', or load fewer streams' if streams > 1 else ''} ({IGNORE}=1 skips this check)"
        )
    return need


def of_stream(bundle: "Bundle", backend: "Backend") -> Space:
    """The memory of one stream's caches and buffers."""
    nbytes = buffers(bundle, backend.NAME)
    return Space(nbytes) if backend.free() is None else Space(0, nbytes)


def require_stream(bundle: "Bundle", backend: "Backend") -> None:
    """Raises UnavailableError if the memory that is free does not hold another stream."""
    shortage = _shortage(of_stream(bundle, backend), memory.host_free(), backend.free())
    if shortage and not os.environ.get(IGNORE):
        raise UnavailableError(
            f"another stream needs about {shortage}: close one, or export again with a smaller --capacity ({IGNORE}=1 "
            "skips this check)"
        )


def _shortage(need: Space, host_bytes: int | None, device: Free | None) -> str:
    """The memory that is needed and the memory that is free, in words; "" if it suffices.

    host_bytes: free memory of the host, None if unknown. device: free memory of the device, None without one.
    """
    if host_bytes is not None and need.host > host_bytes:
        return f"{size(need.host)} of memory, and {size(host_bytes)} are free, swap included"
    if device is None or not need.device:
        return ""
    device_bytes = max(device.device, host_bytes or 0) if device.unified else device.device
    if need.device > device_bytes:
        return f"{size(need.device)} on the device, and {size(device_bytes)} are free there"
    if device.unified and need.host + need.device > device_bytes:
        both = f"{size(need.host)} for the host and {size(need.device)} for the device"
        return f"{both}, and {size(device_bytes)} of the memory that they share are free, swap included"
    return ""
