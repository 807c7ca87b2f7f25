"""``python -m runtime.doctor`` as people type it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from exporter.options import config_of
from exporter.recipe.resolve import recipe_of
from exporter.writing.engines import Compiled
from exporter.writing.summary import report
from runtime.backends import NAMES, backend
from runtime.bundle.reader import Bundle
from runtime.cli.checks import doctor
from runtime.cli.checks.recommendation import recommendation
from runtime.decoding.prices import Costs
from runtime.engines import summary
from runtime.engines.store import find_engines
from tests.conftest import DEMO, EVERY_BACKEND, MakeBundle


def test_says_of_every_backend_whether_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert all(package in first for package in ("Python", "onnxruntime", "numpy"))
    assert [line.partition(":")[0] for line in lines] == list(NAMES)
    assert all(line.partition(": ")[2].startswith(("runs: ", "cannot run: ")) for line in lines)
    assert "cpu: runs: onnxruntime" in lines[0]
    assert last.startswith("recommended: ")


def test_says_how_a_bundle_stands(make_bundle: MakeBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_bundle(DEMO, *EVERY_BACKEND)
    capsys.readouterr()  # of the export
    assert doctor.main([str(made)]) == 0
    out = capsys.readouterr().out
    assert "made for cpu, migraphx, tensorrt, tensorrt-rtx, cuda" in out
    assert "engines/cpu-" in out
    assert "is current" in out
    assert out.count("memory-bound estimate: speed-up = tau / ") == 5

    copy = tmp_path / "bundle"
    shutil.copytree(made, copy, ignore=shutil.ignore_patterns("engines"))
    assert doctor.main([str(copy), "--backend", "cpu"]) == 1
    out = capsys.readouterr().out
    assert f"gumiho compile {copy} --backend cpu" in out
    assert "  cuda: " not in out  # of which nobody asked


@pytest.mark.parametrize(
    ("files", "runs", "expected"),
    [
        ({}, (), "recommended: cpu: gumiho export --target MODEL --backend cpu"),
        ({"dev/nvidia0": ""}, ("cuda",), "cuda, for the NVIDIA GPU: gumiho export --target MODEL --backend cuda"),
        ({"dev/nvidia0": ""}, (), "cuda, for the NVIDIA GPU, once it runs (see above); until then cpu: gumiho export"),
        ({"etc/nv_tegra_release": "", "dev/nvidia0": ""}, ("cuda", "tensorrt"), "tensorrt, for the Jetson: gumiho"),
        (
            {
                "sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 16\ngfx_target_version 0\n",
                "sys/class/kfd/kfd/topology/nodes/1/properties": "simd_count 64\ngfx_target_version 110501\n",
            },
            ("migraphx",),
            "migraphx, for the AMD GPU: gumiho export --target MODEL --backend migraphx",
        ),
        ({"sys/class/kfd/kfd/topology/nodes/0/properties": "gfx_target_version 0\n"}, (), "recommended: cpu: gumiho"),
    ],
)
def test_recommends_the_backend_for_the_hardware(
    tmp_path: Path, files: dict[str, str], runs: tuple[str, ...], expected: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    available: Any = {name: object() if name in (*runs, "cpu") else None for name in NAMES}
    assert expected in recommendation(available, None, tmp_path)


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
