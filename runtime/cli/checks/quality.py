"""Measures on a text how much a bundle's precision costs, with the bundle's own engines: its perplexity, and how far
its probabilities are from those of a reference bundle, usually an unquantized export of the same model.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from ...api.loader import load
from ...backends import backend as make_backend
from ...bundle.reader import Bundle
from ...engines.store import find_engines
from ...errors import InputError
from ..command import argument_parser, read_text
from ..command import run as run_command
from ..engine_options import add_engine_options
from .perplexity import Quality, measure, windows

_WINDOW, _TOKENS = 1024, 8192


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser("quality", __doc__)
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="folders made by gumiho-export, of one model")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text to measure on")
    parser.add_argument("--reference", metavar="BUNDLE", help="bundle to compare with (default: the first of BUNDLE)")
    parser.add_argument(
        "--window", type=int, metavar="N", help=f"tokens read together (default: {_WINDOW}, or the smallest capacity)"
    )
    parser.add_argument(
        "--tokens", type=int, default=_TOKENS, metavar="N", help=f"tokens of the text (default: {_TOKENS})"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    add_engine_options(parser, bundle="each bundle")
    args = parser.parse_args(argv)
    return run_command(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    reference, *others = _bundles(args)
    texts = _texts(args, [reference, *others])
    for bundle in (reference, *others):
        # Checked first, because a bundle without engines would otherwise fail only after others have been measured.
        find_engines(bundle, make_backend(args.backend or bundle.manifest.default, args.device))
    options = args.backend, args.device, args.threads
    progress = _Progress(sum(len(window) - 1 for window in texts))
    found: list[Quality] = []
    with load(reference.path, *options) as first:
        for bundle in others:
            with load(bundle.path, *options) as model:  # never more than two in memory
                pair = measure(first, [model], texts, progress.of(bundle))
                found = [pair[0], *found[1:], pair[1]]
        if not others:
            found = measure(first, (), texts, progress.of(reference))
    names = _names(args)
    if args.json:
        print(json.dumps(_document(args, names, [reference, *others], texts, found)))
    else:
        print(table(names, found))
    return 0


def _names(args: argparse.Namespace) -> list[str]:
    """The bundles' paths as given, the reference first."""
    given: list[str] = list(args.bundles)
    if args.reference is None:
        return given
    return [args.reference, *(name for name in given if Path(name).resolve() != Path(args.reference).resolve())]


def _bundles(args: argparse.Namespace) -> list[Bundle]:
    """The reference, then the others. Raises InputError if their vocabularies differ, or one has no tokenizer."""
    opened = [Bundle(name) for name in _names(args)]
    first = opened[0]
    for bundle in opened:
        bundle.manifest.form(args.backend or bundle.manifest.default)
        if bundle.manifest.vocabulary != first.manifest.vocabulary:
            raise InputError(
                f"{first.path} has a vocabulary of {first.manifest.vocabulary} tokens and {bundle.path} one of "
                f"{bundle.manifest.vocabulary}: compare bundles of one model"
            )
    return opened


def _texts(args: argparse.Namespace, bundles: Sequence[Bundle]) -> list[list[int]]:
    """The windows to read. Raises InputError for windows that do not fit, too little text, or tokenizers that differ on
    it."""
    capacity = min(bundle.manifest.capacity for bundle in bundles)
    window = min(_WINDOW, capacity) if args.window is None else args.window
    if not 2 <= window <= capacity:
        raise InputError(f"--window is {window}: give 2 to {capacity}, the smallest capacity of these bundles")
    if args.tokens < 2:
        raise InputError(f"--tokens is {args.tokens}: give 2 or more, since the first token is not predicted")
    text = read_text(args.text, "the text")
    first, *others = bundles
    texts = windows(first, text, window, args.tokens)
    for bundle in others:
        if windows(bundle, text, window, args.tokens) != texts:
            raise InputError(
                f"the tokenizers of {first.path} and {bundle.path} split '{args.text}' differently: compare bundles of "
                "one model"
            )
    if sum(len(part) - 1 for part in texts) < 2:
        raise InputError(
            f"'{args.text}' has too few tokens to measure anything: give a longer text, best of some thousand tokens"
        )
    return texts


class _Progress:
    """Reports progress on standard error, at most every ten seconds."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._last = tokens, monotonic()

    def of(self, bundle: Bundle) -> Callable[[int], None]:
        def tell(done: int) -> None:
            if monotonic() - self._last > 10:
                self._last = monotonic()
                print(f"{bundle.path.name}: {done} of {self._tokens} tokens ...", file=sys.stderr)

        return tell


def table(names: Sequence[str], found: Sequence[Quality]) -> str:
    """A line for each bundle, the reference first."""
    columns = 2 if len(found) == 1 else 5
    heads = ["", "perplexity", "nats lost per token", "KL divergence", "same first choice"]
    rows = [row[:columns] for row in (heads, *([name, *_cells(q)] for name, q in zip(names, found, strict=True)))]
    widths = [max(len(row[i]) for row in rows) for i in range(columns)]
    lines = [
        "  ".join(
            [f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    against = f", compared with {names[0]}" if len(names) > 1 else ""
    count = f"{found[0].loss.count} tokens{against}; ± one standard error, as of independent tokens"
    return "\n".join([*(line.rstrip() for line in lines), count])


def _cells(quality: Quality) -> list[str]:
    lost, divergence = quality.lost, quality.divergence
    compared = [
        f"{lost.value:+.4f} ± {lost.error:.4f}",
        f"{divergence.value:.4f} ± {divergence.error:.4f}",
        f"{quality.agreement.value:.1%}",
    ]
    return [f"{quality.perplexity:.2f}", *(compared if lost.count else [""] * len(compared))]


def _document(
    args: argparse.Namespace,
    names: Sequence[str],
    bundles: Sequence[Bundle],
    texts: Sequence[Sequence[int]],
    found: Sequence[Quality],
) -> dict[str, Any]:
    def weights(bundle: Bundle) -> str:
        form = bundle.manifest.form(args.backend or bundle.manifest.default)
        return bundle.manifest.weights.get("target") or form.graphs["target"].precision

    return {
        "text": str(args.text),
        "tokens": found[0].loss.count,
        "window": max(len(window) for window in texts),
        "reference": names[0],
        "bundles": [
            {"bundle": name, "weights": weights(bundle), **quality.summary()}
            for name, bundle, quality in zip(names, bundles, found, strict=True)
        ],
    }
