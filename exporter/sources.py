"""The checkpoints that a command line names, opened as it says."""

import argparse

from runtime.errors import GumihoError

from .checkpoints.draft_vocabulary import frequent, require_size
from .checkpoints.drafters import Overrides, open_drafter
from .checkpoints.families import EAGLE_3, MEDUSA, SMALL
from .checkpoints.hub import target_of
from .checkpoints.lone_target import LoneTarget
from .checkpoints.pair import Pair
from .checkpoints.target import target_checkpoint


def open_pair(args: argparse.Namespace) -> Pair:
    target = target_checkpoint(args.target or target_of(args.ckpt))
    if args.ckpt is None:
        return LoneTarget(target)
    return Pair(target, open_drafter(args.ckpt, args.family), overrides(args))


def overrides(args: argparse.Namespace) -> Overrides:
    given: list[str] = args.taps or []
    outputs = given == ["output"]
    if not outputs and not all(tap.isascii() and tap.isdigit() and len(tap) < 6 for tap in given):
        raise GumihoError(f"--taps is {' '.join(given)}: give numbers of layers, from 0, or the word output")
    taps = "output" if outputs else tuple(map(int, given))
    theta, normed = args.draft_rope_theta, args.norm_before_residual
    if theta is not None and not 1 <= theta <= 1e12:
        raise GumihoError(f"--draft-rope-theta is {theta:g}: give 1 to 1e12")
    return Overrides(taps, theta, None if normed is None else normed == "yes", args.family)


def trim(args: argparse.Namespace, pair: Pair) -> None:
    """Sets a pair's draft vocabulary as the options say. Raises GumihoError for impossible options."""

    size, vocabulary, ends = args.draft_vocab, pair.target_shape.vocabulary, set(pair.eos_token_ids)
    if size is None:
        if args.draft_text:
            raise GumihoError(
                "--draft-text is what --draft-vocab counts: give --draft-vocab, the number of tokens to draft, too"
            )
        return
    if (pair.family == EAGLE_3 and pair.reader.own_head) or (pair.family in (MEDUSA, SMALL) and pair.draft_vocabulary):
        raise GumihoError(
            f"drafter '{pair.drafter.source}' has an lm_head of its own, for {pair.drafted} tokens: leave --draft-vocab out"
        )
    require_size(size, vocabulary, ends)
    if args.draft_text and pair.tokenizer is None:
        raise GumihoError(f"target '{pair.target.source}' has no tokenizer to count --draft-text with: leave the option out")
    if size == vocabulary:
        pair.draft_vocabulary = None
    else:
        pair.draft_vocabulary = frequent(size, vocabulary, pair.tokenizer, args.draft_text, ends)
