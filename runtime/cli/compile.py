"""Compiles a bundle's engines for this machine and checks them against the golden run."""

import signal
import sys

from ..backends import backend, require
from ..bundle.reader import Bundle
from ..engines.store import compile_engines
from .command import argument_parser, run
from .engine_options import add_engine_options


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser("compile", __doc__)
    parser.add_argument("bundle", help="folder made by gumiho-export")
    add_engine_options(parser, "compile for", threads="")
    parser.add_argument(
        "--tune", action="store_true", help="search longer for faster kernels (only migraphx and tensorrt)"
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
            folder, errors = compile_engines(
                bundle, backend(name, args.device), args.tune, lambda step: print(f"{step} ...", file=sys.stderr)
            )
        finally:
            signal.signal(signal.SIGTERM, previous)
        print(f"{folder}: golden run replayed, largest error {', '.join(f'{n} {e:.1e}' for n, e in errors.items())}")
        return 0

    return run(work, interrupted="earlier engines are unchanged, and no new ones were kept")
