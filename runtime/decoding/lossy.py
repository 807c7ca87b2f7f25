"""Lossy acceptance: it gains speed and changes the output. Off by default."""

from collections.abc import Callable, Sequence

import numpy as np

from .logprobs import log_softmax

NextToken = Callable[[int], int | None]  # the target's token after a row; None if the text ends with it

_EPSILON, _DELTA = 0.09, 0.3  # Medusa's posterior_threshold and posterior_alpha (arXiv 2401.10774, section 2.3.1)


def full_tree(tokens: Sequence[int], parents: Sequence[int], next_token: NextToken) -> list[int]:
    """Full Tree Attention as published (arXiv 2503.10135, section 3.3, and the official code): a path that ends early
    is extended with the most common row of each deeper level, the one that most paths go through.

    Such a row is accepted if its token is the target's choice, although the target computed it under other ancestors;
    the target's next choice is taken from it. Returns the accepted rows, the root first.
    """
    depths, path_counts, is_leaf = [0] * len(tokens), [0] * len(tokens), [True] * len(tokens)
    for row in range(1, len(tokens)):
        depths[row] = depths[parents[row]] + 1
        is_leaf[parents[row]] = False
    for row in reversed(range(len(tokens))):
        path_counts[row] += is_leaf[row]
        if row:
            path_counts[parents[row]] += path_counts[row]
    deepest = max(depths)
    levels = [[row for row in range(len(tokens)) if depths[row] == depth] for depth in range(deepest + 1)]
    most_common = [max(level, key=lambda row: (path_counts[row], -row)) for level in levels]
    path, token, extended = [0], next_token(0), False
    for depth in range(1, deepest + 1):
        extended = extended or is_leaf[path[-1]]
        candidates = [most_common[depth]] if extended else [row for row in levels[depth] if parents[row] == path[-1]]
        accepted = next((row for row in candidates if tokens[row] == token), None)
        if accepted is None:
            break
        path.append(accepted)
        token = next_token(accepted)
    return path


def typical(
    tokens: Sequence[int],
    parents: Sequence[int],
    next_token: NextToken,
    add: NextToken,
    row: Callable[[int], np.ndarray],
    temperature: float,
) -> list[int]:
    """Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1): a drafted token is accepted if the target's
    probability of it is greater than min(epsilon, delta * exp(-entropy)).

    add: appends an accepted token (not a row) to the text; returns None if the text ends with it. row: the target's
    logits [V] after a row. temperature: of the target's distribution; 0 stands for 1. Returns the longest path of
    accepted rows, the likeliest if there are several, the root first, cut off where the text ends.
    """
    accepted, best = {0: (0, 0.0)}, 0
    distributions: dict[int, tuple[np.ndarray, float]] = {}  # by row: log-probabilities [V], and the threshold
    for i in range(1, len(tokens)):
        if parents[i] not in accepted:
            continue
        if parents[i] not in distributions:
            log_p = log_softmax(row(parents[i]), temperature or 1.0)
            possible = log_p[log_p > -np.inf]
            distributions[parents[i]] = (
                log_p,
                min(_EPSILON, _DELTA * float(np.exp((np.exp(possible) * possible).sum()))),
            )
        log_p, threshold = distributions[parents[i]]
        if log_p[tokens[i]] > np.log(threshold):
            depth, likelihood = accepted[parents[i]]
            accepted[i] = depth + 1, likelihood + float(log_p[tokens[i]])
            best = max(best, i, key=accepted.__getitem__)
    path = [best]
    while path[-1]:
        path.append(parents[path[-1]])
    path.reverse()
    for i, drafted in enumerate(path[1:]):
        if add(tokens[drafted]) is None:
            return path[: i + 1]
    next_token(path[-1])
    return path
