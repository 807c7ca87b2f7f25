"""Features of the processor, and the number of cores that this process may use."""

import os
import platform
from math import ceil
from pathlib import Path

from .control_groups import quotas

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_CPUINFO = Path("/proc/cpuinfo")


def physical_cores() -> int:
    """The cores that this process may use. Hardware threads of one core count once if the system reports them (Linux).
    Quotas of control groups (containers' ``--cpus``, systemd's ``CPUQuota``) are rounded down to whole cores, at least
    one.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(_SIBLINGS.format(cpu))
        cores.add(siblings.read_text() if siblings.is_file() else str(cpu))
    return min([len(cores), *(max(1, ceil(quota)) for quota in quotas())])


def vnni() -> bool | None:
    """Whether an x86 processor sums 8-bit products in 32 bits; None for others, and if unknown."""
    return "vnni" in _CPUINFO.read_text() if platform.machine() == "x86_64" and _CPUINFO.is_file() else None


def overflows() -> bool:
    """Whether sums of 8-bit products can overflow 16 bits, as on x86 before VNNI; False if unknown."""
    return vnni() is False


def one_row_differs() -> bool:
    """Whether ONNX Runtime sums the product of a single row with 4-bit codes in another order than that of several
    rows. It does on x86 without AVX-512; True also if that is unknown."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    return not (_CPUINFO.is_file() and "avx512vl" in _CPUINFO.read_text())
