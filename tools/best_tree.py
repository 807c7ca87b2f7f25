"""Finds the fastest draft tree of a drafter on this machine by exporting and decoding (for ``tools.compare``)."""

import argparse
import io
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import exporter
from exporter.checkpoints.pair import Pair
from exporter.config import ExportConfig
from exporter.options import config_of
from exporter.recipe.trees import usual_tree
from runtime import Model, load
from runtime.errors import GumihoError, InputError
from tools.paper_table import Asked, decoded, read, room

Options = tuple[str, ...]
NUMBERS = {"--serial-steps": "serial_steps", "--heads": "heads"}  # of ``DraftTree``
PLANNED = "planned"  # the kind of the trees found here, in names of bundles and rows of tables
_ENOUGH = 4.0  # seconds of plain decoding; one round of a small model is too short to compare


def export(args: argparse.Namespace, drafter: str, weights: str, options: Sequence[str], out: Path) -> Path:
    """Exports a bundle unless it exists. Raises InputError with the export's reason.

    The export runs in this process, which keeps the traced target of earlier exports: tracing takes the longest.
    """
    if (out / "gumiho.json").is_file():
        return out
    told = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(told):
            exporter.export(
                _config(["--ckpt", drafter, "--target", args.target, "--weights", weights, "--out", str(out)], options)
            )
    except (GumihoError, SystemExit) as error:  # argparse exits after printing the reason
        reason = (
            (told.getvalue().strip().splitlines() or ["no reason given"])[-1]
            if isinstance(error, SystemExit)
            else str(error)
        )
        raise InputError(
            f"exporting '{drafter}' with {' '.join(options)} failed: {reason.removeprefix('error: ')}"
        ) from None
    return out


def _config(argv: Sequence[str], options: Sequence[str]) -> ExportConfig:
    """The configuration of a command line. options: pairs of an option and its value, including the tree's numbers."""
    pairs = list(zip(options[::2], options[1::2], strict=True))
    config = config_of([*argv, *(part for pair in pairs if pair[0] not in NUMBERS for part in pair)])
    numbers: dict[str, Any] = {NUMBERS[option]: int(value) for option, value in pairs if option in NUMBERS}
    return replace(config, draft_tree=replace(config.draft_tree, **numbers))


def place(args: argparse.Namespace, drafter: str, weights: str, kind: str, options: Sequence[str]) -> Path:
    """The folder of the bundle of a drafter with this kind of tree."""
    return (
        args.out
        / "bundles"
        / weights
        / f"{Path(drafter).name}-{kind}-{'-'.join(option.strip('-') for option in options)}"
    )


def prompt_of(model: Model, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens of a conversation in the chat template, or of its last message if the target has no template."""
    return model.chat(messages) if model.chat_template else model.encode(messages[-1]["content"])


def speed(args: argparse.Namespace, bundle: Path, prompts: Asked) -> float:
    """The speed-up over plain decoding on all first turns that fit: greedy, planned, without prompt lookup, in rounds
    that take at least ``_ENOUGH``."""
    ways = {"plain": {"speculate": False}, "drafter": {"lookup": False}}
    spent = dict.fromkeys(ways, 0.0)
    with load(bundle, threads=args.threads) as model:
        tokens = [(number, prompt_of(model, [{"role": "user", "content": turns[0]}])) for _, number, turns in prompts]
        fitting = [(number, prompt) for number, prompt in tokens if len(prompt) <= room(args, model)]
        if not fitting:
            raise InputError("no prompt to choose trees with fits: give a larger --tuning or --longest")
        while spent["plain"] < _ENOUGH:
            for number, prompt in fitting:
                for way in list(ways)[:: -1 if number % 2 else 1]:
                    spent[way] += decoded(model, prompt, args.new_tokens, ways[way])["seconds"]
    return spent["plain"] / spent["drafter"]


class Search:
    """Finds the fastest tree for one drafter and one format of weights. A file keeps all speeds by options; of the
    bundles only the fastest is kept."""

    def __init__(self, args: argparse.Namespace, drafter: str, weights: str, prompts: Asked) -> None:
        self.args, self.drafter, self.weights, self.prompts = args, drafter, weights, prompts
        self.file = args.out / "trees.jsonl"
        self.known = {tuple(line["key"]): float(line["speed"]) for line in read(self.file)}

    def of(self, options: Options) -> float:
        """The speed-up with these options of the export."""
        key = (self.weights, self.drafter, *options)
        if key not in self.known:
            bundle = export(self.args, self.drafter, self.weights, options, self.place(options))
            self.known[key] = speed(self.args, bundle, self.prompts)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "speed": self.known[key]}) + "\n")
            print(
                f"{Path(self.drafter).name}  {self.weights}  {' '.join(options)}  {self.known[key]:.3f}",
                file=sys.stderr,
            )
        return self.known[key]

    def place(self, options: Options) -> Path:
        return place(self.args, self.drafter, self.weights, PLANNED, options)

    def best(self, pair: Pair) -> Options:
        """The options of the fastest tree. The bundles of the others are removed."""
        chosen = self._best(pair)
        for weights, drafter, *options in self.known:
            if (weights, drafter) == (self.weights, self.drafter) and tuple(options) != chosen:
                shutil.rmtree(self.place(tuple(options)), ignore_errors=True)
        return chosen

    def _best(self, pair: Pair) -> Options:
        """The options of the best number of rows, then of more or fewer levels as long as that helps. A single number
        of rows is taken without a trial."""
        if len(self.args.rows) == 1:
            return "--rows", str(self.args.rows[0])
        rows = max(self.args.rows, key=lambda n: self.of(("--rows", str(n))))
        chosen: Options = "--rows", str(rows)
        levels = pair.reader.levels or 64
        tree = usual_tree(pair.family, rows, pair.heads, levels=levels)
        option, usual, most = (
            ("--heads", tree.heads, pair.heads)
            if pair.heads
            else ("--serial-steps", tree.serial_steps, min(levels, 10))
        )
        least = 0 if tree.serial_steps and pair.heads else 1
        for step in (1, -1):
            count = usual + step
            while least <= count <= most and self.of(more := ("--rows", str(rows), option, str(count))) > self.of(
                chosen
            ):
                chosen, count = more, count + step
            if len(chosen) > 2:
                break
        return chosen
