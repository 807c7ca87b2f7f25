"""Free space on the disk that an export writes to."""

import shutil
from pathlib import Path

from runtime.errors import UnavailableError


def free_space(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_space(needed: int, out: Path) -> None:
    """Raises UnavailableError if the disk of ``out`` has fewer free bytes than ``needed``."""
    free = free_space(out)
    if free < needed:
        raise UnavailableError(
            f"the export needs {needed / 1e9:.2f} GB and the disk of '{out}' has {free / 1e9:.2f} GB free: "
            "free some space, or name a folder on another disk with --out"
        )
