"""Records whether modules are being traced, in which case dialects emit the operators of their backends."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_capturing: ContextVar[bool] = ContextVar("capturing", default=False)


@contextmanager
def tracing() -> Iterator[None]:
    """Within this context modules are traced by ``exporter.tracing.capture``."""
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


def is_traced() -> bool:
    """Whether modules are being traced, by ``exporter.tracing.capture`` or, in tests that compare with it, by
    ``torch.onnx.export``."""
    return _capturing.get() or torch.onnx.is_in_onnx_export()
