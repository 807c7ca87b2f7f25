"""Ways to accept drafted tokens that gain speed by changing the output. Off unless asked for by name."""

from collections.abc import Callable, Sequence

import numpy as np

NextToken = Callable[[int], int | None]  # the target's token behind a row; None where the text ends with it

_EPSILON, _DELTA = 0.09, 0.3  # Medusa's posterior_threshold and posterior_alpha (arXiv 2401.10774, section 2.3.1)


def full_tree(tokens: Sequence[int], parents: Sequence[int], next_token: NextToken) -> list[int]:
    """Full Tree Attention as published (arXiv 2503.10135, section 3.3, and the official code): a path that ends early is filled
    up with each deeper column's commonest node, the one that most paths go through.

    A node that fills is accepted when its token is the target's choice, though the target read it under ancestors of its own;
    what it says comes next is taken from there. Returns the accepted rows, the root first.
    """
    depths, paths, ends = [0] * len(tokens), [0] * len(tokens), [True] * len(tokens)
    for row in range(1, len(tokens)):
        depths[row] = depths[parents[row]] + 1
        ends[parents[row]] = False
    for row in reversed(range(len(tokens))):
        paths[row] += ends[row]
        if row:
            paths[parents[row]] += paths[row]
    deepest = max(depths)
    columns = [[row for row in range(len(tokens)) if depths[row] == depth] for depth in range(deepest + 1)]
    commonest = [max(column, key=lambda row: (paths[row], -row)) for column in columns]
    path, token, filled = [0], next_token(0), False
    for depth in range(1, deepest + 1):
        filled = filled or ends[path[-1]]
        options = [commonest[depth]] if filled else [row for row in columns[depth] if parents[row] == path[-1]]
        found = [row for row in options if tokens[row] == token]
        if not found:
            break
        path.append(found[0])
        token = next_token(found[0])
    return path


def typical(
    tokens: Sequence[int],
    parents: Sequence[int],
    next_token: NextToken,
    add: NextToken,
    row: Callable[[int], np.ndarray],
    temperature: float,
) -> list[int]:
    """Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1): a drafted token is accepted where the target gives it more
    than min(epsilon, delta * exp(-entropy)).

    add: puts an accepted token (not a row) into the text; row: the target's logits [V] behind a row; temperature: of the
    distribution they stand for, 1 where it is 0. Takes the longest path of accepted rows, of several the likeliest. Returns it,
    the root first, as far as the text went.
    """
    accepted, best = {0: (0, 0.0)}, 0
    known: dict[int, tuple[np.ndarray, float]] = {}
    for i in range(1, len(tokens)):
        if parents[i] not in accepted:
            continue
        if parents[i] not in known:
            values = row(parents[i]).astype(np.float64)
            with np.errstate(over="ignore"):
                log_p = (values - values.max()) / (temperature or 1.0)
            log_p -= np.log(np.exp(log_p).sum())
            possible = log_p[log_p > -np.inf]
            known[parents[i]] = log_p, min(_EPSILON, _DELTA * float(np.exp((np.exp(possible) * possible).sum())))
        log_p, threshold = known[parents[i]]
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
