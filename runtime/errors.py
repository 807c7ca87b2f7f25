"""The one exception for what a user can mend."""


class GumihoError(Exception):
    """Says in one sentence what is wrong and what to do; command lines print it and exit with status 1.

    The text is a single line: names and libraries' messages that it quotes may hold line breaks.
    """

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())
