"""``gumiho quality``: perplexity, divergence and agreement, against transformers' own loss and logits."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM

from graphs.dialects.quantization import Scheme
from runtime import DamageError, load
from runtime.bundle.reader import Bundle
from runtime.cli.checks.perplexity import Mean, measure, windows
from runtime.decoding.target_passes import TargetPasses
from runtime.gumiho import main
from tests.conftest import DEMO, MakeBundle
from tests.end_to_end import llama
from tests.end_to_end.test_quantized import CPU4, meant_by, rounding
from tests.seal import update
from tests.test_selftest import SMALL

TEXT = "\n".join(
    f"def {name}_of(self, {name}):\n    return [{name}.value for {name} in self.{name}s]\n"
    for name in (
        "row",
        "token",
        "path",
        "layer",
        "child",
        "matrix",
        "sample",
        "width",
        "error",
        "column",
        "parent",
        "bundle",
    )
)


@pytest.fixture(scope="module")
def bundles(make_bundle: MakeBundle) -> tuple[Path, Path]:
    """The demo pair unquantized, and its target in int4."""
    return make_bundle(DEMO), make_bundle(DEMO, "--capacity", "200", "--weights", "int4", drafter=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT, "utf-8")
    return file


@torch.inference_mode()
def expected(folders: Sequence[LlamaForCausalLM], texts: Sequence[Sequence[int]]) -> tuple[list[float], float, float]:
    """transformers' own mean losses, and by its logits the divergence of the second model from the first and their
    agreement."""
    losses, divergence, same, count = [0.0] * len(folders), 0.0, 0, 0
    for ids in (torch.tensor([text]) for text in texts):
        outputs = [model(ids, labels=ids) for model in folders]
        count += (n := ids.shape[1] - 1)
        losses = [loss + n * float(out.loss) for loss, out in zip(losses, outputs, strict=True)]
        p, q = (out.logits[0, :-1].double().log_softmax(-1) for out in (outputs[0], outputs[-1]))
        divergence += float(torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum"))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    return [loss / count for loss in losses], divergence / count, same / count


def test_numbers_are_transformers_own(
    bundles: tuple[Path, Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In windows that no chunk divides. The int4 target is compared with the numbers its codes stand for, its rows
    rounded alike."""
    argv = [
        "quality",
        *map(str, bundles),
        "--text",
        str(text),
        "--window",
        "90",
        "--tokens",
        "300",
        "--threads",
        "1",
        "--json",
    ]
    assert main(argv) == 0
    out = json.loads(capsys.readouterr().out)
    start, *ids = Bundle(bundles[0]).tokenizer.encode(TEXT).ids[:301]
    texts = [[start, *ids[i : i + 89]] for i in range(0, 300, 89)]
    scheme = Scheme(32, torch.uint8)
    judges = [llama.load(DEMO / "target"), rounding(meant_by(DEMO, CPU4, tmp_path / "meant"), scheme)]
    losses, divergence, agreement = expected(judges, texts)
    plain, quantized = out["bundles"]
    assert (out["tokens"], out["window"], out["reference"]) == (300, 90, str(bundles[0]))
    assert plain.keys() == {"bundle", "weights", "perplexity", "nats_per_token"}
    assert plain["perplexity"] == pytest.approx(np.exp(losses[0]), rel=1e-5)
    assert (plain["weights"], quantized["weights"]) == ("float32", "int4, blocks of 32 with zero points, lm_head int8")
    # A rounding that falls the other way moves a row a little.
    assert quantized["nats_per_token"] == pytest.approx(losses[1], rel=2e-3)
    assert quantized["nats_lost"] == pytest.approx(quantized["nats_per_token"] - plain["nats_per_token"], abs=1e-9)
    assert quantized["kl_divergence"] == pytest.approx(divergence, rel=2e-2)
    assert quantized["agreement"] == pytest.approx(agreement, abs=0.015)
    assert divergence > 1e-3  # far enough for the tolerances to mean something
    assert 0 < quantized["kl_divergence_error"] < quantized["kl_divergence"]


def test_a_table_and_another_reference(
    bundles: tuple[Path, Path], text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, quantized = map(str, bundles)
    options = ["--text", str(text), "--window", "61", "--tokens", "60"]
    assert main(["quality", quantized, plain, *options, "--reference", plain]) == 0
    heads, first, second, last = capsys.readouterr().out.splitlines()
    assert heads.split("  ")[-1] == "same first choice"
    assert (first.split()[0], len(first.split()), second.split()[0]) == (plain, 2, quantized)
    assert last == f"60 tokens, compared with {plain}; ± one standard error, as of independent tokens"
    assert main(["quality", plain, *options]) == 0
    alone = capsys.readouterr().out.splitlines()[1:]
    assert [alone[0].split(), alone[1]] == [first.split(), "60 tokens; ± one standard error, as of independent tokens"]


def test_the_same_bundle_twice_costs_nothing(bundles: tuple[Path, Path], text: Path) -> None:
    with load(bundles[0], threads=1) as first, load(bundles[0], threads=1) as second:
        same = measure(first, [second], windows(first.bundle, TEXT, 64, 64))[1]
    assert (same.divergence.value, same.lost.value, same.agreement.value) == (0.0, 0.0, 1.0)


def test_memory_does_not_grow_with_the_text(bundles: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No more rows of logits are read at a time than one of each model."""
    with load(bundles[0], threads=1) as model:
        passes, shapes = model.decoder.target, []
        row = passes.row
        monkeypatch.setattr(TargetPasses, "row", lambda _, i: shapes.append(row(i).shape) or row(i))
        measure(model, [], windows(model.bundle, TEXT, 150, 149))
    assert shapes == [(model.vocabulary_size,)] * 149


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40))
def test_means(values: list[float]) -> None:
    mean = Mean()
    for value in values:
        mean.add(value)
    assert mean.value == pytest.approx(np.mean(values), abs=1e-9)
    assert mean.error == pytest.approx(np.std(values, ddof=1) / len(values) ** 0.5, abs=1e-9)


def test_special_tokens_begin_every_window(bundles: tuple[Path, Path]) -> None:
    bundle = Bundle(bundles[0])
    start, *ids = bundle.tokenizer.encode(TEXT).ids[:121]
    begun = windows(bundle, TEXT, 50, 120)
    assert [len(part) for part in begun] == [50, 50, 23]
    assert {part[0] for part in begun} == {start}
    assert [token for part in begun for token in part[1:]] == ids
    bundle.tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    plain = windows(bundle, TEXT, 50, 121)
    assert [len(part) for part in plain] == [50, 50, 21]
    assert [token for part in plain for token in part][:120] == ids
    assert [len(part) for part in windows(bundle, TEXT, 50, 101)] == [50, 50]  # one token by itself predicts nothing


# --- what cannot be measured ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--text", "nowhere.txt"], "'nowhere.txt' cannot be read as the text"),
        (["--text", "EMPTY"], "has too few tokens to measure anything: give a longer text"),
        (["--text", "TEXT", "--window", "1"], "--window is 1: give 2 to 200, the smallest capacity"),
        (["--text", "TEXT", "--window", "201"], "--window is 201: give 2 to 200, the smallest capacity"),
        (["--text", "TEXT", "--tokens", "1"], "--tokens is 1: give 2 or more"),
        (["--text", "TEXT", "--backend", "cuda"], "has graphs for cpu and none for cuda"),
        (["--text", "TEXT", "--reference", "/"], "is not a bundle"),
    ],
)
def test_options_that_cannot_be(
    bundles: tuple[Path, Path],
    text: Path,
    tmp_path: Path,
    options: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").write_text("a")
    given = [{"TEXT": str(text), "EMPTY": str(tmp_path / "empty")}.get(option, option) for option in options]
    assert main(["quality", *map(str, bundles), *given]) == 1
    shown = capsys.readouterr()
    assert said in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def refused(bundles: Sequence[Path], text: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["quality", *map(str, bundles), "--text", str(text)]) == 1
    return capsys.readouterr().err


def test_bundles_of_different_models(
    bundles: tuple[Path, Path], make_bundle: MakeBundle, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_bundle(SMALL, "--capacity", "100")
    assert "one of 40: compare bundles of one model" in refused([bundles[0], other], text, capsys)
    assert "has no tokenizer" in refused([other], text, capsys)
    copy = Path(shutil.copytree(bundles[1], tmp_path / "copy"))
    raw = json.loads((copy / "tokenizer.json").read_text())
    raw["normalizer"] = {"type": "Prepend", "prepend": "x"}
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").write_text(json.dumps(raw))
    update(copy, "tokenizer.json")
    assert f"split '{text}' differently: compare bundles of one model" in refused([bundles[0], copy], text, capsys)


def test_logits_that_are_not_numbers(bundles: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with load(bundles[0], threads=1) as model:
        row = model.decoder.target.row
        monkeypatch.setattr(TargetPasses, "row", lambda _, i: row(i) * np.float32(np.nan))
        with pytest.raises(DamageError, match="hold NaN or infinity"):
            measure(model, [], windows(model.bundle, TEXT, 20, 20))
