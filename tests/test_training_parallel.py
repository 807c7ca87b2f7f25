"""``gumiho train`` in two processes on the CPU, started with the variables that torchrun sets."""

import io
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from exporter.training import batches, cli, conversation, loop, losses, parallel, start, state, store, target
from exporter.training.batches import Features, anchors, batch, choose, usable, wanted
from exporter.training.drafters.gumiho import Gumiho
from exporter.training.evaluate import Evaluation, Vocabulary
from runtime.errors import InputError
from tests.conftest import DEMO
from tests.limits import full_disk
from tests.training import SMALL, SOURCE, not_evaluated, write_chat_target, write_source

TINY = ["--serial-layers", "1", "--heads", "1"]
SETTINGS = loop.Settings(3, 192, 2, 2e-3, 2, 0.8, 0.1, 0.5, 0, torch.float32)


def in_two(work: Callable[..., Any], *arguments: object) -> list[Any]:
    """What ``work(rank, *arguments)`` returns in each process. A server that has imported everything is what they are
    forked from."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # others notice that a process has ended, not failed
    with ProcessPoolExecutor(2, context, max_tasks_per_child=1) as pool:
        running = [pool.submit(_as_rank, rank, port, work, arguments) for rank in range(2)]
        return [own.result() for own in running]


def _as_rank(rank: int, port: int, work: Callable[..., Any], arguments: tuple[object, ...]) -> Any:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    signal.alarm(300)  # ends processes that wait for each other
    return work(rank, *arguments)


def command(rank: int, *arguments: str) -> tuple[int, str]:
    """Exit status and output."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        status = cli.main(list(arguments))
    return status, said.getvalue()


def steps(rank: int, folder: Path) -> None:
    """Weights and their average after some steps from weights that only the first process has."""
    with parallel.joined("cpu"):
        loaded = target.load(str(DEMO / "target"))
        llama = loaded.model
        text = store.Text(folder / "text", llama.config.vocab_size, loaded.name)
        torch.manual_seed(rank)
        drafter = Gumiho(start.config(llama, 1), 1)
        embed, lm_head = llama.model.embed_tokens.weight.detach(), llama.lm_head.weight.detach()
        features = Features(folder / "hidden", text, llama.model)
        training = loop.Training(drafter, text, features, embed, Vocabulary(lm_head, None), SETTINGS)
        while training.step < SETTINGS.steps:
            training.advance()
        weights = {name: value.clone() for name, value in drafter.state_dict().items()}
        for number, values in enumerate((weights, training.average)):
            torch.save(values, folder / f"{rank}-{number}.pt")


def test_two_processes_step_as_one_that_averages_their_gradients(tmp_path: Path) -> None:
    loaded = target.load(str(DEMO / "target"))
    llama = loaded.model
    text = write_source(tmp_path / "text", loaded)
    in_two(steps, tmp_path)
    found = [[torch.load(tmp_path / f"{rank}-{number}.pt") for number in range(2)] for rank in range(2)]
    for a, b in zip(*found, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)

    torch.manual_seed(0)
    drafter = Gumiho(start.config(llama, 1), 1)
    embed, lm_head = llama.model.embed_tokens.weight.detach(), llama.lm_head.weight.detach()
    features = Features(None, text, llama.model)
    optimizers = loop.Training(drafter, text, features, embed, Vocabulary(lm_head, None), SETTINGS).optimizers
    for step in range(SETTINGS.steps):
        parts: list[list[Tensor]] = []
        for rank in range(2):
            rng = np.random.default_rng((SETTINGS.seed, step, rank))
            own = batch(text, features, choose(text, usable(text, 3, training=True), SETTINGS.positions, rng))
            at = anchors(own, SETTINGS.spans, 3, rng)
            hidden, valid = wanted(own, at, 3)
            outs = drafter(F.embedding(own.ids, embed), own.hidden.float(), at, 1)
            loss, _ = losses.losses(outs, hidden, lm_head, valid, SETTINGS.hidden_weight)
            weighted = sum(0.8**depth * own for depth, own in enumerate(loss))
            parts.append(list(torch.autograd.grad(weighted, list(drafter.parameters()))))
        for parameter, a, b in zip(drafter.parameters(), *parts, strict=True):
            parameter.grad = (a + b) / 2
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = SETTINGS.rate * loop.scale(step, SETTINGS.steps, SETTINGS.warmup)
            optimizer.step()
    for name, expected in drafter.state_dict().items():
        torch.testing.assert_close(found[0][0][name], expected, rtol=1e-5, atol=1e-6)


def stopped(rank: int, at: str, *arguments: str) -> tuple[int, str, int]:
    """Exit status, output and number of saved states of a training whose second process is stopped, or fails, in its
    second step."""
    advance, save, saves = loop.Training.advance, state.save, 0

    def counted(file: Path, content: dict[str, Any]) -> None:
        nonlocal saves
        saves += 1
        save(file, content)

    def advance_and_end(training: loop.Training) -> tuple[Tensor, Tensor]:
        if rank and training.step == 1:
            if at == "failure":
                raise InputError("the second process fails")
            os.kill(os.getpid(), signal.SIGINT)
        return advance(training)

    loop.Training.advance, state.save = advance_and_end, counted  # type: ignore[method-assign]
    Evaluation.__call__ = not_evaluated  # type: ignore[method-assign]
    return *command(rank, *arguments), saves


def test_stopping_one_process_stops_both_and_one_process_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--target", str(DEMO / "target"), "--data", str(SOURCE), *SMALL, *TINY, "--out", str(tmp_path / "out")]
    (first, said, saves), (second, quiet, none) = in_two(stopped, "signal", *arguments, "--steps", "5")
    assert (first, second) == (130, 130), said + quiet
    assert (saves, none) == (1, 0)
    assert said.endswith("error: interrupted: the same command goes on from here\n")
    assert quiet == ""
    stored = state.read(tmp_path / "out-training" / "state" / "gumiho.pt", {})
    assert stored is not None
    assert stored["step"] == 2
    # A process that ends without a word to the others: they do not wait for it.
    (first, said, saves), (second, told, _) = in_two(stopped, "failure", *arguments, "--out", str(tmp_path / "failed"))
    assert (first, second) == (1, 1), said + told
    assert told == "error: the second process fails\n"
    assert "another process of this training has ended" in said.splitlines()[-1]
    assert saves == 0

    monkeypatch.setattr(Evaluation, "__call__", not_evaluated)
    assert cli.main([*arguments, "--steps", "3"]) == 0
    assert "goes on from step 2 of 3" in capsys.readouterr().out


def writing(rank: int, *arguments: str) -> tuple[int, str]:
    conversation._MOST_QUESTION = 12  # this target seldom ends a question by itself
    return command(rank, *arguments)


def test_both_processes_write_text(tmp_path: Path) -> None:
    chat_target = write_chat_target(tmp_path / "target")
    questions = ["What is a list?", "How long is it?", "And why?"]  # two for the first process, one for the second
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": question}) for question in questions))
    common = ["--target", str(chat_target), "--only", "text", *SMALL, "--window", "48", "--conversations", "2"]
    for name, source in (("answers", ("--data", str(data))), ("own", ("--tokens", "200"))):
        results = in_two(writing, *common, *source, "--out", str(tmp_path / name))
        assert [status for status, _ in results] == [0, 0], results
    loaded = target.load(str(chat_target))
    llama, tokenizer = loaded.model, loaded.tokenizer
    made = store.Text(tmp_path / "answers-training" / "text", llama.config.vocab_size, loaded.name)
    assert sorted(made.sources) == [0, 1, 2]
    for record, source in enumerate(made.sources):
        stored = made.record(record)
        asked = f"<|begin_of_text|>user\n{questions[source]}<|end_of_text|><|begin_of_text|>assistant\n"
        assert tokenizer.decode((stored & store.TOKEN).tolist()).startswith(asked)
        assert (stored & store.ANSWER).any()
    own = store.Text(tmp_path / "own-training" / "text", llama.config.vocab_size, loaded.name)
    assert own.tokens >= 200
    assert len({own.record(record).tobytes() for record in range(len(own))}) == len(own) > 4


def sharded(rank: int, folder: Path, *arguments: str) -> tuple[int, str, list[int]]:
    """Exit status, output, and how many of each layer's weights this process holds once the target is split."""
    batches._TOGETHER = 1
    Evaluation.__call__ = not_evaluated  # type: ignore[method-assign]
    held: list[int] = []
    split = parallel.shard

    def counted(layer: nn.Module, device: str) -> None:
        split(layer, device)
        held.append(sum(own.to_local().numel() for own in layer.parameters()))  # type: ignore[attr-defined]

    parallel.shard = counted
    return *command(rank, *arguments, "--shard-target", "--out", str(folder / "sharded")), held


def test_a_target_split_over_processes_is_the_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers, hidden states, the first drafter and the trained one; each process holds half of the layers."""
    chat_target = write_chat_target(tmp_path / "target")
    data = tmp_path / "data.jsonl"  # two questions for the first process, one for the second
    given = [
        {"prompt": "What is a list?"},
        {"prompt": "How long is it?"},
        {"prompt": "And why?"},
        {"text": SOURCE.read_text()[:1700]},
    ]
    data.write_text("\n".join(map(json.dumps, given)))
    arguments = [
        "--target",
        str(chat_target),
        "--data",
        str(data),
        *SMALL,
        *TINY,
        "--conversations",
        "1",
        "--steps",
        "2",
    ]
    results = in_two(sharded, tmp_path, *arguments)
    assert [status for status, *_ in results] == [0, 0], results
    loaded = target.load(str(chat_target))
    llama = loaded.model
    weights = sum(own.numel() for own in llama.model.layers[0].parameters())
    assert all(held == [weights // 2] * llama.config.num_hidden_layers for *_, held in results)

    text = store.Text(tmp_path / "sharded-training" / "text", llama.config.vocab_size, loaded.name)
    assert [source for source in sorted(text.sources) if source < 3] == [0, 1, 2]
    assert len(text) % 2, "one process must have no text left while the other computes the last one's hidden states"
    greedy = 0
    for record in range(len(text)):
        stored = text.record(record)
        ids = torch.from_numpy((stored & store.TOKEN).astype(np.int64))
        logits = llama(ids[None]).logits[0]
        for place in np.flatnonzero(stored & store.GREEDY):
            greedy += 1
            assert logits[place - 1, ids[place]] >= logits[place - 1].max() - 1e-3
    assert greedy > 5
    kept, own = Features(tmp_path / "sharded-training" / "hidden", text, llama.model), Features(None, text, llama.model)
    assert not kept._missing(range(len(text)))
    for record in range(len(text)):
        torch.testing.assert_close(kept.of([record]), own.of([record]), rtol=0.02, atol=0.02)

    shutil.copytree(tmp_path / "sharded-training" / "text", tmp_path / "whole-training" / "text")
    results = in_two(unevaluated, *arguments, "--out", str(tmp_path / "whole"))
    assert [status for status, _ in results] == [0, 0], results
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "sharded"))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-2, atol=1e-3)


def unevaluated(rank: int, *arguments: str) -> tuple[int, str]:
    Evaluation.__call__ = not_evaluated  # type: ignore[method-assign]
    return command(rank, *arguments)


def test_processes_share_hidden_states(tmp_path: Path) -> None:
    """What one writes while another computes stays, and nothing counts before it is on disk."""
    loaded = target.load(str(DEMO / "target"))
    llama = loaded.model
    text = write_source(tmp_path / "text", loaded)
    one, other = (Features(tmp_path / "hidden", text, llama.model) for _ in range(2))
    compute = one._compute

    def meanwhile(records: Any) -> list[Tensor]:
        other.of([4])
        return compute(records)

    one._compute = meanwhile  # type: ignore[method-assign]
    one.of([2, 6])
    with full_disk(), pytest.raises(OSError, match="too large"):
        one.of([3])
    assert (tmp_path / "hidden" / "done.bin").read_bytes() == bytes([0, 0, 1, 0, 1, 0, 1])
    reader = Features(tmp_path / "hidden", text, llama.model)
    reader._compute = lambda _: pytest.fail("computed again")  # type: ignore[method-assign]
    for record, found in zip((2, 4, 6), reader.of([2, 4, 6]), strict=True):
        torch.testing.assert_close(found, compute([record])[0], rtol=0.02, atol=0.02)


def test_anchors_that_do_not_divide_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parallel, "ranks", lambda: 2)
    arguments = ["--target", str(DEMO / "target"), "--out", str(tmp_path / "out"), "--anchors", "96"]
    assert cli.main(arguments) == 1
    assert capsys.readouterr().err == "error: --anchors is 96, and 2 processes share them: give a multiple of 64\n"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "start them with torchrun --nproc-per-node N"),
        (["--no-hidden-cache"], "needs the hidden states on disk: leave out --no-hidden-cache"),
    ],
)
def test_what_a_split_target_needs(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--target", str(DEMO / "target"), "--out", str(tmp_path / "out"), "--shard-target", *more]
    assert cli.main(arguments) == 1
    assert said in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variables", "device", "said"),
    [
        ({}, "cuda:1", "--device cuda:1 is one device, and 2 processes train"),
        ({}, "cuda", "2 processes need as many GPUs, and 0 are here"),
        ({"LOCAL_WORLD_SIZE": "1"}, "cpu", "the GPUs of one machine"),
        ({}, "cpu", "start them with torchrun"),  # without MASTER_ADDR
    ],
)
def test_processes_that_cannot_train_together_are_told(
    variables: dict[str, str],
    device: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["--target", str(DEMO / "target"), "--out", str(tmp_path / "out"), "--device", device]) == 1
    assert said in capsys.readouterr().err
