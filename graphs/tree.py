"""Builds the draft tree of R rows inside the graph, with TopK, Gather and comparisons on static shapes.

The score of a node is its cumulative log-probability under the drafter. Each level keeps its best nodes. Only the best
``beam`` nodes of a serial level are expanded. The tree consists of the root and the best R - 1 nodes of all levels,
best first. Two facts make this exact:

- A node's score never exceeds its parent's, and ties go to the lower index. So a parent always comes before its
  children, and every prefix of the rows is itself the best tree of that size.
- A chosen node of depth d has d - 1 chosen ancestors, so only the best R - d nodes of each level can be chosen. Keeping
  those makes the choice exact over all candidates at every R: the best ``top_k`` nodes of the serial levels, or every
  continuation of the expanded nodes, and every continuation of those by the heads.

A static tree has fixed ``paths`` instead, such as EAGLE-1's. Its candidates are the tokens at those paths, of which the
best R - 1 are chosen in the same way: all of them, or the best smaller tree among them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .dialects.plain import Plain

Path = tuple[int, ...]  # ranks


@dataclass(frozen=True)
class TreeConfig:
    """The shape of the draft tree (paper, section 3.3; reference code, ``topK_genrate``).

    rows: R, root included. serial_steps: levels drafted by the serial layers; if there are heads, 0 or at least 2.
    heads: levels drafted by the heads. top_k: tokens tried per serial node, and nodes of a serial level. head_top_k:
    tokens tried per path and head. beam: nodes of a serial level that are expanded by the next serial step or the
    heads; the drafter's cost grows with it. reference: reproduces the official code, which differs from the paper in
    two ways (the siblings of a serial step attend causally to each other; the heads pair level-1 and level-2 tokens by
    rank instead of by parent) and keeps only ``head_top_k`` nodes per head level. wide: candidates are all tokens that
    a serial level tries, not the best ``top_k``, as in EAGLE-2 (arXiv 2406.16858, section 4.2). paths: of a static
    tree; every node's rank among its parent's children, from level 1 on.
    """

    rows: int
    serial_steps: int
    heads: int
    top_k: int
    head_top_k: int
    beam: int
    reference: bool = False
    wide: bool = False
    paths: tuple[Path, ...] = ()

    @staticmethod
    def static(paths: Sequence[Path], heads: bool = False) -> "TreeConfig":
        """A tree of fixed paths. The parent of every path is another path or the root. heads: whether heads draft all
        levels, instead of serial steps."""
        levels, top_k = max(map(len, paths)), 1 + max(map(max, paths))
        expanded = Counter(len(parent) for parent in {path[:-1] for path in paths})
        steps = (0, levels) if heads else (levels, 0)
        return TreeConfig(
            1 + len(paths), *steps, top_k, top_k if heads else 1, beam=max(expanded.values()), paths=tuple(paths)
        )

    def static_level(self, depth: int) -> list[Path]:
        """The paths of one level; those with children come first."""
        parents = {path[:-1] for path in self.paths}
        return sorted((path for path in self.paths if len(path) == depth), key=lambda path: path not in parents)

    @property
    def depth(self) -> int:
        """Drafted tokens on the longest path that R rows can hold."""
        return min(self.serial_steps + self.heads, self.rows - 1)

    @property
    def is_chain(self) -> bool:
        """Whether every level has only the best token."""
        return self.rows == 1 + self.depth and all(self.tokens_per_node(depth) == 1 for depth in range(1, self.rows))

    def _largest_level(self, depth: int) -> int:
        """The most nodes that a level keeps. In the reference code the rows of a serial step attend to each other, so
        it keeps all of them, even those that the tree cannot hold."""
        if depth <= self.serial_steps and not self.wide:
            return self.top_k if self.reference else min(self.top_k, self.rows - depth)
        return min(self.head_top_k, self.rows - depth) if self.reference else self.rows - depth

    def expanded_nodes(self, depth: int) -> int:
        """How many nodes of serial level ``depth`` are expanded: only nodes that can be chosen together with a child.
        Level 0 is the root."""
        if self.paths:
            return len({path[:-1] for path in self.static_level(depth + 1)})
        if depth == 0:
            return 1
        return min(self.beam, self.level_size(depth), self.top_k if self.reference else self.rows - 1 - depth)

    def tokens_per_node(self, depth: int) -> int:
        """How many tokens are tried at level ``depth`` for each node of the previous level."""
        if self.paths:
            return 1 + max(path[-1] for path in self.static_level(depth))
        return min(self.top_k if depth <= self.serial_steps else self.head_top_k, self._largest_level(depth))

    def level_size(self, depth: int) -> int:
        """How many nodes level ``depth`` keeps."""
        if self.paths:
            return len(self.static_level(depth))
        if depth == 1:
            return self.tokens_per_node(1)
        parents = self.expanded_nodes(depth - 1) if depth <= self.serial_steps + 1 else self.level_size(depth - 1)
        return min(parents * self.tokens_per_node(depth), self._largest_level(depth))

    def fitted(self, vocabulary: int) -> "TreeConfig":
        """The same tree, with tokens per node and rows limited to the number of candidates."""
        if self.paths:
            whole = TreeConfig.static([path for path in self.paths if max(path) < vocabulary], self.heads > 0)
            return replace(whole, rows=min(self.rows, whole.rows))
        small = replace(self, top_k=min(self.top_k, vocabulary), head_top_k=min(self.head_top_k, vocabulary))
        candidates = sum(small.level_size(d) for d in range(1, small.depth + 1))
        return replace(small, rows=min(small.rows, 1 + candidates))


def default_beam(rows: int, widest: int = 14) -> int:
    """The official beam, Gumiho's of 14 at 64 rows, scaled down for smaller trees to keep drafting cheap."""
    return max(1, round(widest * rows / 64))


def default_depth(rows: int) -> int:
    """Levels that are worth drafting: 8 with 64 rows (more than the 7 that Gumiho drafts), one fewer each time the rows
    halve.

    With 8 rows, one path in a thousand is accepted up to level 5 (demo pair).
    """
    return 2 + rows.bit_length() - 1


# (tokens [k], parents' hidden [k, H], attention mask over the serial rows bool [k, n]) -> y [k, H]
Step = Callable[[Tensor, Tensor, Tensor], Tensor]
# (token 1, its hidden, token 2, its hidden), each [P] or [P, H], and the number of heads -> log-probabilities [heads,
# P, V]. Without serial steps, both tokens are the pending one, with the hidden row given to ``grow``.
Heads = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


@dataclass
class _Nodes:
    """All candidates so far, the root first. parent: index among all candidates. depth: a list, as it is known when
    tracing."""

    token: list[Tensor]
    score: list[Tensor]
    parent: list[Tensor]
    depth: list[int]

    def add(self, token: Tensor, score: Tensor, parent: Tensor, depth: int) -> None:
        self.token.append(token)
        self.score.append(score)
        self.parent.append(parent)
        self.depth += [depth] * token.shape[0]


def grow(
    tree: TreeConfig,
    pending: Tensor,
    hidden: Tensor,
    log_probs: Callable[[Tensor, int], Tensor],
    step: Step,
    heads: Heads,
    token_ids: Tensor | None = None,
    ops: type[Plain] = Plain,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Grows the draft tree from the pending token.

    pending: int64 [1]; hidden: [1, H], the drafter's prediction at the pending token; log_probs: [n, H] and the level
    that they draft, from 1 on -> fp32 [n, V]. token_ids: int64 [V], the target's ids of the V columns if the drafter
    has its own vocabulary, else None. Returns tokens, depth, parent (int64 [R]), mask (bool [R, R]) and score (fp32
    [R]); parents come before children.
    """
    device = pending.device
    nodes = _Nodes([pending], [torch.zeros(1, device=device)], [torch.zeros(1, dtype=torch.int64, device=device)], [0])
    levels = _Levels(tree, nodes, _Level(0, pending, nodes.score[0], hidden), ops, token_ids)
    if tree.serial_steps:
        levels.first(log_probs(hidden, 1))
    levels.serial(log_probs, step)
    if tree.depth > tree.serial_steps:
        levels.parallel(heads)
    return _rows(tree, nodes, ops)


@dataclass
class _Level:
    """The last level's nodes. first: the index of the first one. drafted_by: the hidden row that drafted each token."""

    first: int
    token: Tensor
    score: Tensor
    drafted_by: Tensor


class _Levels:
    """Adds levels to the candidates. origin: for each node of the last level, the rank of the node in the level above
    whose token and row the heads read."""

    def __init__(
        self, tree: TreeConfig, nodes: _Nodes, root: _Level, ops: type[Plain], token_ids: Tensor | None
    ) -> None:
        self._tree, self._nodes, self._last, self._ops, self._token_ids = tree, nodes, root, ops, token_ids
        self._device = root.token.device
        self._above = root.token, root.drafted_by  # tokens of the level above the last, and the rows that drafted them
        self._origin = torch.zeros_like(root.token)

    def first(self, log_probs: Tensor) -> None:
        """Level 1: the best tokens of the serial step that has just read the accepted tokens. log_probs: fp32 [1,
        V]."""
        root = self._last
        score, token = self._ops.top_k(log_probs, self._tree.tokens_per_node(1))
        if self._tree.paths:
            score, token, _ = self._select(score, token, 1)
        else:
            score, token = score[0], self._target_id(token[0])
        self._nodes.add(token, score, torch.zeros_like(token), 1)
        self._last = _Level(1, token, score, root.drafted_by.expand(token.shape[0], -1))
        self._above, self._origin = (token, self._last.drafted_by), torch.zeros_like(token)

    def serial(self, log_probs: Callable[[Tensor, int], Tensor], step: Step) -> None:
        """The levels from 2 on that serial steps draft, one by one."""
        tree, ops = self._tree, self._ops
        visible = torch.zeros(self._last.token.shape[0], 0, dtype=torch.bool, device=self._device)
        for depth in range(2, min(tree.serial_steps, tree.depth) + 1):
            last, width = self._last, tree.expanded_nodes(depth - 1)
            siblings = torch.ones(width, width, dtype=torch.bool, device=self._device)
            siblings = (
                siblings.tril()
                if tree.reference
                else siblings & torch.eye(width, dtype=torch.bool, device=self._device)
            )
            ancestors = torch.ones_like(visible[:width]) if tree.reference else visible[:width]
            visible = torch.cat((ancestors, siblings), dim=1)
            y = step(last.token[:width], last.drafted_by[:width], visible)
            self._above = last.token, last.drafted_by
            log_p, tokens = ops.top_k(log_probs(y, depth), tree.tokens_per_node(depth))
            score, token, parent = self._select(last.score[:width, None] + log_p, tokens, depth)
            self._nodes.add(token, score, parent + last.first, depth)
            self._last = _Level(last.first + last.token.shape[0], token, score, ops.gather(y, parent))
            visible = ops.gather(visible, parent)
            self._origin = torch.arange(token.shape[0], device=self._device) if tree.reference else parent

    def parallel(self, heads: Heads) -> None:
        """The levels that heads draft; all continue the last level of the serial steps."""
        tree, ops, last = self._tree, self._ops, self._last
        width, count = tree.expanded_nodes(tree.serial_steps), tree.depth - tree.serial_steps
        pair = self._origin[:width]
        first_token, first_hidden = ops.gather(self._above[0], pair), ops.gather(self._above[1], pair)
        log_p, tokens = ops.top_k(
            heads(first_token, first_hidden, last.token[:width], last.drafted_by[:width], count),
            max(tree.tokens_per_node(depth) for depth in range(tree.serial_steps + 1, tree.depth + 1)),
        )
        score, path = last.score[:width], torch.arange(width, device=self._device)
        first, size = last.first, last.token.shape[0]
        for i in range(count):
            depth = tree.serial_steps + 1 + i
            per_node = tree.tokens_per_node(depth)
            options = score[:, None] + ops.gather(log_p[i], path)[:, :per_node]
            score, token, parent = self._select(options, ops.gather(tokens[i], path)[:, :per_node], depth)
            self._nodes.add(token, score, parent + first, depth)
            first, size = first + size, token.shape[0]
            path = ops.gather(path, parent)

    def _select(self, options: Tensor, tokens: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keeps the level's best nodes, or those of a static tree. Returns their scores, tokens, and parents' ranks
        among the expanded nodes."""
        tree, ops = self._tree, self._ops
        if tree.paths:
            above = {path: rank for rank, path in enumerate(tree.static_level(depth - 1) if depth > 1 else [()])}
            places = [above[path[:-1]] * options.shape[1] + path[-1] for path in tree.static_level(depth)]
            index = torch.tensor(places, device=self._device)
            score = ops.gather(options.reshape(-1), index)
        else:
            score, index = ops.top_k(options.reshape(-1), tree.level_size(depth))
        # A table instead of a division: on GPUs, MIGraphX up to ROCm 7.2.4 computes int64 in fp32 without rounding.
        parents = torch.arange(options.shape[0], device=self._device)[:, None].expand_as(options).reshape(-1)
        return score, self._target_id(ops.gather(tokens.reshape(-1), index)), ops.gather(parents, index)

    def _target_id(self, index: Tensor) -> Tensor:
        return index if self._token_ids is None else self._ops.gather(self._token_ids, index)


def _rows(tree: TreeConfig, nodes: _Nodes, ops: type[Plain]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Chooses the best R - 1 candidates and renumbers their parents."""
    scores = torch.cat(nodes.score)
    device = scores.device
    best = ops.best(scores[1:], tree.rows - 1)
    chosen = torch.cat((torch.zeros_like(best[:1]), best + 1))
    row = torch.arange(tree.rows, device=device)

    # Sums of floats instead of ArgMax and "any", which not every backend has for these types.
    parent_node = ops.gather(torch.cat(nodes.parent), chosen)
    parent_row = (parent_node[:, None] == chosen[None, :]).float() * row
    parent = parent_row.sum(1).to(torch.int64)
    ancestors = [row]
    for _ in range(tree.depth):
        ancestors.append(ops.gather(parent, ancestors[-1]))
    mask = (torch.stack(ancestors)[:, :, None] == row).float().sum(0) > 0

    token = ops.gather(torch.cat(nodes.token), chosen)
    depth = ops.gather(torch.tensor(nodes.depth, device=device), chosen)
    return token, depth, parent, mask, ops.gather(scores, chosen)
