"""``python -m runtime.selftest``."""

import sys

from .cli.checks.selftest import main

if __name__ == "__main__":
    sys.exit(main())
