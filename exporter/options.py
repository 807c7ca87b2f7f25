"""The options of ``gumiho-export``, and what they ask for."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from runtime.backends import DEVICES, NAMES
from runtime.backends.rtx_cards import CARDS
from runtime.cli.command import argument_parser

from .config import CHOICES, DEFAULT_CAPACITY, POLICIES, DraftTree, ExportConfig
from .recipe.precision import PERPLEXITIES

# What a first export needs: --help lists these, --help-all every option.
_FIRST = {
    "--help",
    "--help-all",
    "--version",
    "--ckpt",
    "--target",
    "--out",
    "--overwrite",
    "--backend",
    "--preset",
    "--weights",
    "--draft-weights",
    "--capacity",
    "--dry-run",
    "--validate",
}
_TREES = {
    "dynamic": DraftTree(),
    "chain": DraftTree(policy="chain"),
    "static": DraftTree(policy="static"),
    "reference": DraftTree(reference=True),
}
_NUMBERS = "serial_steps", "heads", "top_k", "head_top_k", "beam"  # of trees, which were options of their own


class _HelpAll(argparse.Action):
    def __call__(self, own: argparse.ArgumentParser, *_: Any) -> None:
        parser(every=True).print_help()
        own.exit()


def parser(every: bool = False) -> argparse.ArgumentParser:
    """every: whether the help lists every option."""
    parser = argument_parser(
        "export", "Exports a target model, with or without a Gumiho drafter, to a bundle.", prog="gumiho-export"
    )
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show every option and exit")
    _sources(parser.add_argument_group("sources and output"))
    numbers = parser.add_argument_group("backends and precision")
    _backends(numbers)
    _precision(numbers)
    _tree(parser.add_argument_group("the tree"))
    _eagle_3(
        parser.add_argument_group(
            "what an EAGLE-3's config.json may not say, or say wrongly; none of it changes the output"
        )
    )
    _sizes(parser.add_argument_group("size and memory"))
    _checks(parser.add_argument_group("checks"))
    for action in parser._actions:
        if not every and not _FIRST.intersection(action.option_strings):
            action.help = argparse.SUPPRESS
    return parser


def _sources(files: argparse._ArgumentGroup) -> None:
    files.add_argument(
        "--ckpt",
        nargs="+",
        default=[],
        help="drafter, of Gumiho, EAGLE, Medusa or Hydra, or a small model: a folder, or a hub id such as "
        "amd/Gumiho-llama3-8b; or several, over the same target, of which each text uses one (default: none; the "
        "bundle then decodes plainly and by prompt lookup)",
    )
    files.add_argument(
        "--family",
        choices=CHOICES["family"],
        help="what kind of drafter it is, if its tensors do not tell (default: what they tell)",
    )
    files.add_argument(
        "--target",
        help="target model: a folder, a GGUF file, or on the hub owner/name or owner/name/file.gguf (default: known "
        "for the released drafters)",
    )
    files.add_argument(
        "--out",
        type=Path,
        help="folder to write (default: NAME-BACKEND, from --ckpt, or else --target, and the first --backend)",
    )
    files.add_argument("--overwrite", action="store_true", help="replace an earlier export")


def _backends(where: argparse._ArgumentGroup) -> None:
    where.add_argument(
        "--backend",
        nargs="+",
        choices=CHOICES["backend"],
        default=["cpu"],
        metavar="NAME",
        help=f"backends to export for, one or more of {', '.join(NAMES)}; or vllm, which writes only the drafter, in "
        "vLLM's format (default: cpu)",
    )
    where.add_argument("--device", default="", help=DEVICES)
    where.add_argument(
        "--gpu",
        nargs="+",
        default=[],
        metavar="CARD",
        help="with --backend tensorrt-rtx: build plans for these kinds of cards, on any machine; compute capabilities "
        f"({', '.join(CARDS)}) or cards, such as rtx-4090 (default: compile on the device)",
    )


def _precision(numbers: argparse._ArgumentGroup) -> None:
    numbers.add_argument(
        "--preset",
        choices=CHOICES["preset"],
        help="fast: what decodes fastest on the backend (--weights w8a8 --draft-weights int4 on the CPU, w8a8-unsigned "
        "where this CPU lacks VNNI; --weights int4 on GPUs, where it was not measured yet); small: int4 for target and "
        "drafter; "
        "full: the target is not quantized, so that the output is exactly the checkpoint's. --weights and "
        f"--draft-weights override it. Both fast and small change the output: {PERPLEXITIES} (default: full)",
    )
    numbers.add_argument(
        "--dtype",
        choices=CHOICES["dtype"],
        help="precision of weights and KV caches; with bf16 weights the caches are fp16 "
        "(default: fp32 on the CPU, fp16 elsewhere; for vllm as in the checkpoint)",
    )
    numbers.add_argument(
        "--weights",
        choices=CHOICES["weights"],
        help="quantize the target's matrices except the embedding. int8 and int4: weights only, but on the CPU they "
        "also round activations to 8 bits; int8 is not for tensorrt and tensorrt-rtx. fp8: only for these. w8a8: only "
        "for the CPU, on x86 with VNNI; int8 weights, with one scale per matrix row, and int8 activations, multiplied "
        "in integers, so that verifying more rows costs little. w8a8-unsigned: the same numbers, stored so that x86 "
        f"without VNNI multiplies them too; runs everywhere. On the CPU, {PERPLEXITIES}. as-is: keep the codes and "
        "scales of a target in GGUF (Q8_0, Q4_0), GPTQ, AWQ or compressed-tensors (default: what --preset says; else "
        "as-is on the CPU if the target holds most matrices so, or none)",
    )
    numbers.add_argument(
        "--other-weights",
        choices=CHOICES["other_weights"],
        help="with --weights as-is, quantize the matrices that the target holds in another way, or turn them into "
        "floats, which makes every pass slower (default: int8)",
    )
    numbers.add_argument(
        "--draft-weights",
        choices=CHOICES["draft_weights"],
        help="quantize the drafter's matrices, its lm_head included; never changes the output "
        "(default: int4 on the CPU, none elsewhere)",
    )
    numbers.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="quantize the target by what the first 512 tokens of this UTF-8 text show to be large: for int4 on cpu "
        "and cuda, and for int8 and w8a8 (either) on the CPU alone (default: a page of English and code)",
    )


def _tree(tree: argparse._ArgumentGroup) -> None:
    tree.add_argument(
        "--draft-tree",
        choices=_TREES,
        help="dynamic: the rows that the drafter finds most likely; chain: one token a level, as vLLM; static: the "
        "fixed tree of the code of EAGLE-1, Medusa or Hydra; reference: exactly the official code's trees, the two "
        "quirks of Gumiho's included. Python's exporter.DraftTree has their numbers (default: dynamic)",
    )
    tree.add_argument(
        "--rows",
        type=int,
        metavar="R",
        help="rows that the target verifies in one pass, root included; without a drafter those of looked-up tokens "
        "(default: 8 on the CPU, 64 elsewhere, or 16 there with --weights int4)",
    )
    tree.add_argument("--policy", choices=POLICIES, help=argparse.SUPPRESS)
    tree.add_argument("--compat", choices=("reference",), help=argparse.SUPPRESS)
    for name in _NUMBERS:
        tree.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=argparse.SUPPRESS)


def _eagle_3(drafter: argparse._ArgumentGroup) -> None:
    drafter.add_argument(
        "--taps",
        nargs="+",
        default=[],
        metavar="N",
        help="layers of the target whose inputs it reads; or 'output', if the numbers in its config.json are of layers "
        "whose outputs are meant (default: config.json's, else the official code's: 2, half of the layers, and three "
        "before the last)",
    )
    drafter.add_argument(
        "--norm-before-residual",
        choices=("yes", "no"),
        help="whether its layer adds to the normed features (default: config.json's)",
    )
    drafter.add_argument(
        "--draft-rope-theta",
        type=float,
        metavar="BASE",
        help="base of the drafter's rotary embedding (default: config.json's)",
    )


def _sizes(sizes: argparse._ArgumentGroup) -> None:
    sizes.add_argument(
        "--capacity",
        type=int,
        metavar="S",
        help="positions of the KV caches (default: the target's maximum or sliding window, but at most "
        f"{DEFAULT_CAPACITY})",
    )
    sizes.add_argument(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="draft only the N most frequent tokens, which makes the drafter's lm_head smaller "
        "(default: the checkpoint's token_map, or all tokens)",
    )
    sizes.add_argument(
        "--draft-text",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="text in which --draft-vocab counts tokens: text files, or .jsonl with 'prompt', 'text' or 'turns' "
        "(default: none; --draft-vocab then takes the tokens that the tokenizer learned first)",
    )
    sizes.add_argument(
        "--link-weights",
        action="store_true",
        help="hard-link the checkpoint's .safetensors files instead of copying the tensors that the backends can read "
        "directly (default: copy)",
    )


def _checks(checks: argparse._ArgumentGroup) -> None:
    checks.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be written and the memory and disk it needs; write nothing",
    )
    checks.add_argument(
        "--validate",
        action="store_true",
        help="run the bundle against eager PyTorch and print the largest errors; exit with status 1 if they exceed "
        "their limits",
    )


def asked(argv: Sequence[str] | None) -> tuple[ExportConfig, bool]:
    """What a command line asks for, and whether it is a dry run."""
    options = parser()
    args = options.parse_args(argv)
    if not args.ckpt and args.target is None:
        options.error("nothing to export: name a drafter with --ckpt, or a model without a drafter with --target")
    if args.draft_tree and (args.policy or args.compat):
        options.error("--policy and --compat are earlier spellings of --draft-tree: leave them out")
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()
    }
    for line in _renamed(given):
        print(f"note: {line}, and goes with the next release", file=sys.stderr)
    given["backend"] = tuple(dict.fromkeys(given["backend"]))
    given["norm_before_residual"] = {"yes": True, "no": False}.get(given["norm_before_residual"])
    tree = _TREES[args.draft_tree or args.policy or "dynamic"]
    numbers = {name: given[name] for name in _NUMBERS}
    given["draft_tree"] = replace(tree, reference=tree.reference or args.compat is not None, **numbers)
    return ExportConfig(**{f.name: given[f.name] for f in fields(ExportConfig)}), args.dry_run


def _renamed(given: Mapping[str, Any]) -> Iterator[str]:
    """What earlier spellings are now."""
    for name in ("policy", "compat"):
        if given[name]:
            yield f"--{name} {given[name]} is --draft-tree {given[name]} now"
    for name in _NUMBERS:
        if given[name] is not None:
            number = f"{name}={given[name]}"
            yield f"--{name.replace('_', '-')} {given[name]} is exporter.DraftTree({number}) in Python now"


def config_of(argv: Sequence[str]) -> ExportConfig:
    """What a command line asks for."""
    return asked(argv)[0]
