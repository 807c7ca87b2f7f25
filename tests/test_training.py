"""``gumiho train``: losses, the form that is trained, self-written text, resuming, what comes out, and bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import exporter.cli
import exporter.options
import exporter.recipe.sources
import runtime
from exporter.training import cli, loop, losses, start, state, store, target, text
from exporter.training.batches import SPAN, Anchors, Features, anchors, batch, usable, wanted
from exporter.training.conversation import Script, template
from exporter.training.drafters.gumiho import Gumiho, shape_of
from exporter.training.evaluate import Evaluation
from runtime.errors import DamageError, GumihoError, InputError, UnavailableError
from tests.conftest import DEMO
from tests.limits import full_disk
from tests.training import (
    SMALL,
    SOURCE,
    before_and_after,
    not_evaluated,
    taus,
    training_of,
    write_chat_target,
    write_small_target,
    write_source,
)


@pytest.fixture(scope="module")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_target(tmp_path_factory.mktemp("chat") / "target")


@pytest.fixture(scope="module")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_target(tmp_path_factory.mktemp("small") / "target")


@pytest.fixture(scope="module")
def small(small_target: Path) -> target.Target:
    return target.load(str(small_target))


@pytest.fixture(scope="module")
def small_text(small: target.Target, tmp_path_factory: pytest.TempPathFactory) -> store.Text:
    return write_source(tmp_path_factory.mktemp("text"), small)


def trainee(
    loaded: target.Target, written: store.Text, steps: int = 6, rate: float = 2e-3, heads: int = 3
) -> tuple[loop.Training, Evaluation]:
    features = Features(None, written, loaded.model.model)
    torch.manual_seed(1)
    drafter = Gumiho(start.config(loaded.model, 2), heads)
    drafter.begin(loaded.model, written, features, lambda _: None)
    return training_of(drafter, loaded, features, steps, rate=rate)


def naive(outs: list[Tensor], hidden: Tensor, weight: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL, smooth L1 and agreement by depth, one anchor at a time."""
    kl, distance, hits = (torch.zeros(len(outs), dtype=torch.float64) for _ in range(3))
    for depth, out in enumerate(outs):
        count = 0
        for n in range(out.shape[0]):
            for s in range(out.shape[1]):
                if not valid[n, s + depth]:
                    continue
                h, y = hidden[n, s + depth].double(), out[n, s].double()
                p, q = (weight.double() @ h).softmax(0), (weight.double() @ y).softmax(0)
                kl[depth] += (p * (p / q).log()).sum()
                distance[depth] += torch.where((y - h).abs() < 1, (y - h) ** 2 / 2, (y - h).abs() - 0.5).mean()
                hits[depth] += p.argmax() == q.argmax()
                count += 1
        kl[depth], distance[depth], hits[depth] = (x[depth] / count for x in (kl, distance, hits))
    return kl, distance, hits


def some_outs() -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4 + 2, 12, generator=draw)
    outs = [torch.randn(n, 4, 12, generator=draw, requires_grad=True) for n in (5, 5, 2)]
    return outs, hidden, torch.randn(31, 12, generator=draw), torch.rand(5, 6, generator=draw) < 0.8


def test_losses_are_those_of_a_naive_loop() -> None:
    outs, hidden, weight, valid = some_outs()
    loss, hits = losses.losses(outs, hidden, weight, valid, 0.3)
    kl, distance, agreement = naive(outs, hidden, weight, valid)
    torch.testing.assert_close(loss.double(), kl + 0.3 * distance, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hits.double(), agreement)


def test_gradients_are_those_of_autograd() -> None:
    outs, hidden, weight, valid = some_outs()
    losses.losses(outs, hidden, weight, valid, 0.3)[0].sum().backward()
    found = [out.grad.clone() for out in outs]
    total = torch.zeros(())
    for depth, out in enumerate(outs):
        real, ahead = valid[: len(out), depth : depth + 4].float(), hidden[: len(out), depth : depth + 4]
        p, q = ((x @ weight.T).log_softmax(-1) for x in (ahead, out))
        apart = F.smooth_l1_loss(out, ahead, reduction="none").mean(-1)
        total = total + (((p.exp() * (p - q)).sum(-1) + 0.3 * apart) * real).sum() / real.sum()
    for out in outs:
        out.grad = None
    total.backward()
    for own, out in zip(found, outs, strict=True):
        torch.testing.assert_close(own, out.grad, rtol=1e-4, atol=1e-6)


def test_slices_change_nothing() -> None:
    results = []
    for most in (1, 31 * 6 * 2, 1 << 30):
        outs, hidden, weight, valid = some_outs()
        loss, hits = losses.losses(outs, hidden, weight, valid, 0.1, most)
        loss.sum().backward()
        results.append([loss.detach(), hits, *(out.grad for out in outs)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_second_step_sees_the_text_up_to_its_anchor_and_itself(loaded: target.Target) -> None:
    llama = loaded.model
    torch.manual_seed(2)
    drafter = Gumiho(start.config(llama, 2), 2)
    embedded, hidden = torch.randn(2, 20, 192), torch.randn(2, 20, 192)
    y, caches = drafter.extend(embedded[:, 1:], hidden[:, :-1])
    at = Anchors(torch.tensor([0, 1]), torch.tensor([[3, 4, 5], [10, 11, 12]]))
    found = drafter.step(at.of(embedded, 2), at.of(y), at, caches)
    for n in range(2):
        for s in range(3):
            row, p = int(at.record[n]), int(at.place[n, s])
            tokens = embedded[row : row + 1, 1 : p + 3]
            states = torch.cat((hidden[row : row + 1, : p + 1], y[row : row + 1, p : p + 1]), 1)
            torch.testing.assert_close(found[n, s], drafter.extend(tokens, states)[0][0, -1], rtol=1e-4, atol=1e-4)


def test_anchors_lie_before_answers_and_within_the_text(loaded: target.Target, written: store.Text) -> None:
    llama = loaded.model
    own = batch(written, Features(None, written, llama.model), [1, 2], "cpu")
    at = anchors(own, 6, 5, np.random.default_rng(0))
    hidden, valid = wanted(own, at, 5)
    assert hidden.shape == (6, SPAN + 4, 192)
    assert valid.all()
    assert int(at.place.min()) >= 0
    assert int(at.place.max()) + 5 + 1 < own.ids.shape[1]
    row, place = int(at.record[0]), int(at.place[0, 0])
    torch.testing.assert_close(hidden[0, 2], own.hidden[row, place + 3])


def test_hidden_states_on_disk_are_the_targets_own(loaded: target.Target, written: store.Text, tmp_path: Path) -> None:
    llama = loaded.model
    kept = Features(tmp_path, written, llama.model)
    records = [4, 1, len(written) - 1]
    first = kept.of(records)
    reader = Features(tmp_path, written, llama.model)
    reader.decoder = None  # nothing is computed again
    again = reader.of(records)
    for record, a, b in zip(records, first, again, strict=True):
        ids = torch.from_numpy((written.record(record) & store.TOKEN).astype(np.int64))
        with torch.no_grad():
            expected = llama.model(ids[None]).last_hidden_state[0].to(torch.bfloat16)
        torch.testing.assert_close(a, expected, rtol=0.02, atol=0.02)
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("of", "text", "steps"),
    # 21 s: the matrices of the demo target's drafter.
    [("small", "small_text", 12), pytest.param("loaded", "written", 30, marks=pytest.mark.exhaustive)],
)
def test_a_few_steps_reduce_the_loss_on_held_out_text(
    of: str, text: str, steps: int, request: pytest.FixtureRequest
) -> None:
    before, after = before_and_after(*trainee(request.getfixturevalue(of), request.getfixturevalue(text), steps))
    assert sum(after.loss) < 0.95 * sum(before.loss)
    assert 1 <= after.tau[4] <= 4


def test_a_resumed_run_is_the_uninterrupted_one(small: target.Target, small_text: store.Text, tmp_path: Path) -> None:
    whole, evaluation = trainee(small, small_text)
    pace, quiet = loop.Pace(1e9, 1e9), lambda _: None
    assert loop.run(whole, evaluation, tmp_path / "a.pt", {}, pace, quiet, lambda: False, lambda: None)
    first, _ = trainee(small, small_text)
    assert not loop.run(first, evaluation, tmp_path / "b.pt", {}, pace, quiet, lambda: first.step >= 3, lambda: None)
    second, _ = trainee(small, small_text)
    stored = state.read(tmp_path / "b.pt", {})
    assert stored is not None
    assert stored["step"] == 3
    second.resume(stored)
    assert loop.run(second, evaluation, tmp_path / "b.pt", {}, pace, quiet, lambda: False, lambda: None)
    for name, expected in whole.average.items():
        assert torch.equal(expected, second.average[name]), name


class Killed(BaseException):
    """What nothing catches."""


def end_here(own: list[str], state_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first saved state, in this process."""
    save = state.save

    def saved_once(file: Path, content: dict[str, Any]) -> None:
        save(file, content)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(state, "save", saved_once)
        with pytest.raises(Killed):
            cli.main(own)


def kill(own: list[str], state_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 after the first saved state."""
    process = subprocess.Popen([sys.executable, "-m", "exporter.training.cli", *own], stdout=subprocess.DEVNULL)
    while not state_file.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("end", [end_here, pytest.param(kill, marks=pytest.mark.exhaustive)])
def test_killed_training_goes_on(
    small_target: Path,
    tmp_path: Path,
    end: Callable[[list[str], Path, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Through the command: the same one again."""
    monkeypatch.setattr(Evaluation, "__call__", not_evaluated)
    common = ["--target", str(small_target), "--data", str(SOURCE), *SMALL, "--steps", "4"]
    assert cli.main([*common, "--out", str(tmp_path / "whole")]) == 0
    own = [*common, "--save-every", "0.0001", "--out", str(tmp_path / "killed")]
    state_file = tmp_path / "killed-training" / "state" / "gumiho.pt"
    end(own, state_file, monkeypatch)
    assert state_file.exists()
    capsys.readouterr()
    assert cli.main(own) == 0
    assert "goes on from step" in capsys.readouterr().out
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    ("family", "options", "layers"),
    [
        ("gumiho", ["--heads", "1", "--serial-layers", "1"], 1),
        pytest.param("eagle", ["--family", "eagle"], 1, marks=pytest.mark.exhaustive),
    ],
)
def test_what_comes_out_exports_and_is_lossless(
    family: str,
    options: list[str],
    layers: int,
    small_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("exporter.training.evaluate.Evaluation", partial(Evaluation, texts=1, most=24))
    out = tmp_path / "drafter"
    arguments = ["--target", str(small_target), "--data", str(SOURCE), *SMALL, "--steps", "3", "--out", str(out)]
    assert cli.main([*arguments, "--draft-vocab", "1500", *options]) == 0
    assert "step 3 of 3" in capsys.readouterr().out
    bundle, argv = tmp_path / "bundle", ["--ckpt", str(out), "--target", str(small_target)]
    assert exporter.recipe.sources.open_pair(exporter.options.config_of(argv)).family == family
    assert exporter.cli.main([*argv, "--out", str(bundle)]) == 0
    with runtime.load(bundle) as loaded:
        prompt = "def first(items):\n"
        drafted = loaded.generate(prompt, max_new_tokens=48, lookup=False)
        said = "".join(drafted)
        plain = loaded.generate(prompt, max_new_tokens=48, speculate=False)
        assert said == "".join(plain)
        assert drafted.ids == plain.ids
        assert drafted.stats.tau > 1.1
    # A drafter that exists is a beginning.
    monkeypatch.setattr(Evaluation, "__call__", not_evaluated)
    again = [*arguments[:-1], str(tmp_path / "again"), "--init", str(out), "--draft-vocab", "1500"]
    assert cli.main(again) == 0
    assert json.loads((tmp_path / "again" / "config.json").read_text())["num_hidden_layers"] == layers
    other = {"gumiho": "eagle", "eagle": "gumiho"}[family]
    assert cli.main([*again, "--family", other]) == 1
    assert f"are of the family {family}: name that" in capsys.readouterr().err


def test_trees_are_those_of_the_runtime(
    tmp_path: Path, small_target: Path, small: target.Target, small_text: store.Text
) -> None:
    """Tau on a text that the target wrote greedily is what decoding it gains."""
    training, _ = trainee(small, small_text, heads=1)
    walked, decoded = taus(tmp_path, small, training, training.drafter, small_target)
    assert walked == pytest.approx(decoded, rel=0.25)
    assert walked > 1.5
    weights, config = (tmp_path / "drafter" / name for name in ("model.safetensors", "config.json"))
    assert weights.stat().st_mode == config.stat().st_mode  # whoever may read one may read the other


@torch.no_grad()
def test_slots_give_the_logits_of_whole_texts(loaded: target.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations whose first tokens were read in one pass, beside one that was not, and one in a slot that was used
    before."""
    llama, draw = loaded.model, torch.Generator().manual_seed(3)
    texts = torch.randint(0, llama.config.vocab_size, (5, 20), generator=draw).tolist()
    wanted = [llama(torch.tensor([ids])).logits[0] for ids in texts]
    monkeypatch.setattr(llama.config, "_attn_implementation", "gumiho_slots")
    slots = text.Slots(llama, text.groups(4, 64))
    slots.read(2, texts[4])
    slots.restart(2)
    begun = [9, 0, 4, 1]
    for slot, count in enumerate(begun):
        slots.read(slot, texts[slot][:count]) if count else None
    for step in range(10):
        at = [count + step for count in begun]
        logits = slots.step(torch.tensor([ids[i] for ids, i in zip(texts, at, strict=False)]), torch.tensor(at))
        for slot, i in enumerate(at):
            torch.testing.assert_close(logits[slot], wanted[slot][i], rtol=1e-3, atol=1e-3)


def test_own_text_begins_with_the_templates_opening(
    chat_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporter.training.conversation._MOST_QUESTION", 12)  # this target seldom ends one by itself
    loaded = target.load(str(chat_target))
    llama, tokenizer = loaded.model, loaded.tokenizer
    pieces = template(tokenizer, loaded.ends)
    assert tokenizer.decode(pieces.opening) == "<|begin_of_text|>user\n"
    assert tokenizer.decode(pieces.closing) == "<|end_of_text|><|begin_of_text|>assistant\n"
    made = store.Text(tmp_path, llama.config.vocab_size, "x")
    with made.writing():
        text.write(llama, made, Script(pieces, tokenizer, 0, 0), 160, 4, 64, lambda _: None)
    assert made.tokens >= 160
    greedy = 0
    for record in range(len(made)):
        stored = made.record(record)
        ids = torch.from_numpy((stored & store.TOKEN).astype(np.int64))
        assert tuple(ids[: len(pieces.opening)].tolist()) == pieces.opening
        assert (stored & store.ANSWER).any()
        assert len(ids) <= 64
        with torch.no_grad():
            logits = llama(ids[None]).logits[0]
        for place in np.flatnonzero(stored & store.GREEDY):
            greedy += 1
            assert logits[place - 1, ids[place]] >= logits[place - 1].max() - 1e-3
    assert greedy > 5


def test_prompts_are_answered_once(chat_target: Path, tmp_path: Path) -> None:
    questions = [{"prompt": "What is a list?"}, {"turns": ["How long is it?", "And why?"]}, {"text": "x = 1\n" * 60}]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, questions)))
    arguments = [
        "--target",
        str(chat_target),
        "--out",
        str(tmp_path / "out"),
        "--data",
        str(data),
        "--only",
        "text",
        *SMALL,
    ]
    for _ in range(2):
        assert cli.main([*arguments, "--conversations", "3"]) == 0
    loaded = target.load(str(chat_target))
    llama, tokenizer = loaded.model, loaded.tokenizer
    made = store.Text(tmp_path / "out-training" / "text", llama.config.vocab_size, loaded.name)
    assert sorted(source for source in made.sources if source < 1000) == [0, 1]
    asked = next(r for r in range(len(made)) if made.sources[r] == 0)
    decoded = tokenizer.decode((made.record(asked) & store.TOKEN).tolist())
    assert decoded.startswith("<|begin_of_text|>user\nWhat is a list?<|end_of_text|><|begin_of_text|>assistant\n")


def test_prompts_need_a_chat_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "What is a list?"}')
    assert (
        cli.main(["--target", str(DEMO / "target"), "--out", str(tmp_path / "out"), "--data", str(data), *SMALL]) == 1
    )
    assert "has no chat template to ask the prompts of --data with" in capsys.readouterr().err


def test_long_prompts_wait_for_long_records(chat_target: Path) -> None:
    """A prompt that would fill a short record is not wasted on one; the longest records take whatever comes."""
    loaded = target.load(str(chat_target))
    asked = [(0, ["why? " * 40]), (1, ["so? " * 20]), (2, ["Why?"]), (3, ["How? " * 10, "And? " * 10])]
    script = Script(template(loaded.tokenizer, loaded.ends), loaded.tokenizer, 0, 0, asked, own=False)
    lengths = [sum(len(script.encode(turn)) for turn in turns) for _, turns in asked]
    assert [length <= 32 for length in lengths] == [False, False, True, False]
    taken = [
        talk and (talk.source, talk.turns) for limit in (64, 64, 128, 128, 128) for talk in [script.next(limit, 128)]
    ]
    assert taken == [(2, 0), None, (3, 1), (0, 0), (1, 0)]


def test_text_survives_a_killed_writer(tmp_path: Path) -> None:
    made = store.Text(tmp_path, 100, "x")
    with made.writing():
        made.append([(np.arange(5, dtype=np.uint32), -1), (np.arange(3, dtype=np.uint32), 7)])
    with open(tmp_path / "tokens.bin", "ab") as tokens, open(tmp_path / "index.bin", "ab") as index:
        tokens.write(b"\1" * 6)
        index.write(b"\2" * 3)
    again = store.Text(tmp_path, 100, "x")
    assert len(again) == 2
    with again.writing():
        again.append([(np.arange(4, dtype=np.uint32), 8)])
        with pytest.raises(UnavailableError, match="another process"), store.Text(tmp_path, 100, "x").writing():
            pass
    assert [again.record(r).tolist() for r in range(3)] == [[0, 1, 2, 3, 4], [0, 1, 2], [0, 1, 2, 3]]
    assert again.sources.tolist() == [-1, 7, 8]
    with open(tmp_path / "tokens.bin", "r+b") as tokens:
        tokens.truncate(8)
    with pytest.raises(DamageError, match="contradict"):
        store.Text(tmp_path, 100, "x")
    with pytest.raises(InputError, match="another target"):
        store.Text(tmp_path, 100, "y")


def test_a_full_disk_leaves_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "state.pt"
    state.save(file, {"known": {}, "step": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UnavailableError, match="free some space"):
        state.save(file, {"known": {}, "step": 2})
    stored = state.read(file, {})
    assert stored is not None
    assert stored["step"] == 1
    assert [f.name for f in tmp_path.iterdir()] == ["state.pt"]


def test_a_full_disk_leaves_the_drafter_before(loaded: target.Target, tmp_path: Path) -> None:
    drafter = Gumiho(start.config(loaded.model, 1), 0)
    (tmp_path / "model.safetensors").write_text("the one before")
    with full_disk(), pytest.raises(UnavailableError, match="free some space"):
        state.write_checkpoint(
            tmp_path,
            drafter,
            drafter.state_dict(),
            None,
            loaded.model.model.embed_tokens.weight,
            loaded.model.lm_head.weight,
        )
    assert [f.name for f in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_text() == "the one before"


def test_a_state_of_another_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    assert state.read(file, {}) is None
    state.save(file, {"known": {"heads": 5}})
    with pytest.raises(InputError, match="heads 5, and this run has 3"):
        state.read(file, {"heads": 3})
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DamageError, match="training begins anew"):
        state.read(file, {})


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("layers.first.weight", "mlp.0.0.linear.weight"), "no serial layers"),
        (("layers.0.weight", "mlp.0.7.linear.weight"), "heads of another depth"),
        (("layers.0.weight", "layers.x.weight", "mlp.weight", "mlp.0.bias"), "lacks the tensor"),
    ],
)
def test_a_beginning_with_odd_tensors_is_refused(
    loaded: target.Target, names: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")

    def begin(source: str) -> None:
        layers, heads = shape_of(source)
        Gumiho(start.config(loaded.model, layers), heads).from_checkpoint(source)

    with pytest.raises(GumihoError, match=said):
        begin(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--anchors", "33"], "multiple of 32"),
        (["--steps", "0"], "--steps is 0: give 1 or more"),
        (["--rate", "nan"], "--rate is nan"),
        (["--seed", "-1"], "--seed is -1: give 0 to 2**63 - 1"),
        (["--threads", "9" * 30], f"--threads is {'9' * 30}: give 1 to 1024"),
        (["--init", ""], "--init is empty: name a drafter, or leave it out"),
        (
            ["--work", "~nobody-here/x"],
            "--work ~nobody-here/x cannot be the name of a folder (Could not determine home directory): name another",
        ),
        (["--out", "."], "--out '.' has no name of its own to write the drafter under: name another folder"),
        (["--window", "4096"], "--window is 4096: give at most 1024"),
        (["--target", "nowhere"], "nowhere"),
        (["--data", "missing.txt"], "missing.txt"),
        (
            ["--data", os.devnull],
            f"--data '{os.devnull}' cannot be read (it is not a file): give text, or a JSON object a line",
        ),
        (["--only", "drafter"], "write some first"),
        (["--device", "cuda:7"], "--device cuda:7 is not here"),
        (["--family", "eagle", "--heads", "2"], "--family eagle takes no --heads: leave it out"),
        (["--family", "eagle", "--serial-layers", "2"], "--family eagle takes no --serial-layers: leave it out"),
        (["--family", "eagle3", "--init", "x"], "--family eagle3 takes no --init: leave it out"),
        (["--family", "small", "--hidden-weight", "0.5"], "--family small takes no --hidden-weight: leave it out"),
        (["--family", "medusa", "--heads", "0"], "--heads is 0, and a Medusa is its heads: give 1 or more"),
    ],
)
def test_bad_input_gets_one_sentence(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--target", str(DEMO / "target"), "--out", "out", *arguments]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert said in error


@pytest.mark.parametrize("line", ["", '{"prompt": 5}', "{}", '{"turns": []}', "[1]", "{"])
def test_data_without_text_is_refused(
    line: str, chat_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(f"\n{line}" if line else "")
    assert cli.main(["--target", str(chat_target), "--out", str(tmp_path / "out"), "--data", str(data)]) == 1
    err = capsys.readouterr().err
    assert "--data" in err
    assert (
        "data.jsonl:2" in err
        or "data.jsonl' is empty: give text" in err
        or "data.jsonl' cannot be read (line 2, column 2 is not JSON): give text" in err
    )


def test_too_little_text_is_refused(loaded: target.Target, tmp_path: Path) -> None:
    made = store.Text(tmp_path, 2048, "x")
    with made.writing():
        made.append([(np.arange(20, dtype=np.uint32), -1)])
    assert not len(usable(made, 7, training=True))


def test_rotary_frequencies_are_not_rounded(loaded: target.Target) -> None:
    """At position 1,000 a frequency of bf16 is another angle by up to 3.9 radians."""
    half = target.load(str(DEMO / "target"), dtype=torch.bfloat16).model
    assert half.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(half.model.rotary_emb.inv_freq, loaded.model.model.rotary_emb.inv_freq)


def test_a_small_gpu_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has a total capacity of 1 GiB."
        )

    monkeypatch.setattr(target, "load", full)
    assert cli.main(["--target", str(DEMO / "target"), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: the memory of cpu is too small: give fewer --conversations")
    assert error.count("\n") == 1
