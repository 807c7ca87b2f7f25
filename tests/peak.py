"""Code in a process of its own, since peaks of memory are of a whole process."""

import os
import subprocess
import sys
from pathlib import Path

_BEFORE = """
import resource, sys
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
"""


def printed(code: str, *argv: object) -> str:
    """What code prints that may call ``peak()``: KiB that its process has held at most."""
    done = subprocess.run(
        [sys.executable, "-c", _BEFORE + code, *map(str, argv)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
