"""The target as transformers reads it, and how fast this machine computes in which precision."""

import time
import zlib
from typing import Any

import torch

from runtime.errors import DamageError, InputError

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.json_config import reason
from ..checkpoints.llama import llama_config, transformers_class


def load(source: str, device: str = "cpu") -> tuple[Any, Any]:
    """The target and its tokenizer, both transformers' own. The model is frozen and in fp32.

    Raises GumihoError for what is no supported target in the Hugging Face layout.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    checkpoint = Checkpoint(source, "target")
    config = llama_config(checkpoint)
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises whatever comes up
        raise InputError(
            f"target '{source}' has no tokenizer that can be loaded ({reason(error)}): training needs one"
        ) from None
    try:
        model = transformers_class(config).from_pretrained(checkpoint.folder, dtype=torch.float32, local_files_only=True)
    except Exception as error:
        raise DamageError(f"target '{source}' cannot be loaded ({reason(error)}): download it again") from None
    if model.config.vocab_size != config.vocab_size:
        raise DamageError(f"target '{source}' has a config.json that contradicts its weights: download it again")
    return model.to(device).eval().requires_grad_(False), tokenizer


def positions(model: Any) -> int:
    """Of the longest text whose every position all layers attend to, as those of a bundle do."""
    config = model.config
    window = None if config.model_type == "llama" else config.sliding_window
    return min(config.max_position_embeddings, window or config.max_position_embeddings)


def ends(model: Any, tokenizer: Any, source: str) -> tuple[int, ...]:
    """The tokens that end a text: of generation_config.json, of config.json, of the tokenizer."""
    found = [
        model.generation_config.eos_token_id if model.generation_config else None,
        model.config.eos_token_id,
        tokenizer.eos_token_id,
    ]
    ids = [i for value in found if value is not None for i in (value if isinstance(value, list) else [value])]
    if not ids:
        raise InputError(f"target '{source}' names no token that ends a text: give its generation_config.json an eos_token_id")
    return tuple(dict.fromkeys(ids))


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
