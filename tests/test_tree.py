"""graphs.tree over made-up drafters, against search."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from graphs.static_trees import EAGLE_1
from graphs.tree import TreeConfig, default_beam, grow
from tests.conftest import examples
from tests.naive import Node, best, brute_force_tree, reference_tree, static_tree

PENDING = 10**6
EAGLE_2 = TreeConfig(60, 6, 0, 10, 10, 10, wide=True)  # as its paper: ten tokens a node, depth 6


@lru_cache(maxsize=4096)
def _table(vocabulary: int, tied: bool, key: int) -> np.ndarray:
    draw = np.random.default_rng(key)
    raw = draw.normal(0, 2, vocabulary)
    if tied:
        raw = raw.round()
        # Powers of two stay exact when summed, so that equal scores are common on all levels.
        return (-np.abs(raw - raw.max()) / 4).astype(np.float32)
    return torch.log_softmax(torch.from_numpy(raw).float(), 0).numpy()


class Toy:
    """A drafter whose predictions are hashes of all they depend on: reading a wrong row, or one too many, shows."""

    def __init__(self, vocabulary: int, seed: int, tied: bool = False) -> None:
        self.vocabulary, self.seed, self.tied = vocabulary, seed, tied
        self.rows: list[tuple[int, int, int]] = []

    def __repr__(self) -> str:
        return f"Toy({self.vocabulary}, {self.seed}, {self.tied})"

    def _hash(self, *parts: object) -> int:
        return hash((self.seed, *parts)) & (2**62 - 1)  # of integers and tuples, so the same in every process

    # naive.Model
    def first(self) -> int:
        return self._hash(-1)

    def serial(self, rows: Sequence[tuple[int, int]], depth: Sequence[int]) -> list[int]:
        placed = [(*row, d) for row, d in zip(rows, depth, strict=True)]
        return [self._hash(tuple(placed[: i + 1])) for i in range(len(placed))]

    def head(self, i: int, pair: tuple[tuple[int, int], tuple[int, int]]) -> int:
        return self._hash(i, *pair)

    def log_probs(self, feature: int) -> np.ndarray:
        return _table(self.vocabulary, self.tied, feature)

    # what graphs.tree.grow calls
    def tables(self, features: Tensor, level: int = 0) -> Tensor:
        return torch.from_numpy(np.stack([self.log_probs(int(f)) for f in features.flatten()]))

    def step(self, tokens: Tensor, hidden: Tensor, slots: Tensor) -> Tensor:
        depth = self.rows[-1][2] + 1 if self.rows else 0
        self.rows += [(t, h, depth) for t, h in zip(tokens.tolist(), hidden[:, 0].tolist(), strict=True)]
        assert slots.shape == (len(tokens), len(self.rows))
        seen = [tuple(row for row, see in zip(self.rows, line, strict=True) if see) for line in slots.tolist()]
        return torch.tensor([self._hash(rows) for rows in seen])[:, None]

    def heads(self, first: Tensor, h1: Tensor, second: Tensor, h2: Tensor, count: int) -> Tensor:
        pairs = list(zip(first.tolist(), h1[:, 0].tolist(), second.tolist(), h2[:, 0].tolist(), strict=True))
        features = [[self._hash(i, (a, b), (c, d)) for a, b, c, d in pairs] for i in range(count)]
        return self.tables(torch.tensor(features)).reshape(count, len(pairs), -1)

    def grow(self, tree: TreeConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        self.rows = []
        return grow(tree, torch.tensor([PENDING]), torch.tensor([[self.first()]]), self.tables, self.step, self.heads)

    def expected(self, tree: TreeConfig) -> list[Node]:
        if tree.reference:
            return reference_tree(self, tree.rows, tree.serial_steps, tree.heads, tree.top_k, tree.head_top_k)
        return brute_force_tree(
            self, tree.rows, tree.serial_steps, tree.heads, tree.top_k, tree.head_top_k, tree.beam, tree.wide
        )


def paths(token: Tensor, parent: Tensor) -> list[tuple[int, ...]]:
    """The drafted tokens from the root to each row."""
    out: list[tuple[int, ...]] = [()]
    for row in range(1, len(token)):
        out.append((*out[int(parent[row])], int(token[row])))
    return out


def check_tree(token: Tensor, depth: Tensor, parent: Tensor, mask: Tensor, score: Tensor) -> None:
    """What holds for every tree. Parents before children make every prefix a tree."""
    rows = len(token)
    assert token.dtype == depth.dtype == parent.dtype == torch.int64
    assert mask.dtype == torch.bool
    assert score.dtype == torch.float32
    assert depth[0] == 0
    assert parent[0] == 0
    assert score[0] == 0
    for row in range(1, rows):
        above = int(parent[row])
        assert 0 <= above < row
        assert depth[row] == depth[above] + 1
        assert score[row] <= score[above]
    assert (score.diff() <= 0).all()
    for row in range(rows):
        ancestors, at = {row}, row
        while at:
            at = int(parent[at])
            ancestors.add(at)
        assert set(mask[row].nonzero()[:, 0].tolist()) == ancestors | {0}
    assert len(set(paths(token, parent))) == rows  # no path is drafted twice


@st.composite
def trees(draw: st.DrawFn, reference: bool = False, serial: tuple[int, int] = (1, 3)) -> TreeConfig:
    rows = draw(st.integers(2, 64))
    steps = draw(st.integers(*serial))
    heads = draw(st.integers(0, 5)) if steps > 1 else 0
    top_k, head_top_k = draw(st.integers(1, 16)), draw(st.integers(1, 40))
    wide = not reference and draw(st.booleans())
    return TreeConfig(
        rows, steps, heads, top_k, head_top_k, top_k if reference else draw(st.integers(1, 16)), reference, wide
    )


@st.composite
def static_trees(draw: st.DrawFn) -> TreeConfig:
    """Random paths, with gaps among the ranks, whose parents are among them; in any order but for that."""
    paths: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 30))):
        above = draw(st.sampled_from([(), *(path for path in paths if len(path) < 5)]))
        rank = draw(st.integers(0, 8))
        if (*above, rank) not in paths:
            paths.append((*above, rank))
    return TreeConfig.static(paths)


toys = st.builds(Toy, st.integers(2, 60), st.integers(0, 2**30), st.booleans())
many = examples(250)


def same(toy: Toy, tree: TreeConfig) -> None:
    """The tree grown is the tree searched for, row for row: the toys' sums are exact, and ties have an order."""
    token, depth, parent, mask, score = toy.grow(tree)
    check_tree(token, depth, parent, mask, score)
    assert token[0] == PENDING
    expected = toy.expected(tree)
    assert len(token) == 1 + len(expected) == tree.rows
    assert paths(token, parent)[1:] == [node.path for node in expected]
    assert score[1:].tolist() == [float(node.score) for node in expected]


@many
@given(trees(), toys)
@example(TreeConfig(64, 2, 5, 14, 35, 14), Toy(60, 0))
@example(TreeConfig(16, 2, 5, 14, 35, default_beam(16)), Toy(60, 1))
@example(TreeConfig(64, 3, 5, 16, 40, 16), Toy(60, 2))
@example(TreeConfig(2, 2, 5, 14, 35, 14), Toy(60, 3))
@example(TreeConfig(3, 3, 5, 14, 35, 14), Toy(60, 4))
@example(TreeConfig(64, 2, 5, 14, 35, 14), Toy(60, 5, tied=True))
@example(EAGLE_2, Toy(60, 6))
@example(EAGLE_2, Toy(60, 7, tied=True))
def test_dynamic_is_the_best_of_all_candidates(tree: TreeConfig, toy: Toy) -> None:
    same(toy, tree.fitted(toy.vocabulary))


@many
@given(st.integers(2, 12), st.integers(1, 3), st.integers(0, 5), toys)
def test_chain_is_the_likeliest_token_of_each_level(rows: int, steps: int, heads: int, toy: Toy) -> None:
    tree = TreeConfig(rows, steps, heads if steps > 1 else 0, 1, 1, 1).fitted(toy.vocabulary)
    token, depth, parent, mask, score = toy.grow(tree)
    check_tree(token, depth, parent, mask, score)
    assert parent.tolist() == [0, *range(len(token) - 1)]
    # Independently of any tree: the likeliest token of the prediction at hand, step after step.
    drafted: list[tuple[int, int]] = []
    feature = toy.first()
    for level in range(tree.rows - 1):
        if level >= steps:
            feature = toy.head(level - steps, (drafted[steps - 2], drafted[steps - 1]))
        drafted.append((best(toy.log_probs(feature), 1)[0], feature))
        if level + 1 < steps:
            feature = toy.serial(drafted, range(len(drafted)))[-1]
    assert token[1:].tolist() == [t for t, _ in drafted]
    assert tree.rows == min(rows, 1 + steps + (heads if steps > 1 else 0))


@many
@given(trees(reference=True, serial=(1, 2)), toys)
@example(TreeConfig(64, 2, 5, 14, 35, 14, True), Toy(60, 0))
@example(TreeConfig(8, 2, 5, 14, 35, 14, True), Toy(60, 1))
@example(TreeConfig(64, 2, 5, 14, 35, 14, True), Toy(60, 2, tied=True))
def test_reference_is_the_official_tree(tree: TreeConfig, toy: Toy) -> None:
    # The official code stops with an error where the vocabulary has fewer tokens than a level tries.
    assume(toy.vocabulary >= max(tree.top_k, tree.head_top_k))
    same(toy, tree.fitted(toy.vocabulary))


@many
@given(trees(reference=True, serial=(3, 3)), toys)
@example(TreeConfig(8, 3, 5, 14, 35, 14, True), Toy(60, 1))
def test_reference_with_a_third_serial_step(tree: TreeConfig, toy: Toy) -> None:
    assume(toy.vocabulary >= max(tree.top_k, tree.head_top_k))
    same(toy, tree.fitted(toy.vocabulary))


@many
@given(static_trees(), toys)
@example(TreeConfig.static(EAGLE_1), Toy(60, 0))
@example(TreeConfig.static(EAGLE_1), Toy(60, 1, tied=True))
def test_static_is_the_tokens_at_its_paths(tree: TreeConfig, toy: Toy) -> None:
    assume(any(max(path) < toy.vocabulary for path in tree.paths))
    fitted = tree.fitted(toy.vocabulary)
    token, depth, parent, mask, score = toy.grow(fitted)
    check_tree(token, depth, parent, mask, score)
    listed = static_tree(toy, [path for path in tree.paths if max(path) < toy.vocabulary])
    grown = zip(paths(token, parent)[1:], score[1:].tolist(), strict=True)
    assert sorted(grown) == sorted((node.path, float(node.score)) for node in listed)


@many
@given(static_trees(), toys, st.integers(2, 30))
def test_a_smaller_static_tree_is_the_best_of_its_paths(tree: TreeConfig, toy: Toy, rows: int) -> None:
    assume(any(max(path) < toy.vocabulary for path in tree.paths))
    fitted = replace(tree, rows=min(rows, tree.rows)).fitted(toy.vocabulary)
    token, depth, parent, mask, score = toy.grow(fitted)
    check_tree(token, depth, parent, mask, score)
    scores = sorted((float(node.score) for node in static_tree(toy, fitted.paths)), reverse=True)
    assert score[1:].tolist() == scores[: fitted.rows - 1]


class Late(Toy):
    """Flat everywhere, but for what follows the worst node that can be chosen at all together with a child.

    The bounds in graphs.tree leave out nothing only if they leave in that node, of rank R - 2 - depth.
    """

    def __init__(self, rows: int, depth: int) -> None:
        super().__init__(40, 0)
        self.rank, self.depth = rows - 2 - depth, depth

    def first(self) -> tuple[int, ...]:  # type: ignore[override]  # a feature is the path that it predicts from
        return ()

    def serial(self, rows: Sequence[tuple[int, int]], depth: Sequence[int]) -> list[tuple[int, ...]]:  # type: ignore[override]
        return [tuple(token for token, _ in rows[: i + 1]) for i in range(len(rows))]

    def log_probs(self, feature: tuple[int, ...]) -> np.ndarray:  # type: ignore[override]
        out = np.full(self.vocabulary, -20.0, np.float32)
        if len(feature) < self.depth - 1:
            out[0] = 0.0  # a single trunk down to the level in question
        elif len(feature) == self.depth - 1:
            out[:] = -3 - np.arange(self.vocabulary) / 100 if not any(feature) else -20.0
        elif feature[self.depth - 1] == self.rank:
            out[7] = 0.0
        return out

    def tables(self, features: Tensor, level: int = 0) -> Tensor:
        return torch.from_numpy(np.stack([self.log_probs(self.known[int(f)]) for f in features.flatten()]))

    def step(self, tokens: Tensor, hidden: Tensor, slots: Tensor) -> Tensor:
        out = []
        for token, made in zip(tokens.tolist(), hidden[:, 0].tolist(), strict=True):
            self.known.append((*self.known[made], token))
            out.append(len(self.known) - 1)
        return torch.tensor(out)[:, None]

    def grow(self, tree: TreeConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        self.known: list[tuple[int, ...]] = [()]
        return grow(tree, torch.tensor([PENDING]), torch.tensor([[0]]), self.tables, self.step, self.heads)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("rows", [4, 5, 8, 16, 33])
def test_the_worst_node_with_a_chosen_child_is_carried_on(rows: int, depth: int) -> None:
    toy, tree = Late(rows, depth), TreeConfig(rows, depth + 1, 0, 40, 40, 40)
    same(toy, tree.fitted(toy.vocabulary))
    assert max(len(node.path) for node in toy.expected(tree)) == depth + 1


@many
@given(trees(), toys, st.integers(2, 64))
def test_a_prefix_is_the_smaller_tree(tree: TreeConfig, toy: Toy, rows: int) -> None:
    whole = tree.fitted(toy.vocabulary)
    rows = min(rows, whole.rows)
    part = replace(tree, rows=rows).fitted(toy.vocabulary)
    assert part.rows == rows
    for name, small, large in zip(
        ["token", "depth", "parent", "mask", "score"], toy.grow(part), toy.grow(whole), strict=True
    ):
        expected = large[:rows, :rows] if name == "mask" else large[:rows]
        assert torch.equal(small, expected), name


@many
@given(trees() | trees(reference=True), toys)
@example(TreeConfig(64, 2, 0, 2, 35, 1), Toy(60, 0))
@example(TreeConfig(64, 1, 0, 14, 35, 14), Toy(9, 0))
def test_fitted_has_as_many_rows_as_candidates(tree: TreeConfig, toy: Toy) -> None:
    if tree.reference:
        assume(toy.vocabulary >= max(tree.top_k, tree.head_top_k))
    fitted = tree.fitted(toy.vocabulary)
    assert fitted.rows == 1 + len(toy.expected(tree))
    assert fitted.fitted(toy.vocabulary) == fitted
    assert fitted.top_k <= toy.vocabulary
    assert fitted.head_top_k <= toy.vocabulary
    # One cycle never walks deeper than the configuration says, and a level is as deep as it says where rows suffice.
    assert int(toy.grow(fitted)[1].max()) <= fitted.depth <= tree.serial_steps + tree.heads


@pytest.mark.parametrize(("rows", "beam"), [(2, 1), (8, 2), (16, 4), (32, 7), (64, 14), (128, 28)])
def test_default_beam(rows: int, beam: int) -> None:
    assert default_beam(rows) == beam
