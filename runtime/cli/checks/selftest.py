"""Checks on this machine that speculation does not change the output: tokens are the same with and without it at
several settings, and sampled texts have the target's own distribution (chi-squared test).

If a quantized target rounds activations to int8, as on the CPU, it also checks that every row of a tree has the same
logits, bit for bit, as in a pass of its own.
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

from ...api.generation import Generation
from ...api.loader import load
from ...api.model import Model
from ...backends import backend as make_backend
from ...engines.store import find_engines
from ...errors import InputError
from ..command import argument_parser
from ..command import run as run_command
from ..engine_options import add_engine_options
from .lossless import Difference, differences, near_margin
from .rows_alone import rows_alone

_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "top_p": 0.9, "seed": 2},
    {"temperature": 1.3, "top_k": 50, "min_p": 0.02, "seed": 3},
    {"repetition_penalty": 1.2, "no_repeat_ngram": 4},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3, "seed": 4},
)
_TOP_K, _TOKENS, _TEMPERATURE = 4, 3, 1.5  # of the sampled texts; _TOKENS is their length
_EDGE = -1  # stands for any token at the edge of top k
_SIGNIFICANCE = 1e-4  # the test fails if a deviation as large has a lower probability
_FEWEST = 200  # texts that the chi-squared test needs


@dataclass(frozen=True)
class Result:
    """The result of one check. holds: whether it passed; found: its numbers, in one line."""

    name: str
    holds: bool
    found: str


@dataclass(frozen=True)
class Comparison:
    """A prompt continued with and without speculation. differences: found by replaying the speculative text; empty if
    both texts are equal."""

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
        """The number of differences that rounding does not explain. Texts that differ although the replay finds no
        difference count as one."""
        return len(self.differences) - len(self.ties) + (not self.alike and not self.differences)


def prompts(model: Model, count: int) -> list[list[int]]:
    """Prompts of random tokens, the same in every run. Without a drafter every prompt repeats itself, so that prompt
    lookup has matches."""
    random, manifest = np.random.default_rng(0), model.bundle.manifest
    repeated = 1 if manifest.has_drafter else 2
    longest = max(1, min(48, manifest.capacity // 2) // repeated)
    return [
        random.integers(0, manifest.vocabulary, random.integers(1, longest + 1)).tolist() * repeated
        for _ in range(count)
    ]


def generated(
    model: Model, prompt: Sequence[int], tokens: int, speculate: bool, settings: Mapping[str, Any]
) -> Generation:
    """Runs a generation to its end and returns it."""
    generation = model.generate(prompt, tokens, speculate, **settings)
    list(generation.cycles())
    return generation


def compare(model: Model, prompt: Sequence[int], tokens: int, settings: Mapping[str, Any]) -> Comparison:
    """Continues a prompt with and without speculation."""
    speculative, plain = (generated(model, prompt, tokens, speculate, settings) for speculate in (True, False))
    return Comparison(speculative, plain, differences(model, speculative) if speculative.ids != plain.ids else [])


def distribution(
    model: Model, prompt: Sequence[int]
) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], list[int]]]:
    """The exact probability of every text of ``_TOKENS`` tokens, computed by plain decoding, and the edge tokens after
    every prefix. Edge tokens nearly tie with the last token within top k, so rounding decides which of them are within.
    Texts with an edge token are counted together: as the prefix before it and ``_EDGE``, whatever follows.
    """
    near = near_margin(model)
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    edges: dict[tuple[int, ...], list[int]] = {}
    for _ in range(_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in texts.items():
            if text[-1:] == (_EDGE,):
                longer[text] = probability
                continue
            with model.exclusive() as decoder:
                decoder.clear()
                row = decoder.prefill([*prompt, *text], speculate=False)
                assert row is not None
                logits = decoder.target.row(row).astype(np.float64)
            order = np.argsort(-logits, kind="stable")
            likeliest = order[:_TOP_K]
            tied = order[np.abs(logits[order] - logits[likeliest[-1]]) < near * np.abs(logits).max()]
            if not set(tied.tolist()) <= set(likeliest.tolist()):
                edges[text] = tied.tolist()
            weights = np.exp((logits[likeliest] - logits.max()) / _TEMPERATURE)
            for token, weight in zip(likeliest.tolist(), weights / weights.sum(), strict=True):
                known = counted((*text, token), edges)
                longer[known] = longer.get(known, 0.0) + probability * float(weight)
        texts = longer
    return texts, edges


def counted(text: tuple[int, ...], edges: Mapping[tuple[int, ...], list[int]]) -> tuple[int, ...]:
    """The key under which a text is counted; see ``distribution``."""
    for i, token in enumerate(text):
        if token in edges.get(text[:i], ()):
            return (*text[:i], _EDGE)
    return text


def drawn(model: Model, prompt: Sequence[int], draws: int) -> Iterator[tuple[int, ...]]:
    """Samples one text per seed. Trees verify all tokens but the first."""
    session = model.session()
    for seed in range(draws):
        turn = session.generate(prompt, _TOKENS, temperature=_TEMPERATURE, top_k=_TOP_K, seed=seed)
        list(turn.cycles())
        yield tuple(turn.ids)


def chi_squared(
    counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], draws: int
) -> tuple[float, int, float]:
    """Pearson's statistic, its degrees of freedom, and the probability that chance gives a larger one (Wilson, Hilferty
    1931).

    counts: texts that were sampled; expected: probabilities of all texts; draws: the number of samples. Texts expected
    fewer than five times are merged into one cell.
    """
    frequent = {text: draws * p for text, p in expected.items() if draws * p >= 5}
    cells = [(counts[text], expectation) for text, expectation in frequent.items()]
    merged = draws - sum(expectation for _, expectation in cells)
    if merged > 0.5:
        cells.append((draws - sum(count for count, _ in cells), merged))
    value, freedom = sum((count - expectation) ** 2 / expectation for count, expectation in cells), len(cells) - 1
    if any(count for text, count in counts.items() if text not in expected):
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
    add_engine_options(parser)
    parser.add_argument("--quick", action="store_true", help="check only samples of large files instead of every byte")
    args = parser.parse_args(argv)

    def work() -> int:
        least = {"prompts": 1, "max_new_tokens": 1, "draws": _FEWEST}
        for name, value in least.items():
            if getattr(args, name) < value:
                option = name.replace("_", "-")
                raise InputError(
                    f"--{option} is {getattr(args, name)}: give {value} or more, or the test would show little"
                )
        with load(args.bundle, args.backend, args.device, args.threads) as model:
            if not args.quick:
                model.bundle.verify()
                find_engines(
                    model.bundle, make_backend(args.backend or model.bundle.manifest.default, args.device), quick=False
                )
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
    """Runs the checks and yields each result.

    count: prompts per setting; tokens: to compare per prompt; draws: texts for the chi-squared test. progress: called
    with a line now and then. deadline: a time of ``time.monotonic`` in seconds; after it each check uses only one
    prompt, or 200 texts.
    """
    for drafter in model.bundle.manifest.each:
        for settings in _SETTINGS:
            yield _identity(model, drafter, settings, prompts(model, count), tokens, deadline)
    if model.decoder.target.graphs["target"].precision == "int8":
        compared = [rows_alone(model, prompt) for prompt in _until(deadline, prompts(model, count))]
        many = "trees" if model.bundle.manifest.has_drafter else "passes of several rows"
        rows, unequal = (sum(numbers) for numbers in zip(*compared, strict=True))
        yield Result(
            "rows",
            rows > 0 and not unequal,
            f"{rows - unequal} of {rows} in {many} are bitwise equal to the same rows computed one by one",
        )
    prompt = prompts(model, 1)[0][: model.bundle.manifest.capacity - _TOKENS]
    (expected, edges), counts, reported = distribution(model, prompt), Counter[tuple[int, ...]](), monotonic()
    for text in drawn(model, prompt, draws):
        counts[counted(text, edges)] += 1
        if monotonic() - reported > 10:
            reported = monotonic()
            progress(f"sampled {counts.total()} of {draws} texts")
        if counts.total() >= _FEWEST and monotonic() > deadline:
            break
    value, freedom, chance = chi_squared(counts, expected, counts.total())
    yield Result(
        "distribution",
        chance > _SIGNIFICANCE and freedom > 0,
        f"{counts.total()} texts of {_TOKENS} tokens, chi-squared {value:.1f} at {freedom} degrees of freedom, "
        f"p = {chance:.3g}",
    )


def _identity(
    model: Model,
    drafter: str,
    settings: Mapping[str, Any],
    all_prompts: Sequence[list[int]],
    tokens: int,
    deadline: float,
) -> Result:
    """Checks that the settings give the same tokens with and without speculation. drafter: "" if there is at most
    one."""
    comparisons = [
        compare(model, prompt, tokens, {**settings, "drafter": drafter or None})
        for prompt in _until(deadline, all_prompts)
    ]
    compared, ties, defects = (
        sum(numbers)
        for numbers in zip(*((len(c.speculative.ids), len(c.ties), c.defects) for c in comparisons), strict=True)
    )
    description = ", ".join(f"{name} {value}" for name, value in settings.items()) or "greedy"
    name = f"identity, drafter {drafter}" if drafter else "identity"
    return Result(f"{name}, {description}", not defects, f"{compared} tokens, {ties} near-ties, {defects} defects")


def _until(deadline: float, all_prompts: Sequence[list[int]]) -> Iterator[list[int]]:
    """The first prompt, and more until the deadline."""
    for i, prompt in enumerate(all_prompts):
        if i and monotonic() > deadline:
            return
        yield prompt


def run(model: Model, args: argparse.Namespace) -> bool:
    """Prints every result. Returns whether all checks passed."""
    passed = True
    for result in results(
        model, args.prompts, args.max_new_tokens, args.draws, lambda step: print(f"{step} ...", file=sys.stderr)
    ):
        passed &= result.holds
        print(f"{'ok    ' if result.holds else 'FAILED'}  {result.name}: {result.found}")
    return passed
