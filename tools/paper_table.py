"""Measures bundles as the paper does: tau and speed-up for each set of prompts. Checks that every text is that of plain
decoding.

    python -m tools.paper_table BUNDLE ... --prompts DIR [--count N] [--ways plain trees] [--out build/paper.jsonl]

Every ``*.jsonl`` of DIR is a set; ``docs/benchmarks.md`` names the paper's. Conversations go through the chat template,
turn by turn, with the answers of plain decoding before the next turn. Each turn is decoded in every way, one after
another. Each turn's results are a line of OUT; running the same command again continues after them. Exits with 1 if a
text differs from that of plain decoding.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime import Model, load
from runtime.bundle.reader import Bundle
from runtime.cli.command import run
from runtime.errors import InputError, reason
from tools.measure import distinct

WAYS = {
    "plain": "one token a pass",
    "trees": "the drafter alone, whole trees: the paper's tau",
    "drafter": "the drafter alone, as planned",
    "lookup": "the drafter and prompt lookup, as planned",
}
KEY = ("bundle", "temperature", "set", "number", "turn")
Line = Mapping[str, Any]
Message = Mapping[str, str]
Asked = Sequence[tuple[str, int, list[str]]]


def conversations(folder: Path, count: int | None) -> Iterator[tuple[str, int, list[str]]]:
    """Yields the set, number and user turns of every line of a folder's JSONL files. Raises InputError for a line that
    is not a prompt."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise InputError(
            f"--prompts '{folder}' holds no .jsonl: give a folder with a file for each set, lines with 'turns' or "
            "'prompt'"
        )
    for file in files:
        try:
            lines = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]
            found = [line["turns"] if "turns" in line else [line["prompt"]] for line in lines[:count]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"'{file}' cannot be read as prompts ({reason(error)}): give JSON objects with 'turns' or 'prompt'"
            ) from None
        yield from ((file.stem, number, turns) for number, turns in enumerate(found))


def options(way: str, rows: int, temperature: float, seed: int) -> dict[str, Any]:
    """The options of ``Model.generate`` for a way."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {"speculate": False},
        "trees": {"lookup": False, "rows": rows},
        "drafter": {"lookup": False},
        "lookup": {},
    }
    return {**ways[way], "temperature": temperature, **({"seed": seed} if temperature else {})}


def decoded(model: Model, prompt: Sequence[int], count: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Decodes a text and returns its tokens and its costs after the first step. cycles: target passes; tokens: emitted
    in them; seconds: of the cycles, drafts included; draft_seconds: of the drafts."""
    generation = model.generate(prompt, count, **settings)
    for _ in generation.cycles():
        pass
    stats = generation.stats
    return {
        "ids": generation.ids,
        "tokens": stats.cycle_tokens,
        "cycles": stats.cycles,
        "seconds": round(stats.seconds, 5),
        "draft_seconds": round(stats.draft_ns / 1e9, 5),
    }


def key(line: Line) -> tuple[Any, ...]:
    return tuple(line[name] for name in KEY)


def room(args: argparse.Namespace, model: Model) -> int:
    """Positions that a prompt may have."""
    return min(args.longest or model.capacity, model.capacity - args.new_tokens)


def answered(
    model: Model,
    asked: Asked,
    longest: int,
    known: Mapping[tuple[Any, ...], Line],
    names: Sequence[str],
    place: tuple[Any, ...],
    decode: Callable[[list[int], int], Mapping[str, Any]],
    encode: Callable[[Model, Sequence[Message]], list[int]] = Model.chat,
) -> Iterator[Line]:
    """Yields a line for each turn that fits and has no result yet. A turn follows plain decoding's answers to the turns
    before it.

    longest: most positions of a prompt. names: the keys that identify a line, with set, number and turn last. place:
    the values of the keys before these three. decode: makes the rest of a line from a prompt and its conversation's
    number. encode: makes a conversation's token ids.
    """
    for group, number, turns in asked:
        messages: list[Message] = []
        for turn, question in enumerate(turns):
            messages.append({"role": "user", "content": question})
            prompt = encode(model, messages)
            if len(prompt) > longest:
                break
            at = *place, group, number, turn
            if (line := known.get(at)) is None:
                line = {**dict(zip(names, at, strict=True)), **decode(prompt, number)}
                yield line
            messages.append({"role": "assistant", "content": model.decode(line["ways"]["plain"]["ids"])})


def measure(
    model: Model, name: str, asked: Asked, args: argparse.Namespace, known: Mapping[tuple[Any, ...], Line]
) -> Iterator[Line]:
    """Yields a line for each turn that fits and has no result yet."""
    for temperature in args.temperatures:
        settings = {way: options(way, model.bundle.manifest.rows, temperature, args.seed) for way in args.ways}

        def decode(
            prompt: list[int], number: int, settings: Mapping[str, Mapping[str, Any]] = settings
        ) -> dict[str, Any]:
            # The order alternates, because the first way finds the caches filled by another prompt.
            order = args.ways[:: -1 if number % 2 else 1]
            return {
                "prompt": prompt,
                "ways": {way: decoded(model, prompt, args.new_tokens, settings[way]) for way in order},
            }

        yield from answered(model, asked, room(args, model), known, KEY, (name, temperature), decode)


def measured(lines: Sequence[Line], way: str) -> tuple[float, float] | None:
    """Speed-up over plain decoding, and tau; None without a pass after the first step."""
    spent = [line["ways"][way] for line in lines]
    tokens, cycles, seconds = (sum(own[name] for own in spent) for name in ("tokens", "cycles", "seconds"))
    return (sum(line["ways"]["plain"]["seconds"] for line in lines) / seconds, tokens / cycles) if cycles else None


def share(lines: Sequence[Line], way: str) -> float | None:
    """The drafts' share of the time after the first step; None if unknown."""
    spent = [line["ways"][way] for line in lines]
    seconds = sum(own["seconds"] for own in spent)
    return (
        sum(own["draft_seconds"] for own in spent) / seconds
        if seconds and all("draft_seconds" in own for own in spent)
        else None
    )


def table(heading: str, rows: Sequence[tuple[str, Sequence[Line], str]]) -> list[str]:
    """The paper's table in Markdown: speed-up over plain decoding, and tau. rows: a name, lines, and the way to
    decode."""
    sets = sorted({line["set"] for _, lines, _ in rows for line in lines})
    text = [
        f"| {heading} | " + " | ".join((*sets, "mean", "draft", "texts as plain")) + " |",
        "|" + "---|" * (len(sets) + 4),
    ]
    for name, lines, way in rows:
        found = [measured([line for line in lines if line["set"] == group], way) for group in sets]
        real = [pair for pair in found if pair]
        mean = (sum(pair[0] for pair in real) / len(real), sum(pair[1] for pair in real) / len(real)) if real else None
        cells = ["{:.2f}x {:.2f}".format(*pair) if pair else "-" for pair in (*found, mean)]
        part = share(lines, way)
        equal = sum(line["ways"][way]["ids"] == line["ways"]["plain"]["ids"] for line in lines)
        shown = "-" if part is None else f"{part:.0%}"
        text.append(f"| {name} | " + " | ".join((*cells, shown, f"{equal} of {len(lines)}")) + " |")
    return text


def tables(lines: Sequence[Line], temperature: float) -> list[str]:
    """The table of one temperature, of all bundles."""
    lines = [line for line in lines if line["temperature"] == temperature]
    rows = list[tuple[str, Sequence[Line], str]]()
    for bundle in dict.fromkeys(line["bundle"] for line in lines):
        own = [line for line in lines if line["bundle"] == bundle]
        drafting = (way for way in WAYS if way != "plain" and all(way in line["ways"] for line in own))
        rows += [(f"{bundle}, {way}", own, way) for way in drafting]
    return table(f"temperature {temperature:g}", rows)


def read(file: Path) -> list[Line]:
    """The lines of an earlier run; one that was cut off by an interruption is dropped from the file too."""
    text = file.read_text("utf-8") if file.is_file() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, "utf-8")
    return [json.loads(line) for line in whole.splitlines()]


def compare(args: argparse.Namespace) -> int:
    lines = read(args.out)
    known = {key(line): line for line in lines}
    asked = list(conversations(args.prompts, args.count))
    for path in args.bundles:
        Bundle(path)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for path in args.bundles:
        with load(path, threads=args.threads) as model, args.out.open("a", encoding="utf-8") as file:
            for line in measure(model, path.name, asked, args, known):
                file.write(json.dumps(line) + "\n")
                file.flush()
                lines.append(line)
                taus = "  ".join(
                    f"{way} {found['tokens'] / max(1, found['cycles']):.2f}" for way, found in line["ways"].items()
                )
                print(
                    f"{path.name}  {line['set']} {line['number']}  {len(line['prompt'])} positions  {taus}",
                    file=sys.stderr,
                )
    print("\n\n".join("\n".join(tables(lines, temperature)) for temperature in args.temperatures))
    return int(any(found["ids"] != line["ways"]["plain"]["ids"] for line in lines for found in line["ways"].values()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+", help="bundles for the CPU, of targets with a chat template")
    parser.add_argument(
        "--prompts", type=Path, required=True, help="folder of JSONL files with 'turns' or 'prompt', one for each set"
    )
    parser.add_argument("--count", type=int, help="conversations of each set (default: all)")
    parser.add_argument(
        "--longest", type=int, help="leave out turns with more positions than this before the answer (default: none)"
    )
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to generate for each turn (default: 128)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="default: 0 1")
    parser.add_argument("--seed", type=int, default=1, help="of the texts at other temperatures than 0 (default: 1)")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=list(WAYS),
        help="; ".join(f"{way}: {what}" for way, what in WAYS.items()),
    )
    parser.add_argument("--threads", type=int, default=0, help="threads (default: as many as compiling found fastest)")
    parser.add_argument("--out", type=Path, default=Path("build/paper.jsonl"), help="default: build/paper.jsonl")
    args = parser.parse_args(argv)
    if "plain" not in args.ways:
        parser.error("--ways lacks plain, which the others are compared with: add it")
    distinct(parser, args.bundles)
    return run(lambda: compare(args))


if __name__ == "__main__":
    sys.exit(main())
