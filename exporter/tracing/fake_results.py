"""What operators return, on tensors without numbers, where PyTorch takes long or cannot tell."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .recording import DTYPES

_OF_ONNX = {int(onnx): dtype for dtype, onnx in DTYPES.items()}
_COMPARING = {"eq", "lt", "le", "gt", "ge"}
_BROADCASTING = {*_COMPARING, "add", "sub", "mul", "div", "maximum", "pow", "bitwise_and", "bitwise_or", "where"}
_KEEPING = {
    "abs",
    "exp",
    "floor",
    "rsqrt",
    "silu",
    "clamp",
    "clone",
    "alias",
    "detach",
    "_to_copy",
    "_softmax",
    "_log_softmax",
}
_REDUCING = {"sum", "mean", "amax", "amin"}


def computed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator makes of constants. None for symbolic ones, which PyTorch cannot compute, but for the dialects'
    ``gather``."""
    if func.namespace != "onnx_symbolic":
        return func(*args, **kwargs)
    return args[0][0].index_select(0, args[0][1]) if args[1] == "Gather" else None


def declared(dtypes: int | Sequence[int], *, shape: Any = None, shapes: Any = None, **_: Any) -> Tensor | list[Tensor]:
    """The outputs of ``torch.onnx.ops.symbolic`` or ``symbolic_multi_out``, of which both declare dtypes and shapes."""
    if isinstance(dtypes, int):
        return torch.empty(shape, dtype=_OF_ONNX[dtypes])
    return [torch.empty(own, dtype=_OF_ONNX[dtype]) for own, dtype in zip(shapes, dtypes, strict=True)]


def inferred(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The output of an operator whose shape is simple, without PyTorch's rules for open sizes, which take several times
    as long. None for others."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    if name in _BROADCASTING and "rounding_mode" not in kwargs:
        operands = args[1:] if name == "where" else args[:2]
        first, second = (1 if isinstance(x, torch.SymInt) else x for x in operands)
        dtype = torch.bool if name in _COMPARING else torch.result_type(first, second)
        return torch.empty(_broadcast([x.shape for x in tensors]), dtype=dtype)
    if name in _KEEPING:
        return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    if name in _REDUCING:
        x, dims, *rest = args
        axes = {dim % x.dim() for dim in ([dims] if isinstance(dims, int) else dims)}
        keep = bool(rest[0] if rest else kwargs.get("keepdim", False))
        counts = name == "sum" and not x.is_floating_point()
        dtype = kwargs.get("dtype") or (torch.int64 if counts else x.dtype)
        return torch.empty([1 if i in axes else n for i, n in enumerate(x.shape) if keep or i not in axes], dtype=dtype)
    return None


def _broadcast(shapes: Sequence[Sequence[Any]]) -> list[Any]:
    """The shape of what is computed from tensors of these. Open sizes are not asked whether they are 1."""
    aligned = zip(*([1] * (max(map(len, shapes)) - len(shape)) + list(shape) for shape in shapes), strict=True)
    return [next((n for n in sizes if not isinstance(n, int) or n != 1), 1) for sizes in aligned]
