"""Measures the gain of drafting on this machine: prompts of several kinds, decoded plainly, with the drafter, and also
with prompt lookup.

    python -m tools.demo BUNDLE [--name NAME] [--prompts FILE] [--new-tokens N] [--seconds S] [--trace FILE]

Every round decodes each prompt in all ways, one right after the other, so that other load slows them alike. The fastest
run of a prompt counts. Speeds exclude reading the prompt. Exits with 1 if the tokens of two runs differ.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from runtime import Cycle, Model, Settings, Stats, load
from runtime.backends.processor import physical_cores
from runtime.cli.command import run as run_command
from runtime.cli.generate import run as generate
from runtime.cli.trace_page import Trace
from runtime.engines.thread_count import OtherPrograms
from runtime.errors import InputError
from tools.measure import processor

ROOT = Path(__file__).parent.parent
PLAIN, DRAFTING, LOOKUPS = "plain", "drafting", "with lookups"
WAYS: Mapping[str, Mapping[str, Any]] = {PLAIN: {"speculate": False}, DRAFTING: {"lookup": False}, LOOKUPS: {}}
_WARM_UP = 24  # tokens
_SHOWN = 110  # characters of an answer
_PAYS = 1.05  # times the speed of plain decoding; a smaller gain may be noise


@dataclass
class Answer:
    """The fastest run of one prompt in one way."""

    ids: list[int]
    text: str
    stats: Stats
    cycles: list[Cycle]  # after the one that reads the prompt


@dataclass
class Result:
    """A prompt's results. answers: by way. differ: the ways whose tokens differed from plain decoding's in some run."""

    kind: str
    answers: dict[str, Answer]
    differ: set[str]


def prompts(file: Path) -> list[tuple[str, str]]:
    """Kinds and texts of a file's prompts. Raises InputError."""
    try:
        lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        found = [(str(line["kind"]), str(line["prompt"])) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{file} cannot be read as prompts ({error!r}): give lines of JSON with 'kind' and 'prompt'"
        ) from None
    if not found:
        raise InputError(f"{file} has no prompts: give lines of JSON with 'kind' and 'prompt'")
    return found


def tokens(model: Model, prompt: str) -> list[int]:
    return model.chat([{"role": "user", "content": prompt}]) if model.chat_template else model.encode(prompt)


def answer(model: Model, prompt: Sequence[int], count: int, way: str) -> Answer:
    generation = model.start(prompt, Settings(count, **WAYS[way]))
    cycles = list(generation.cycles())
    return Answer(generation.ids, generation.text, generation.stats, cycles[1:])


def measured(model: Model, asked: Sequence[tuple[str, str]], count: int, seconds: float) -> list[Result]:
    """Decodes every prompt in every way, in rounds, and prints the answers as they come. seconds: limit of all rounds;
    the first one always finishes."""
    ids = [tokens(model, prompt) for _, prompt in asked]
    for way in WAYS:
        answer(model, ids[0], _WARM_UP, way)
    results, started, rounds = [Result(kind, {}, set()) for kind, _ in asked], perf_counter(), 0
    while not rounds or (perf_counter() - started) * (rounds + 1) / rounds <= seconds:
        for prompt, result in zip(ids, results, strict=True):
            for way in reversed(tuple(WAYS)) if rounds % 2 else WAYS:
                found = answer(model, prompt, count, way)
                fastest = result.answers.setdefault(way, found)
                if found.ids != result.answers[PLAIN].ids:
                    result.differ.add(way)
                if found.stats.seconds < fastest.stats.seconds:
                    result.answers[way] = found
            if not rounds:
                shown = " ".join(result.answers[PLAIN].text.split())
                print(f"{result.kind}: {shown[:_SHOWN]}{'...' if len(shown) > _SHOWN else ''}", flush=True)
        rounds += 1
    return results


def total(results: Iterable[Result], way: str) -> Stats:
    stats = Stats(texts=0)
    for result in results:
        stats.add(result.answers[way].stats)
    return stats


def faster(stats: Stats, plain: Stats) -> float:
    """Speed relative to plain decoding; 1 if nothing was decoded after the first token."""
    return stats.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 1.0


def _rate(stats: Stats) -> str:
    rate = stats.tokens_per_second
    return f"{rate:.{0 if rate >= 10 else 1}f}"


def table(results: Sequence[Result]) -> str:
    lines = [("", "tokens", PLAIN, DRAFTING, "", LOOKUPS, "")]
    rows = [(result.kind, {way: found.stats for way, found in result.answers.items()}) for result in results]
    for kind, by_way in [*rows, ("total", {way: total(results, way) for way in WAYS})]:
        plain = by_way[PLAIN]
        cells = [kind, str(plain.tokens), f"{plain.tokens_per_second:.1f} tokens/s"]
        for way in (DRAFTING, LOOKUPS):
            cells += [f"{faster(by_way[way], plain):.2f} times", f"{by_way[way].tau:.2f} a pass"]
        lines.append(tuple(cells))  # type: ignore[arg-type]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def why(plain: Stats, cycles: Iterable[Cycle]) -> str:
    """A line about the cost and gain of a cycle. plain: stats of plain decoding. cycles: of speculative decoding."""
    drafted = [cycle for cycle in cycles if cycle.times[0]]
    if not drafted or not plain.seconds:
        return "nothing was drafted"
    a_pass = plain.seconds * 1e9 / plain.cycles * len(drafted)
    draft, target, host = (sum(times) / a_pass for times in zip(*(cycle.times for cycle in drafted), strict=True))
    rows, brought = (
        sum(counts) / len(drafted) for counts in zip(*((c.rows, len(c.tokens)) for c in drafted), strict=True)
    )
    return (
        f"a draft takes {draft:.2f} of the time of a plain pass, and verifying it ({rows:.1f} rows) "
        f"{target + host:.2f}, so it must bring {draft + target + host:.2f} tokens to break even, and it brought "
        f"{brought:.2f}"
    )


def verdict(model: str, results: Sequence[Result]) -> str:
    """The result in a sentence, and a second one with the reason if drafting is not worthwhile."""
    plain, drafting = total(results, PLAIN), total(results, LOOKUPS)
    ratio = faster(drafting, plain)
    speeds = f"{model}: {_rate(drafting)} tokens/s with drafting"
    if ratio >= _PAYS:
        return f"{speeds} instead of {_rate(plain)} plain ({ratio:.1f} times as fast), and every token is the same."
    cycles = [cycle for result in results for cycle in result.answers[DRAFTING].cycles]
    return (
        f"{speeds} and {_rate(plain)} plain ({ratio:.2f} times the speed); every token is the same.\n"
        f"Drafting {'does not pay' if ratio < 1 else 'hardly pays'} on this machine: {why(plain, cycles)}."
    )


def described(model: Model, name: str) -> str:
    """A line about model, weights and machine."""
    manifest = model.bundle.manifest
    precision = manifest.weights.get("target", manifest.form(manifest.default).graphs["target"].precision)
    weights = precision.partition(",")[0].replace("float", "fp")
    cores = physical_cores()
    return (
        f"{name}, {weights}, {cores} core{'s' if cores > 1 else ''} of "
        f"{processor().replace('(R)', '').replace('(TM)', '')}"
    )


def demonstrate(args: argparse.Namespace) -> int:
    asked = prompts(args.prompts)
    if args.trace:
        Trace.check(args.trace)
    with load(args.bundle) as model:
        if not model.bundle.manifest.has_drafter:
            raise InputError(f"bundle {args.bundle} has no drafter: export one with --ckpt")
        others = OtherPrograms()
        results = measured(model, asked, args.new_tokens, args.seconds)
        disturbed = others.in_the_way
        differing = [f"{result.kind}, {way}" for result in results for way in WAYS if way in result.differ]
        print(f"\n{table(results)}\n")
        if differing:
            print(
                f"error: tokens differ from those of plain decoding ({'; '.join(differing)}): report this as a bug",
                file=sys.stderr,
            )
            return 1
        print(verdict(described(model, args.name or args.bundle.name), results))
        if disturbed:
            print(
                "Other programs were using the processor meanwhile: these numbers are less certain than on an idle "
                "machine."
            )
        if args.trace:
            traced = Settings(args.new_tokens, trace=True)
            generate(model, tokens(model, asked[min(1, len(asked) - 1)][1]), traced, show=False, trace=args.trace)
            print(f"Where every token came from: open {args.trace}")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="folder made by gumiho-export, with a drafter")
    parser.add_argument("--name", help="of the model, for the last sentence (default: the folder's)")
    parser.add_argument(
        "--prompts",
        type=Path,
        default=ROOT / "demo/prompts.jsonl",
        metavar="JSONL",
        help="lines of JSON with 'kind' and 'prompt' (default: demo/prompts.jsonl)",
    )
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="at most, of each answer (default: 64)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20,
        metavar="S",
        help="time for all rounds; one is finished in any case (default: 20)",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the second answer's trace to a .html or .jsonl file"
    )
    args = parser.parse_args(argv)
    if args.new_tokens < 1:
        parser.error(f"--new-tokens is {args.new_tokens}: give 1 or more")
    return run_command(lambda: demonstrate(args))


if __name__ == "__main__":
    sys.exit(main())
