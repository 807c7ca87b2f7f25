"""transformers' own models as the judge of what the target generates."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

# Two passes that add up the same products in another order agree to about this share of the largest logit.
ROUNDING = 2e-6


@lru_cache(maxsize=4)
def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generate(folder: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy continuations of prompts of one length, cut behind the first end-of-text token."""
    return [list(text) for text in _generated(folder, tuple(map(tuple, prompts)), count)]


@lru_cache(maxsize=256)  # the same texts judge many ways to decode
@torch.inference_mode()
def _generated(folder: Path, prompts: tuple[tuple[int, ...], ...], count: int) -> list[list[int]]:
    model = load(folder)
    ids = torch.tensor(prompts)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
    )
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    texts = []
    for row in out[:, ids.shape[1] :].tolist():
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        texts.append(row[:stop])
    return texts


@torch.inference_mode()
def is_tie(folder: Path, prefix: Sequence[int], first: int, second: int) -> bool:
    """Whether two tokens after a prefix are closer than rounding can tell apart."""
    logits = load(folder)(torch.tensor([list(prefix)])).logits[0, -1]
    best = logits.max()
    return bool(max(best - logits[first], best - logits[second]) <= ROUNDING * logits.abs().max())


def assert_same(folder: Path, prompt: Sequence[int], found: Sequence[int], expected: Sequence[int]) -> bool:
    """The same tokens. A difference within rounding of a tie is no failure; returns True where one was met."""
    if list(found) == list(expected):
        return False
    at = next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected))
    )
    assert at < min(len(found), len(expected)), f"lengths differ: {len(found)} and {len(expected)}"
    prefix = [*prompt, *expected[:at]]
    assert is_tie(folder, prefix, found[at], expected[at]), f"token {at} is {found[at]}, expected {expected[at]}"
    return True
