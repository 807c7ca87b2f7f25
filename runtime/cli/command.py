"""Option parsing and error reporting that all commands share."""

import argparse
import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..errors import GumihoError, InputError, reason, remedy
from ..errors.interruption import INTERRUPTED, raised

_MOST_BYTES = 256 << 20  # of a text file
# Errors of writes to standard output. Errors of writes to files name the file, or their writer reports them.
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

through_gumiho = ""  # the command's name for help and messages, if ``gumiho`` runs it


def argument_parser(command: str, description: str | None, prog: str = "") -> argparse.ArgumentParser:
    """A parser for one of the package's commands, with the options that all of them take.

    command: its name for ``gumiho``. prog: its name when it runs by itself; "" for ``python -m runtime.COMMAND``.
    """
    own = prog or f"python -m runtime.{command.replace('-', '_')}"
    parser = _Parser(prog=f"gumiho {through_gumiho}" if through_gumiho else own, description=description)
    for kind, read in ((int, _whole), (float, _number), (Path, _path)):
        parser.register("type", kind, read)
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    return parser


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, like the commands themselves. argparse would print the usage too, which lists every
    option."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {GumihoError(message)} ({self.prog} --help lists the options)\n")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number: give one") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number: give one") from None


def _path(text: str) -> Path:
    """Refuses an empty name, such as an undefined shell variable leaves: it would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty: give that of a file or folder")
    return Path(text)


def read_text(file: Path, what: str) -> str:
    """The text of a UTF-8 file. what: its purpose, for the message. Raises InputError if it cannot be read."""
    from ..bundle.files import read_regular

    try:
        return read_regular(file, _MOST_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"'{file}' cannot be read as {what} ({reason(error)}): give a readable UTF-8 file") from None


class _Version(argparse.Action):
    """Like argparse's own action, but looks the version up only when it is printed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"gumiho-export {package_version()}")
        parser.exit()


def package_version() -> str:
    """The installed package's version, "unknown" if the code runs from a folder that is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and rarely needed

    try:
        return version("gumiho-export")
    except PackageNotFoundError:
        return "unknown"


def run(work: Callable[[], int], interrupted: str = "") -> int:
    """Runs a command, reports errors in one line on standard error, and returns the exit status: 1 for errors, 130 for
    an interruption, 141 if the reader of standard output has gone.

    interrupted: the message about an interruption, "" for none.
    """
    try:
        with raised():
            status = work()
            if sys.stdout:
                sys.stdout.flush()
            return status
    except GumihoError as error:
        return _failed(error)
    except KeyboardInterrupt:
        if interrupted:
            print(f"error: interrupted: {interrupted}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stdout = None  # flushing its buffer at exit would fail again
        return 141
    except UnicodeEncodeError as error:
        return _failed(
            f"text cannot be encoded ({reason(error)}): give whole characters, and a terminal that shows them"
        )
    except MemoryError as error:
        return _failed(
            f"there is not enough memory ({error or 'none is left'}): close other programs, or use a smaller bundle"
        )
    except OSError as error:
        if error.filename is not None:
            return _failed(f"'{error.filename}' cannot be used ({reason(error)}): check that path")
        if error.errno in _WRITING:
            sys.stdout = None
            return _failed(
                f"standard output cannot be written ({reason(error)}): {remedy(error, 'write it elsewhere')}"
            )
        return _failed(f"the operating system refused a request ({reason(error)}): see what this machine lacks")


def _failed(error: object) -> int:
    print(f"error: {GumihoError(str(error))}", file=sys.stderr)
    return 1
