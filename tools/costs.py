"""Measures and plots the time of passes by their number of rows and the context before them.

    python -m tools.costs BUNDLE ... [--rows 1 2 4 8 16 32 64] [--contexts 0 64 128 256 512 768] [--out build/costs]

For every bundle it measures target passes over each number of rows, and drafting a tree, after each number of cached
positions. The rows are a causal chunk; those of a tree take as long, as only the mask differs. The fastest of several
runs counts, and all measurements of a bundle alternate. Writes ``costs.md``, ``costs.json`` and plots.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from runtime import load
from runtime.cli.command import run as run_command
from runtime.decoding.cycle import Accepted
from runtime.decoding.decoder import Decoder
from runtime.errors import InputError, UnavailableError
from tools.measure import distinct

ROOT = Path(__file__).parent.parent


def costs(decoder: Decoder, rows: Sequence[int], contexts: Sequence[int], repeats: int) -> dict[str, list[list[float]]]:
    """Milliseconds per pass. target: [rows][contexts]; draft: [1][contexts].

    Raises InputError for a bundle with static shapes, and for more rows or positions than it has.
    """
    if decoder.form.static:
        raise InputError(
            "this backend has static shapes, so every pass has the same number of rows: give a bundle for cpu"
        )
    chunk, capacity = len(decoder.target.choice), decoder.manifest.capacity
    largest = max(*rows, decoder.manifest.rows)
    if max(rows) > chunk:
        raise InputError(f"a pass of this bundle takes at most {chunk} rows, not {max(rows)}: give smaller --rows")
    if max(contexts) + largest > capacity:
        raise InputError(
            f"{max(contexts)} positions and {largest} rows exceed the capacity of {capacity}: give smaller --contexts"
        )
    draft = decoder.draft.drafting(Accepted((0,), (0,)))
    calls: list[Callable[[], object]] = [*(decoder.target.causal(n) for n in rows), draft]
    fastest_ms = [[math.inf] * len(contexts) for _ in calls]
    for _ in range(repeats + 1):  # the first run maps memory
        for column, context in enumerate(contexts):
            decoder.target.keep(context)
            decoder.draft.keep(context)
            calls[0]()  # makes the cache as large as the context needs
            for call, fastest in zip(calls, fastest_ms, strict=True):
                started = perf_counter_ns()
                call()
                decoder.device.synchronize()
                fastest[column] = min(fastest[column], (perf_counter_ns() - started) / 1e6)
    decoder.clear()
    return {"target": fastest_ms[:-1], "draft": fastest_ms[-1:]}


def growth(sizes: Sequence[float], spent: Sequence[float]) -> float:
    """The largest growth exponent between neighbouring sizes; 1 is linear."""
    points = [(size, cost) for size, cost in zip(sizes, spent, strict=True) if size > 0]
    return max((math.log(d / b) / math.log(c / a) for (a, b), (c, d) in pairwise(points)), default=0.0)


def markdown(results: Mapping[str, Any]) -> str:
    rows, contexts = results["rows"], results["contexts"]
    lines = [
        f"Milliseconds, fastest of {results['repeats']}, {results['threads']} threads. growth: the largest exponent"
        " between neighbours, by context in the last column and by rows in the last line; 1 is linear."
    ]
    for name, bundle in results["bundles"].items():
        lines += ["", f"## {name}", "", "| rows \\ context | " + " | ".join(map(str, contexts)) + " | growth |"]
        lines.append("|" + "---|" * (len(contexts) + 2))
        for label, spent in [
            *zip(rows, bundle["target"], strict=True),
            (f"draft, R {bundle['tree rows']}", *bundle["draft"]),
        ]:
            lines.append(
                f"| {label} | " + " | ".join(f"{ms:.2f}" for ms in spent) + f" | {growth(contexts, spent):.2f} |"
            )
        by_rows = (growth(rows, [spent[at] for spent in bundle["target"]]) for at in range(len(contexts)))
        lines.append("| growth | " + " | ".join(f"{exponent:.2f}" for exponent in by_rows) + " | |")
    return "\n".join(lines) + "\n"


def plot(results: Mapping[str, Any], out: Path) -> None:
    """Plots time against context, one line per number of rows, and against rows, one line per context."""
    from matplotlib.figure import Figure

    rows, contexts, bundles = results["rows"], results["contexts"], results["bundles"]
    figure = Figure(figsize=(12, 4 * len(bundles)), layout="constrained")
    for name, (left, right) in zip(bundles, figure.subplots(len(bundles), 2, squeeze=False), strict=True):
        for n, spent in zip(rows, bundles[name]["target"], strict=True):
            left.plot(contexts, spent, marker=".", label=f"{n} rows")
        left.plot(contexts, *bundles[name]["draft"], "k--", label=f"draft, R = {bundles[name]['tree rows']}")
        for at, context in enumerate(contexts):
            right.plot(rows, [spent[at] for spent in bundles[name]["target"]], marker=".", label=f"context {context}")
        right.set_xscale("log", base=2)
        for axes, label in ((left, "context"), (right, "rows of a target pass")):
            axes.set(title=name, xlabel=label, ylabel="ms", ylim=(0, None))
            axes.legend(fontsize=8)
    for kind in ("png", "svg"):
        figure.savefig(out / f"costs.{kind}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+", help="bundles compiled for the CPU")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32, 64],
        help="rows per pass (default: 1 2 4 8 16 32 64)",
    )
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[0, 64, 128, 256, 512, 768],
        help="cached positions before the pass (default: 0 64 128 256 512 768)",
    )
    parser.add_argument(
        "--repeats", type=int, default=7, help="runs per measurement, of which the fastest counts (default: 7)"
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="threads of the engines (default: all cores)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/costs", help="folder for the results (default: build/costs)"
    )
    args = parser.parse_args(argv)
    if min(*args.rows, args.repeats, args.threads) < 1 or min(args.contexts) < 0:
        parser.error("--rows, --repeats and --threads must be 1 or more, --contexts 0 or more")
    distinct(parser, args.bundles)
    return run_command(lambda: measured(args))


def measured(args: argparse.Namespace) -> int:
    if not importlib.util.find_spec("matplotlib"):
        raise UnavailableError("matplotlib, which draws the plots, is missing: pip install '.[bench]'")
    rows, contexts = sorted(set(args.rows)), sorted(set(args.contexts))
    bundles = {}
    for bundle in args.bundles:
        with load(bundle, threads=args.threads) as model, model.exclusive() as decoder:
            bundles[bundle.name] = {"tree rows": decoder.manifest.rows, **costs(decoder, rows, contexts, args.repeats)}
    results = {"rows": rows, "contexts": contexts, "repeats": args.repeats, "threads": args.threads, "bundles": bundles}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "costs.json").write_text(json.dumps(results), "utf-8")
    (args.out / "costs.md").write_text(markdown(results), "utf-8")
    plot(results, args.out)
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
