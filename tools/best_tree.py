"""Finds the draft tree with which a drafter is fastest on this machine, by exporting and decoding (for ``tools.compare``)."""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from exporter.checkpoints.pair import Pair
from exporter.trees import usual_tree
from runtime import Model, load
from runtime.errors import InputError
from tools.paper_table import Asked, decoded, read, room

ROOT = Path(__file__).parent.parent
Options = tuple[str, ...]
_ENOUGH = 4.0  # seconds of plain decoding: small models are done too soon to be compared


def export(args: argparse.Namespace, drafter: str, weights: str, options: Sequence[str], out: Path) -> Path:
    """A bundle, which is made if it is not there yet. Raises InputError with the export's reason."""
    if (out / "gumiho.json").is_file():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "exporter.cli", "--ckpt", drafter, "--target", args.target, "--weights", weights]
    finished = subprocess.run([*command, "--out", str(out), *options], cwd=ROOT, capture_output=True, text=True)
    if finished.returncode:
        reason = (finished.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError(f"exporting '{drafter}' with {' '.join(options)} failed: {reason.removeprefix('error: ')}")
    return out


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
    """The tree that is fastest here, for one drafter and one format of weights. Candidates are kept in a file by their options."""

    def __init__(self, args: argparse.Namespace, drafter: str, weights: str, prompts: Asked) -> None:
        self.args, self.drafter, self.weights, self.prompts = args, drafter, weights, prompts
        self.folder = args.out / "bundles" / weights
        self.file = args.out / "trees.jsonl"
        self.known = {tuple(line["key"]): float(line["speed"]) for line in read(self.file)}

    def of(self, options: Options) -> float:
        """The speed-up with these options of the export."""
        key = (self.weights, self.drafter, *options)
        if key not in self.known:
            shutil.rmtree(self.folder / "candidate", ignore_errors=True)  # of an interrupted run
            bundle = export(self.args, self.drafter, self.weights, options, self.folder / "candidate")
            self.known[key] = speed(self.args, bundle, self.prompts)
            shutil.rmtree(bundle)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "speed": self.known[key]}) + "\n")
            print(f"{Path(self.drafter).name}  {self.weights}  {' '.join(options)}  {self.known[key]:.3f}", file=sys.stderr)
        return self.known[key]

    def best(self, pair: Pair) -> Options:
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
