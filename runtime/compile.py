"""``python -m runtime.compile BUNDLE``: compiles a bundle's engines on the machine that is to run them."""

import argparse
import sys

from .bundle import Bundle
from .engines import BACKENDS, compile_engines
from .errors import GumihoError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.compile", description=__doc__)
    parser.add_argument("bundle", help="folder made by gumiho-export")
    parser.add_argument("--backend", default="cpu", choices=list(BACKENDS), help="what to compile for (cpu)")
    args = parser.parse_args(argv)
    try:
        folder, errors = compile_engines(Bundle(args.bundle), args.backend)
    except GumihoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{folder}: golden run replayed, largest error {', '.join(f'{n} {e:.1e}' for n, e in errors.items())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
