"""How good a drafter is on held-out text: agreement of first choices by depth, and tau of the trees it would grow
there."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graphs.tree import TreeConfig, grow
from runtime.decoding.acceptance import accept_path

from ..recipe.trees import usual_tree
from .batches import Batch, Features, anchors, batch, usable, wanted
from .losses import divergence
from .model import Drafter
from .store import ANSWER, GREEDY, Text


@dataclass(frozen=True)
class Vocabulary:
    """What is drafted. lm_head: rows [N, H] in the precision to compute in; ids: the tokens they are of, int64 [N],
    None for all."""

    lm_head: Tensor
    ids: Tensor | None


@dataclass(frozen=True)
class Score:
    """loss: KL in nats by depth; agreement: share of first choices by depth; tau: by R. tau is NaN without text to
    measure it on."""

    loss: list[float]
    agreement: list[float]
    tau: dict[int, float]

    def __str__(self) -> str:
        agreement = " ".join(f"{a:.3f}" for a in self.agreement)
        taus = ", ".join(f"{tau:.2f} at R = {rows}" for rows, tau in self.tau.items())
        return f"held out: loss {self.loss[0]:.3f}  agreement {agreement}  tau {taus}"


class Evaluation:
    """The same held-out text each time.

    Agreement: at random places in answers, with the text's own tokens before them. tau: trees as the runtime grows
    them, walked along the answer that the target wrote at temperature 0 (any answer, if there is none): the accepted
    path is what the answer holds, as it would be in decoding, since such an answer is the target's own first choice at
    every place. Texts end where the record does.
    """

    def __init__(
        self,
        text: Text,
        features: Features,
        embed: Tensor,
        full: Tensor,
        texts: int = 12,
        most: int = 128,
        rows: Sequence[int] = (8, 64),
    ) -> None:
        """embed, full: the target's embedding and lm_head [V, H]. texts: for tau; most: tokens of each."""
        self.text, self.features, self.embed, self.full = text, features, embed, full
        self.texts, self.most, self.rows = texts, most, rows

    @torch.no_grad()
    def __call__(self, drafter: Drafter, vocabulary: Vocabulary) -> Score:
        depths = drafter.depths
        records = usable(self.text, depths, training=False)
        if not len(records):
            nan = float("nan")
            return Score([nan] * depths, [nan] * depths, dict.fromkeys(self.rows, nan))
        rng = np.random.default_rng(0)
        chosen = rng.permutation(records)[:32].tolist()
        sums, hits, counts = (torch.zeros(depths) for _ in range(3))
        for begin in range(0, len(chosen), 4):
            own = batch(self.text, self.features, chosen[begin : begin + 4], str(self.embed.device))
            at = anchors(own, 8, depths, rng)
            outs = self._outs(drafter, own, at)
            hidden, valid = wanted(own, at, depths)
            lost, hit = divergence(outs, hidden, self.full, valid)
            sums, hits = sums + lost.cpu(), hits + hit.cpu()
            counts += torch.stack([valid[:, d : d + at.place.shape[1]].sum() for d in range(depths)]).cpu()
        return Score((sums / counts).tolist(), (hits / counts).tolist(), self._taus(drafter, vocabulary, chosen))

    def _outs(self, drafter: Drafter, own: Batch, at: object) -> list[Tensor]:
        embedded = torch.nn.functional.embedding(own.ids, self.embed).float()
        return drafter(embedded, own.read.float(), at, own.ids.shape[0] * 8)

    def _taus(self, drafter: Drafter, vocabulary: Vocabulary, records: Sequence[int]) -> dict[int, float]:
        greedy = [r for r in records if (self.text.record(r) & GREEDY).any()]
        runs = greedy or list(records)
        totals = dict.fromkeys(self.rows, (0, 0))
        for record in runs[: self.texts]:
            own = batch(self.text, self.features, [record], str(self.embed.device))
            chosen = (self.text.record(record) & (GREEDY if greedy else ANSWER)) != 0
            begin = max(1, int(chosen.argmax()))
            stop = begin
            while stop < min(len(chosen), begin + self.most) and chosen[stop]:
                stop += 1
            walk = Walk(drafter, own, self.embed, vocabulary)
            for rows in self.rows:
                tokens, cycles = walk.run(rows, begin, stop)
                totals[rows] = totals[rows][0] + tokens, totals[rows][1] + cycles
        return {rows: tokens / cycles if cycles else float("nan") for rows, (tokens, cycles) in totals.items()}


class Walk:
    """Speculative decoding of a text that is known already: only the drafter runs."""

    def __init__(self, drafter: Drafter, own: Batch, embed: Tensor, vocabulary: Vocabulary) -> None:
        """own: one text."""
        self.drafter, self.embed, self.vocabulary = drafter, embed, vocabulary
        self.ids: list[int] = own.ids[0].tolist()
        embedded = torch.nn.functional.embedding(own.ids, embed).float()
        self.seen = drafter.read_text(embedded, own.read.float())

    def run(self, rows: int, begin: int, stop: int) -> tuple[int, int]:
        """Decodes the tokens from ``begin``, which the prompt's pass gives, to before ``stop``. Returns tokens and
        cycles."""
        own = self.drafter
        tree = usual_tree(own.family, rows, own.heads, levels=own.levels).fitted(self.vocabulary.lm_head.shape[0])
        pending, cycles, answer = begin, 0, iter(self.ids[begin + 1 : stop])
        while pending + 1 < stop:
            tokens, parents = self.grow(tree, pending - 1)
            pending += len(accept_path(tokens, parents, lambda _: next(answer, None)))
            cycles += 1
        return stop - 1 - begin, cycles

    @torch.no_grad()
    def grow(self, tree: TreeConfig, place: int) -> tuple[list[int], list[int]]:
        """The tokens and parents of the tree below the token after ``place``."""
        drafter = self.drafter

        def log_probs(y: Tensor) -> Tensor:
            head = self.vocabulary.lm_head
            return torch.matmul(y.to(head.dtype), head.T).float().log_softmax(-1)

        def heads(first: Tensor, h1: Tensor, second: Tensor, h2: Tensor, count: int) -> Tensor:
            return log_probs(drafter.head_rows(self.embed[first].float(), h1, self.embed[second].float(), h2, count))

        pending = torch.tensor([self.ids[place + 1]], device=self.embed.device)
        row, step = drafter.grow_from(self.seen, place, pending, self.embed)
        tokens, _, parents, _, _ = grow(
            tree, pending, row, lambda y, _: log_probs(drafter.predicted(y)), step, heads, self.vocabulary.ids
        )
        return tokens.tolist(), parents.tolist()
