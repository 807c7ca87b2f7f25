"""The options of ``gumiho train``, and values that no run can have."""

import argparse
from pathlib import Path

from runtime.cli.command import argument_parser
from runtime.errors import InputError, reason

from ..checkpoints.families import EAGLE, EAGLE_3, GUMIHO, HYDRA, MEDUSA, SMALL

# Serial layers and heads without an option or --init. Released: Medusa 5 heads, Hydra 4.
USUAL = {GUMIHO: (2, 5), EAGLE: (1, 0), EAGLE_3: (1, 0), MEDUSA: (0, 5), HYDRA: (0, 4), SMALL: (4, 0)}
_LEAST_WINDOW, _MOST_THREADS = 48, 1024
_LAYERS, _HEADS, _INIT, _HIDDEN = "--serial-layers", "--heads", "--init", "--hidden-weight"
_TAKEN = {
    GUMIHO: {_LAYERS, _HEADS, _INIT, _HIDDEN}, EAGLE: {_INIT, _HIDDEN}, EAGLE_3: set[str](), MEDUSA: {_HEADS}, HYDRA: {_HEADS},
    SMALL: {_LAYERS},
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = argument_parser(
        "train",
        "Trains a drafter of any family for a target. Interrupt it at any time: the same command goes on from where it was.",
        prog="gumiho train",
    )
    files = parser.add_argument_group("sources and output")
    files.add_argument("--target", required=True, help="target model, as for gumiho export: a folder, a GGUF file, or a hub id")
    files.add_argument("--out", type=Path, required=True, help="folder to write the drafter to, for gumiho export --ckpt")
    files.add_argument(
        "--data", nargs="+", type=Path, default=[], metavar="FILE",
        help="text to train on: text files, or .jsonl with 'text', or with 'prompt' or 'turns', which the target answers "
        "(default: the target writes questions and answers itself)",
    )  # fmt: skip
    files.add_argument(
        "--work", type=Path, metavar="FOLDER", help="folder for text, hidden states and training state (default: OUT-training)"
    )
    files.add_argument("--init", metavar="CKPT", help="begin with this drafter (default: fitted to the target's hidden states)")
    files.add_argument(
        "--only", choices=("text", "drafter"), help="only write text, or only train on the text that is there (default: both)"
    )
    text = parser.add_argument_group("text")
    text.add_argument("--tokens", type=int, default=2_000_000, metavar="N", help="tokens of text to have (default: 2000000)")
    text.add_argument("--window", type=int, default=1024, metavar="N", help="positions of the longest texts (default: 1024)")
    text.add_argument(
        "--conversations", type=int, default=128, metavar="N", help="texts that each process writes at once (default: 128)"
    )
    drafter = parser.add_argument_group("drafter")
    drafter.add_argument(
        "--family",
        choices=tuple(USUAL),
        help="what to train; eagle: one layer without heads; eagle3: one that reads three layers of the target; small: the target's first "
        "layers (default: gumiho, or that of --init)",
    )
    drafter.add_argument(
        "--serial-layers", type=int, metavar="N",
        help="layers of Gumiho's serial steps, or of a small model (default: 2, or those of --init; small model 4)",
    )  # fmt: skip
    drafter.add_argument(
        "--heads", type=int, metavar="N",
        help="Gumiho's parallel heads, or Medusa's or Hydra's heads (default: 5, or those of --init; Hydra 4)",
    )  # fmt: skip
    drafter.add_argument(
        "--draft-vocab", type=int, metavar="N",
        help="draft and train only the N most frequent tokens of the text, which makes steps and drafting faster (default: all)",
    )  # fmt: skip
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=20_000, metavar="N", help="steps in all (default: 20000)")
    training.add_argument("--batch", type=int, default=4096, metavar="N", help="positions of text in a step (default: 4096)")
    training.add_argument(
        "--anchors",
        type=int,
        default=2048,
        metavar="N",
        help="positions in a step to draft from, a multiple of 32 (default: 2048)",
    )
    training.add_argument("--rate", type=float, metavar="X", help="highest learning rate (default: 0.05 / sqrt(hidden size))")
    training.add_argument("--warmup", type=int, default=200, metavar="N", help="steps until the rate is reached (default: 200)")
    training.add_argument(
        "--depth-decay",
        type=float,
        default=0.8,
        metavar="X",
        help="weight of each depth's loss by the one before (default: 0.8)",
    )
    training.add_argument(
        "--hidden-weight", type=float, metavar="X",
        help="weight of the hidden states' distance beside the distributions' (default: 0.1); of Gumiho and EAGLE",
    )  # fmt: skip
    training.add_argument("--seed", type=int, default=0, metavar="N", help="of text and batches (default: 0)")
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--device", default="", help="cpu, cuda, cuda:1, ... (default: cuda if there is one; with torchrun, one each)"
    )
    machine.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="precision of matrix products (default: bf16 if it is faster here)"
    )
    machine.add_argument("--threads", type=int, metavar="N", help="threads on the CPU (default: all cores)")
    machine.add_argument(
        "--shard-target", action="store_true",
        help="split the target's layers over the processes that torchrun starts (FSDP), for targets larger than one GPU",
    )  # fmt: skip
    machine.add_argument(
        "--no-hidden-cache", action="store_true",
        help="compute the target's hidden states anew for each step instead of keeping them on disk (2 x hidden size bytes a token)",
    )  # fmt: skip
    machine.add_argument("--save-every", type=float, default=5, metavar="MIN", help="minutes between saved states (default: 5)")
    machine.add_argument(
        "--evaluate-every", type=float, default=30, metavar="MIN", help="minutes between evaluations (default: 30)"
    )
    return parser


def check(args: argparse.Namespace) -> None:
    """Raises InputError for such values, and fills in defaults that depend on others."""
    least = {
        "tokens": 1, "window": _LEAST_WINDOW, "conversations": 1, "serial_layers": 1, "heads": 0, "draft_vocab": 2, "steps": 1,
        "batch": 1, "anchors": 32, "warmup": 0, "threads": 1,
    }  # fmt: skip
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and value < smallest:
            raise InputError(f"--{name.replace('_', '-')} is {value}: give {smallest} or more")
    if args.threads is not None and args.threads > _MOST_THREADS:
        raise InputError(f"--threads is {args.threads}: give 1 to {_MOST_THREADS}")
    if not 0 <= args.seed < 1 << 63:
        raise InputError(f"--seed is {args.seed}: give 0 to 2**63 - 1")
    if args.init == "":
        raise InputError("--init is empty: name a drafter, or leave it out")
    for name in ("out", "work"):
        if given := getattr(args, name):
            try:
                setattr(args, name, given.expanduser())
            except RuntimeError as error:  # an unknown user's home
                raise InputError(
                    f"--{name} {given} cannot be the name of a folder ({reason(error)}): name another one"
                ) from None
    if args.out.name in ("", ".."):
        raise InputError(f"--out '{args.out}' has no name of its own to write the drafter under: name another folder")
    for name in ("rate", "depth_decay", "save_every", "evaluate_every"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"--{name.replace('_', '-')} is {value}: give a number above 0")
    family = args.family or GUMIHO
    given = {_LAYERS: args.serial_layers, _HEADS: args.heads, _INIT: args.init, _HIDDEN: args.hidden_weight}
    for option, value in given.items():
        if value is not None and option not in _TAKEN[family]:
            raise InputError(f"--family {family} takes no {option}: leave it out")
    if family in (MEDUSA, HYDRA) and args.heads == 0:
        raise InputError(f"--heads is 0, and a {family.capitalize()} is its heads: give 1 or more")
    if args.hidden_weight is None:
        args.hidden_weight = 0.1 if _HIDDEN in _TAKEN[family] else 0.0
    if not 0 <= args.hidden_weight < float("inf"):
        raise InputError(f"--hidden-weight is {args.hidden_weight}: give a number from 0")
    if args.anchors % 32:
        raise InputError(f"--anchors is {args.anchors}: give a multiple of 32")
    if args.shard_target and args.no_hidden_cache:
        raise InputError("--shard-target needs the hidden states on disk: leave out --no-hidden-cache")
