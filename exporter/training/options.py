"""The options of ``gumiho train``."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from runtime.cli.command import argument_parser

from .config import USUAL, TrainConfig


def parser() -> argparse.ArgumentParser:
    parser = argument_parser(
        "train",
        "Trains a drafter of any family for a target. Interrupt it at any time: the same command goes on from where it "
        "was.",
        prog="gumiho train",
    )
    _sources(parser.add_argument_group("sources and output"))
    _text(parser.add_argument_group("text"))
    _drafter(parser.add_argument_group("drafter"))
    _training(parser.add_argument_group("training"))
    _machine(parser.add_argument_group("machine"))
    return parser


def _sources(files: argparse._ArgumentGroup) -> None:
    files.add_argument(
        "--target", required=True, help="target model, as for gumiho export: a folder, a GGUF file, or a hub id"
    )
    files.add_argument(
        "--out", type=Path, required=True, help="folder to write the drafter to, for gumiho export --ckpt"
    )
    files.add_argument(
        "--data",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="text to train on: text files, or .jsonl with 'text', or with 'prompt' or 'turns', which the target "
        "answers (default: the target writes questions and answers itself)",
    )
    files.add_argument(
        "--work",
        type=Path,
        metavar="FOLDER",
        help="folder for text, hidden states and training state (default: OUT-training)",
    )
    files.add_argument(
        "--init", metavar="CKPT", help="begin with this drafter (default: fitted to the target's hidden states)"
    )
    files.add_argument(
        "--only",
        choices=("text", "drafter"),
        help="only write text, or only train on the text that is there (default: both)",
    )


def _text(text: argparse._ArgumentGroup) -> None:
    text.add_argument(
        "--tokens", type=int, default=2_000_000, metavar="N", help="tokens of text to have (default: 2000000)"
    )
    text.add_argument(
        "--window", type=int, default=1024, metavar="N", help="positions of the longest texts (default: 1024)"
    )
    text.add_argument(
        "--conversations",
        type=int,
        default=128,
        metavar="N",
        help="texts that each process writes at once (default: 128)",
    )


def _drafter(drafter: argparse._ArgumentGroup) -> None:
    drafter.add_argument(
        "--family",
        choices=tuple(USUAL),
        help="what to train; eagle: one layer without heads; eagle3: one that reads three layers of the target; small: "
        "the target's first layers (default: gumiho, or that of --init)",
    )
    drafter.add_argument(
        "--serial-layers",
        type=int,
        metavar="N",
        help="layers of Gumiho's serial steps, or of a small model (default: 2, or those of --init; small model 4)",
    )
    drafter.add_argument(
        "--heads",
        type=int,
        metavar="N",
        help="Gumiho's parallel heads, or Medusa's or Hydra's heads (default: 5, or those of --init; Hydra 4)",
    )
    drafter.add_argument(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="draft and train only the N most frequent tokens of the text, which makes steps and drafting faster "
        "(default: all)",
    )


def _training(training: argparse._ArgumentGroup) -> None:
    training.add_argument("--steps", type=int, default=20_000, metavar="N", help="steps in all (default: 20000)")
    training.add_argument(
        "--batch", type=int, default=4096, metavar="N", help="positions of text in a step (default: 4096)"
    )
    training.add_argument(
        "--anchors",
        type=int,
        default=2048,
        metavar="N",
        help="positions in a step to draft from, a multiple of 32 (default: 2048)",
    )
    training.add_argument(
        "--rate", type=float, metavar="X", help="highest learning rate (default: 0.05 / sqrt(hidden size))"
    )
    training.add_argument(
        "--warmup", type=int, default=200, metavar="N", help="steps until the rate is reached (default: 200)"
    )
    training.add_argument(
        "--depth-decay",
        type=float,
        default=0.8,
        metavar="X",
        help="weight of each depth's loss by the one before (default: 0.8)",
    )
    training.add_argument(
        "--hidden-weight",
        type=float,
        metavar="X",
        help="weight of the hidden states' distance beside the distributions' (default: 0.1); of Gumiho and EAGLE",
    )
    training.add_argument("--seed", type=int, default=0, metavar="N", help="of text and batches (default: 0)")


def _machine(machine: argparse._ArgumentGroup) -> None:
    machine.add_argument(
        "--device", default="", help="cpu, cuda, cuda:1, ... (default: cuda if there is one; with torchrun, one each)"
    )
    machine.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="precision of matrix products (default: bf16 if it is faster here)"
    )
    machine.add_argument("--threads", type=int, metavar="N", help="threads on the CPU (default: all cores)")
    machine.add_argument(
        "--shard-target",
        action="store_true",
        help="split the target's layers over the processes that torchrun starts (FSDP), for targets larger than one "
        "GPU",
    )
    machine.add_argument(
        "--no-hidden-cache",
        action="store_true",
        help="compute the target's hidden states anew for each step instead of keeping them on disk (2 x hidden size "
        "bytes a token)",
    )
    machine.add_argument(
        "--save-every", type=float, default=5, metavar="MIN", help="minutes between saved states (default: 5)"
    )
    machine.add_argument(
        "--evaluate-every", type=float, default=30, metavar="MIN", help="minutes between evaluations (default: 30)"
    )


def asked(argv: Sequence[str] | None) -> TrainConfig:
    """What a command line asks for."""
    given = vars(parser().parse_args(argv))
    given["data"] = tuple(given["data"])
    return TrainConfig(**{field.name: given[field.name] for field in fields(TrainConfig)})
