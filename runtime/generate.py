"""``python -m runtime.generate``."""

import sys

from .cli.generate import main

if __name__ == "__main__":
    sys.exit(main())
