"""``gumiho train``: a target -> a drafter for it, in the layout of the released ones."""

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.command import INTERRUPTED, argument_parser, run
from runtime.errors import GumihoError, InputError, UnavailableError

from .interruption import Interruption

if TYPE_CHECKING:
    from .store import Text

_LEAST_WINDOW = 48


def parser() -> argparse.ArgumentParser:
    parser = argument_parser(
        "train",
        "Trains a Gumiho drafter for a target. Interrupt it at any time: the same command goes on from where it was.",
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
        "--serial-layers", type=int, metavar="N", help="layers of the serial steps (default: 2, or those of --init)"
    )
    drafter.add_argument("--heads", type=int, metavar="N", help="parallel heads (default: 5, or those of --init)")
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
        "--hidden-weight", type=float, default=0.1, metavar="X",
        help="weight of the hidden states' distance beside the distributions' (default: 0.1)",
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
        "--no-hidden-cache", action="store_true",
        help="compute the target's hidden states anew for each step instead of keeping them on disk (2 x hidden size bytes a token)",
    )  # fmt: skip
    machine.add_argument("--save-every", type=float, default=5, metavar="MIN", help="minutes between saved states (default: 5)")
    machine.add_argument(
        "--evaluate-every", type=float, default=30, metavar="MIN", help="minutes between evaluations (default: 30)"
    )
    return parser


def check(args: argparse.Namespace) -> None:
    """Raises InputError for values that no run can have."""
    least = {
        "tokens": 1, "window": _LEAST_WINDOW, "conversations": 1, "serial_layers": 1, "heads": 0, "draft_vocab": 2, "steps": 1,
        "batch": 1, "anchors": 32, "warmup": 0, "threads": 1,
    }  # fmt: skip
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and value < smallest:
            raise InputError(f"--{name.replace('_', '-')} is {value}: give {smallest} or more")
    for name in ("rate", "depth_decay", "save_every", "evaluate_every"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"--{name.replace('_', '-')} is {value}: give a number above 0")
    if not 0 <= args.hidden_weight < float("inf"):
        raise InputError(f"--hidden-weight is {args.hidden_weight}: give a number from 0")
    if args.anchors % 32:
        raise InputError(f"--anchors is {args.anchors}: give a multiple of 32")


def train(args: argparse.Namespace, device: str, stopped: Callable[[], bool]) -> bool:
    """Returns whether everything that was asked for is done."""
    import torch

    from . import parallel, target
    from .store import Text

    if args.threads:
        torch.set_num_threads(args.threads)
    if args.anchors % (32 * parallel.ranks()):
        raise InputError(
            f"--anchors is {args.anchors}, and {parallel.ranks()} processes share them: give a multiple of {32 * parallel.ranks()}"
        )
    work = (args.work or args.out.with_name(f"{args.out.name}-training")).expanduser()
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise UnavailableError(f"--device {device} is not here: leave it out, or give cpu") from None
    with parallel.in_turn():  # each holds all of the target in fp32 until it is on its GPU
        loaded = target.load(args.target, device)
    model, tokenizer, ends = loaded.model, loaded.tokenizer, loaded.ends
    if args.window > loaded.positions:
        raise InputError(
            f"--window is {args.window}: give at most {loaded.positions}, the positions that target '{args.target}' attends to"
        )
    dtype = parallel.same({"fp32": torch.float32, "bf16": torch.bfloat16, None: None}[args.dtype] or target.faster(device))
    with parallel.in_turn():
        text = Text(work / "text", model.config.vocab_size, target.fingerprint(model))
    model = model.to(dtype)
    if args.only != "drafter" and not _written(args, text, model, tokenizer, ends, stopped):
        return False
    if args.only == "text":
        return True
    return _trained(args, text, model, tokenizer, ends, work, stopped)


def _written(
    args: argparse.Namespace, text: "Text", model: Any, tokenizer: Any, ends: tuple[int, ...], stopped: Callable[[], bool]
) -> bool:
    """Has the text written that is missing. Returns whether it is all there."""
    from . import parallel
    from .conversation import Script, template
    from .data import plain, prompts
    from .text import write

    if parallel.same(text.tokens >= args.tokens):
        return True
    rank, ranks = parallel.rank(), parallel.ranks()
    with nullcontext() if rank else text.writing():
        if not rank:
            plain(args.data, tokenizer, text, args.window, {int(source) for source in text.sources})
        parallel.wait()
        text.refresh()
        known = {int(source) for source in text.sources}
        asked = [prompt for prompt in prompts(args.data) if prompt[0] not in known]
        if args.data and not asked:
            return True
        pieces = template(tokenizer, ends)
        if asked and not pieces.chat:
            raise InputError(
                f"target '{args.target}' has no chat template to ask the prompts of --data with: give text instead ('text' in "
                ".jsonl, or .txt), or add its chat_template.jinja"
            )
        seed = args.seed * ranks + rank
        script = Script(pieces, tokenizer, seed, len(text), asked[rank::ranks], own=not args.data)
        write(model, text, script, args.tokens, args.conversations, args.window, _say, seed, stopped)
    return not stopped()


def _trained(
    args: argparse.Namespace,
    text: "Text",
    model: Any,
    tokenizer: Any,
    ends: tuple[int, ...],
    work: Path,
    stopped: Callable[[], bool],
) -> bool:
    import torch

    from . import loop, parallel, start, state
    from .batches import Features, usable
    from .evaluate import Evaluation
    from .model import Drafter
    from .vocabulary import vocabulary

    layers, heads = start.shape_of(args.init) if args.init else (2, 5)
    layers, heads = args.serial_layers or layers, heads if args.heads is None else args.heads
    if not len(usable(text, 2 + heads, training=True)):
        raise InputError(f"'{text.folder}' has no text that is long enough to train on: write some first (--only text)")
    if not args.no_hidden_cache:
        _require_space(work, text.tokens * model.config.hidden_size * 2)
    features = Features(None if args.no_hidden_cache else work / "hidden", text, model.model)
    file = work / "state" / "state.pt"
    known = {
        "target": text.target, "serial layers": layers, "heads": heads, "draft vocabulary": args.draft_vocab or model.config.vocab_size,
        "seed": args.seed,
    }  # fmt: skip
    stored = state.read(file, known)
    embed, lm_head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    drafted = vocabulary(args.draft_vocab, stored, text, tokenizer, ends, lm_head)
    drafter = Drafter(start.config(model, layers), heads).to(embed.device)
    if stored is None and not parallel.rank():  # the others get these weights
        torch.manual_seed(args.seed)
        if args.init:
            start.from_checkpoint(drafter, args.init)
        else:
            start.from_target(drafter, model, text, features, _say)
    settings = loop.Settings(
        args.steps, max(1, args.batch // parallel.ranks()), args.anchors // 32 // parallel.ranks(),
        args.rate or 0.05 / model.config.hidden_size**0.5, args.warmup, args.depth_decay, args.hidden_weight, 0.5, args.seed, embed.dtype,
    )  # fmt: skip
    training = loop.Training(drafter, text, features, embed, drafted, settings)
    if stored is not None:
        training.resume(stored)
        _say(f"goes on from step {training.step:,} of {args.steps:,}")
    del stored
    pace = loop.Pace(args.save_every * 60, args.evaluate_every * 60)

    def saved() -> None:
        state.write_checkpoint(args.out, drafter, training.average, drafted.ids)

    done = loop.run(training, Evaluation(text, features, embed, lm_head), file, known, pace, _say, stopped, saved)
    if done:
        _say(f"{args.out}: try gumiho export --ckpt {args.out} --target {args.target}")
    return done


def _require_space(folder: Path, needed: int) -> None:
    from ..plan import free_space

    free, have = free_space(folder), sum(f.stat().st_blocks * 512 for f in folder.glob("hidden/*"))
    if needed - have > free:
        raise UnavailableError(
            f"'{folder}' needs {(needed - have) / 1e9:.1f} GB for hidden states and has {free / 1e9:.1f}: free some space, or give --no-hidden-cache"
        )


def _say(line: str) -> None:
    from .parallel import rank

    if not rank():
        print(line, flush=True)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _finished(args))


def _finished(args: argparse.Namespace) -> int:
    interruption = Interruption()
    try:
        check(args)
        from .parallel import joined, rank

        with interruption.heeded(), joined(args.device) as device:
            done = train(args, device, interruption)
            leads = not rank()
    except ModuleNotFoundError as error:
        raise GumihoError(f"training needs the package '{error.name}': pip install 'gumiho-export[train]'") from None
    if not done and interruption.came:
        if leads:
            print("error: interrupted: the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
