"""One pass of the unquantized target over a text: how large the inputs of its matrices are, and its probabilities.

The error of a quantized weight counts as much as the input that it is multiplied by. Inputs differ by orders of
magnitude from column to column, which a few hundred tokens show.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from graphs.dialects.plain import Plain
from graphs.dialects.quantization import EMBEDDING
from graphs.tree import TreeConfig
from runtime.api.loader import load
from runtime.cli.checks.perplexity import Quality, log_probabilities
from runtime.decoding.logprobs import log_softmax
from runtime.errors import UnavailableError

from ..checkpoints.pair import Pair
from ..progress import Progress
from ..recipe.recipe import Recipe
from ..weights.ahead import one_thread
from .golden_recorder import empty
from .smoothing import smoothing

_LARGE = 1 << 22  # numbers of a matrix; torch's threads wait for one another longer than they compute with smaller ones
_CHAIN = TreeConfig(2, 1, heads=0, top_k=1, head_top_k=1, beam=1)  # of no consequence: the drafter is not used
# What the cost is measured on.
_TEXT = """The harbour was quiet in the early morning. A few boats had already left, and their lights moved slowly along the coast.
Anna walked to the end of the pier, as she did every day before work, and looked for the ferry. It came from the islands with
letters, fruit and people who had business in the town. Today it was late. "There is fog outside," said the old man who sold
coffee. "He will wait until he can see the tower." She nodded and sat down beside him. They talked about the weather, about the
price of fish, and about the new bridge, which had cost twice as much as planned and was still not open. When the sun came
through, the water turned from grey to green, and far away they heard the horn."""


@dataclass(frozen=True)
class Observed:
    """moments: the mean square of each input of a matrix, fp32 [K], by the matrix' name. columns: the sum of the
    squares of each of its columns, fp32 [K], of matrices whose inputs may be scaled. logits: fp32 [n, V], of the first
    rows."""

    moments: dict[str, Tensor]
    columns: dict[str, Tensor]
    logits: Tensor


@torch.inference_mode()
def observe(
    pair: Pair,
    ids: Sequence[int],
    scored: int = 0,
    columns: bool = False,
    progress: Callable[[int], object] = lambda _: None,
) -> Observed:
    """Reads every matrix at most once, slice by slice, in the checkpoint's precision; products are fp32.

    ids: a text. scored: of how many of its first tokens to compute logits. columns: whether to sum the squares of
    columns, those of lm_head only if no drafter reads its inputs. progress: gets the bytes of every slice.
    """
    n, moments, squares, sources = len(ids), dict[str, Tensor](), dict[str, Tensor](), pair.target_sources(len(ids))
    names, logits = dict[int, str](), torch.empty(0)

    def product(x: Tensor, name: str) -> Tensor:
        y, at = torch.empty(len(x), sources[name].shape[0]), 0
        torch.set_num_threads(threads if prod(sources[name].shape) > _LARGE else 1)
        if columns:
            squares[name] = torch.zeros(x.shape[1])
        for part in sources[name].slices():
            values = part.float()
            y[:, at : at + len(part)] = x @ values.T
            if columns:
                squares[name] += values.square().sum(0)
            at += len(part)
            progress(part.nbytes)
        return y

    class Observing(Plain):
        @classmethod
        def linear(
            cls, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, zero: Tensor | None = None
        ) -> Tensor:
            nonlocal logits
            name = names[id(weight)]
            moments[name] = x.square().mean(0)
            if name == "lm_head.weight":
                if scored or (columns and not pair.has_drafter):
                    logits = product(x[:scored], name)
                return torch.zeros(len(x), 1)  # not all rows' logits are held
            y = product(x, name)
            return y if bias is None else y + bias

    module = pair.modules(_CHAIN, n, n, Observing)["target"]
    names |= {id(parameter): name for name, parameter in module.named_parameters()}
    small = {
        name: source.whole().float() for name, source in sources.items() if len(source.shape) == 1 or "rotary" in name
    }
    module.load_state_dict(small, strict=False, assign=True)
    # A table of the text's own tokens stands in for the whole embedding.
    distinct, tokens = torch.tensor(ids).unique(return_inverse=True)
    module.embed_tokens.weight = nn.Parameter(sources[EMBEDDING].rows(distinct).whole().float(), requires_grad=False)
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    with one_thread() as threads:
        module(tokens, torch.arange(n), mask, None, torch.tensor([0]), empty(module, torch.float32))
    return Observed(moments, squares, logits)


def calibrated(recipe: Recipe, progress: Progress) -> Recipe:
    """The recipe with what its text, if it has one, shows of the target: how its columns are weighed, or smoothed."""
    if not recipe.calibration:
        return recipe
    progress.start("calibrating", _bytes(recipe.pair))
    seen = observe(recipe.pair, recipe.calibration, columns=not recipe.zeros, progress=progress.advance)
    if recipe.zeros:
        return replace(recipe, importance=seen.moments)
    return replace(recipe, factors=smoothing(recipe.pair.target_shape, seen.moments, seen.columns))


def cost(recipe: Recipe, bundle: Path, backend: str, device: str, progress: Progress) -> str:
    """How far the bundle's engines are from the unquantized target, in a line; "" for targets that are not quantized,
    those without a tokenizer to read the text with, and if there is not enough memory to run the bundle."""
    if "target" not in recipe.quantized or recipe.pair.tokenizer is None:
        return ""
    ids = recipe.pair.tokenizer(_TEXT).input_ids[: recipe.capacity]
    progress.start("measuring what quantizing costs", _bytes(recipe.pair))
    reference = observe(recipe.pair, ids, len(ids) - 1, progress=progress.advance).logits.numpy()
    quality = Quality()
    try:
        with load(bundle, backend, device) as model:
            for token, expected, (row,) in zip(ids[1:], reference, log_probabilities([model], ids), strict=True):
                quality.add(token, row, log_softmax(expected))
    except UnavailableError:
        return ""
    return (
        f"quantizing the target costs {quality.divergence.value:.3f} ± {quality.divergence.error:.3f} nats per token "
        f"(KL divergence over {len(reference)} tokens of English); on your own text: gumiho quality"
    )


def _bytes(pair: Pair) -> int:
    """Bytes of the matrices, about: in the checkpoint's files they take two per number."""
    return 2 * sum(prod(source.shape) for name, source in pair.target_sources(1).items() if name != EMBEDDING)
