"""``python -m runtime.doctor`` as people type it."""

import shutil
from pathlib import Path

import pytest

from exporter.options import config_of
from exporter.recipe.resolve import recipe_of
from exporter.writing.engines import Compiled
from exporter.writing.summary import report
from runtime.backends import NAMES, backend
from runtime.bundle.reader import Bundle
from runtime.cli.checks import doctor
from runtime.decoding.prices import Costs
from runtime.engines import summary
from runtime.engines.store import find_engines
from tests.conftest import DEMO, EVERY_BACKEND, MakeBundle


def test_says_of_every_backend_whether_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert all(package in first for package in ("Python", "onnxruntime", "numpy"))
    assert [line.partition(":")[0] for line in lines] == list(NAMES)
    assert all(line.partition(": ")[2].startswith(("runs: ", "cannot run: ")) for line in lines)
    assert "cpu: runs: onnxruntime" in lines[0]


def test_says_how_a_bundle_stands(make_bundle: MakeBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_bundle(DEMO, *EVERY_BACKEND)
    capsys.readouterr()  # of the export
    assert doctor.main([str(made)]) == 0
    out = capsys.readouterr().out
    assert "made for cpu, migraphx, tensorrt, cuda" in out
    assert "engines/cpu-" in out
    assert "is current" in out
    assert out.count("memory-bound estimate: speed-up = tau / ") == 4

    copy = tmp_path / "bundle"
    shutil.copytree(made, copy, ignore=shutil.ignore_patterns("engines"))
    assert doctor.main([str(copy), "--backend", "cpu"]) == 1
    out = capsys.readouterr().out
    assert f"gumiho compile {copy} --backend cpu" in out
    assert "  cuda: " not in out  # of which nobody asked


def test_the_export_and_the_doctor_say_the_same_of_a_bundle(
    demo_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, cpu = Bundle(demo_bundle), backend("cpu")
    pair = ["--ckpt", str(DEMO / "drafter"), "--target", str(DEMO / "target"), "--draft-weights", "none"]
    compiled = Compiled("cpu", cpu, find_engines(bundle, cpu).name, {"golden run": {"target": 1e-6, "draft": 20.0}})
    lines = report(bundle, recipe_of(config_of(pair)), [compiled]).splitlines()
    capsys.readouterr()
    assert doctor.main([str(demo_bundle), "--backend", "cpu"]) == 0
    said = capsys.readouterr().out.splitlines()
    about = [line for line in lines if not line.startswith(("  cpu: golden run: ", "note: ", "next: "))]
    assert len(about) >= 8
    assert set(about) <= set(said)
    assert "  cpu: golden run: target 1.0e-06 of at most 2.0e-03: ok" in lines
    assert "  cpu: golden run: draft 2.0e+01 of at most 1.0e-02: TOO LARGE" in lines
    assert lines[-1] == f'next: gumiho generate {bundle.path} --backend cpu --prompt "..."'


def test_measured_passes_give_an_estimate_of_their_own(demo_bundle: Path) -> None:
    bundle = Bundle(demo_bundle)
    costs = Costs({1: 10.0, bundle.manifest.rows: 12.0}, 7.0, 1.0)
    assert "estimate from the passes measured here: speed-up = tau / 1.82" in "\n".join(
        summary.performance(bundle, "cpu", {"": costs})
    )


def test_traffic_counts_what_a_pass_reads(demo_bundle: Path) -> None:
    """By hand, from the shapes: every matrix once, lm_head three times in a cycle's draft, embeddings not at all."""
    graphs = Bundle(demo_bundle).manifest.form("cpu").graphs
    h, ffn, layers, vocabulary, kv = 192, 512, 6, 2048, 64
    layer = h * (2 * h + 2 * kv) + 3 * h * ffn
    assert graphs["target"].reads == pytest.approx(4 * (layers * layer + h * vocabulary), rel=0.01)
    draft = 2 * 2 * layer + 3 * h * vocabulary  # both serial steps, and the heads' rows
    heads = 3 * (2 * h * h + 5 * h * h)  # of the five, for eight rows
    fused = 4 * 2 * h * h  # fc: the extension, step 2, and both tokens of the heads' pairs
    assert graphs["draft"].reads == pytest.approx(4 * (draft + heads + fused), rel=0.01)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "is not a bundle"),
        (["--device", "ref"], "--device belongs to a backend"),
    ],
)
def test_bad_input(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(argv) == 1
    assert message in capsys.readouterr().err
