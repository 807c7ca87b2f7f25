"""Whether modules are being traced, in which case dialects emit the operators of their backends, and branches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.onnx import ops

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


def either(condition: Tensor, then: Sequence[Tensor], otherwise: Sequence[Tensor]) -> Sequence[Tensor]:
    """One of two sequences of values; only that one is computed (``exporter.tracing.branches``). condition: bool
    [1]."""
    if not is_traced():
        return then if condition else otherwise
    dtypes, shapes = [x.dtype for x in then], [list(x.shape) for x in then]
    return ops.symbolic_multi_out(
        "gumiho::Either", [condition, *then, *otherwise], {}, dtypes=dtypes, shapes=shapes, version=1
    )
