"""``gumiho train``: a target -> a drafter for it, in the layout of the released ones."""

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.cli.command import run
from runtime.errors import GumihoError, InputError, UnavailableError
from runtime.errors.interruption import INTERRUPTED

from ..checkpoints.families import EAGLE, GUMIHO, family
from .interruption import Interruption
from .options import USUAL, check, parser

if TYPE_CHECKING:
    from .store import Text


def train(args: argparse.Namespace, device: str, stopped: Callable[[], bool]) -> bool:
    """Returns whether everything that was asked for is done. Raises GumihoError, UnavailableError for a GPU that is too small."""
    import torch

    try:
        return _train(args, device, stopped)
    except torch.OutOfMemoryError:
        raise UnavailableError(
            f"the memory of {device} is too small: give fewer --conversations or a smaller --batch, --anchors or --window, or split the "
            "target over several GPUs (torchrun and --shard-target)"
        ) from None


def _train(args: argparse.Namespace, device: str, stopped: Callable[[], bool]) -> bool:
    import torch

    from . import parallel, target
    from .store import Text

    if args.threads:
        torch.set_num_threads(args.threads)
    if args.anchors % (32 * parallel.ranks()):
        raise InputError(
            f"--anchors is {args.anchors}, and {parallel.ranks()} processes share them: give a multiple of {32 * parallel.ranks()}"
        )
    if args.shard_target and parallel.ranks() == 1:
        raise InputError("--shard-target splits the target over several processes: start them with torchrun --nproc-per-node N")
    work = args.work or args.out.with_name(f"{args.out.name}-training")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise UnavailableError(f"--device {device} is not here: leave it out, or give cpu") from None
    dtype = parallel.same({"fp32": torch.float32, "bf16": torch.bfloat16, None: None}[args.dtype] or target.faster(device))
    shard = partial(parallel.shard, device=device) if args.shard_target else lambda _: None
    loaded = target.load(args.target, device, dtype, shard)
    model, tokenizer, ends = loaded.model, loaded.tokenizer, loaded.ends
    if args.window > loaded.positions:
        raise InputError(
            f"--window is {args.window}: give at most {loaded.positions}, the positions that target '{args.target}' attends to"
        )
    with parallel.in_turn():
        text = Text(work / "text", model.config.vocab_size, loaded.name)
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
        write(model, text, script, args.tokens, args.conversations, args.window, _say, seed, stopped, args.shard_target)
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

    from . import loop, parallel, state
    from .batches import Features, usable
    from .drafters import made
    from .drafters.gumiho import Gumiho, shape_of
    from .evaluate import Evaluation
    from .vocabulary import vocabulary

    layers, heads = shape_of(args.init) if args.init else USUAL[args.family or GUMIHO]
    layers, heads = args.serial_layers or layers, heads if args.heads is None else args.heads
    kind = family(layers, heads) if args.family in (None, GUMIHO, EAGLE) else args.family
    if args.family not in (None, kind):
        raise InputError(
            f"--family is {args.family}, but {layers} serial layers and {heads} heads are of the family {kind}: name that"
        )
    drafter = made(kind, layers, heads, model)
    if not len(usable(text, drafter.depths, training=True)):
        raise InputError(f"'{text.folder}' has no text that is long enough to train on: write some first (--only text)")
    if not args.no_hidden_cache:
        _require_space(work, text.tokens * model.config.hidden_size * 2 * (1 + len(drafter.taps)))
    kept = "-".join(map(str, ("hidden", *drafter.taps)))
    features = Features(None if args.no_hidden_cache else work / kept, text, model.model, drafter.taps)
    file = work / "state" / f"{kind}.pt"
    known = {
        "target": text.target, "serial layers": layers, "heads": heads, "draft vocabulary": args.draft_vocab or model.config.vocab_size,
        "seed": args.seed,
    }  # fmt: skip
    stored = state.read(file, known)
    embed, lm_head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    drafted = vocabulary(args.draft_vocab, stored, text, tokenizer, ends, lm_head)
    drafter = drafter.to(embed.device)
    if args.shard_target and not features.fill(stopped, _say):
        return False
    if stored is None and (args.shard_target or not parallel.rank()):  # without their help, the others get these weights
        torch.manual_seed(args.seed)
        if args.init and isinstance(drafter, Gumiho):
            drafter.from_checkpoint(args.init)
        else:
            drafter.begin(model, text, features, _say)
    if args.shard_target:
        del model.model.layers  # their hidden states are on disk
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
        state.write_checkpoint(args.out, drafter, training.average, drafted.ids, embed, lm_head)

    done = loop.run(training, Evaluation(text, features, embed, lm_head), file, known, pace, _say, stopped, saved)
    if done:
        _say(f"{args.out}: try gumiho export --ckpt {args.out} --target {args.target}")
    return done


def _require_space(folder: Path, needed: int) -> None:
    from ..disk import free_space

    free, have = free_space(folder), sum(f.stat().st_blocks * 512 for f in folder.glob("hidden*/*"))
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
