"""Compares drafters of one target as the papers do, by set of prompts: tau, speed-up over plain decoding, and the
draft's share of a cycle.

    python -m tools.compare --target T --drafters A B ... [--prompts DIR] [--weights none w8a8] [--count N]
        [--out build/compare]

Every drafter is exported with its paper's tree (``PAPER``) and with the fastest tree on this machine. The latter is
searched among ``--rows``, then among more or fewer levels at the best number of rows, greedily, on prompts that are not
measured later (the last ``--tuning`` of each set). Then all ways decode each prompt one after another, so that other
load slows them alike: plain, with the paper's whole tree, with the fastest tree as the planner verifies it ("planned"),
and at temperature 0 also planned with prompt lookup.

Prompts are sets as for ``tools.paper_table``, named after their files; without ``--prompts``, beginnings of definitions
in Python's library, for the demo pair. Results are lines of ``OUT/texts.jsonl``; running the same command again
continues after them. Tables are printed and written to ``OUT/compare.md``, with plots next to it. Exits with 1 if a
text differs from that of plain decoding.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from exporter.checkpoints.drafters import open_drafter
from exporter.checkpoints.pair import Pair
from exporter.checkpoints.target import target_checkpoint
from runtime import Model, load
from runtime.cli.command import run
from runtime.errors import InputError
from tools import measure
from tools.best_tree import PLANNED, Options, Search, export, place, prompt_of
from tools.paper_table import Asked, Line, answered, conversations, decoded, measured, read, room, share, table

# The papers' trees. Gumiho and Medusa verify 64 rows, EAGLE-2 and EAGLE-3 60, EAGLE-1 and Hydra their static trees.
# Speculative sampling with a small model drafts a chain (arXiv 2302.01318); other papers' tables use five tokens.
PAPER: Mapping[str, Mapping[str, Sequence[str]]] = {
    "gumiho": {"paper": ["--rows", "64"]},
    "eagle": {"EAGLE-2": ["--rows", "60", "--serial-steps", "6"], "EAGLE-1": ["--draft-tree", "static"]},
    "eagle3": {"paper": ["--rows", "60", "--serial-steps", "8"]},
    "medusa": {"paper": ["--draft-tree", "static"]},
    "hydra": {"paper": ["--draft-tree", "static"]},
    "small": {"paper": ["--draft-tree", "chain", "--rows", "6", "--serial-steps", "5"]},
}
KEY = "weights", "temperature", "set", "number", "turn"


def asked(args: argparse.Namespace) -> tuple[Asked, Asked]:
    """The conversations to measure, and those for choosing trees."""
    if args.prompts:
        sets = dict[str, list[tuple[str, int, list[str]]]]()
        for found in conversations(args.prompts, None):
            sets.setdefault(found[0], []).append(found)
    else:
        sets = {
            "held-out": [("held-out", i, [text]) for i, text in enumerate(measure.prompts(args.count + args.tuning))]
        }
    for name, own in sets.items():
        if len(own) < args.count + args.tuning:
            raise InputError(
                f"set '{name}' has {len(own)} prompts, and {args.count} are measured after {args.tuning} others chose "
                "the trees: give a smaller --count or --tuning"
            )
    return [one for own in sets.values() for one in own[: args.count]], [
        one for own in sets.values() for one in own[-args.tuning :]
    ]


def bundles(args: argparse.Namespace, weights: str, prompts: Asked) -> dict[str, tuple[Path, Options]]:
    """The bundles to measure and their options, by the name of their row in the tables."""
    found = dict[str, tuple[Path, Options]]()
    target = target_checkpoint(args.target)
    for drafter in args.drafters:
        pair, name = Pair(target, open_drafter(drafter)), Path(drafter).name
        trees = {paper: tuple(options) for paper, options in PAPER[pair.family].items()} if args.papers else {}
        for kind, options in ({PLANNED: Search(args, drafter, weights, prompts).best(pair)} | trees).items():
            path = place(args, drafter, weights, kind, options)
            found[f"{name}, {kind}"] = export(args, drafter, weights, options, path), options
    return found


def ways(
    names: Sequence[str], models: Mapping[str, Model], temperature: float
) -> dict[str, tuple[Model, dict[str, Any]]]:
    """The model and the options of ``Model.generate`` of each way to decode, by its name in the tables."""
    found: dict[str, tuple[Model, dict[str, Any]]] = {"plain": (models[names[0]], {"speculate": False})}
    for name in names:
        model = models[name]
        if not name.endswith(PLANNED):
            found[name] = model, {"lookup": False, "rows": model.bundle.manifest.rows}
            continue
        found[name] = model, {"lookup": False}
        if not temperature:
            found[f"{name}, lookup"] = model, {}
    return found


def texts(
    args: argparse.Namespace,
    weights: str,
    models: Mapping[str, Model],
    prompts: Asked,
    known: Mapping[tuple[Any, ...], Line],
) -> Iterator[Line]:
    """Yields a line for each turn that fits and has no result yet."""
    names = list(models)
    first = models[names[0]]
    prompts = prompts if first.chat_template else [(group, number, turns[:1]) for group, number, turns in prompts]
    for temperature in args.temperatures:
        sampled = {"temperature": temperature, **({"seed": args.seed} if temperature else {})}
        all_ways = {
            way: (model, settings | sampled) for way, (model, settings) in ways(names, models, temperature).items()
        }

        def decode(
            prompt: list[int], number: int, all_ways: Mapping[str, tuple[Model, dict[str, Any]]] = all_ways
        ) -> dict[str, Any]:
            order = list(all_ways)[:: -1 if number % 2 else 1]
            spent = {way: decoded(all_ways[way][0], prompt, args.new_tokens, all_ways[way][1]) for way in order}
            return {"prompt": len(prompt), "ways": {way: spent[way] for way in all_ways}}  # as tables list them

        yield from answered(first, prompts, room(args, first), known, KEY, (weights, temperature), decode, prompt_of)


def grouped(
    args: argparse.Namespace, lines: Sequence[Line], weights: str
) -> Iterator[tuple[float, list[Line], list[str]]]:
    """Yields every temperature that has lines, with the lines and their speculative ways."""
    for temperature in args.temperatures:
        own = [line for line in lines if line["weights"] == weights and line["temperature"] == temperature]
        if own:
            yield temperature, own, [way for way in own[0]["ways"] if way != "plain"]


def report(args: argparse.Namespace, lines: Sequence[Line], trees: Mapping[str, Mapping[str, Options]]) -> str:
    """The tables of a run in Markdown."""
    parts = list[str]()
    for weights in args.weights:
        for temperature, own, names in grouped(args, lines, weights):
            rows = [(way, own, way) for way in names]
            parts.append("\n".join(table(f"{weights}, temperature {temperature:g}", rows)))
        listed = "; ".join(f"{name}: `{' '.join(options)}`" for name, options in trees[weights].items())
        parts.append(f"Options, {weights}: {listed}.")
    return "\n\n".join(parts) + "\n"


def plot(args: argparse.Namespace, lines: Sequence[Line]) -> None:
    """Writes bar charts of tau, speed-up and share, one file for each format of weights and temperature."""
    from matplotlib.figure import Figure

    for weights in args.weights:
        for temperature, own, names in grouped(args, lines, weights):
            figure = Figure(figsize=(13, 1 + 0.3 * len(names)), layout="constrained")
            numbers = {way: measured(own, way) or (0.0, 0.0) for way in names}
            panels = {
                "tau": [numbers[way][1] for way in names],
                "speed-up over plain decoding": [numbers[way][0] for way in names],
                "share of the draft in a cycle": [share(own, way) or 0.0 for way in names],
            }
            drafters = [way.partition(",")[0] for way in names]
            colours = [f"C{list(dict.fromkeys(drafters)).index(drafter)}" for drafter in drafters]
            for (title, values), axes in zip(panels.items(), figure.subplots(1, len(panels), sharey=True), strict=True):
                bars = axes.barh(names, values, color=colours)
                axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=2, fontsize=8)
                axes.set_title(title)
                axes.margins(x=0.15)
            axes.invert_yaxis()
            figure.suptitle(f"{weights}, temperature {temperature:g}, all sets")
            figure.savefig(args.out / f"compare-{weights}-{temperature:g}.png")


def require_same(args: argparse.Namespace) -> None:
    """Records the options that results in OUT depend on. Raises InputError if OUT has results of other options, which
    must not be mixed."""
    file = args.out / "arguments.json"
    own = {
        "target": str(Path(args.target).absolute()),
        "drafters": [str(Path(drafter).absolute()) for drafter in args.drafters],
        "papers": args.papers,
        "new_tokens": args.new_tokens,
        "seed": args.seed,
        "tuning": args.tuning,
        "rows": args.rows,
    }
    earlier = json.loads(file.read_text("utf-8")) if file.is_file() else own
    if other := next((name for name in own if own[name] != earlier.get(name)), None):
        option = f"--{other.replace('_', '-')}"
        raise InputError(
            f"{args.out} holds results with another {option} ({earlier.get(other)}): give another --out, or the same "
            "options"
        )
    file.write_text(json.dumps(own), "utf-8")


def compare(args: argparse.Namespace) -> int:
    prompts, tuning = asked(args)
    args.out.mkdir(parents=True, exist_ok=True)
    require_same(args)
    file, trees = args.out / "texts.jsonl", dict[str, dict[str, Options]]()
    lines = read(file)
    known = {tuple(line[name] for name in KEY): line for line in lines}
    for weights in args.weights:
        found = bundles(args, weights, tuning)
        trees[weights] = {name: options for name, (_, options) in found.items()}
        with ExitStack() as stack, file.open("a", encoding="utf-8") as out:
            models = {name: stack.enter_context(load(path, threads=args.threads)) for name, (path, _) in found.items()}
            for line in texts(args, weights, models, prompts, known):
                out.write(json.dumps(line) + "\n")
                out.flush()
                lines.append(line)
                print(f"{weights}  {line['temperature']:g}  {line['set']} {line['number']}", file=sys.stderr)
    text = report(args, lines, trees)
    (args.out / "compare.md").write_text(text, "utf-8")
    plot(args, lines)
    print(text, end="")
    return int(any(found["ids"] != line["ways"]["plain"]["ids"] for line in lines for found in line["ways"].values()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="target, as for gumiho-export")
    parser.add_argument(
        "--drafters", nargs="+", required=True, help="drafters of any family, as for gumiho-export --ckpt"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        help="folder of JSONL files with 'turns' or 'prompt', one for each set (default: Python's library)",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        default=["none"],
        help="formats of the target, as for gumiho-export --weights (default: none)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[4, 8, 16],
        help="rows to try; one number: the usual tree of so many (default: 4 8 16)",
    )
    parser.add_argument(
        "--papers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the trees of the papers too (default: yes)",
    )
    parser.add_argument("--count", type=int, default=10, help="conversations of each set to measure (default: 10)")
    parser.add_argument(
        "--tuning", type=int, default=2, help="conversations of each set to choose trees with (default: 2)"
    )
    parser.add_argument(
        "--longest", type=int, help="leave out turns with more positions than this before the answer (default: none)"
    )
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate for each turn (default: 64)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="default: 0 1")
    parser.add_argument("--seed", type=int, default=1, help="of the texts at other temperatures than 0 (default: 1)")
    parser.add_argument("--threads", type=int, default=0, help="threads (default: as many as compiling found fastest)")
    parser.add_argument("--out", type=Path, default=Path("build/compare"), help="default: build/compare")
    args = parser.parse_args(argv)
    measure.distinct(parser, [Path(drafter) for drafter in args.drafters])
    if min(args.count, args.tuning) < 1 or min(args.rows) < 2:
        parser.error("--count and --tuning are 1 or more, --rows 2 or more")
    return run(lambda: compare(args))


if __name__ == "__main__":
    sys.exit(main())
