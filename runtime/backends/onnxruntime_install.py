"""Which distribution of ONNX Runtime is installed, and what to install instead."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution

from ..errors import GumihoError

# Distributions of one and the same Python package: installed into one folder they overwrite each other's files.
_DISTRIBUTIONS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-migraphx",
    "onnxruntime-rocm",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
)
INSTALL_CUDA = "pip install 'onnxruntime-gpu[cuda,cudnn]>=1.31' 'cuda-bindings>=13'"
NO_PACKAGE = "the registry has none for aarch64, so export for tensorrt"


def require_one() -> None:
    """Raises GumihoError where two distributions of ONNX Runtime lie in one folder: which files are whose depends on their order."""
    found: dict[str, list[str]] = {}
    for name in _DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            found.setdefault(str(distribution(name).locate_file("")), []).append(name)
    for folder, names in found.items():
        if len(names) > 1:
            both = " ".join(names)
            raise GumihoError(
                f"{' and '.join(names)} are both installed in {folder} and overwrite each other's files: pip uninstall -y {both}, "
                f"then, for an NVIDIA GPU, {INSTALL_CUDA}, or else pip install onnxruntime"
            )
