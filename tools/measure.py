"""Measures tau by R, time per cycle, memory of a loaded bundle, and time and memory of an export.

    python tools/measure.py [--pair demo] [--rows 2 4 8 16 32 64] [--prompts 40] [--new-tokens 128]

Prompts are the beginnings of held-out definitions (``tools/train_demo.py``). Times are means over whole generations.
Ratios compare runs that alternated in one process.
"""

import argparse
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import runtime
from runtime.bundle.reader import Bundle
from runtime.decoding.stats import Stats

ROOT = Path(__file__).parent.parent


def prompts(count: int) -> list[str]:
    """The first lines of held-out definitions, spread over the modules."""
    sys.path.insert(0, str(ROOT))
    from tools.train_demo import documents

    texts = ["\n".join(text.splitlines()[:3]) + "\n" for text in documents(held_out=True)]
    return texts[:: max(1, len(texts) // count)][:count]


def distinct(parser: argparse.ArgumentParser, bundles: Sequence[Path]) -> None:
    """Ends the command if two bundles have the same name, since results are listed by name."""
    if len({bundle.name for bundle in bundles}) < len(bundles):
        parser.error("two bundles' folders have the same name, but results are listed by name: rename one")


def processor() -> str:
    """The name of this machine's processor, its architecture if there is none."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def export(pair: Path, out: Path, *options: str) -> tuple[float, float]:
    """Runs an export in a separate process. Returns its seconds and peak resident MB."""
    command = [sys.executable, "-m", "exporter.cli", "--ckpt", str(pair / "drafter"), "--target", str(pair / "target")]
    started = time.perf_counter()
    subprocess.run([*command, "--out", str(out), *options], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def decode(bundle: Path, texts: list[str], new_tokens: int) -> list[Stats]:
    """Statistics, summed over prompts, of four ways to decode: plain, whole trees, and as planned without and with
    lookups.

    Each prompt is decoded in all ways before the next, so that their times can be compared.
    """
    totals = [Stats() for _ in range(4)]
    with runtime.load(bundle) as model:
        ways: tuple[dict[str, Any], ...] = (
            {"speculate": False},
            {"rows": model.bundle.manifest.rows},
            {"lookup": False},
            {},
        )
        list(model.generate(texts[0], new_tokens).cycles())  # warm-up
        for text in texts:
            for total, way in zip(totals, ways, strict=True):
                generation = model.generate(text, new_tokens, **way)
                list(generation.cycles())
                total.add(generation.stats)
    return totals


def memory(bundle: Path) -> dict[str, float]:
    """Resident MB of a new process after loading a bundle and generating, and the MB of its weights and caches."""
    code = f"""
import runtime
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) / 1024
import onnxruntime, tokenizers
before = resident()
model = runtime.load({str(bundle)!r})
list(model.generate([0, 5, 6, 7], 200).cycles())
print(before, resident())
"""
    process = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    sizes = dict(zip(("before", "loaded"), map(float, process.stdout.split()), strict=True))
    read = Bundle(bundle)
    return sizes | {"weights": read.weights() / 2**20, "caches": read.caches(read.manifest.default) / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pair", type=Path, default=ROOT / "demo", help="folder with target/ and drafter/ (default: demo)"
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[2, 4, 8, 16, 32, 64],
        help="--rows of the exports (default: 2 4 8 16 32 64)",
    )
    parser.add_argument("--prompts", type=int, default=40, help="prompts to decode (default: 40)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to generate per prompt (default: 128)")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["", "--draft-tree chain", "--draft-tree reference"],
        help="further options of the exports, one string per variant (default: none, '--draft-tree chain' and "
        "'--draft-tree reference')",
    )
    args = parser.parse_args()
    texts = prompts(args.prompts)

    with tempfile.TemporaryDirectory() as folder:
        for variant in args.variants:
            for rows in args.rows:
                bundle = Path(folder) / f"{variant.replace(' ', '')}{rows}"
                seconds, peak = export(args.pair, bundle, "--rows", str(rows), *variant.split())
                if (variant, rows) == (args.variants[0], args.rows[0]):
                    print(f"export: {seconds:.1f} s, peak {peak:.0f} MB resident")
                    print("memory in MB:", {k: round(v, 1) for k, v in memory(bundle).items()})
                summaries = (stats.summary() for stats in decode(bundle, texts, args.new_tokens))
                plain, speculative, planned, looked_up = summaries
                print(
                    f"{variant or 'dynamic':20} R {rows:2}  tau {speculative['tau']:.2f}  draft "
                    f"{speculative['draft_us_per_cycle']:.0f} us  target {speculative['target_us_per_cycle']:.0f} us  "
                    f"host {speculative['host_us_per_cycle']:.0f} us  plain pass {plain['target_us_per_cycle']:.0f} us "
                    f" speed {speculative['tokens_per_second'] / plain['tokens_per_second']:.2f} of plain, planned "
                    f"{planned['tokens_per_second'] / plain['tokens_per_second']:.2f} {planned['cycles_by_rows']}, "
                    f"with lookups {looked_up['tokens_per_second'] / plain['tokens_per_second']:.2f} "
                    f"{looked_up['cycles_by_rows']}  by depth {speculative['acceptance_by_depth']}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
