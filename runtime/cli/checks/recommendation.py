"""The backend that a machine should use, by its hardware and by what has been run on such."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from ...backends import Backend
from ...bundle.reader import Bundle


def gpu(root: Path = Path("/")) -> tuple[str, str]:
    """What the machine has besides its CPU, and the backend for that; "" and ``cpu`` if nothing. root: of the file
    system, whose device files tell; no driver is asked."""
    if any((root / name).exists() for name in ("etc/nv_tegra_release", "dev/nvhost-gpu")):
        return "the Jetson", "tensorrt"
    if any((root / name).exists() for name in ("dev/nvidia0", "proc/driver/nvidia/gpus")):
        # TensorRT and TensorRT for RTX have not been run on any card yet (docs/backends.md).
        return "the NVIDIA GPU", "cuda"
    for node in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        facts = dict(line.split(maxsplit=1) for line in node.read_text("utf-8").splitlines() if " " in line)
        if facts.get("gfx_target_version", "0").strip() != "0":  # 0 is a CPU's
            return "the AMD GPU", "migraphx"
    return "", "cpu"


def recommendation(available: Mapping[str, Backend | None], bundle: Bundle | None, root: Path = Path("/")) -> str:
    """A sentence with the command to type. available: the backends by name, None if one cannot run here."""
    hardware, name = gpu(root)
    what = f"{name}, for {hardware}" if hardware else name
    if available.get(name) is None and name != "cpu":
        what, name = f"{what}, once it runs (see above); until then cpu", "cpu"
    if bundle is None:
        return f"recommended: {what}: gumiho export --target MODEL --backend {name}"
    path = shlex.quote(str(bundle.path))
    if name not in bundle.manifest.forms:
        return f"recommended: {what}: export the bundle again with --backend {name}"
    return f"recommended: {what}: gumiho compile {path} --backend {name}, then gumiho generate {path} --backend {name}"
