"""The target as transformers reads it, and how fast this machine computes in which precision."""

import time
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from runtime.errors import InputError

from ..checkpoints.llama import transformers_model
from ..checkpoints.lone_target import LoneTarget
from ..checkpoints.target import target_checkpoint
from ..plan import eos_token_ids


@dataclass(frozen=True)
class Target:
    """model: transformers' own, frozen, in fp32. ends: the tokens that end a text. positions: of the longest text whose every position
    all layers attend to, as those of a bundle do."""

    model: Any
    tokenizer: Any
    ends: tuple[int, ...]
    positions: int


def load(source: str, device: str = "cpu") -> Target:
    """Any target that can be exported, in whatever format; quantized weights become the numbers they stand for.

    Raises GumihoError for what is no supported target.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    found = LoneTarget(target_checkpoint(source))
    tokenizer = found.tokenizer
    if tokenizer is None:
        raise InputError(f"target '{source}' has no tokenizer, which training needs: add its tokenizer.json")
    own = tokenizer.eos_token_id
    ends = tuple(dict.fromkeys((*eos_token_ids(found), *(() if own is None else (own,)))))
    if not ends:
        raise InputError(f"target '{source}' names no token that ends a text: give its generation_config.json an eos_token_id")
    return Target(model_of(found).to(device), tokenizer, ends, found.target_config.positions)


def model_of(found: LoneTarget) -> Any:
    """transformers' own model over the numbers of a checkpoint, in fp32 on the CPU, frozen."""
    return transformers_model(found.target_config, {name: found.target.read(name).float() for name in found.target.names()})


def fingerprint(model: Any) -> str:
    """A short name of a target by its shape and some of its weights, so that text and state of another one are refused."""
    config, crc = model.config, 0
    for tensor in (
        model.model.norm.weight,
        model.model.embed_tokens.weight[:64],
        model.model.layers[-1].mlp.down_proj.weight[:8],
    ):
        crc = zlib.crc32(tensor.detach().float().cpu().contiguous().numpy().tobytes(), crc)
    return f"{config.num_hidden_layers}x{config.hidden_size}x{config.vocab_size}-{crc:08x}"


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

    return torch.bfloat16 if device != "cpu" or seconds(torch.bfloat16) < 0.8 * seconds(torch.float32) else torch.float32
