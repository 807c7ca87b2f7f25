"""Compiles a bundle's engines for this machine and checks them against the golden run."""

import signal
import sys
from collections.abc import Sequence

from ..backends import backend, require
from ..backends.rtx_cards import card
from ..bundle.manifest import RTX
from ..bundle.reader import Bundle
from ..engines.plans_without_device import build_plans
from ..engines.store import compile_engines
from ..errors import InputError
from .command import argument_parser, run
from .engine_options import add_engine_options


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser("compile", __doc__)
    parser.add_argument("bundle", help="folder made by gumiho-export")
    add_engine_options(parser, "compile for", threads="")
    parser.add_argument(
        "--tune", action="store_true", help="search longer for faster kernels (only migraphx and tensorrt)"
    )
    parser.add_argument(
        "--gpu",
        nargs="+",
        default=[],
        metavar="CARD",
        help="with tensorrt-rtx: build plans for these kinds of cards, such as sm89 or rtx-4090, on any machine",
    )
    args = parser.parse_args(argv)

    def work() -> int:
        # Like Ctrl-C, SIGTERM removes unfinished files.
        previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            bundle = Bundle(args.bundle)
            name = args.backend or bundle.manifest.default
            require(name)
            bundle.manifest.form(name)
            if args.gpu:
                return _build(bundle, name, args.gpu)
            folder, errors = compile_engines(bundle, backend(name, args.device), args.tune, _tell)
        finally:
            signal.signal(signal.SIGTERM, previous)
        print(f"{folder}: golden run replayed, largest error {', '.join(f'{n} {e:.1e}' for n, e in errors.items())}")
        return 0

    return run(work, interrupted="earlier engines are unchanged, and no new ones were kept")


def _tell(step: str) -> None:
    print(f"{step} ...", file=sys.stderr)


def _build(bundle: Bundle, name: str, cards: Sequence[str]) -> int:
    if name != RTX:
        raise InputError(f"--gpu is for backend {RTX}, and this is {name}: leave it out, or give --backend")
    for kind in cards:
        card(kind)
    for kind in cards:
        print(f"{build_plans(bundle, kind, _tell)}: plans for {card(kind).name}, not run yet")
    return 0
