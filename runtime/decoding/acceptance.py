"""Which rows of a verified proposal are accepted."""

from collections.abc import Callable, Sequence

import numpy as np

from . import lossy
from .lossy import NextToken
from .token_selector import TokenSelector


def accept_path(tokens: Sequence[int], parents: Sequence[int], next_token: NextToken) -> list[int]:
    """The rows whose tokens the target itself chooses, the root first. Parents come before children, so one loop finds
    them.

    next_token: the target's token after a row, None if the text ends with it; called only for rows of the path.
    """
    path, token = [0], next_token(0)
    for row in range(1, len(tokens)):
        if parents[row] == path[-1] and tokens[row] == token:
            path.append(row)
            token = next_token(row)
    return path


def accept(
    tokens: Sequence[int],
    parents: Sequence[int],
    next_token: NextToken,
    selector: TokenSelector,
    logits: Callable[[int], np.ndarray],
) -> list[int]:
    """The accepted rows, by the method of the text's settings: lossless, or one of ``lossy``. logits: the target's,
    [V], after a row."""
    settings = selector.settings
    if settings.accept == "typical":
        return lossy.typical(tokens, parents, next_token, selector.add, logits, settings.temperature)
    if settings.tree == "exact":
        return accept_path(tokens, parents, next_token)
    return lossy.full_tree(tokens, parents, next_token)
