"""``gumiho train --family eagle3``: its steps against the formulas, and what comes out."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import exporter.cli
import exporter.options
import exporter.recipe.sources
import runtime
from exporter.training import cli, loop, start, store, target
from exporter.training.batches import Anchors, Features, batch
from exporter.training.drafters import eagle3
from exporter.training.evaluate import Evaluation
from tests.naive import NaiveEagle3
from tests.training import SMALL, SOURCE, before_and_after, not_evaluated, taus, training_of, write_small_target

TAPS = (0, 1, 3)


def trainee(loaded: target.Target, written: store.Text, steps: int) -> tuple[loop.Training, Evaluation]:
    torch.manual_seed(1)
    drafter = eagle3.Eagle3(start.config(loaded.model, 1), TAPS)
    features = Features(None, written, loaded.model.model, TAPS)
    drafter.begin(loaded.model, written, features, lambda _: None)
    return training_of(drafter, loaded, features, steps, hidden_weight=0.0)


def test_taps_of_the_official_code() -> None:
    assert [eagle3.usual_taps(layers) for layers in (32, 7, 6, 4, 2)] == [
        (2, 16, 29),
        (2, 3, 4),
        (3, 4, 5),
        (1, 2, 3),
        (0, 1),
    ]


@torch.no_grad()
def test_every_step_is_that_of_the_formulas(loaded: target.Target) -> None:
    llama = loaded.model
    torch.manual_seed(3)
    drafter = eagle3.Eagle3(start.config(llama, 1), TAPS)
    for parameter in drafter.parameters():
        parameter.copy_(torch.rand_like(parameter) + 0.5 if parameter.ndim == 1 else torch.randn_like(parameter) * 0.08)
    size, table = drafter.config.hidden_size, llama.model.embed_tokens.weight.detach()
    ids, read = torch.randint(0, 2048, (2, 30)), torch.randn(2, 30, 3 * size)
    at = Anchors(torch.tensor([0, 1]), torch.tensor([[3, 4, 5], [10, 11, 12]]))
    outs = drafter(F.embedding(ids, table), read, at, 1)
    assert len(outs) == eagle3.DEPTHS
    naive = NaiveEagle3(
        {drafter.stored_as(name): t for name, t in drafter.state_dict().items()} | {"embed_tokens.weight": table},
        drafter.config,
    )
    for n in range(2):
        for s in range(3):
            text, place = int(at.record[n]), int(at.place[n, s])
            rows = [(int(ids[text, p + 1]), read[text, p]) for p in range(place + 1)]
            for depth, out in enumerate(outs, 1):
                feature = naive._layers(rows, list(range(len(rows))))[-1]
                torch.testing.assert_close(out[n, s], naive._norm(feature, "norm"), rtol=1e-3, atol=1e-3)
                rows.append((int(ids[text, place + 1 + depth]), feature))


def test_taps_are_what_enters_the_layers(loaded: target.Target, written: store.Text) -> None:
    llama, seen = loaded.model, list[torch.Tensor]()
    hooks = [
        llama.model.layers[tap].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0])) for tap in TAPS
    ]
    own = batch(written, Features(None, written, llama.model, TAPS), [2], "cpu")
    for hook in hooks:
        hook.remove()
    assert torch.equal(own.read[0], torch.cat(seen, -1).to(torch.bfloat16))
    assert torch.equal(own.hidden, batch(written, Features(None, written, llama.model), [2], "cpu").hidden)


@pytest.mark.exhaustive
def test_a_few_steps_reduce_the_loss_on_held_out_text(loaded: target.Target, written: store.Text) -> None:
    before, after = before_and_after(*trainee(loaded, written, steps=30))
    assert sum(after.loss) < 0.8 * sum(before.loss)
    assert all(a < b for a, b in zip(after.loss, before.loss, strict=True))
    assert 1 <= after.tau[4] <= 4


def test_what_comes_out_exports_and_is_lossless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a draft vocabulary."""
    monkeypatch.setattr(Evaluation, "__call__", not_evaluated)
    out, pair = tmp_path / "drafter", ["--target", str(write_small_target(tmp_path / "target"))]
    arguments = [*pair, "--data", str(SOURCE), *SMALL, "--steps", "3", "--out", str(out), "--draft-vocab", "1500"]
    assert cli.main([*arguments, "--family", "eagle3"]) == 0
    said = json.loads((out / "config.json").read_text())
    assert said["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    assert said["draft_vocab_size"] == 1500  # else vLLM expects an lm_head of the whole vocabulary
    opened = exporter.recipe.sources.open_pair(exporter.options.config_of(["--ckpt", str(out), *pair]))
    assert (opened.family, opened.returns.taps, opened.drafted) == ("eagle3", (1, 2, 3), 1500)
    assert exporter.cli.main(["--ckpt", str(out), *pair, "--out", str(tmp_path / "bundle")]) == 0
    with runtime.load(tmp_path / "bundle") as model:
        drafted = "".join(model.generate("def first(items):\n", max_new_tokens=48, lookup=False, rows=8))
        assert drafted == "".join(model.generate("def first(items):\n", max_new_tokens=48, speculate=False))


@pytest.mark.exhaustive
def test_trees_are_those_of_the_runtime(tmp_path: Path, loaded: target.Target, written: store.Text) -> None:
    """The same trees, in one place after another of a text that the target wrote."""
    training, _ = trainee(loaded, written, steps=8)
    while training.step < 8:
        training.advance()
    walked, decoded = taus(tmp_path, loaded, training, training.averaged())
    assert walked == pytest.approx(decoded, rel=0.25)
