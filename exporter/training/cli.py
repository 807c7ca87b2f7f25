"""``gumiho train``: a target -> a drafter for it, in the layout of the released ones."""

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
from .config import USUAL, TrainConfig, settled
from .interruption import Interruption
from .options import asked

if TYPE_CHECKING:
    import torch

    from .batches import Features
    from .loop import Settings
    from .model import Drafter
    from .store import Text


def train(config: TrainConfig, device: str, stopped: Callable[[], bool]) -> bool:
    """Returns whether everything that was asked for is done. Raises GumihoError, UnavailableError for a GPU that is too
    small."""
    import torch

    try:
        return _train(config, device, stopped)
    except torch.OutOfMemoryError:
        raise UnavailableError(
            f"the memory of {device} is too small: give fewer --conversations or a smaller --batch, --anchors or "
            "--window, or split the target over several GPUs (torchrun and --shard-target)"
        ) from None


def _train(config: TrainConfig, device: str, stopped: Callable[[], bool]) -> bool:
    import torch

    from . import parallel, target
    from .store import Text

    if config.threads:
        torch.set_num_threads(config.threads)
    if config.anchors % (32 * parallel.ranks()):
        raise InputError(
            f"--anchors is {config.anchors}, and {parallel.ranks()} processes share them: give a multiple of "
            f"{32 * parallel.ranks()}"
        )
    if config.shard_target and parallel.ranks() == 1:
        raise InputError(
            "--shard-target splits the target over several processes: start them with torchrun --nproc-per-node N"
        )
    work = config.work or config.out.with_name(f"{config.out.name}-training")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise UnavailableError(f"--device {device} is not here: leave it out, or give cpu") from None
    dtype = parallel.same(
        {"fp32": torch.float32, "bf16": torch.bfloat16, None: None}[config.dtype] or target.faster(device)
    )
    shard = partial(parallel.shard, device=device) if config.shard_target else lambda _: None
    loaded = target.load(config.target, device, dtype, shard)
    model, tokenizer, ends = loaded.model, loaded.tokenizer, loaded.ends
    if config.window > loaded.positions:
        raise InputError(
            f"--window is {config.window}: give at most {loaded.positions}, the positions that target "
            f"'{config.target}' attends to"
        )
    with parallel.in_turn():
        text = Text(work / "text", model.config.vocab_size, loaded.name)
    if config.only != "drafter" and not _written(config, text, model, tokenizer, ends, stopped):
        return False
    if config.only == "text":
        return True
    return _trained(config, text, model, tokenizer, ends, work, stopped)


def _written(
    config: TrainConfig, text: "Text", model: Any, tokenizer: Any, ends: tuple[int, ...], stopped: Callable[[], bool]
) -> bool:
    """Has the text written that is missing. Returns whether it is all there."""
    from . import parallel
    from .conversation import Script, template
    from .data import plain, prompts
    from .text import write

    if parallel.same(text.tokens >= config.tokens):
        return True
    rank, ranks = parallel.rank(), parallel.ranks()
    with nullcontext() if rank else text.writing():
        if not rank:
            plain(config.data, tokenizer, text, config.window, {int(source) for source in text.sources})
        parallel.wait()
        text.refresh()
        known = {int(source) for source in text.sources}
        asked = [prompt for prompt in prompts(config.data) if prompt[0] not in known]
        if config.data and not asked:
            return True
        pieces = template(tokenizer, ends)
        if asked and not pieces.chat:
            raise InputError(
                f"target '{config.target}' has no chat template to ask the prompts of --data with: give text instead "
                "('text' in .jsonl, or .txt), or add its chat_template.jinja"
            )
        seed = config.seed * ranks + rank
        script = Script(pieces, tokenizer, seed, len(text), asked[rank::ranks], own=not config.data)
        write(
            model,
            text,
            script,
            config.tokens,
            config.conversations,
            config.window,
            _say,
            seed,
            stopped,
            config.shard_target,
        )
    return not stopped()


def _trained(
    config: TrainConfig,
    text: "Text",
    model: Any,
    tokenizer: Any,
    ends: tuple[int, ...],
    work: Path,
    stopped: Callable[[], bool],
) -> bool:
    from . import loop, state
    from .batches import usable
    from .drafters import made
    from .evaluate import Evaluation
    from .vocabulary import vocabulary

    kind, layers, heads = _kind(config)
    drafter = made(kind, layers, heads, model)
    if not len(usable(text, drafter.depths, training=True)):
        raise InputError(f"'{text.folder}' has no text that is long enough to train on: write some first (--only text)")
    features = _features(config, text, model, drafter, work)
    file = work / "state" / f"{kind}.pt"
    known = {
        "target": text.target,
        "serial layers": layers,
        "heads": heads,
        "draft vocabulary": config.draft_vocab or model.config.vocab_size,
        "seed": config.seed,
    }
    stored = state.read(file, known)
    embed, lm_head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    drafted = vocabulary(config.draft_vocab, stored, text, tokenizer, ends, lm_head)
    drafter = drafter.to(embed.device)
    if config.shard_target and not features.fill(stopped, _say):
        return False
    if stored is None:
        _begin(config, drafter, model, text, features)
    if config.shard_target:
        del model.model.layers  # their hidden states are on disk
    settings = _settings(config, model.config.hidden_size, embed.dtype)
    training = loop.Training(drafter, text, features, embed, drafted, settings)
    if stored is not None:
        training.resume(stored)
        _say(f"goes on from step {training.step:,} of {config.steps:,}")
    del stored
    pace = loop.Pace(config.save_every * 60, config.evaluate_every * 60)

    def saved() -> None:
        state.write_checkpoint(config.out, drafter, training.average, drafted.ids, embed, lm_head)

    done = loop.run(training, Evaluation(text, features, embed, lm_head), file, known, pace, _say, stopped, saved)
    if done:
        _say(f"{config.out}: try gumiho export --ckpt {config.out} --target {config.target}")
    return done


def _features(config: TrainConfig, text: "Text", model: Any, drafter: "Drafter", work: Path) -> "Features":
    """The hidden states that the drafter reads. Raises UnavailableError if the disk does not hold them."""
    from .batches import Features

    kept = None
    if not config.no_hidden_cache:
        _require_space(work, text.tokens * model.config.hidden_size * 2 * (1 + len(drafter.taps)))
        kept = work / "-".join(map(str, ("hidden", *drafter.taps)))
    return Features(kept, text, model.model, drafter.taps)


def _begin(config: TrainConfig, drafter: "Drafter", model: Any, text: "Text", features: "Features") -> None:
    """The drafter's weights before the first step. Of several processes, those that need not help with it get them from
    the first one."""
    import torch

    from . import parallel
    from .drafters.gumiho import Gumiho

    if not config.shard_target and parallel.rank():
        return
    torch.manual_seed(config.seed)
    if config.init and isinstance(drafter, Gumiho):
        drafter.from_checkpoint(config.init)
    else:
        drafter.begin(model, text, features, _say)


def _settings(config: TrainConfig, hidden: int, dtype: "torch.dtype") -> "Settings":
    """What one of the processes that share the training does."""
    from . import parallel
    from .loop import Settings

    ranks, rate = parallel.ranks(), config.rate or 0.05 / hidden**0.5
    return Settings(
        config.steps,
        max(1, config.batch // ranks),
        config.anchors // 32 // ranks,
        rate,
        config.warmup,
        config.depth_decay,
        config.distance_weight,
        0.5,
        config.seed,
        dtype,
    )


def _kind(config: TrainConfig) -> tuple[str, int, int]:
    """The drafter's family, serial layers and heads. Raises InputError if they do not go together."""
    from .drafters.gumiho import shape_of

    layers, heads = shape_of(config.init) if config.init else USUAL[config.family or GUMIHO]
    layers, heads = config.serial_layers or layers, heads if config.heads is None else config.heads
    kind = family(layers, heads) if config.family in (None, GUMIHO, EAGLE) else config.family
    if config.family not in (None, kind):
        raise InputError(
            f"--family is {config.family}, but {layers} serial layers and {heads} heads are of the family {kind}: name "
            "that"
        )
    return kind, layers, heads


def _require_space(folder: Path, needed: int) -> None:
    from ..disk import free_space

    free, have = free_space(folder), sum(f.stat().st_blocks * 512 for f in folder.glob("hidden*/*"))
    if needed - have > free:
        raise UnavailableError(
            f"'{folder}' needs {(needed - have) / 1e9:.1f} GB for hidden states and has {free / 1e9:.1f}: free some "
            "space, or give --no-hidden-cache"
        )


def _say(line: str) -> None:
    from .parallel import rank

    if not rank():
        print(line, flush=True)


def main(argv: list[str] | None = None) -> int:
    config = asked(argv)
    return run(lambda: _finished(config))


def _finished(config: TrainConfig) -> int:
    interruption = Interruption()
    try:
        config = settled(config)
        from .parallel import joined, rank

        with interruption.heeded(), joined(config.device) as device:
            done = train(config, device, interruption)
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
