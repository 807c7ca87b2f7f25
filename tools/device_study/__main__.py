"""Measures on a device, within minutes, what could make ONNX Runtime on CUDA faster: one command per question.

    python -m tools.device_study graphs STUDY          # before, anywhere; needs torch, which the others do not
    python -m tools.device_study check STUDY --backend cpu --out check.jsonl
    python -m tools.device_study cycle STUDY --out cycle.jsonl --seconds 280
    python -m tools.device_study questions STUDY --bundles B ... --out questions.jsonl --seconds 280
    python -m tools.device_study rtx STUDY --out rtx.jsonl --seconds 120

``graphs`` writes the graphs of a cycle at several shapes and in several variants, without weights: a few megabytes.
``check`` compares the tokens of all variants. ``cycle`` times a plain pass, a tree's pass, a draft and a cycle,
profiles them by node, and does the same for the variants. ``questions`` times passes of 1 to 128 rows in fp32 and
passes over int4 weights, and compares texts of bundles with plain decoding's. ``rtx`` asks TensorRT for RTX for a plan
for this device. Weights are random. Every result is written as a line of JSON when it is known; what no longer fits
into the time is skipped.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from runtime.cli.command import run as run_command
from runtime.errors import InputError

from . import questions
from .runner import Bound, Entry, Runner

VARIANTS_OF_ENVIRONMENT = {
    "copying-attention": {"ORT_DISABLE_MEMORY_EFFICIENT_ATTENTION": "0"},
    "cudnn-attention": {"ORT_ENABLE_CUDNN_FLASH_ATTENTION": "1"},
}
ORDER = (
    *("all-grouped", "all-standard", "grouped", "joined", "lengths", "casts", "skip-norm", "decomposed"),
    *("grouped-apart", "top-k-first", "heads-apart", "vocabulary"),
)
_RUNS, _LONGEST = 30, 3.0  # timed calls at most, and their seconds
_FILLED = 512  # positions of the caches, where there is room


class Report:
    """Results, written as they come. left: seconds until the limit."""

    def __init__(self, file: Path, seconds: float) -> None:
        self._file, self._until = file, time.monotonic() + seconds
        file.parent.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        return self._until - time.monotonic()

    def add(self, **result: Any) -> None:
        line = json.dumps(result)
        with self._file.open("a") as file:
            file.write(line + "\n")
        short = {key: value for key, value in result.items() if key != "profile"}
        print(json.dumps(short), flush=True)
        for row in result.get("profile", [])[:15]:
            print("   ", *row, flush=True)

    def attempt(
        self, what: Mapping[str, Any], needs: float, work: Callable[[], Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Adds the result of some work, or why there is none, and returns it. needs: seconds that it takes, about."""
        if self.left < needs:
            self.add(**what, skipped=f"needs about {needs:.0f} s, and {self.left:.0f} s are left")
            return {}
        started = time.monotonic()
        try:
            found = work()
        except Exception as error:  # whatever one variant does, the others are measured
            found = {"failed": f"{type(error).__name__}: {error}"[:600]}
        self.add(**what, **found, took=round(time.monotonic() - started, 2))
        return found


def milliseconds(call: Callable[[], object], wait: Callable[[], object]) -> dict[str, Any]:
    """Median and fastest of repeated calls, each waited for."""
    times: list[float] = []
    for _ in range(3):
        call()
    wait()
    while len(times) < 5 or (len(times) < _RUNS and sum(times) < _LONGEST):
        started = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - started)
    return {"ms": round(median(times) * 1e3, 4), "fastest": round(min(times) * 1e3, 4)}


def inputs_of(entry: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of a pass, except caches: a random tree, or random accepted rows."""
    drawn, shapes = np.random.default_rng(seed), {i["name"]: i["shape"] for i in entry["inputs"]}
    slots = next(size[2] for name, size in shapes.items() if name.startswith("past_key"))
    length = np.array([min(_FILLED, slots // 2) - seed])
    n = shapes["tokens"][0]
    values = {"tokens": drawn.integers(0, 900, n), "past_length": length}
    if "mask" in shapes:
        parent = [-1, *(int(drawn.integers(0, row)) for row in range(1, n))]
        mask, depth = np.eye(n, dtype=bool), np.zeros(n, np.int64)
        for row in range(1, n):
            mask[row] |= mask[parent[row]]
            depth[row] = depth[parent[row]] + 1
        return values | {"mask": mask, "depth": depth}
    dtype = next(i["dtype"] for i in entry["inputs"] if i["name"] == "hidden")
    return values | {
        "count": np.array([min(3, n)]),
        "path": np.arange(n),
        "hidden": drawn.standard_normal(shapes["hidden"]).astype(dtype),
        "noise": drawn.gumbel(size=shapes["noise"]).astype(np.float32),
    }


def difference(base: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """How the outputs of a variant differ: tokens that differ, of how many, and the largest error of numbers relative
    to the largest one."""
    if "choice" in base:
        tokens, numbers = ["choice"], ["logits", "hidden"]
    else:
        tokens, numbers = ["tree_tokens", "tree_parent", "tree_depth"], ["tree_score"]
    wrong = sum(int((base[name] != other[name]).sum()) for name in tokens)
    errors = []
    for name in numbers:
        a, b = base[name].astype(np.float32), other[name].astype(np.float32)
        errors.append(float(np.abs(a - b).max() / max(1e-30, np.abs(a).max())))
    return {"differ": wrong, "of": sum(base[name].size for name in tokens), "error": float(f"{max(errors):.2g}")}


def text(bound: Bound, count: int) -> list[int]:
    """Tokens decoded by passes of one row over empty caches."""
    tokens, one = [5], {"mask": np.ones((1, 1), bool), "depth": np.zeros(1, np.int64)}
    for position in range(count):
        bound.put({**one, "tokens": np.array(tokens[-1:]), "past_length": np.array([position])})
        bound.call()
        tokens.append(int(bound.outputs(["choice"])["choice"][0]))
    return tokens[1:]


def check(runner: Runner, study: Mapping[str, Any], names: Sequence[str], report: Report) -> int:
    """Compares every variant with the unchanged graph. Returns how many graphs differ in a token or failed."""
    wrong = 0
    for name in names:
        for kind, variants in study[name].items():
            base: dict[str, Any] = {}
            for variant, entry in variants.items():
                if variant != "vocabulary":  # another drafter
                    what = {"check": name, "graph": kind, "variant": variant}
                    found = report.attempt(what, 0, partial(compared, runner, entry, base))
                    wrong += bool(found.get("differ", 1)) or not found.get("text", True)
    return wrong


def compared(runner: Runner, entry: Entry, base: dict[str, Any]) -> dict[str, Any]:
    """How a graph differs from the first one that ``base`` got: the results of three passes, and for passes of one row
    a text of plain decoding."""
    passes, words = [], []
    with runner.session(entry) as session:
        bound = runner.bind(entry, session)
        for seed in range(3):
            bound.fill_caches()
            bound.put(inputs_of(entry, seed))
            bound.call()
            passes.append(bound.outputs())
        if "choice" in passes[0] and passes[0]["choice"].size == 1:
            words = text(bound, 24)
    if not base:
        base |= {"passes": passes, "text": words}
    each = [difference(*pair) for pair in zip(base["passes"], passes, strict=True)]
    found = {"differ": sum(one["differ"] for one in each), "of": sum(one["of"] for one in each)}
    return found | {"error": max(one["error"] for one in each), **({"text": words == base["text"]} if words else {})}


def measure(runner: Runner, entry: Mapping[str, Any], base: dict[str, Any], profile: bool) -> dict[str, Any]:
    """Times a graph, and compares its outputs with those in ``base``, which gets the first ones."""
    with runner.session(entry) as session:
        bound = runner.bind(entry, session)
        bound.fill_caches()
        bound.put(inputs_of(entry))
        bound.call()
        given = bound.outputs()
        found = milliseconds(bound.call, runner.wait)
        if base:
            found |= difference(base, given)
        base |= {} if base else given
    if profile:
        found["profile"] = runner.profile(entry, inputs_of(entry))
    if runner.bandwidth:
        found["of_reading"] = round(found["ms"] / (entry["reads_once"] / runner.bandwidth * 1e3), 3)
    return found


def profiled(runner: Runner, entry: Entry) -> dict[str, Any]:
    return {"profile": runner.profile(entry, inputs_of(entry))}


def both(runner: Runner, draft: Mapping[str, Any], verify: Mapping[str, Any]) -> dict[str, Any]:
    """Times a draft and the pass over its tree together, as a cycle makes them."""
    with runner.session(draft) as first, runner.session(verify) as second:
        drafting, verifying = runner.bind(draft, first), runner.bind(verify, second)
        for bound, entry in ((drafting, draft), (verifying, verify)):
            bound.fill_caches()
            bound.put(inputs_of(entry))

        def call() -> None:
            drafting.call()
            verifying.call()

        found = milliseconds(call, runner.wait)
    if runner.bandwidth:
        reading = (draft["reads_once"] + verify["reads_once"]) / runner.bandwidth * 1e3
        found["of_reading"] = round(found["ms"] / reading, 3)
    return found


def cycle(runner: Runner, graphs: Mapping[str, Any], name: str, report: Report, asked: Sequence[str]) -> None:
    """Times and profiles the graphs of a set, then their variants, the most promising first. asked: the variants, all
    by default."""
    kinds = sorted(graphs, key=lambda kind: (kind == "draft", kind))
    tree = max((kind for kind in graphs if kind != "draft"), key=lambda kind: int(kind.partition("-")[2]))
    expected: dict[str, dict[str, Any]] = {kind: {} for kind in graphs}

    def timed(kind: str, variant: str, profile: bool, needs: float, label: str = "") -> None:
        what = {"cycle": name, "graph": kind, "variant": label or variant}
        base = {} if variant == "vocabulary" else expected[kind]  # that is another drafter
        report.attempt(what, needs, partial(measure, runner, graphs[kind][variant], base, profile))

    def whole(variant: str, needs: float) -> None:
        draft, verify = (graphs[kind].get(variant, graphs[kind]["base"]) for kind in ("draft", tree))
        what = {"cycle": name, "graph": "cycle", "variant": variant}
        report.attempt(what, needs, partial(both, runner, draft, verify))

    for kind in kinds:
        timed(kind, "base", False, 10)
    whole("base", 10)
    for kind in kinds:
        what = {"cycle": name, "graph": kind, "variant": "base", "profiled": True}
        entry = graphs[kind]["base"]
        report.attempt(what, 15, partial(profiled, runner, entry))
    for variant in asked or ORDER:
        for kind in kinds:
            if variant in graphs[kind]:
                timed(kind, variant, variant.startswith("all-"), 12)
        if variant.startswith("all-"):
            whole(variant, 10)
    for label, new in VARIANTS_OF_ENVIRONMENT.items():
        with environment(new):
            for kind in kinds:
                timed(kind, "base", False, 10, label)


@contextmanager
def environment(new: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the sessions made within the block."""
    old = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _sets(study: Mapping[str, Any], asked: Sequence[str] | None, usual: Sequence[str]) -> list[str]:
    names = list(asked or [name for name in usual if name in study])
    if unknown := [name for name in names if name not in study]:
        raise InputError(f"the study has no set '{unknown[0]}': give some of {', '.join(study)}")
    return names


def _work(args: argparse.Namespace) -> int:
    if args.command == "graphs":
        from .graphs import write_all

        print(write_all(args.study, args.sets))
        return 0
    if not args.out:
        raise InputError("the results need a file: give --out")
    study = json.loads((args.study / "study.json").read_text())
    report = Report(args.out, args.seconds)
    if args.command == "rtx":
        questions.rtx(args.study / study["tiny-fp16"]["target-1"]["base"]["file"], report)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        runner = Runner(args.study, args.backend, Path(scratch))
        report.add(started=args.command, **runner.about())
        if args.command == "check":
            names = _sets(study, args.sets, ["tiny", "tiny-fp16"])
            return int(check(runner, study, names, report) > 0)
        if args.command == "cycle":
            for name in _sets(study, args.sets, ["8b"]):
                cycle(runner, study[name], name, report, args.variants)
            return 0
        names = _sets(study, args.sets, [name for name in study if name == "rows" or name.startswith("1b")])
        questions.texts(args.bundles, args.backend, report)
        questions.passes(runner, {name: study[name] for name in names}, report, measure)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("graphs", "check", "cycle", "questions", "rtx"))
    parser.add_argument("study", type=Path, help="folder of the graphs")
    parser.add_argument("--out", type=Path, help="file of results, which are appended")
    parser.add_argument("--seconds", type=float, default=280, help="limit of the whole command (default: 280)")
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda", help="where to run (default: cuda)")
    parser.add_argument("--sets", nargs="+", help="sets of graphs (default: those of the command)")
    parser.add_argument("--variants", nargs="+", choices=ORDER, default=[], help="of 'cycle' (default: all)")
    parser.add_argument("--bundles", nargs="*", default=[], help="of 'questions': bundles whose texts are compared")
    args = parser.parse_args(argv)
    return run_command(lambda: _work(args))


if __name__ == "__main__":
    sys.exit(main())
