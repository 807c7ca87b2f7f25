"""Checks on this machine that speculation does not change the output: tokens are the same with and without it at several settings,
and sampled texts have the target's own distribution (chi-squared test).

If a quantized target rounds activations to int8, as on the CPU, it also checks that every row of a tree has the same logits, bit for
bit, as in a pass of its own.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import erfc, inf, sqrt
from time import monotonic
from typing import Any

import numpy as np

from .backends import DEVICES, NAMES
from .backends import backend as made
from .command import argument_parser
from .command import run as run_command
from .decoding.cycle import Tree
from .engines.store import find_engines
from .errors import GumihoError
from .generation import Generation
from .lossless import Difference, differences
from .model import Model, load

_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "top_p": 0.9, "seed": 2},
    {"temperature": 1.3, "top_k": 50, "min_p": 0.02, "seed": 3},
    {"repetition_penalty": 1.2, "no_repeat_ngram": 4},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3, "seed": 4},
)
_SHORT = 12  # tokens of the texts whose trees are read again row by row
_WIDTH, _TOKENS, _TEMPERATURE = 4, 3, 1.5  # of the drawn texts: tokens that may be drawn at each position, and positions
_SUSPICIOUS = 1e-4  # probability of so large a deviation by chance
_FEWEST = 200  # texts that the chi-squared test needs


@dataclass(frozen=True)
class Result:
    """One property. holds: whether it was confirmed; found: the numbers, in one line."""

    name: str
    holds: bool
    found: str


@dataclass(frozen=True)
class Comparison:
    """One prompt, continued both ways. differences: of the speculative text, from its replay; [] where the texts are the same."""

    speculative: Generation
    plain: Generation
    differences: list[Difference]

    @property
    def alike(self) -> bool:
        return self.speculative.ids == self.plain.ids

    @property
    def ties(self) -> list[Difference]:
        return [difference for difference in self.differences if difference.near]

    @property
    def defects(self) -> int:
        """Differences that rounding does not explain. The texts begin alike, so the replay should show the first difference; if it
        shows none, that counts as a defect."""
        return len(self.differences) - len(self.ties) + (not self.alike and not self.differences)


def prompts(model: Model, count: int) -> list[list[int]]:
    """Random tokens; the same for every run."""
    draw, manifest = np.random.default_rng(0), model.bundle.manifest
    longest = max(1, min(48, manifest.capacity // 2))
    return [draw.integers(0, manifest.vocabulary, draw.integers(1, longest + 1)).tolist() for _ in range(count)]


def generated(model: Model, prompt: Sequence[int], tokens: int, speculate: bool, settings: Mapping[str, Any]) -> Generation:
    """A generation that has ended."""
    generation = model.generate(prompt, tokens, speculate, **settings)
    list(generation.cycles())
    return generation


def compare(model: Model, prompt: Sequence[int], tokens: int, settings: Mapping[str, Any]) -> Comparison:
    """Continues a prompt with and without speculation."""
    speculative, plain = (generated(model, prompt, tokens, speculate, settings) for speculate in (True, False))
    return Comparison(speculative, plain, differences(model, speculative) if speculative.ids != plain.ids else [])


def rows_alone(model: Model, prompt: Sequence[int]) -> tuple[int, int]:
    """Reads the trees of a text again, every row in a pass of its own. Identical tokens depend on identical rows, and these depend on
    kernels that differ between processors.

    Returns how many rows there are, and of how many the logits are not the same to the last bit.
    """
    text, trees = list(prompt), list[tuple[int, Tree, np.ndarray]]()
    generation = model.generate(prompt, _SHORT, rows=model.bundle.manifest.rows, trace=True)
    for cycle in generation.cycles():
        if cycle.tree:
            logits = np.stack([model.decoder.passes.row(row) for row in range(len(cycle.tree.tokens))])
            trees.append((len(text) - 1, cycle.tree, logits))
        text += cycle.tokens
    unlike = 0
    with model.exclusive() as decoder:
        for past, tree, logits in trees:
            decoder.clear()
            decoder.prefill(text[:past], speculate=False)
            paths = [[0]]
            for row in range(1, len(tree.tokens)):
                paths.append([*paths[tree.parents[row]], row])
            for path, together in zip(paths, logits, strict=True):
                decoder.passes.target_cache.length[0] = past
                for row in path:
                    decoder.feed([tree.tokens[row]])
                unlike += not np.array_equal(decoder.passes.row(0), together)
    return sum(len(logits) for _, _, logits in trees), unlike


def distribution(model: Model, prompt: Sequence[int]) -> dict[tuple[int, ...], float]:
    """The exact probability of every text of ``_TOKENS`` tokens, from rows of plain decoding."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in texts.items():
            with model.exclusive() as decoder:
                decoder.clear()
                row = decoder.prefill([*prompt, *text], speculate=False)
                assert row is not None
                logits = decoder.passes.row(row).astype(np.float64)
            likeliest = np.argsort(-logits, kind="stable")[:_WIDTH]
            weights = np.exp((logits[likeliest] - logits.max()) / _TEMPERATURE)
            for token, weight in zip(likeliest.tolist(), weights / weights.sum(), strict=True):
                longer[(*text, token)] = probability * float(weight)
        texts = longer
    return texts


def drawn(model: Model, prompt: Sequence[int], draws: int) -> Iterator[tuple[int, ...]]:
    """Texts by seed, all but their first token verified in trees."""
    session = model.session()
    for seed in range(draws):
        turn = session.generate(prompt, _TOKENS, temperature=_TEMPERATURE, top_k=_WIDTH, seed=seed)
        list(turn.cycles())
        yield tuple(turn.ids)


def chi_squared(
    counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], draws: int
) -> tuple[float, int, float]:
    """Pearson's statistic, its degrees of freedom, and the probability of a larger one by chance (Wilson, Hilferty 1931).

    Outcomes expected fewer than five times are taken together.
    """
    often = {text: draws * p for text, p in expected.items() if draws * p >= 5}
    cells = [(counts[text], wanted) for text, wanted in often.items()]
    rest = draws - sum(wanted for _, wanted in cells)
    if rest > 0.5:
        cells.append((draws - sum(found for found, _ in cells), rest))
    value, freedom = sum((found - wanted) ** 2 / wanted for found, wanted in cells), len(cells) - 1
    if any(found for text, found in counts.items() if text not in expected):
        return np.inf, freedom, 0.0
    if freedom < 1:
        return value, freedom, 1.0
    spread = 2 / (9 * freedom)
    return value, freedom, 0.5 * erfc(((value / freedom) ** (1 / 3) - (1 - spread)) / sqrt(2 * spread))


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser("selftest", __doc__)
    parser.add_argument("bundle", help="folder made by gumiho-export")
    parser.add_argument("--prompts", type=int, default=6, metavar="N", help="random prompts per setting (default: 6)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="tokens to compare per prompt (default: 64)"
    )
    parser.add_argument(
        "--draws", type=int, default=4000, metavar="N", help="texts to sample for the chi-squared test (default: 4000)"
    )
    parser.add_argument("--backend", default="", help=f"backend to run: {', '.join(NAMES)} (default: the bundle's first)")
    parser.add_argument("--device", default="", help=DEVICES)
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="CPU threads of the engines (default: one per physical core)"
    )
    parser.add_argument("--quick", action="store_true", help="check only samples of large files instead of every byte")
    args = parser.parse_args(argv)

    def work() -> int:
        least = {"prompts": 1, "max_new_tokens": 1, "draws": _FEWEST}
        for name, value in least.items():
            if getattr(args, name) < value:
                option = name.replace("_", "-")
                raise GumihoError(f"--{option} is {getattr(args, name)}: give {value} or more, or little would be proven")
        with load(args.bundle, args.backend, args.device, args.threads) as model:
            if not args.quick:
                model.bundle.verify()
                find_engines(model.bundle, made(args.backend or model.bundle.manifest.default, args.device), quick=False)
            return 0 if run(model, args) else 1

    return run_command(work)


def results(
    model: Model,
    count: int,
    tokens: int,
    draws: int,
    progress: Callable[[str], object] = lambda _: None,
    deadline: float = inf,
) -> Iterator[Result]:
    """Every property as it is confirmed or not.

    count, tokens: prompts per setting and tokens to compare of each; draws: texts for the chi-squared test. deadline: in seconds of
    ``time.monotonic``; after it each property is judged by one prompt, or 200 texts.
    """
    for settings in _SETTINGS:
        yield _identity(model, settings, prompts(model, count), tokens, deadline)
    if model.decoder.passes.graphs["target"].precision == "int8":
        found = [rows_alone(model, prompt) for prompt in _until(deadline, prompts(model, count))]
        rows, unlike = (sum(counts) for counts in zip(*found, strict=True))
        yield Result(
            "rows", rows > 0 and not unlike, f"{rows - unlike} of {rows} in trees are what they are alone, to the last bit"
        )
    prompt = prompts(model, 1)[0][: model.bundle.manifest.capacity - _TOKENS]
    expected, counts, told = distribution(model, prompt), Counter[tuple[int, ...]](), monotonic()
    for text in drawn(model, prompt, draws):
        counts[text] += 1
        if monotonic() - told > 10:
            told = monotonic()
            progress(f"drawn {counts.total()} of {draws}")
        if counts.total() >= _FEWEST and monotonic() > deadline:
            break
    value, freedom, chance = chi_squared(counts, expected, counts.total())
    yield Result(
        "distribution",
        chance > _SUSPICIOUS and freedom > 0,
        f"{counts.total()} texts of {_TOKENS} tokens, chi-squared {value:.1f} at {freedom} degrees of freedom, p = {chance:.3g}",
    )


def _identity(model: Model, settings: Mapping[str, Any], given: Sequence[list[int]], tokens: int, deadline: float) -> Result:
    made = [compare(model, prompt, tokens, settings) for prompt in _until(deadline, given)]
    compared, ties, defects = (
        sum(numbers) for numbers in zip(*((len(c.speculative.ids), len(c.ties), c.defects) for c in made), strict=True)
    )
    named = ", ".join(f"{name} {value}" for name, value in settings.items()) or "greedy"
    return Result(f"identity, {named}", not defects, f"{compared} tokens, {ties} near-ties, {defects} defects")


def _until(deadline: float, given: Sequence[list[int]]) -> Iterator[list[int]]:
    """The first, and the others as long as there is time."""
    for i, one in enumerate(given):
        if i and monotonic() > deadline:
            return
        yield one


def run(model: Model, args: argparse.Namespace) -> bool:
    """Prints every result. Returns whether all is well."""
    well = True
    for result in results(
        model, args.prompts, args.max_new_tokens, args.draws, lambda what: print(f"{what} ...", file=sys.stderr)
    ):
        well &= result.holds
        print(f"{'ok    ' if result.holds else 'FAILED'}  {result.name}: {result.found}")
    return well


if __name__ == "__main__":
    sys.exit(main())
