"""The blocks of GGUF that are codes of a bundle in another order: Q8_0 and Q4_0, 32 numbers after a scale in fp16."""

import numpy as np
import torch
from torch import Tensor

from graphs.dialects.quantization import flip_top_bits, pack

BITS = {"Q8_0": 8, "Q4_0": 4}


def parts(raw: np.ndarray, bits: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows, as ``Scheme`` has them for codes of dtype uint8.

    raw: uint8 [n, bytes of a row]. Q8_0 has signed codes; Q4_0 has codes offset by 8, the first 16 of a block in the
    low halves of its bytes and the others in the high ones (ggml's ``block_q8_0`` and ``block_q4_0``).
    """
    blocks = torch.from_numpy(raw).reshape(len(raw), -1, 2 + 4 * bits)
    scale, codes = blocks[..., :2].contiguous().view(torch.float16)[..., 0], blocks[..., 2:]
    if bits == 8:
        return flip_top_bits(codes.contiguous(), 8), scale
    return pack(torch.cat((codes & 15, codes >> 4), dim=-1)), scale
