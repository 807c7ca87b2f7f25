"""Whether a text is what plain decoding gives: its tokens are replayed through the same engine, a row at a time."""

from dataclasses import dataclass, replace

import numpy as np

from .generation import Generation
from .model import Model

# Of the largest logit, by the precision of the target's products. Rows of one pass and of another differ by up to 1.5e-6 in fp32
# and 2.3e-3 in fp16 where that was measured (docs/backends.md); deeper models add up more of it. bf16 has three bits fewer than fp16. Where products round rows to int8,
# rows are the same to the last bit (graphs.dialects.exact.Exact).
NEAR = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2, "int8": 0.0}


@dataclass(frozen=True)
class Difference:
    """A place where plain decoding goes on otherwise.

    index: of the emitted token; position: in the whole text; token: emitted; choice: plain decoding's; margin: by how much the
    emitted token's logit falls short of being chosen, of the largest logit; near: whether that is no more than two passes may
    differ by, so that rounding decided, not a defect.
    """

    index: int
    position: int
    token: int
    choice: int
    margin: float
    near: bool


def differences(model: Model, generation: Generation) -> list[Difference]:
    """Replays a finished generation. What follows a difference is still judged, behind the emitted tokens.

    Its settings hold, its seed included, but for those that change the output by design.
    """
    seed = generation.stats.seed
    plain = replace(generation.settings, seed=seed, speculate=False, callback=None, tree="exact", accept="exact")
    near = NEAR[model.decoder.passes.graphs["target"].precision]
    sampler, prompt = model.selector(generation.prompt, plain).sampler, generation.prompt
    found: list[Difference] = []
    with model.exclusive() as decoder:
        decoder.clear()
        row = decoder.prefill(prompt, speculate=False)
        assert row is not None
        for index, token in enumerate(generation.ids):
            logits = decoder.passes.row(row)
            choice = sampler.choose(logits)
            if choice != token:
                margin = sampler.margin(logits, token) / float(np.abs(logits).max())
                found.append(Difference(index, len(prompt) + index, token, choice, margin, margin <= near))
            sampler.accept(token)
            if index + 1 < len(generation.ids):
                decoder.feed([token])
                row = 0
    return found
