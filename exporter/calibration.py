"""One pass of the unquantized target over a text: how large the inputs of its matrices are, and its probabilities.

The error of a quantized weight counts as much as the input that it is multiplied by. Inputs differ by orders of magnitude from
column to column, which a few hundred tokens show.
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
from runtime.errors import InputError, UnavailableError, reason

from .checkpoints.pair import Pair
from .golden_recorder import empty
from .plan import Plan
from .progress import Progress
from .smoothing import smoothing
from .weights.ahead import one_thread

TOKENS = 512  # of a text that are read
_LARGE = 1 << 22  # numbers of a matrix; torch's threads wait for one another longer than they compute with smaller ones
_CHAIN = TreeConfig(2, 1, heads=0, top_k=1, head_top_k=1, beam=1)  # of no consequence: the drafter is not used
# What a target is calibrated with, and what the cost is then measured on.
_PAGE = """# Notes on the archive

The archive keeps one record per parcel: when it came in, who brought it, and where it lies now. Records are never deleted. If a
parcel leaves, its record says so, and the place becomes free. Why so strict? In 1987 a whole shelf was lost for nine months;
nobody had done anything wrong, but nobody could prove it either.

1. Weigh the parcel (in kg) and note the weight, e.g. 2.75.
2. Choose the lowest free place that is large enough.
3. Write the label *before* you walk to the shelf.

```python
def lowest_place(shelf: list[Place], size: float) -> Place | None:
    '''The first place that is free and large enough.'''
    for place in sorted(shelf, key=lambda p: p.height):
        if place.parcel is None and place.size >= size:
            return place
    return None
```

Questions? Ask Maria Keller (room 14, phone 555-0142) or write to archive@example.org. She will answer within two days, usually
sooner; on Fridays the office closes at 15:30."""
_TEXT = """The harbour was quiet in the early morning. A few boats had already left, and their lights moved slowly along the coast.
Anna walked to the end of the pier, as she did every day before work, and looked for the ferry. It came from the islands with
letters, fruit and people who had business in the town. Today it was late. "There is fog outside," said the old man who sold
coffee. "He will wait until he can see the tower." She nodded and sat down beside him. They talked about the weather, about the
price of fish, and about the new bridge, which had cost twice as much as planned and was still not open. When the sun came
through, the water turned from grey to green, and far away they heard the horn."""


@dataclass(frozen=True)
class Observed:
    """moments: the mean square of each input of a matrix, fp32 [K], by the matrix' name. columns: the sum of the squares of each of its
    columns, fp32 [K], of matrices whose inputs may be scaled. logits: fp32 [n, V], of the first rows."""

    moments: dict[str, Tensor]
    columns: dict[str, Tensor]
    logits: Tensor


def calibration_text(plan: Plan, file: Path | None, dry: bool) -> tuple[int, ...]:
    """The token ids that ``plan`` calibrates with; none in a dry run without a file, which loads no tokenizer.

    Raises InputError for a file that cannot be used, or a target that is not calibrated.
    """
    if not plan.calibrates:
        raise InputError("--calibrate is for --weights int4 on cpu and cuda, and int8 and w8a8 on the CPU alone: leave it out")
    return () if dry and file is None else text_tokens(plan.pair, file, plan.capacity)


def text_tokens(pair: Pair, file: Path | None, capacity: int) -> tuple[int, ...]:
    """The tokens to calibrate with: the first of a text, at most ``TOKENS`` or the capacity. Without a text they are those of a page
    of English and code, or random ones if there is no tokenizer to read it with.

    Raises InputError if the text cannot be read or has too few.
    """
    most = min(TOKENS, capacity)
    if file is None and pair.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return tuple(torch.randint(0, pair.target_shape.vocabulary, (most,), generator=generator).tolist())
    if file is None:
        return tuple(pair.tokenizer(_PAGE).input_ids[:capacity])
    if pair.tokenizer is None:
        raise InputError(f"target '{pair.target.source}' has no tokenizer to read --calibrate with: leave the option out")
    try:
        text = file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"--calibrate {file} cannot be read ({reason(error)}): give a readable UTF-8 file") from None
    ids = tuple(pair.tokenizer(text).input_ids[:most])
    if len(ids) < most:
        raise InputError(f"--calibrate {file} has {len(ids)} tokens: give a text of {most} or more")
    return ids


@torch.inference_mode()
def observe(
    pair: Pair, ids: Sequence[int], scored: int = 0, columns: bool = False, progress: Callable[[int], object] = lambda _: None
) -> Observed:
    """Reads every matrix at most once, slice by slice, in the checkpoint's precision; products are fp32.

    ids: a text. scored: of how many of its first tokens to compute logits. columns: whether to sum the squares of columns, those of
    lm_head only if no drafter reads its inputs. progress: gets the bytes of every slice.
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
    small = {name: source.whole().float() for name, source in sources.items() if len(source.shape) == 1 or "rotary" in name}
    module.load_state_dict(small, strict=False, assign=True)
    # A table of the text's own tokens stands in for the whole embedding.
    distinct, tokens = torch.tensor(ids).unique(return_inverse=True)
    module.embed_tokens.weight = nn.Parameter(sources[EMBEDDING].rows(distinct).whole().float(), requires_grad=False)
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    with one_thread() as threads:
        module(tokens, torch.arange(n), mask, None, torch.tensor([0]), empty(module, torch.float32))
    return Observed(moments, squares, logits)


def calibrated(plan: Plan, progress: Progress) -> Plan:
    """The plan with what its text, if it has one, shows of the target: how its columns are weighed, or smoothed."""
    if not plan.calibration:
        return plan
    progress.start("calibrating", _bytes(plan.pair))
    seen = observe(plan.pair, plan.calibration, columns=not plan.zeros, progress=progress.advance)
    if plan.zeros:
        return replace(plan, importance=seen.moments)
    return replace(plan, factors=smoothing(plan.pair.target_shape, seen.moments, seen.columns))


def cost(plan: Plan, bundle: Path, backend: str, device: str, progress: Progress) -> str:
    """How far the bundle's engines are from the unquantized target, in a line; "" for targets that are not quantized, those without
    a tokenizer to read the text with, and if there is not enough memory to run the bundle."""
    if "target" not in plan.quantized or plan.pair.tokenizer is None:
        return ""
    ids = plan.pair.tokenizer(_TEXT).input_ids[: plan.capacity]
    progress.start("measuring what quantizing costs", _bytes(plan.pair))
    reference = observe(plan.pair, ids, len(ids) - 1, progress=progress.advance).logits.numpy()
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
