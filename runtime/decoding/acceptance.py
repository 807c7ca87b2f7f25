"""Which rows of a verified proposal are accepted."""

from collections.abc import Sequence

from . import lossy
from .engine_passes import EnginePasses
from .lossy import NextToken
from .token_selector import TokenSelector


def accept_path(tokens: Sequence[int], parents: Sequence[int], next_token: NextToken) -> list[int]:
    """The path of the target's own choices down the tree, the root first. Parents come before children, so one pass finds it.

    next_token: the target's token after a row, None if the text ends with it; it is called for the rows of the path only.
    """
    path, token = [0], next_token(0)
    for row in range(1, len(tokens)):
        if parents[row] == path[-1] and tokens[row] == token:
            path.append(row)
            token = next_token(row)
    return path


def accept(
    tokens: Sequence[int], parents: Sequence[int], next_token: NextToken, selector: TokenSelector, passes: EnginePasses
) -> list[int]:
    """The accepted rows in the way that the text's settings name: the lossless one, or a lossy one (``lossy``)."""
    settings = selector.settings
    if settings.accept == "typical":
        return lossy.typical(tokens, parents, next_token, selector.add, passes.row, settings.temperature)
    if settings.tree == "exact":
        return accept_path(tokens, parents, next_token)
    return lossy.full_tree(tokens, parents, next_token)
