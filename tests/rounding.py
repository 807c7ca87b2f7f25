"""PyTorch's own products, of rows that are rounded to int8 as the CPU's are."""

from torch import Tensor, nn


class Rounding(nn.Linear):
    """Rounds what it multiplies as MatMulNBits of accuracy_level 4 does, and w8a8: each block of a row to whole steps
    of its largest number / 127."""

    block: int

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, self.block))
        step = blocks.abs().amax(-1, keepdim=True) / 127
        return super().forward(((blocks / step).round() * step).flatten(-2))
