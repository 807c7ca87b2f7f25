"""Replays emitted tokens by plain decoding on the same engine, one row per pass, and reports the differences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...api.generation import Generation
from ...api.model import Model
from ...decoding.settings import Settings

# Near-tie margins relative to the largest logit, by the precision of the target's products. Measured differences between a row of one
# pass and of another are up to 1.5e-6 in fp32 and 2.3e-3 in fp16 (docs/backends.md); they grow with depth. bf16 has three bits fewer
# than fp16. int8 products round every row alike, so these rows are bit-identical (graphs.dialects.exact.Exact).
NEAR = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2, "int8": 0.0}


def near_margin(model: Model) -> float:
    """The margin of a near-tie between passes of different shapes, relative to the largest logit."""
    return NEAR[model.decoder.passes.graphs["target"].precision]


@dataclass(frozen=True)
class Difference:
    """A token that plain decoding would not have emitted.

    index: among the emitted tokens. position: in the whole text. token: emitted. choice: plain decoding's. margin: how much the emitted
    token's logit would have to grow to be chosen, relative to the largest logit. near: whether rounding explains the difference.
    """

    index: int
    position: int
    token: int
    choice: int
    margin: float
    near: bool


def differences(model: Model, generation: Generation) -> list[Difference]:
    """Replays a finished generation with its own settings and seed, except lossy ones."""
    return replay(model, generation.prompt, generation.ids, replace(generation.settings, seed=generation.stats.seed))


def replay(model: Model, prompt: Sequence[int], ids: Sequence[int], settings: Settings) -> list[Difference]:
    """Compares emitted tokens with plain decoding's. Those after a difference are still checked, each after the tokens that were emitted.

    ids: emitted after the prompt. settings: with the seed that was used, if they sample.
    """
    plain = replace(settings, speculate=False, callback=None, tree="exact", accept="exact")
    near = near_margin(model)
    sampler = model.selector(prompt, plain).sampler
    result: list[Difference] = []
    with model.exclusive() as decoder:
        decoder.clear()
        row = decoder.prefill(prompt, speculate=False)
        assert row is not None
        for index, token in enumerate(ids):
            logits = decoder.passes.row(row)
            choice = sampler.choose(logits)
            if choice != token:
                margin = sampler.margin(logits, token) / float(np.abs(logits).max())
                result.append(Difference(index, len(prompt) + index, token, choice, margin, margin <= near))
            sampler.accept(token)
            if index + 1 < len(ids):
                decoder.feed([token])
                row = 0
    return result
