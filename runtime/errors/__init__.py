"""The exceptions that callers can handle, GumihoError and a subclass for each kind of cause, and other exceptions in
words."""

import errno
import json
from typing import Any

_MOST = 1200  # characters
_REMEDIES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space")
_REMEDIES |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make its place writable")
_REMEDIES[errno.EFBIG] = "raise the limit on the size of files"


def reason(error: BaseException) -> str:
    """Why an exception of Python's or a library's was raised, in one line: in words of the cause, and without a file's
    name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}, column {error.colno} is not JSON" if error.doc.strip() else "it is empty"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    if isinstance(error, UnicodeEncodeError):
        return f"character {error.start} cannot be written as {error.encoding}"
    if isinstance(error, KeyError):
        return f"there is no {error}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, ValueError) and "integer string conversion" in str(error):
        return "a number has too many digits"
    return " ".join(str(error).split()).removesuffix(".")[:500] or type(error).__name__


def json_line(line: str, number: int) -> Any:
    """``json.loads`` of a line of a file. What it raises names the line's number there."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        error.lineno = number
        raise


def remedy(error: BaseException, otherwise: str = "") -> str:
    """What to do about a file that cannot be written. otherwise: what else helps. Libraries' own exceptions mostly mean
    a full disk."""
    number = error.errno if isinstance(error, OSError) else errno.ENOSPC
    first = _REMEDIES.get(number or 0, "")
    return ", or ".join(way for way in (first, otherwise) if way) or "see what the disk lacks"


def unreadable(file: object, error: BaseException, otherwise: str = "") -> "GumihoError":
    """What to raise for a file that cannot be read. otherwise: what to do, unless the error is a PermissionError."""
    if isinstance(error, PermissionError):
        return UnavailableError(
            f"{file} cannot be read ({reason(error)}): let this user read it, and the folders above it"
        )
    return DamageError(f"{file} cannot be read ({reason(error)}): {otherwise}")


class GumihoError(Exception):
    """Says in one sentence what is wrong and what to do; command lines print it and exit with status 1.

    The text is a single printable line of bounded length: names and libraries' messages that it quotes may hold
    anything.
    """

    def __str__(self) -> str:
        text = " ".join(super().__str__().split())
        if len(text) > _MOST:  # the way out is at the end
            text = f"{text[: _MOST * 2 // 3]} ... {text[-_MOST // 3 :]}"
        return "".join(c if c.isprintable() else "?" for c in text)


class InputError(GumihoError):
    """A value, option or file that the caller gave cannot be used: a setting, a prompt, a grammar, a conversation."""


class DamageError(GumihoError):
    """Stored data is damaged, incomplete or not what its manifest says: a bundle, engines, a saved session, a
    checkpoint."""


class MisuseError(GumihoError):
    """An object is used in a way or at a time that it does not support: after ``close``, or from two threads at
    once."""


class UnavailableError(GumihoError):
    """This machine lacks something: a package, a library, a device, memory, disk space, or compiled engines."""
