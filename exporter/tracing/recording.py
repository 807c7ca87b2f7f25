"""What the spellings of operators (``aten``) ask of the recorder of a graph (``capture``)."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import onnx_ir as ir
import torch
from torch import Tensor

DTYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.float64: ir.DataType.DOUBLE,
    torch.int64: ir.DataType.INT64,
    torch.int32: ir.DataType.INT32,
    torch.uint8: ir.DataType.UINT8,
    torch.int8: ir.DataType.INT8,
    torch.bool: ir.DataType.BOOL,
    torch.float8_e4m3fn: ir.DataType.FLOAT8E4M3FN,
}
Like: TypeAlias = Tensor | tuple[torch.dtype, Any]  # a value's dtype and shape, or a tensor that has them


class Recording(Protocol):
    """A graph that operators are appended to."""

    def value(self, x: Tensor) -> ir.Value:
        """The value that stands for a tensor."""

    def constant(self, x: Tensor) -> ir.Value:
        """A constant; equal ones are one."""

    def operand(self, x: Any, dtype: torch.dtype, dims: int) -> ir.Value:
        """A tensor, a number or a size, cast to ``dtype``. dims: axes of what it is combined with."""

    def cast(self, value: ir.Value, dtype: torch.dtype, shape: Any, to: torch.dtype) -> ir.Value:
        """A value of ``dtype`` and ``shape`` as ``to``."""

    def same_shape(self, first: Sequence[Any], second: Sequence[Any]) -> bool:
        """Whether two shapes are equal whatever the open sizes are."""

    def shape(self, sizes: Sequence[Any]) -> ir.Value:
        """Sizes as int64 [n]."""

    def reshaped(self, sizes: Sequence[Any]) -> ir.Value:
        """``shape`` for Reshape, which infers one open size."""

    def emit(self, op: str, inputs: Sequence[ir.Value | None], like: Like, **attributes: Any) -> ir.Value:
        """Appends an operator with one output."""

    def emit_all(
        self, op: str, inputs: Sequence[ir.Value | None], like: Sequence[Like], domain: str = "", **attributes: Any
    ) -> list[ir.Value]:
        """``emit`` for operators of several outputs."""
