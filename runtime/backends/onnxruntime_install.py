"""Checks which distribution of ONNX Runtime is installed, and names the one to install."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution

from ..errors import UnavailableError

# These distributions contain the same Python package: if two are installed into one folder, they overwrite each other's
# files.
_DISTRIBUTIONS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-migraphx",
    "onnxruntime-rocm",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
)
INSTALL_CUDA = "pip install 'onnxruntime-gpu[cuda,cudnn]>=1.31' 'cuda-bindings>=13'"
JETSON = "; it has no kernels for Jetson Orin and Thor: export for tensorrt there"


def require_one() -> None:
    """Raises UnavailableError if two distributions of ONNX Runtime are installed in one folder, since their files are
    then mixed.
    """
    installed: dict[str, list[str]] = {}
    for name in _DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            installed.setdefault(str(distribution(name).locate_file("")), []).append(name)
    for folder, names in installed.items():
        if len(names) > 1:
            raise UnavailableError(
                f"{' and '.join(names)} are both installed in {folder} and overwrite each other's files: pip uninstall "
                f"-y {' '.join(names)}, then, for an NVIDIA GPU, {INSTALL_CUDA}, or else pip install onnxruntime"
            )
