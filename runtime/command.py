"""What the commands have in common: how they end."""

import sys
from collections.abc import Callable

from .errors import GumihoError


def run(work: Callable[[], int]) -> int:
    """The exit status of a command. What fails is told in a line on standard error.

    1 for errors, 130 for an interruption, 141 where the reader of standard output has gone.
    """
    try:
        status = work()
        if sys.stdout:
            sys.stdout.flush()
        return status
    except GumihoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stdout = None  # what is left in its buffer has nowhere to go either
        return 141
    except UnicodeEncodeError as error:
        print(
            f"error: text cannot be encoded ({error}): give whole characters, and a terminal that shows them", file=sys.stderr
        )
        return 1
    except OSError as error:
        sys.stdout = None
        print(f"error: standard output cannot be written ({error.strerror or error}): free some space", file=sys.stderr)
        return 1
