"""Replays emitted tokens by plain decoding on the same engine, one row per pass, and reports the differences."""

from dataclasses import dataclass, replace

import numpy as np

from .generation import Generation
from .model import Model

# Near-tie margins relative to the largest logit, by the precision of the target's products. Measured differences between a row of one
# pass and of another are up to 1.5e-6 in fp32 and 2.3e-3 in fp16 (docs/backends.md); they grow with depth. bf16 has three bits fewer
# than fp16. int8 products round every row alike, so these rows are bit-identical (graphs.dialects.exact.Exact).
NEAR = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2, "int8": 0.0}


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
    """Replays a finished generation with its own settings and seed, except lossy ones.

    Tokens after a difference are still checked, each after the tokens that were emitted.
    """
    seed = generation.stats.seed
    plain = replace(generation.settings, seed=seed, speculate=False, callback=None, tree="exact", accept="exact")
    near = NEAR[model.decoder.passes.graphs["target"].precision]
    sampler, prompt = model.selector(generation.prompt, plain).sampler, generation.prompt
    result: list[Difference] = []
    with model.exclusive() as decoder:
        decoder.clear()
        row = decoder.prefill(prompt, speculate=False)
        assert row is not None
        for index, token in enumerate(generation.ids):
            logits = decoder.passes.row(row)
            choice = sampler.choose(logits)
            if choice != token:
                margin = sampler.margin(logits, token) / float(np.abs(logits).max())
                result.append(Difference(index, len(prompt) + index, token, choice, margin, margin <= near))
            sampler.accept(token)
            if index + 1 < len(generation.ids):
                decoder.feed([token])
                row = 0
    return result
