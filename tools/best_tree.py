"""Finds the draft tree with which a drafter is fastest on this machine, by exporting and decoding (for ``tools.compare``)."""

import argparse
import io
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from exporter import cli
from exporter.checkpoints.pair import Pair
from exporter.trees import usual_tree
from runtime import Model, load
from runtime.errors import InputError
from runtime.errors.interruption import INTERRUPTED
from tools.paper_table import Asked, decoded, read, room

Options = tuple[str, ...]
PLANNED = "planned"  # the kind of the trees that are searched here, in names of bundles and rows of tables
_ENOUGH = 4.0  # seconds of plain decoding: small models are done too soon to be compared


def export(args: argparse.Namespace, drafter: str, weights: str, options: Sequence[str], out: Path) -> Path:
    """A bundle, which is made if it is not there yet. Raises InputError with the export's reason.

    It is made in this process, which has traced the target for earlier ones: that takes longer than all else.
    """
    if (out / "gumiho.json").is_file():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    told = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(told):
        status = _exported(["--ckpt", drafter, "--target", args.target, "--weights", weights, "--out", str(out), *options])
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status:
        reason = (told.getvalue().strip().splitlines() or ["no reason given"])[-1]
        raise InputError(f"exporting '{drafter}' with {' '.join(options)} failed: {reason.removeprefix('error: ')}")
    return out


def _exported(argv: list[str]) -> int:
    """The exit status of an export."""
    try:
        return cli.main(argv)
    except SystemExit as ended:  # argparse, which has told why
        return int(ended.code or 0)


def place(args: argparse.Namespace, drafter: str, weights: str, kind: str, options: Sequence[str]) -> Path:
    """Where the bundle of a drafter with such a tree is kept."""
    return args.out / "bundles" / weights / f"{Path(drafter).name}-{kind}-{'-'.join(option.strip('-') for option in options)}"


def prompt_of(model: Model, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """A conversation in the chat template, or its last text for a target without one."""
    return model.chat(messages) if model.chat_template else model.encode(messages[-1]["content"])


def speed(args: argparse.Namespace, bundle: Path, prompts: Asked) -> float:
    """Speed-up over plain decoding of the first turns that fit, greedy, as planned without lookups, in as many rounds as take ``_ENOUGH``."""
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
    """The tree that is fastest here, for one drafter and one format of weights. Speeds are kept in a file by the options, of bundles only the
    fastest one's."""

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
            print(f"{Path(self.drafter).name}  {self.weights}  {' '.join(options)}  {self.known[key]:.3f}", file=sys.stderr)
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
        """Options: the best number of rows, then levels more, or fewer, as long as that helps. With one number of rows nothing is tried."""
        if len(self.args.rows) == 1:
            return "--rows", str(self.args.rows[0])
        rows = max(self.args.rows, key=lambda n: self.of(("--rows", str(n))))
        chosen: Options = "--rows", str(rows)
        levels = pair.reader.levels or 64
        tree = usual_tree(pair.family, rows, pair.heads, levels=levels)
        option, usual, most = (
            ("--heads", tree.heads, pair.heads) if pair.heads else ("--serial-steps", tree.serial_steps, min(levels, 10))
        )
        least = 0 if tree.serial_steps and pair.heads else 1
        for step in (1, -1):
            count = usual + step
            while least <= count <= most and self.of(more := ("--rows", str(rows), option, str(count))) > self.of(chosen):
                chosen, count = more, count + step
            if len(chosen) > 2:
                break
        return chosen
