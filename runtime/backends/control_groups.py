"""The control groups around this process (Linux), which limit its memory and its processor time."""

from collections.abc import Iterator
from pathlib import Path

_OWN, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def text(file: Path) -> str:
    """The text of a file; "" if it cannot be read."""
    try:
        return file.read_text("ascii")
    except (OSError, ValueError):
        return ""


def groups(controller: str = "") -> Iterator[Path]:
    """The folders of the process's group and of its ancestors. controller: a controller of version 1; "" for groups of
    version 2."""
    for line in text(_OWN).splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            root = _ROOT / names
            folder = root / path.strip("/")
            yield folder
            if folder != root:
                yield from folder.parents[: len(folder.relative_to(root).parts)]


def quotas() -> Iterator[float]:
    """Each group's quota of processor time, in processors."""
    for group in groups():
        limit, _, period = text(group / "cpu.max").partition(" ")
        if limit.isdigit():
            yield int(limit) / int(period)
    for group in groups("cpu"):
        limit, period = text(group / "cpu.cfs_quota_us").strip(), text(group / "cpu.cfs_period_us")
        if limit.isdigit():  # -1: no limit
            yield int(limit) / int(period)
