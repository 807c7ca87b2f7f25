"""What a drafter is trained on: the target's next hidden states, and the distributions that follow from them (paper,
section 3)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_SLICE = 24 << 20  # logits that exist at once


class _Divergence(torch.autograd.Function):
    """KL(target || drafter), summed over the anchors of each depth.

    With target p, drafter q and the rows W of lm_head, the sum of p * logits is the product of the hidden state with p
    W, and the gradient with respect to the drafter's hidden state is q W - p W. So p W, which all depths share, and q W
    are all that is kept: logits exist a slice at a time, and only a softmax passes over them.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, valid: Tensor, size: int, *outs: Tensor
    ) -> tuple[Tensor, Tensor]:
        span = outs[0].shape[1]
        sums, hits = (torch.zeros(len(outs), device=hidden.device) for _ in range(2))
        gradients = [torch.zeros_like(out) for out in outs]
        for begin in range(0, hidden.shape[0], size):
            part = slice(begin, begin + size)
            rows = hidden[part].to(weight.dtype)
            share, best, normalizer = _softmax(torch.matmul(rows, weight.T), None)
            mean = torch.matmul(share, weight).float()
            del share
            entropy = (rows.float() * mean).sum(-1) - normalizer
            for depth, out in enumerate(outs):
                rows = out[part].to(weight.dtype)
                count = rows.shape[0]
                if not count:
                    continue
                place = slice(count), slice(depth, depth + span)
                real = valid[part][place].float()
                share, agree, normalizer = _softmax(torch.matmul(rows, weight.T), best[place])
                divergence = entropy[place] - (rows.float() * mean[place]).sum(-1) + normalizer
                sums[depth] += (divergence * real).sum()
                hits[depth] += (agree * real).sum()
                gradients[depth][part] = ((torch.matmul(share, weight).float() - mean[place]) * real[..., None]).to(
                    out.dtype
                )
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(hits)
        return sums, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *(own * grads[0][depth] for depth, own in enumerate(ctx.saved_tensors))


def _softmax(logits: Tensor, wanted: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax, whether its first choice is the wanted token (without one: which it is), and the logarithm of what it
    divided by."""
    share = logits.softmax(-1)
    best = share.argmax(-1) if wanted is None else wanted
    own = share.gather(-1, best[..., None])[..., 0]
    normalizer = logits.gather(-1, best[..., None])[..., 0].float() - own.float().clamp(min=1e-30).log()
    # A maximum is found several times faster than its place.
    return share, best if wanted is None else (own == share.amax(-1)).float(), normalizer


def divergence(
    outs: Sequence[Tensor], hidden: Tensor, weight: Tensor, valid: Tensor, most: int = _SLICE
) -> tuple[Tensor, Tensor]:
    """Sums of KL divergences in nats, fp32 [depths], and how often the first choices agree, fp32 [depths].

    outs: [n, S, H] of each depth, n at most N; hidden: [N, S + depths - 1, H], the target's hidden states from one
    position after the anchors; weight: lm_head [V, H], or some of its rows; valid: bool [N, S + depths - 1], which of
    those positions count. most: logits that may exist at once, of target and drafter each.
    """
    size = max(1, most // (hidden.shape[1] * weight.shape[0]))
    sums, hits = _Divergence.apply(hidden, weight, valid, size, *outs)
    return sums, hits


def losses(
    outs: Sequence[Tensor], hidden: Tensor, weight: Tensor, valid: Tensor, hidden_weight: float, most: int = _SLICE
) -> tuple[Tensor, Tensor]:
    """The loss of every depth, fp32 [depths], averaged over the anchors that count, and the share of first choices that
    agree.

    As ``divergence``; hidden_weight: of the smooth L1 distance between hidden states, beside a divergence of weight 1.
    The official code has 1 beside 0.1; a target's hidden states differ much in scale, its distributions do not.
    """
    sums, hits = divergence(outs, hidden, weight, valid, most)
    counts, distances = [], []
    for depth, out in enumerate(outs):
        ahead = slice(depth, depth + out.shape[1])
        real = valid[: out.shape[0], ahead].float()
        counts.append(real.sum().clamp(min=1))
        apart = F.smooth_l1_loss(out.float(), hidden[: out.shape[0], ahead].float(), reduction="none").mean(-1)
        distances.append((apart * real).sum())
    count = torch.stack(counts)
    return (sums + hidden_weight * torch.stack(distances)) / count, hits / count


def depth_weights(depths: int, decay: float) -> list[float]:
    """How much each depth's loss weighs: 1 for the first, and a draft that far is as much rarer."""
    return [decay**depth for depth in range(depths)]
