"""Ctrl-C while commands load: they end quietly. The package imports this before its libraries, so it imports nothing
slow."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
_SCRIPTS = ("gumiho", "gumiho-export")


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)


def _is_command() -> bool:
    """Whether this process is one of the package's commands: a script, or ``python -m`` and a module."""
    if sys.argv[:1] == ["-m"]:  # until the module is found, which follows
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m").startswith(("exporter.", "runtime."))
    return os.path.basename(sys.argv[0] if sys.argv else "").removesuffix(".exe") in _SCRIPTS


# While libraries load nothing can be lost, and there is nobody to catch an exception. Where a shell has a background
# process ignore SIGINT, that stays.
if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)


@contextmanager
def raised() -> Iterator[None]:
    """In this context SIGINT raises KeyboardInterrupt in a command too; around it there is nobody to catch that."""
    command = signal.getsignal(signal.SIGINT) is _leave
    try:
        if command:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        if command:
            signal.signal(signal.SIGINT, _leave)


@contextmanager
def delayed() -> Iterator[None]:
    """SIGINT waits until this context is left: libraries that it interrupts as they load say that they cannot be
    imported."""
    before, came = signal.getsignal(signal.SIGINT), list[tuple[int, object]]()
    try:
        signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    except ValueError:  # only the main thread may, and only it is interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
