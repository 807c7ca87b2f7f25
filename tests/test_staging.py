"""Two exports at once, interruptions at any time, and names that no folder can have: each ends in one sentence and
leaves it whole.

python -m tests.test_staging 50     # so many overlapping pairs of exports
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from exporter import staging
from exporter.cli import main
from exporter.staging import staged
from runtime.bundle.reader import Bundle
from runtime.errors import GumihoError
from tests.pairs import RandomPair

ROOT = Path(__file__).parents[1]
TINY = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TREE = ["--rows", "4", "--capacity", "64"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    RandomPair(TINY, layers=1, heads=1).write(folder)
    return folder


def folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "file").write_text(content)
    return path


def options(pair: Path, out: Path | str, *more: str) -> list[str]:
    return ["--ckpt", str(pair / "drafter"), "--target", str(pair / "target"), "--out", str(out), *TREE, *more]


def started(argv: list[str], **more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-m", "exporter.cli", *argv],
        cwd=ROOT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more},
    )


def at_once(pair: Path, folder: Path, overwrite: bool, apart: float) -> str:
    """Two real exports to one folder, the second started ``apart`` seconds behind the first. Returns what came of
    them."""
    # Without a drafter there is one graph to trace.
    argv = ["--target", str(pair / "target"), "--out", str(folder / "out"), "--capacity", "64"]
    argv += ["--overwrite"] if overwrite else []
    first = started(argv)
    time.sleep(apart)
    second = started(argv)
    ends = [(p.communicate(timeout=300)[1], p.returncode) for p in (first, second)]
    for error, status in ends:
        assert status in (0, 1), error
        said = [line for line in error.splitlines() if "error" in line.lower()]
        if status:
            assert len(said) == 1, error
            assert f"another export is writing '{folder / 'out'}'" in said[0] or (
                not overwrite and "exists" in said[0]
            ), error
    assert any(status == 0 for _, status in ends), ends
    Bundle(folder / "out").verify()
    assert [p.name for p in folder.iterdir()] == ["out"]
    if all(status == 0 for _, status in ends):
        return "one behind the other"
    return "locked" if any("another export" in error for error, _ in ends) else "finished before"


@pytest.mark.exhaustive  # the next test is its core
@pytest.mark.parametrize(("overwrite", "apart"), [(True, 0.0), (False, 0.0), (True, 0.5)])
def test_two_exports_at_once_leave_one_whole_bundle(pair: Path, tmp_path: Path, overwrite: bool, apart: float) -> None:
    at_once(pair, tmp_path, overwrite, apart)


def test_who_comes_second_is_told_and_takes_nothing_away(tmp_path: Path) -> None:
    with staged(tmp_path / "out", overwrite=False, fingerprint="this") as folder:
        (folder / "weights").mkdir()
        for overwrite in (False, True):
            with pytest.raises(GumihoError) as caught, staged(tmp_path / "out", overwrite, fingerprint="this"):
                pytest.fail("it began")
            assert str(caught.value) == (
                f"another export is writing '{tmp_path / 'out'}': wait for it, or name another folder with --out"
            )
        assert (folder / "weights").is_dir()
        with staged(tmp_path / "other", overwrite=False):
            pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "out"]


def test_an_interruption_after_the_last_step_is_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new bundle has the name, so it would be untrue to say that nothing was written."""
    real = staging.replace_folder

    def replaced(new: Path, folder: Path) -> None:
        real(new, folder)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(staging, "replace_folder", replaced)
    with staged(tmp_path / "out", overwrite=False) as folder:
        (folder / "file").touch()
    assert (tmp_path / "out" / "file").exists()


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--out", "~nouser/out"),
        ("--out", "a" * 5000),
        ("--out", "a" * 250),
        ("--ckpt", "~nouser"),
        ("--ckpt", "b/" + "a" * 5000),
        ("--target", "~nouser/x"),
    ],
    ids=lambda v: v[:9],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_names_that_no_folder_can_have(
    pair: Path,
    tmp_path: Path,
    option: str,
    name: str,
    dry: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = options(pair, tmp_path / "out", *dry)
    argv[argv.index(option) + 1] = name
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: '{name[:9]}")
    assert "cannot be the name of a folder" in error
    assert error.count("\n") == 1
    assert len(error) < 300
    assert list(tmp_path.iterdir()) == []


def test_a_home_is_expanded(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(options(pair, "~/out", "--dry-run")) == 0
    assert f"bundle '{tmp_path}/out' for cpu.\n" in capsys.readouterr().out


def test_the_reader_of_standard_output_may_go(pair: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = started(options(pair, tmp_path / "out", "--dry-run"), stdout=writing)
    os.close(writing)
    assert process.communicate(timeout=300) == (None, "")
    assert process.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_standard_output_may_be_full(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    assert main(options(pair, tmp_path / "out", "--dry-run")) == 1
    assert sys.stdout is None, "what is left in its buffer fails again when the process ends"
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space left"):
        full.close()
    error = capsys.readouterr().err
    assert (
        error == "error: standard output cannot be written (No space left on device): free some space, or write it "
        "elsewhere\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)])
def test_an_interruption_while_libraries_are_imported(pair: Path, tmp_path: Path, number: signal.Signals) -> None:
    """The signal comes as soon as torch's files are mapped, and torch takes a second to import."""
    process = started(options(pair, tmp_path / "out"))
    deadline = time.monotonic() + 100
    while (
        process.poll() is None
        and time.monotonic() < deadline
        and "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    ):
        time.sleep(0.005)
    process.send_signal(number)
    error = process.communicate(timeout=300)[1]
    assert (process.returncode, error) == (130, "error: interrupted, nothing was written\n")
    assert list(tmp_path.iterdir()) == []


# --- replacing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_is_replaced_or_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(staging, "_exchanged", lambda *_: False)
    for content in ("first", "second"):
        staging.replace_folder(folder(tmp_path / "new", content), tmp_path / "out")
        assert (tmp_path / "out" / "file").read_text() == content
        assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.skipif(sys.platform != "linux", reason="names are exchanged in one step on Linux only")
def test_on_linux_the_names_are_exchanged_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, new = folder(tmp_path / "out", "old"), folder(tmp_path / "new", "new")
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("a rename leaves a moment without a folder"))
    staging.replace_folder(new, out)
    assert (out / "file").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("call", [1, 2])
def test_a_failure_between_two_renames_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    monkeypatch.setattr(staging, "_exchanged", lambda *_: False)
    out, new, calls, real = folder(tmp_path / "out", "old"), folder(tmp_path / "new", "new"), list[int](), Path.rename

    def rename(self: Path, target: Path) -> Path:
        calls.append(1)
        if len(calls) == call:
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        staging.replace_folder(new, out)
    assert (out / "file").read_text() == "old"
    assert not (tmp_path / ".out.old").exists()


def test_what_a_killed_process_left_between_two_renames_is_put_back(tmp_path: Path) -> None:
    folder(tmp_path / ".out.old", "old")
    for _ in range(2):
        with pytest.raises(GumihoError, match="exists"), staged(tmp_path / "out", overwrite=False):
            pass
        assert (tmp_path / "out" / "file").read_text() == "old"
        folder(tmp_path / ".out.old", "older")
    with pytest.raises(GumihoError, match="exists"), staged(tmp_path / "out", overwrite=False):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


if __name__ == "__main__":
    found, draw = Counter[str](), random.Random(1)
    with tempfile.TemporaryDirectory() as root:
        RandomPair(TINY, layers=1, heads=1).write(Path(root) / "pair")
        for i in range(int(sys.argv[1])):
            (Path(root) / str(i)).mkdir()
            overwrite, apart = i % 2 == 1, draw.choice((0.0, 0.0, draw.random(), 8 * draw.random()))
            found[at_once(Path(root) / "pair", Path(root) / str(i), overwrite, apart)] += 1
            print(i, overwrite, f"{apart:.1f} s apart", dict(found), flush=True)
