"""``gumiho train --family medusa|hydra|small``: their steps against the formulas, and what comes out."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import exporter.cli
import exporter.options
import exporter.recipe.sources
import runtime
from exporter.training import cli, drafters, loop, state, store, target
from exporter.training.batches import Anchors, Features
from exporter.training.evaluate import Evaluation
from exporter.training.model import Drafter
from tests.heads import NaiveHydra, NaiveMedusa, RandomHydra
from tests.training import (
    SMALL,
    SOURCE,
    before_and_after,
    not_evaluated,
    taus,
    training_of,
    write_small_target,
    write_source,
)

COUNTS = {"medusa": (0, 5), "hydra": (0, 4), "small": (2, 0)}  # layers and heads
# The others take the same loop; `make test-all` trains them too.
FAMILIES = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "medusa" else pytest.mark.exhaustive) for name in COUNTS]
)


def begun(family: str, loaded: target.Target, written: store.Text) -> tuple[Drafter, Features]:
    torch.manual_seed(1)
    drafter = drafters.made(family, *COUNTS[family], loaded.model)
    features = Features(None, written, loaded.model.model)
    drafter.begin(loaded.model, written, features, lambda _: None)
    return drafter, features


def trainee(family: str, loaded: target.Target, written: store.Text, steps: int) -> tuple[loop.Training, Evaluation]:
    drafter, features = begun(family, loaded, written)
    return training_of(drafter, loaded, features, steps, hidden_weight=0.0)


def stored(drafter: Drafter, loaded: target.Target) -> dict[str, torch.Tensor]:
    """What a checkpoint would hold, but in fp32."""
    embed, lm_head = loaded.model.model.embed_tokens.weight, loaded.model.lm_head.weight
    own = {drafter.stored_as(name): value for name, value in drafter.state_dict().items()}
    return {name: value.float() for name, value in drafter.besides(None, embed, lm_head).items()} | own


@pytest.mark.parametrize("family", ["medusa", "hydra"])
@torch.no_grad()
def test_every_head_is_that_of_the_formulas(family: str, loaded: target.Target) -> None:
    """From a row of the target and the text's tokens behind it, in the naive drafters of the graphs' tests."""
    drafter = drafters.made(family, *COUNTS[family], loaded.model)
    torch.manual_seed(3)
    for parameter in drafter.parameters():
        parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    table, lm_head = loaded.model.model.embed_tokens.weight.detach(), loaded.model.lm_head.weight.detach()
    ids, read = torch.randint(0, 2048, (2, 30)), torch.randn(2, 30, table.shape[1])
    at = Anchors(torch.tensor([0, 1]), torch.tensor([[3, 4, 5], [10, 11, 12]]))
    outs = drafter(F.embedding(ids, table), read, at, 1)
    weights = stored(drafter, loaded) | {f"{i}.1.weight": lm_head for i in range(5)}
    naive: Any = NaiveMedusa(weights, 1)
    if family == "hydra":
        naive = NaiveHydra(RandomHydra())
        naive.state, naive.embedding, naive.made.blocks = weights, table, 0
    for n in range(2):
        for s in range(3):
            text, place = int(at.record[n]), int(at.place[n, s])
            path = tuple(int(token) for token in ids[text, place + 1 :])
            naive.read([path[0]], read[text, place : place + 1])
            for i, out in enumerate(outs):
                expected = torch.from_numpy(naive.log_probs(i if family == "medusa" else path[1 : 1 + i]))
                torch.testing.assert_close((lm_head @ out[n, s]).log_softmax(0), expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_small_model_begins_as_the_targets_first_layers(
    tmp_path: Path, loaded: target.Target, written: store.Text
) -> None:
    """As transformers reads its checkpoint, and as it is trained: what it predicts behind each anchor's next token."""
    drafter, _ = begun("small", loaded, written)
    embed, lm_head = loaded.model.model.embed_tokens.weight, loaded.model.lm_head.weight
    state.write_checkpoint(tmp_path, drafter, drafter.state_dict(), None, embed, lm_head)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs, own = loaded.model.model.layers[1].state_dict(), model.model.layers[1].state_dict()
    for name, value in own.items():
        torch.testing.assert_close(value, theirs[name].float(), rtol=1e-3, atol=1e-3)
    ids, at = torch.randint(0, 2048, (2, 30)), Anchors(torch.tensor([1]), torch.tensor([[3, 4, 5]]))
    (out,) = drafter(F.embedding(ids, embed), torch.zeros(2, 30, embed.shape[1]), at, 1)
    torch.testing.assert_close(out[0] @ lm_head.T, model(ids).logits[1, 4:7], rtol=0.02, atol=0.02)


@FAMILIES
def test_a_few_steps_reduce_the_loss_on_held_out_text(family: str, loaded: target.Target, written: store.Text) -> None:
    steps = 12 if family == "medusa" else 30
    before, after = before_and_after(*trainee(family, loaded, written, steps))
    assert sum(after.loss) < 0.99 * sum(before.loss)  # a Hydra begins with a fit, and gains 2% in 30 steps
    assert 1 <= after.tau[4] <= 4


@pytest.mark.parametrize("family", ["medusa", "hydra", pytest.param("small", marks=pytest.mark.exhaustive)])
def test_trees_are_those_of_the_runtime(family: str, tmp_path: Path) -> None:
    """The same trees, in one place after another of a text that the target wrote."""
    folder = write_small_target(tmp_path / "target")
    loaded = target.load(str(folder))
    training, _ = trainee(family, loaded, write_source(tmp_path / "source", loaded), steps=2)
    while training.step < 2:
        training.advance()
    walked, decoded = taus(tmp_path, loaded, training, training.averaged(), folder)
    assert walked == pytest.approx(decoded, rel=0.25)
    assert (walked > 1.5) == (family != "medusa")  # which begins with heads that know nothing


@FAMILIES
def test_what_comes_out_exports_and_is_lossless(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a draft vocabulary. Another family trained in the same folder begins anew, on the same text."""
    monkeypatch.setattr(Evaluation, "__call__", not_evaluated)
    out, pair = tmp_path / "drafter", ["--target", str(write_small_target(tmp_path / "target"))]
    arguments = [
        *pair,
        "--data",
        str(SOURCE),
        *SMALL,
        "--steps",
        "2",
        "--draft-vocab",
        "1500",
        "--work",
        str(tmp_path / "work"),
    ]
    assert cli.main([*arguments, "--family", family, "--out", str(out)]) == 0
    opened = exporter.recipe.sources.open_pair(exporter.options.config_of(["--ckpt", str(out), *pair]))
    assert (opened.family, opened.drafted) == (family, 1500)
    assert exporter.cli.main(["--ckpt", str(out), *pair, "--out", str(tmp_path / "bundle")]) == 0
    with runtime.load(tmp_path / "bundle") as model:
        drafted = "".join(model.generate("def first(items):\n", max_new_tokens=48, lookup=False, rows=8))
        assert drafted == "".join(model.generate("def first(items):\n", max_new_tokens=48, speculate=False))
    capsys.readouterr()
    text = (tmp_path / "work" / "text" / "tokens.bin").read_bytes()
    assert cli.main([*arguments, "--family", "eagle", "--out", str(tmp_path / "other")]) == 0
    assert "goes on" not in capsys.readouterr().out
    assert (tmp_path / "work" / "text" / "tokens.bin").read_bytes() == text
