"""The exceptions that callers can handle: GumihoError, and a subclass for each kind of cause."""

_MOST = 1200  # characters


class GumihoError(Exception):
    """Says in one sentence what is wrong and what to do; command lines print it and exit with status 1.

    The text is a single printable line of bounded length: names and libraries' messages that it quotes may hold anything.
    """

    def __str__(self) -> str:
        text = " ".join(super().__str__().split())
        if len(text) > _MOST:  # the way out is at the end
            text = f"{text[: _MOST * 2 // 3]} ... {text[-_MOST // 3 :]}"
        return "".join(c if c.isprintable() else "?" for c in text)


class InputError(GumihoError):
    """A value, option or file that the caller gave cannot be used: a setting, a prompt, a grammar, a conversation."""


class DamageError(GumihoError):
    """Stored data is damaged, incomplete or not what its manifest says: a bundle, engines, a saved session, a checkpoint."""


class MisuseError(GumihoError):
    """An object is used in a way or at a time that it does not support: after ``close``, or from two threads at once."""


class UnavailableError(GumihoError):
    """This machine lacks something: a package, a library, a device, memory, disk space, or compiled engines."""
