"""runtime.decoding.lossy against lists of whole paths, each judged by itself."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from runtime.decoding.acceptance import accept_path
from runtime.decoding.lossy import full_tree, typical
from tests.conftest import examples

Tree = tuple[list[int], list[int]]  # tokens, parents


@st.composite
def trees(draw: st.DrawFn, alphabet: int) -> Tree:
    """Parents precede children and siblings have different tokens, as in every tree that is drafted; some deep, some
    wide."""
    rows, near = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    tokens, parents = [draw(st.integers(0, alphabet - 1))], [0]
    for row in range(1, rows):
        possible = [p for p in range(row) if Counter(parents[1:])[p] < alphabet]
        parent = draw(st.sampled_from(possible[-near:]))
        taken = {tokens[other] for other in range(1, row) if parents[other] == parent}
        tokens.append(draw(st.sampled_from([t for t in range(alphabet) if t not in taken])))
        parents.append(parent)
    return tokens, parents


def leaf_paths(parents: Sequence[int]) -> list[list[int]]:
    """The rows from the root to each row that has no child."""
    paths = []
    for row in sorted(set(range(len(parents))) - set(parents[1:])):
        path = [row]
        while path[-1]:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    return paths


class Target:
    """Says what follows each row, takes down what it was asked, and ends the text behind so many tokens."""

    def __init__(self, choices: Sequence[int], room: int) -> None:
        self.choices, self.room, self.asked, self.emitted = choices, room, list[int](), list[int]()

    def add(self, token: int) -> int | None:
        assert len(self.emitted) < self.room, "the text has ended"
        self.emitted.append(token)
        return token if len(self.emitted) < self.room else None

    def next_token(self, row: int) -> int | None:
        self.asked.append(row)
        return self.add(self.choices[row])


def padded_paths(parents: Sequence[int]) -> list[list[int]]:
    """All paths, as long as the longest: where one has no node of its own, it gets the column's commonest."""
    paths = leaf_paths(parents)
    deepest = max(map(len, paths))
    columns = [Counter(path[depth] for path in paths if depth < len(path)) for depth in range(deepest)]
    commonest = [min(column, key=lambda row, column=column: (-column[row], row)) for column in columns]
    return [path + commonest[len(path) :] for path in paths]


@given(st.data())
@examples(300)
def test_full_tree_is_the_longest_of_the_padded_paths(data: st.DataObject) -> None:
    """Each padded path is accepted as far as its tokens are the target's choices behind the rows before them. All that
    get farthest have the same rows so far, because siblings differ; those are what is accepted."""
    tokens, parents = data.draw(trees(alphabet=6))
    choices = data.draw(st.lists(st.integers(0, 5), min_size=len(tokens), max_size=len(tokens)))
    room, padded = data.draw(st.integers(1, 9)), padded_paths(parents)
    for row, after in pairwise(data.draw(st.sampled_from(padded))):  # mostly chosen, so that long paths are common
        choices[row] = data.draw(st.sampled_from([choices[row], *[tokens[after]] * 9]))
    reached = []
    for path in padded:
        count = 1
        while count < len(path) and tokens[path[count]] == choices[path[count - 1]]:
            count += 1
        reached.append(path[:count])
    farthest = max(map(len, reached))
    best = [path for path in reached if len(path) == farthest]

    target = Target(choices, room)
    path = full_tree(tokens, parents, target.next_token)
    assert all(path == other[:room] for other in best)
    # Rows are asked for once each and in order, and every accepted row has brought a token: what the cycle counts on.
    assert target.asked == path
    assert target.emitted == [choices[row] for row in path]
    # What the caches count on to keep a path in place.
    assert all(row >= i for i, row in enumerate(path))
    exact = accept_path(tokens, parents, Target(choices, room).next_token)
    assert path[: len(exact)] == exact


def test_full_tree_by_hand() -> None:
    """Row 3 ends after one column; of the second column row 2 is commonest, of the third row 4, which goes on from
    there."""
    #             0 -> 1 -> 2 -> 4, 2 -> 5; 0 -> 3; 1 -> 6
    tokens = [9, 1, 2, 3, 4, 5, 6]
    parents = [0, 0, 1, 0, 2, 2, 1]
    choices = {0: 3, 3: 2, 2: 4, 4: 7}
    assert padded_paths(parents) == [[0, 3, 2, 4], [0, 1, 2, 4], [0, 1, 2, 5], [0, 1, 6, 4]]
    assert accept_path(tokens, parents, choices.__getitem__) == [0, 3]
    assert full_tree(tokens, parents, choices.__getitem__) == [0, 3, 2, 4]
    # Node 2 is on two of three paths through row 1, and does not fill for row 6, which has a place in that column.
    assert full_tree(tokens, parents, {0: 1, 1: 6, 6: 4, 4: 0}.__getitem__) == [0, 1, 6, 4]
    # Rows 3 and 4 are on two paths each, so 3 fills; of the column behind them it is row 7, which is below row 4.
    tokens, parents = list(range(10)), [0, 0, 0, 2, 2, 3, 3, 4, 7, 7]
    assert full_tree(tokens, parents, {0: 1, 1: 3, 3: 7, 7: 8, 8: 0}.__getitem__) == [0, 1, 3, 7, 8]
    assert full_tree(tokens, parents, {0: 1, 1: 3, 3: 5}.__getitem__) == [0, 1, 3]
    # Row 3 has children, so that behind it nothing fills, though the commonest would do.
    assert full_tree(tokens, parents, {0: 2, 2: 3, 3: 7}.__getitem__) == [0, 2, 3]
    assert full_tree([9], [0], {0: 3}.__getitem__) == [0]


def medusa(
    tokens: Sequence[int], parents: Sequence[int], logits: torch.Tensor, temperature: float
) -> tuple[list[list[int]], bool]:
    """All paths of the greatest accepted length whose likelihood is the largest; and whether any of it hangs on
    rounding.

    logits: float64 [R, V]. Candidates as Medusa's ``evaluate_posterior`` has them: padded paths, judged all at once.
    """
    paths = leaf_paths(parents)
    if paths == [[0]]:
        return paths, False
    deepest = max(map(len, paths))
    rows = torch.tensor([path + [0] * (deepest - len(path)) for path in paths])
    real = torch.tensor([[depth < len(path) for depth in range(1, deepest)] for path in paths])
    distributions = torch.distributions.Categorical(logits=logits[rows[:, :-1]] / temperature)
    probabilities = distributions.probs.gather(2, torch.tensor(tokens)[rows[:, 1:]].unsqueeze(2)).squeeze(2)
    entropy = torch.special.entr(distributions.probs).sum(2)
    threshold = torch.minimum(torch.tensor(0.09).double(), 0.3 * torch.exp(-entropy))
    close = bool(((probabilities / threshold - 1).abs() < 1e-6).any())
    length = ((probabilities > threshold) & real).long().cumprod(1).sum(1)
    most = int(length.max())
    best = torch.where(length == most)[0]
    likelihood = probabilities[best, :most].log().sum(1)
    best = best[likelihood >= likelihood.max() - 1e-9]
    return [paths[i][: most + 1] for i in best.tolist()], close


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@given(st.data())
@examples(300)
def test_typical_is_medusas(dtype: type[np.floating], data: st.DataObject) -> None:
    """The longest path of which each token passes Medusa's threshold, of several the likeliest, with logits of any
    peakedness, ties and -inf; cut where the text ends."""
    tokens, parents = data.draw(trees(alphabet=12))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    temperature = data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.0]))
    logits = rng.normal(0, data.draw(st.sampled_from([0.0, 0.5, 2.0, 6.0])), (len(tokens), 12))
    if data.draw(st.booleans()):
        logits = logits.round()
    if data.draw(st.booleans()):
        logits[rng.random(logits.shape) < 0.2] = -np.inf
        logits[:, 0] = 0.0
    for row in range(1, len(tokens)):  # so that drafted tokens are mostly good ones
        logits[parents[row], tokens[row]] += rng.choice([0, 3])
    logits = logits.astype(dtype)
    best, close = medusa(tokens, parents, torch.from_numpy(logits).double(), temperature or 1.0)
    assume(not close)

    room, fetched = data.draw(st.integers(1, 9)), list[int]()
    target = Target([100 + row for row in range(len(tokens))], room)

    def fetch(row: int) -> np.ndarray:
        fetched.append(row)
        return logits[row]

    path = typical(tokens, parents, target.next_token, target.add, fetch, temperature)
    assert path in [other[:room] for other in best]
    # Accepted tokens join the text in turn, and behind the last of them the target's own, if there is room for it: so
    # as many tokens as rows of the path. Paths as good as each other may be one, once they are cut, and differ in the
    # last token.
    fits = ([tokens[row] for row in other[1:]] for other in best if other[:room] == path)
    drafted = next(drafted for drafted in fits if target.emitted[: len(drafted)] == drafted[:room])
    assert len(target.emitted) == len(path)
    whole = len(path) == len(drafted) + 1
    assert target.asked == ([path[-1]] if whole else [])
    assert target.emitted[len(drafted) :] == [100 + path[-1]] * whole
    # A row of logits is fetched from the device once at most, and not where nothing was drafted behind it.
    assert len(set(fetched)) == len(fetched)
    assert set(fetched) <= set(parents[1:])


def row_of(probabilities: Sequence[float]) -> Callable[[int], np.ndarray]:
    return lambda row: np.log(np.array(probabilities, np.float32))


@pytest.mark.parametrize(
    ("probabilities", "temperature", "accepted"),
    [
        ([0.98, 0.02], 1.0, False),  # sure of itself: 0.09 it must be
        ([0.915, 0.085], 0.0, False),
        ([0.905, 0.095], 0.0, True),
        ([0.4, 0.6], 1e-308, True),  # beyond the largest float, once over the temperature
        ([0.6, 0.4], 1e-308, False),
        ([0.98, 0.02], 2.0, True),  # 0.125 of it at this temperature
        ([*[0.09715] * 10, 0.0285], 1.0, True),  # unsure: 0.3 * exp(-entropy) is 0.0282
        ([*[0.09725] * 10, 0.0275], 1.0, False),
    ],
)
def test_typical_threshold_by_hand(probabilities: list[float], temperature: float, accepted: bool) -> None:
    """The last token is drafted behind the root."""
    target = Target([50, 51], 9)
    drafted = len(probabilities) - 1
    path = typical([0, drafted], [0, 0], target.next_token, target.add, row_of(probabilities), temperature)
    assert (path, target.emitted) == (([0, 1], [drafted, 51]) if accepted else ([0], [50]))
