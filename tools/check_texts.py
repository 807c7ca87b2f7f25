"""Compares the texts of ``tools/paper_table.py`` with transformers: every token must be its most likely one, or nearly.

    python -m tools.check_texts build/paper.jsonl --target TARGET

Runs transformers' model in fp32 over each greedy text of plain decoding with its prompt, in one pass. Prints how many
tokens are not its most likely ones, and their largest distance from these, relative to the largest logit: two correct
programs differ only by the rounding of their sums. Exits with 1 if one is further than --margin.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from exporter.training.target import load
from runtime.cli.command import run
from runtime.errors import InputError


@torch.inference_mode()
def check(args: argparse.Namespace) -> int:
    lines = [json.loads(line) for line in args.texts.read_text("utf-8").splitlines()]
    lines = [
        line for line in lines if line["temperature"] == 0 and line["bundle"] == (args.bundle or lines[0]["bundle"])
    ]
    if not lines:
        raise InputError(
            f"'{args.texts}' holds no greedy texts of bundle {args.bundle}: run tools.paper_table at temperature 0"
        )
    model = load(args.target).model
    tokens, widest, differing = 0, 0.0, 0
    for line in lines:
        ids, text = line["prompt"], line["ways"]["plain"]["ids"]
        logits = model(torch.tensor([ids + text[:-1]]), logits_to_keep=len(text)).logits[0]
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        margins = (logits.amax(1) - chosen) / logits.abs().amax(1)
        tokens, differing = tokens + len(text), differing + int((margins > 0).sum())
        worst = float(margins.max())
        if worst > args.margin:
            print(
                f"{line['set']} {line['number']}, turn {line['turn']}: token {int(margins.argmax())} is off by "
                f"{worst:.1e}"
            )
        widest = max(widest, worst)
    print(
        f"{len(lines)} texts, {tokens} tokens: {differing} are not transformers' first choice; the furthest by "
        f"{widest:.1e}"
    )
    return int(widest > args.margin)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="OUT of tools.paper_table")
    parser.add_argument("--target", required=True, help="folder, GGUF file or hub id of the target")
    parser.add_argument("--bundle", help="name of the bundle, which must not be quantized (default: the first)")
    parser.add_argument(
        "--margin", type=float, default=1e-4, help="largest distance allowed (default: 1e-4 of the largest logit)"
    )
    args = parser.parse_args(argv)
    return run(lambda: check(args))


if __name__ == "__main__":
    sys.exit(main())
