"""``python -m runtime.doctor``."""

import sys

from .cli.checks.doctor import main

if __name__ == "__main__":
    sys.exit(main())
