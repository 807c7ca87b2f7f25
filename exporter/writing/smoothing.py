"""SmoothQuant (arXiv 2211.10438): rescales the inputs of matrices, which the CPU rounds to int8, and leaves the model
as it is.

A row of inputs, or a block of one, is rounded to steps of its largest number, so a few large columns spoil the others.
Each column of inputs is divided by a scale, and the column of the matrix multiplied by it. What computes the inputs
takes up the division: the weight of a norm, or the rows of the matrix before.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graphs.layer import LlamaShape

from ..weights.scaled import Factors

_LEAST = 0.5  # of the scales: a column that is small in the text may be large in another, and dividing enlarges it


def smoothing(shape: LlamaShape, inputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> dict[str, Factors]:
    """The factors of a target's parameters by name, biases that it may lack included.

    inputs: mean square of each input of a matrix, fp32 [K], by the matrix' name. columns: sum of the squares of each of
    its columns, fp32 [K]. The inputs of lm_head, which are the rows that a drafter reads, are scaled only if its
    columns are given.
    """
    rows, by_column = dict[str, Tensor](), dict[str, Tensor]()

    def move(writer: str, readers: Sequence[str], groups: tuple[int, int, int] = (1, 1, -1)) -> None:
        """Scales what ``writer`` computes and ``readers`` multiply. groups: inputs are [n, copies, width], and copies
        have one scale."""
        names = [f"{reader}.weight" for reader in readers]
        of_inputs = inputs[names[0]].view(groups)
        of_columns = torch.stack([columns[name] for name in names]).sum(0).view(groups)
        scale = _scales(of_inputs.mean(1, keepdim=True), of_columns.mean(1, keepdim=True))
        rows[writer] = 1 / scale.flatten()
        by_column.update(dict.fromkeys(readers, scale.expand(of_inputs.shape).flatten()))

    for i in range(shape.layers):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        move(f"layers.{i}.input_layernorm", [f"{attention}.{name}_proj" for name in "qkv"])
        # Query heads that share a head of values read the same rows of v_proj.
        move(
            f"{attention}.v_proj",
            [f"{attention}.o_proj"],
            (shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim),
        )
        move(f"layers.{i}.post_attention_layernorm", [f"{mlp}.gate_proj", f"{mlp}.up_proj"])
        move(f"{mlp}.up_proj", [f"{mlp}.down_proj"])
    if "lm_head.weight" in columns:
        move("norm", ["lm_head"])
    weights = {f"{name}.weight": Factors(rows.get(name), by_column.get(name)) for name in {**rows, **by_column}}
    return weights | {f"{name}.bias": Factors(by) for name, by in rows.items()}


def _scales(inputs: Tensor, columns: Tensor) -> Tensor:
    """The square root of how much larger, as root mean squares, inputs are than the columns they are multiplied by,
    relative to the middle of all (docs/quality.md); 1 for columns that are not used."""
    ratio = inputs / columns
    used = ratio.isfinite() & (ratio > 0)
    if not used.any():
        return torch.ones_like(ratio)
    logarithm = torch.where(used, ratio, 1.0).log() / 4
    return torch.where(used, (logarithm - logarithm[used].mean()).exp().clamp_min(_LEAST), 1.0)
