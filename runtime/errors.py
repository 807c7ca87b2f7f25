"""The one exception for what a user can mend."""

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
