"""``python -m runtime.compile``."""

import sys

from .cli.compile import main

if __name__ == "__main__":
    sys.exit(main())
