"""The training loop: steps that depend on the state and their number only, so that a resumed run is the uninterrupted
one."""

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.errors import InputError

from . import parallel, state
from .batches import SPAN, Features, anchors, batch, choose, usable, wanted
from .evaluate import Evaluation, Vocabulary
from .losses import depth_weights, losses
from .model import Drafter
from .store import Text

_AVERAGE = 0.999  # of the weights that are written: the last thousand steps


@dataclass(frozen=True)
class Settings:
    """steps: in all. positions: of text in a process's part of a step. spans: of 32 anchors in it. rate: the highest
    learning rate. warmup: steps until it is reached. decay: by how much each depth's loss weighs less. hidden_weight:
    of the distance between hidden states. headed: share of the spans that the heads see. dtype: of matrix products.
    """

    steps: int
    positions: int
    spans: int
    rate: float
    warmup: int
    decay: float
    hidden_weight: float
    headed: float
    seed: int
    dtype: torch.dtype


def scale(step: int, steps: int, warmup: int) -> float:
    """The learning rate by its highest: linear warm-up, constant, and a linear decay over the last fifth."""
    last = max(1, steps // 5)
    return min(1.0, (step + 1) / max(1, warmup)) * min(1.0, 0.02 + 0.98 * (steps - step) / last)


class Training:
    """A drafter and what trains it. After ``resume`` or a fresh start, ``run`` does the steps that are left."""

    def __init__(
        self,
        drafter: Drafter,
        text: Text,
        features: Features,
        embed: Tensor,
        vocabulary: Vocabulary,
        settings: Settings,
    ) -> None:
        """embed: the target's embedding [V, H]. vocabulary: what the distributions are over."""
        self.drafter, self.text, self.features = drafter, text, features
        self.model = parallel.wrapped(drafter)
        self.embed, self.vocabulary, self.settings = embed, vocabulary, settings
        self.step = 0
        self.average = {name: t.detach().clone() for name, t in drafter.state_dict().items()}
        matrices = [p for p in drafter.parameters() if p.ndim == 2]
        others = [p for p in drafter.parameters() if p.ndim != 2]
        rate = settings.rate
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "drafter": self.drafter.state_dict(),
            "average": self.average,
            "vocabulary": self.vocabulary.ids,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def resume(self, stored: dict[str, Any]) -> None:
        self.step = stored["step"]
        self.drafter.load_state_dict(stored["drafter"])
        for name, value in stored["average"].items():
            self.average[name].copy_(value)
        for optimizer, own in zip(self.optimizers, stored["optimizers"], strict=True):
            optimizer.load_state_dict(own)

    def advance(self) -> tuple[Tensor, Tensor]:
        """One step. Returns loss and agreement of every depth, fp32 [depths]."""
        settings, depths = self.settings, self.drafter.depths
        records = usable(self.text, depths, training=True)
        if not len(records):
            raise InputError(
                f"no text is longer than {SPAN + depths + 1} tokens, which is the least to train on: give longer texts"
            )
        rng = np.random.default_rng((settings.seed, self.step, parallel.rank()))
        device = self.embed.device
        own = batch(self.text, self.features, choose(self.text, records, settings.positions, rng), str(device))
        at = anchors(own, settings.spans, depths, rng)
        rate = settings.rate * scale(self.step, settings.steps, settings.warmup)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
        hidden, valid = wanted(own, at, depths)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings.dtype == torch.bfloat16):
            embedded = F.embedding(own.ids, self.embed).to(settings.dtype)
            outs = self.model(
                embedded, own.read.to(settings.dtype), at, max(1, round(settings.headed * settings.spans))
            )
        loss, hits = losses(outs, hidden, self.vocabulary.lm_head, valid, settings.hidden_weight)
        (loss * torch.tensor(depth_weights(depths, settings.decay), device=device)).sum().backward()
        nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        keep = min(_AVERAGE, self.step / (self.step + 10))
        for name, value in self.drafter.state_dict().items():
            self.average[name].lerp_(value, 1 - keep)
        return loss.detach(), hits

    def averaged(self) -> Drafter:
        """A drafter with the averaged weights, for measuring."""
        made = deepcopy(self.drafter)
        made.load_state_dict(self.average)
        return made.eval()


@dataclass(frozen=True)
class Pace:
    """Seconds between what a run does beside training."""

    save: float
    evaluate: float
    line: float = 30.0


def run(
    training: Training,
    evaluation: Evaluation,
    file: Path,
    known: dict[str, Any],
    pace: Pace,
    report: Callable[[str], None],
    stopped: Callable[[], bool],
    saved: Callable[[], None],
) -> bool:
    """Trains to the last step, or until ``stopped``. Returns whether all steps are done.

    file: of the state. saved: called after each state that was written. Of several processes the first one writes and
    measures, and all stop after the same step.
    """
    steps, begun, first = training.settings.steps, time.monotonic(), training.step
    leads = not parallel.rank()
    last_save = last_line = begun
    last_score = -float("inf")
    losses_, hits, count = torch.zeros(()), torch.zeros(()), 0

    def store() -> None:
        if leads:
            state.save(file, {"known": known, **training.state()})
            saved()

    def measure() -> None:
        if leads:
            report(f"step {training.step:,}  {evaluation(training.averaged(), training.vocabulary)}")

    while training.step < steps and not stopped():
        loss, hit = training.advance()
        losses_, hits, count = losses_ + loss.cpu(), hits + hit.cpu(), count + 1
        now = time.monotonic()
        if now - last_line > pace.line or training.step == steps:
            left = (now - begun) / (training.step - first) * (steps - training.step)
            agreement = " ".join(f"{h:.2f}" for h in (hits / count).tolist())
            report(
                f"step {training.step:,} of {steps:,}  loss {(losses_ / count)[0]:.3f}  agreement {agreement}  "
                f"{(training.step - first) / (now - begun):.2f} steps a second  {left / 60:.0f} min left"
            )
            losses_, hits, count, last_line = torch.zeros(()), torch.zeros(()), 0, now
        if now - last_save > pace.save:
            store()
            training.features.refresh()
            last_save = time.monotonic()
        if now - last_score > pace.evaluate and training.step < steps:
            measure()
            last_score = time.monotonic()
    store()
    if training.step >= steps:
        measure()
    parallel.wait()
    return training.step >= steps
