"""``python -m runtime.generate`` as people type it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROMPT = "def main(argv=None):\n"


def generate(*argv: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runtime.generate", *map(str, argv)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=Path(__file__).parent.parent)


def test_prompt_from_everywhere(demo_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text(PROMPT)
    outputs = [
        generate(demo_bundle, "--prompt", PROMPT, "--max-new-tokens", "40"),
        generate(demo_bundle, "--prompt-file", tmp_path / "prompt", "--max-new-tokens", "40"),
        generate(demo_bundle, "--max-new-tokens", "40", stdin=PROMPT),
        generate(demo_bundle, "--prompt", PROMPT, "--max-new-tokens", "40", "--no-speculation"),
    ]
    assert all(done.returncode == 0 and done.stderr == "" for done in outputs), outputs
    assert len({done.stdout for done in outputs}) == 1
    assert outputs[0].stdout.strip()


def test_stats_for_programs(demo_bundle: Path) -> None:
    done = generate(demo_bundle, "--prompt", PROMPT, "--max-new-tokens", "50", "--stats", "json", "--compare")
    report = json.loads(done.stdout)
    stats = report["stats"]
    assert done.returncode == 0
    assert report["compare"]["identical"] is True
    assert report["compare"]["first_difference"] is None
    assert report["compare"]["speed_ratio"] > 0
    assert stats["tokens"] == len(report["ids"]) <= 50
    assert stats["tau"] == pytest.approx((stats["tokens"] - 1) / stats["cycles"], abs=1e-3)
    # Every cycle emits the accepted tokens and the target's own next one, save the last one where it was cut.
    assert stats["tau"] == pytest.approx(1 + sum(stats["acceptance_by_depth"]), abs=1.01 / stats["cycles"] + 0.01)
    assert report["plain"]["tau"] == 1.0
    assert report["plain"]["acceptance_by_depth"] == []


def test_stats_for_readers(demo_bundle: Path) -> None:
    done = generate(demo_bundle, "--prompt", PROMPT, "--max-new-tokens", "30", "--stats", "--compare")
    for word in ("tau", "draft", "target", "host", "first token", "tokens/s", "accepted by depth", "identical tokens"):
        assert word in done.stderr
    assert "tau" not in done.stdout


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["nowhere", "--prompt", "x"], 1, "'nowhere' is no bundle"),
        (["BUNDLE", "--prompt-file", "nowhere"], 1, "the prompt cannot be read"),
        (["BUNDLE", "--prompt", "x = 1\n" * 1000], 1, "the bundle's capacity is 1024"),
        (["BUNDLE", "--prompt", "x", "--max-new-tokens", "-3"], 1, "max_new_tokens is -3"),
        (["BUNDLE", "--prompt", "x", "--backend", "abacus"], 1, "there is no backend 'abacus'"),
        (["BUNDLE", "--prompt", "x", "--threads", "-1"], 1, "threads is -1"),
        (["BUNDLE", "--prompt", "x", "--compare", "--no-speculation"], 1, "leave out --no-speculation"),
        (["BUNDLE", "--prompt", "x", "--warp"], 2, "unrecognized arguments: --warp"),
        (["BUNDLE", "--prompt", "x", "--prompt-file", "y"], 2, "not allowed with"),
    ],
)
def test_bad_input(demo_bundle: Path, argv: list[str], status: int, message: str) -> None:
    done = generate(*[demo_bundle if word == "BUNDLE" else word for word in argv])
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    if status == 1:
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


def test_a_reader_that_leaves(demo_bundle: Path) -> None:
    """``generate | head -c 1`` ends quietly."""
    command = f"{sys.executable} -m runtime.generate {demo_bundle} --prompt 'def f' --max-new-tokens 200 | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, errors="replace", cwd=Path(__file__).parent.parent
    )
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
