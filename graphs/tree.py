"""Candidates -> the R-row tree, from TopK, Gather and comparisons on static shapes, so that it grows inside the graph.

Node scores are cumulative log-probabilities under the drafter. A level keeps its best nodes; the best ``beam`` of a serial
level are carried on; the tree is the root and the best R - 1 nodes of all levels, best first. Two facts carry the rest:

- A node's score never exceeds its parent's and ties go to the lower index, so a parent always comes before its children
  and every prefix of the rows is itself the best tree of that size.
- A chosen node of depth d has d - 1 chosen ancestors, so of each level only the best R - d nodes can be chosen. Keeping
  those makes the choice exact over all candidates, at every R: the serial levels' best ``top_k`` nodes, and every
  continuation by the heads of the nodes carried on.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .dialects.plain import Plain


@dataclass(frozen=True)
class TreeConfig:
    """The shape of the draft tree (paper, section 3.3; reference code, ``topK_genrate``).

    rows: R, root included. serial_steps: levels drafted by the serial layers. heads: levels drafted by the heads. top_k:
    tokens tried per serial node, and nodes of a serial level. head_top_k: tokens tried per path and head. beam: nodes of a
    serial level that are carried on, into the next serial step and into the heads; the drafter's cost grows with it.
    reference: the official code's two departures from the method (siblings of a serial step attend causally to each other;
    the heads pair level-1 and level-2 tokens by rank instead of by parenthood), and its pruning to ``head_top_k`` nodes a
    head level.
    """

    rows: int
    serial_steps: int
    heads: int
    top_k: int
    head_top_k: int
    beam: int
    reference: bool = False

    @property
    def depth(self) -> int:
        """Drafted tokens on the longest path that R rows can hold."""
        return min(self.serial_steps + self.heads, self.rows - 1)

    def _width(self, depth: int) -> int:
        """The most nodes a level keeps. The reference code's serial rows see one another, so all of them stay, whether the
        tree can hold them or not."""
        if depth <= self.serial_steps:
            return self.top_k if self.reference else min(self.top_k, self.rows - depth)
        return min(self.head_top_k, self.rows - depth) if self.reference else self.rows - depth

    def expanded(self, depth: int) -> int:
        """How many nodes of serial level ``depth`` are carried on: of those that can be chosen together with a child."""
        return min(self.beam, self.kept(depth), self.top_k if self.reference else self.rows - 1 - depth)

    def tried(self, depth: int) -> int:
        """How many tokens each node of the level before tries at level ``depth``."""
        return min(self.top_k if depth <= self.serial_steps else self.head_top_k, self._width(depth))

    def kept(self, depth: int) -> int:
        """How many nodes level ``depth`` keeps."""
        if depth == 1:
            return self.tried(1)
        parents = self.expanded(depth - 1) if depth <= self.serial_steps + 1 else self.kept(depth - 1)
        return min(parents * self.tried(depth), self._width(depth))

    def fitted(self, vocabulary: int) -> "TreeConfig":
        """The same tree with no more tokens per node, and no more rows, than there are candidates."""
        small = replace(self, top_k=min(self.top_k, vocabulary), head_top_k=min(self.head_top_k, vocabulary))
        candidates = sum(small.kept(d) for d in range(1, small.depth + 1))
        return replace(small, rows=min(small.rows, 1 + candidates))


def default_beam(rows: int) -> int:
    """The official 14 at 64 rows, and in proportion for smaller trees, whose cost must stay small."""
    return max(1, round(14 * rows / 64))


def default_depth(rows: int) -> int:
    """Levels worth drafting: 8 with 64 rows, more than there are heads for, and one fewer for every half. With 8 rows one path in a
    thousand is accepted to the fifth (demo pair)."""
    return 2 + rows.bit_length() - 1


# (tokens [k], parents' hidden [k, H], which slot sees which bool [k, n]) -> y [k, H]
Step = Callable[[Tensor, Tensor, Tensor], Tensor]
# (token 1, its hidden, token 2, its hidden), each [P] or [P, H], and how many heads -> log-probabilities [heads, P, V]
Heads = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


@dataclass
class _Nodes:
    """Every candidate so far, the root first. parent: index among all candidates; depth is known when tracing."""

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
    tree: TreeConfig, pending: Tensor, hidden: Tensor, log_probs: Callable[[Tensor], Tensor], step: Step, heads: Heads,
    token_ids: Tensor | None = None, ops: type[Plain] = Plain,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Grows the tree below the pending token.

    pending: int64 [1]; hidden: [1, H], the drafter's prediction at the pending token; log_probs: [n, H] -> fp32 [n, V].
    token_ids: int64 [V], the target's tokens that those are of, where they are not all of them.
    Returns tokens, depth, parent (int64 [R]), mask (bool [R, R]) and score (fp32 [R]); parents come before children.
    """
    device = pending.device
    nodes = _Nodes([pending], [torch.zeros(1, device=device)], [torch.zeros(1, dtype=torch.int64, device=device)], [0])

    def target_id(index: Tensor) -> Tensor:
        return index if token_ids is None else ops.gather(token_ids, index)

    def select(options: Tensor, tokens: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keeps the level's best nodes: scores, tokens, and the rank of each one's parent among the expanded nodes."""
        score, index = ops.top_k(options.reshape(-1), tree.kept(depth))
        # A table instead of a quotient: MIGraphX up to ROCm 7.2.4 computes int64 in fp32 on a GPU and leaves out the rounding.
        parents = torch.arange(options.shape[0], device=device)[:, None].expand_as(options).reshape(-1)
        return score, target_id(ops.gather(tokens.reshape(-1), index)), ops.gather(parents, index)

    # Level 1: the best tokens of the serial step that has just read the newly accepted tokens.
    score, token = (x[0] for x in ops.top_k(log_probs(hidden), tree.tried(1)))
    token = target_id(token)
    nodes.add(token, score, torch.zeros_like(token), 1)
    first, made = 1, hidden.expand(token.shape[0], -1)  # where the level begins among the nodes; what drafted each token
    previous: tuple[Tensor, Tensor] | None = None
    slots = torch.zeros(token.shape[0], 0, dtype=torch.bool, device=device)

    for depth in range(2, min(tree.serial_steps, tree.depth) + 1):
        width, tried = tree.expanded(depth - 1), tree.tried(depth)
        own = torch.ones(width, width, dtype=torch.bool, device=device)
        own = own.tril() if tree.reference else own & torch.eye(width, dtype=torch.bool, device=device)
        before = torch.ones_like(slots[:width]) if tree.reference else slots[:width]
        slots = torch.cat((before, own), dim=1)
        y = step(token[:width], made[:width], slots)
        previous = token, made
        log_p, tokens = ops.top_k(log_probs(y), tried)
        score, token, parent = select(score[:width, None] + log_p, tokens, depth)
        nodes.add(token, score, parent + first, depth)
        first += previous[0].shape[0]
        made, slots = ops.gather(y, parent), ops.gather(slots, parent)
        origin = torch.arange(token.shape[0], device=device) if tree.reference else parent

    if tree.depth > tree.serial_steps:
        assert previous is not None
        width, count = tree.expanded(tree.serial_steps), tree.depth - tree.serial_steps
        pair = origin[:width]
        first_token, first_made = ops.gather(previous[0], pair), ops.gather(previous[1], pair)
        log_p, tokens = ops.top_k(
            heads(first_token, first_made, token[:width], made[:width], count), tree.tried(tree.serial_steps + 1)
        )
        score, path = score[:width], torch.arange(width, device=device)
        kept = token.shape[0]
        for i in range(count):
            depth = tree.serial_steps + 1 + i
            tried = tree.tried(depth)
            options = score[:, None] + ops.gather(log_p[i], path)[:, :tried]
            score, token, parent = select(options, ops.gather(tokens[i], path)[:, :tried], depth)
            nodes.add(token, score, parent + first, depth)
            first, kept = first + kept, token.shape[0]
            path = ops.gather(path, parent)

    return _rows(tree, nodes, ops)


def _rows(tree: TreeConfig, nodes: _Nodes, ops: type[Plain]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Chooses the best R - 1 candidates and renumbers their parents."""
    scores = torch.cat(nodes.score)
    device = scores.device
    best = ops.best(scores[1:], tree.rows - 1)
    chosen = torch.cat((torch.zeros_like(best[:1]), best + 1))
    row = torch.arange(tree.rows, device=device)

    # Sums of floats in place of a maximum and an "any": not every backend has those for these types.
    parent_node = ops.gather(torch.cat(nodes.parent), chosen)
    at = (parent_node[:, None] == chosen[None, :]).float() * row
    parent = at.sum(1).to(torch.int64)
    ancestors = [row]
    for _ in range(tree.depth):
        ancestors.append(ops.gather(parent, ancestors[-1]))
    mask = (torch.stack(ancestors)[:, :, None] == row).float().sum(0) > 0

    token = ops.gather(torch.cat(nodes.token), chosen)
    depth = ops.gather(torch.tensor(nodes.depth, device=device), chosen)
    return token, depth, parent, mask, ops.gather(scores, chosen)
