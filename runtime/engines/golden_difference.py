"""How the outputs of an engine differ from those of the golden run."""

import numpy as np

from .golden_file import Drafted, malformed


def choice_difference(choice: np.ndarray, recorded: np.ndarray, top_logits: np.ndarray, tolerance: float) -> str:
    """Describes the first row whose choice differs, unless its two largest logits are a near-tie; "" without such a
    row.

    choice, recorded: int64 [n]; top_logits: fp32 [n, k], recorded, in descending order; tolerance: of the largest
    logit.
    """
    if top_logits.shape[1] < 2:
        near_tie = np.zeros(len(choice), np.bool_)
    else:
        near_tie = top_logits[:, 0] - top_logits[:, 1] <= tolerance * np.abs(top_logits).max()
    for row in np.flatnonzero((choice != recorded) & (~near_tie | (choice < 0))):
        return f"in its choice for row {row}: token {choice[row]} instead of {recorded[row]}"
    return ""


def tree_difference(tree: Drafted, recorded: Drafted, tolerance: float, share: float) -> str:
    """Describes how a tree differs from the recorded one by more than rounding explains, "" if it does not.

    Rows are identified by the tokens on their path. Of the recorded rows whose score exceeds the worst row's by more
    than the tolerance (in nats), at least ``share`` must be in the tree, with the same score within the tolerance. Of
    its rows, at least ``share`` must be recorded, or score like the worst recorded row.
    """
    if fault := malformed(tree):
        return fault
    scores, recorded_scores = _scores_by_path(tree), _scores_by_path(recorded)
    worst = float(recorded.score.min())
    clear = [path for path, score in recorded_scores.items() if score - worst > tolerance]
    missing = [
        path for path in clear if path not in scores or not abs(scores[path] - recorded_scores[path]) <= tolerance
    ]
    if len(missing) > (1 - share) * len(clear):
        return (
            f"in its tree: {len(missing)} of {len(clear)} rows are missing, the best of them the path "
            f"{list(missing[0])}"
        )
    other = [
        path for path, score in scores.items() if path not in recorded_scores and not abs(score - worst) <= tolerance
    ]
    if len(other) > (1 - share) * len(scores):
        return (
            f"in its tree: {len(other)} of {len(scores)} rows are others, the first of them the path {list(other[0])}"
        )
    return ""


def chain_difference(
    tree: Drafted, recorded: Drafted, top_ids: np.ndarray, top_scores: np.ndarray, tolerance: float
) -> str:
    """``tree_difference`` of a chain, which has no room for the other of two nearly tied tokens. top_ids: int64 [R - 1,
    k], top_scores: fp32 [R - 1, k], the best tokens behind each recorded row, best first, with their scores.

    The first token that is not the recorded one must be another of the best, with its score, and nearly tied. Rows
    behind it continue another text, so nothing is known of them.
    """
    if fault := malformed(tree):
        return fault
    if tree.tokens[0] != recorded.tokens[0] or (tree.depth != recorded.depth).any():
        return f"in its chain: from token {tree.tokens[0]}, with the parents {tree.parent.tolist()}"
    for row, (ids, scores) in enumerate(zip(top_ids.tolist(), top_scores.tolist(), strict=True), 1):
        token, known = int(tree.tokens[row]), dict(zip(ids, scores, strict=True))
        if token not in known or max(scores[0] - known[token], abs(known[token] - float(tree.score[row]))) > tolerance:
            return f"in its chain: token {token} instead of {recorded.tokens[row]} in row {row}"
        if token != recorded.tokens[row]:
            break
    return ""


def score_error(tree: Drafted, recorded: Drafted) -> float:
    """The largest difference of the scores of rows that are in both well-formed trees, in nats."""
    scores, recorded_scores = _scores_by_path(tree), _scores_by_path(recorded)
    return max(
        (abs(scores[path] - recorded_scores[path]) for path in scores.keys() & recorded_scores.keys()), default=0.0
    )


def _scores_by_path(tree: Drafted) -> dict[tuple[int, ...], float]:
    """The score of each row, by the tokens from the root to it."""
    paths: list[tuple[int, ...]] = [(int(tree.tokens[0]),)]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parent[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return dict(zip(paths, tree.score.tolist(), strict=True))


def relative(values: np.ndarray, expected: np.ndarray) -> float:
    """The largest error, relative to the largest expected value; infinite if all expected values are 0."""
    largest = float(np.abs(expected).max())
    return float(np.abs(values.astype(np.float32) - expected).max()) / largest if largest else np.inf
