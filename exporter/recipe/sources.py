"""The checkpoints that an export names, opened as it says."""

from runtime.errors import GumihoError

from ..checkpoints.draft_vocabulary import frequent, require_size
from ..checkpoints.drafters import Overrides, open_drafter
from ..checkpoints.families import EAGLE_3, MEDUSA, SMALL
from ..checkpoints.hub import target_of
from ..checkpoints.lone_target import LoneTarget
from ..checkpoints.pair import Pair
from ..checkpoints.target import target_checkpoint
from ..config import ExportConfig


def open_pair(config: ExportConfig) -> Pair:
    """The target with the first drafter, or without one."""
    drafter = str(config.ckpt[0]) if config.ckpt else ""
    target = target_checkpoint(str(config.target) if config.target else target_of(drafter))
    return Pair(target, open_drafter(drafter, config.family), overrides(config)) if config.ckpt else LoneTarget(target)


def overrides(config: ExportConfig) -> Overrides:
    given = [str(tap) for tap in config.taps]
    outputs = given == ["output"]
    if not outputs and not all(tap.isascii() and tap.isdigit() and len(tap) < 6 for tap in given):
        raise GumihoError(f"--taps is {' '.join(given)}: give numbers of layers, from 0, or the word output")
    taps = "output" if outputs else tuple(map(int, given))
    theta = config.draft_rope_theta
    if theta is not None and not 1 <= theta <= 1e12:
        raise GumihoError(f"--draft-rope-theta is {theta:g}: give 1 to 1e12")
    return Overrides(taps, theta, config.norm_before_residual, config.family)


def trimmed(config: ExportConfig, pair: Pair) -> Pair:
    """The pair with the draft vocabulary that was asked for. Raises GumihoError for one that it cannot have."""
    size, vocabulary, ends = config.draft_vocab, pair.target_shape.vocabulary, set(pair.eos_token_ids)
    if size is None:
        if config.draft_text:
            raise GumihoError(
                "--draft-text is what --draft-vocab counts: give --draft-vocab, the number of tokens to draft, too"
            )
        return pair
    if (pair.family == EAGLE_3 and pair.reader.own_head) or (pair.family in (MEDUSA, SMALL) and pair.draft_vocabulary):
        raise GumihoError(
            f"drafter '{pair.drafter.source}' has an lm_head of its own, for {pair.drafted} tokens: leave "
            "--draft-vocab out"
        )
    require_size(size, vocabulary, ends)
    if config.draft_text and pair.tokenizer is None:
        raise GumihoError(
            f"target '{pair.target.source}' has no tokenizer to count --draft-text with: leave the option out"
        )
    drafted = None if size == vocabulary else frequent(size, vocabulary, pair.tokenizer, config.draft_text, ends)
    return pair.drafting(drafted)
