"""One process at a time holds a lock, and a file that was left locks nothing."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtime.bundle import locks
from runtime.bundle.locks import locked
from runtime.errors import GumihoError

ROOT = Path(__file__).parents[1]
_HOLDER = """
import sys, time
from pathlib import Path
from runtime.bundle.locks import locked
with locked(Path(sys.argv[1]), "busy"):
    print("held", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock of ``out``."""
    argv = [sys.executable, "-c", _HOLDER, str(tmp_path / ".out.lock")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_process_gets_the_sentence_until_the_first_is_gone(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    with holder:
        with (
            pytest.raises(GumihoError, match="^wait for it$"),
            locked(tmp_path / ".out.lock", "wait for it", remove=True),
        ):
            pass
        with locked(tmp_path / "other", "wait for it", remove=True):
            pass
        assert (tmp_path / ".out.lock").exists()
        holder.kill()  # it had no chance to clean up
        holder.wait()
    assert (tmp_path / ".out.lock").exists()
    with locked(tmp_path / ".out.lock", "wait for it", remove=True):
        pass
    assert list(tmp_path.iterdir()) == []


def test_another_thread_and_the_same_one_are_refused_too(tmp_path: Path) -> None:
    with locked(tmp_path / ".out.lock", "first", remove=True):
        with pytest.raises(GumihoError, match="second"), locked(tmp_path / ".out.lock", "second", remove=True):
            pass
        with pytest.raises(GumihoError, match="third"), locked(tmp_path / ".out.lock", "third", remove=True):
            pass  # the one who was refused has not removed the file
    assert list(tmp_path.iterdir()) == []


def test_only_one_of_many_is_inside(tmp_path: Path) -> None:
    """Locks are taken and given back, and their files made and removed, by several threads at once."""
    inside, seen, wrong = list[int](), list[int](), list[int]()

    def work(number: int) -> None:
        while len(seen) < 300:
            try:
                with locked(tmp_path / ".out.lock", "busy", remove=True):
                    inside.append(number)
                    if len(inside) > 1:
                        wrong.append(number)
                    seen.append(number)
                    inside.remove(number)
            except GumihoError:
                pass

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_file_was_removed_in_between_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes the file after it was opened, and locks a new one of that name."""
    real, other = os.open, list[int]()

    def opened(path: os.PathLike[str], flags: int, mode: int = 0o777) -> int:
        mine = real(path, flags, mode)
        if not other:
            os.unlink(path)
            other.append(real(path, flags, mode))
            locks.fcntl.flock(other[0], locks.fcntl.LOCK_EX)
        return mine

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(GumihoError, match="busy"), locked(tmp_path / ".out.lock", "busy", remove=True):
        pass
    os.close(other[0])


@pytest.mark.parametrize("missing", ["module", "file system"])
def test_without_locks_it_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    if missing == "module":
        monkeypatch.setattr(locks, "fcntl", None)
    else:
        monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with locked(tmp_path / ".out.lock", "busy", remove=True):
        pass
    said = capsys.readouterr().err
    assert said.startswith(f"warning: '{tmp_path}' cannot be locked (")
    assert said.count("\n") == 1


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".out.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / ".out.lock", "busy", remove=True):
        pass
    assert not (tmp_path / "victim").exists()
