"""The one exception for what a user can mend."""


class GumihoError(Exception):
    """Says in one sentence what is wrong and what to do; command lines print it and exit with status 1."""
