"""The target as transformers reads it, and how fast this machine computes in which precision."""

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphs.dialects.quantization import EMBEDDING
from runtime.errors import InputError

from ..checkpoints.llama import transformers_model
from ..checkpoints.lone_target import LoneTarget
from ..checkpoints.target import target_checkpoint


@dataclass(frozen=True)
class Target:
    """model: transformers' own, frozen. name: short, by its shape and some of its weights, so that text and state of
    another target are refused. ends: the tokens that end a text. positions: of the longest text whose every position
    all layers attend to, as those of a bundle do."""

    model: Any
    name: str
    tokenizer: Any
    ends: tuple[int, ...]
    positions: int


def load(
    source: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    layer_made: Callable[[Any], object] = lambda _: None,
) -> Target:
    """Any target that can be exported, in whatever format; quantized weights become the numbers they stand for.

    layer_made: called with each layer of the model, before the weights of the next one are read.
    Raises GumihoError for what is no supported target.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    found = LoneTarget(target_checkpoint(source))
    tokenizer = found.tokenizer
    if tokenizer is None:
        raise InputError(f"target '{source}' has no tokenizer, which training needs: add its tokenizer.json")
    ends = found.eos_token_ids
    if not ends:
        raise InputError(
            f"target '{source}' names no token that ends a text: give its generation_config.json an eos_token_id"
        )
    model = model_of(found, device, dtype, layer_made)
    return Target(model, _name(found), tokenizer, ends, found.target_config.positions)


def model_of(
    found: LoneTarget,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    layer_made: Callable[[Any], object] = lambda _: None,
) -> Any:
    """transformers' own model over the numbers of a checkpoint, frozen."""

    def read(name: str) -> Tensor:
        return found.target.read(name).float().to(device, dtype)

    model = transformers_model(found.target_config, found.target.names(), read, layer_made)
    model.model.rotary_emb.to(device)  # in fp32 always: positions times rounded frequencies are other angles
    return model


def _name(found: LoneTarget) -> str:
    shape, crc = found.target_shape, 0
    for name, rows in (("norm.weight", None), (EMBEDDING, 64), (f"layers.{shape.layers - 1}.mlp.down_proj.weight", 8)):
        crc = zlib.crc32(found.target.read(name)[:rows].float().contiguous().numpy().tobytes(), crc)
    return f"{shape.layers}x{shape.hidden}x{shape.vocabulary}-{crc:08x}"


def faster(device: str = "cpu") -> torch.dtype:
    """bf16 where its matrix products are faster than those of fp32 (AMX, AVX512-BF16, GPUs), else fp32."""

    def seconds(dtype: torch.dtype) -> float:
        a = torch.ones(256, 1024, dtype=dtype, device=device)
        times = []
        for _ in range(4):
            begun = time.perf_counter()
            (a @ a.T).sum().item()
            times.append(time.perf_counter() - begun)
        return min(times)

    return (
        torch.bfloat16 if device != "cpu" or seconds(torch.bfloat16) < 0.8 * seconds(torch.float32) else torch.float32
    )
