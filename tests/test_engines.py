"""Engines: several compiles at once, interrupted ones, and damage."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import GumihoError, load
from runtime.backends import backend
from runtime.bundle.hashes import File
from runtime.bundle.reader import Bundle
from runtime.engines import store
from runtime.engines.store import RECORD, compile_engines, find_engines, read_record
from tests.conftest import MakeBundle
from tests.pairs import SMALL
from tests.seal import edit

ROOT = Path(__file__).parent.parent


@pytest.fixture
def copy(make_bundle: MakeBundle, tmp_path: Path) -> Path:
    made = make_bundle(SMALL, "--capacity", "100")
    return Path(shutil.copytree(made, tmp_path / "copy"))


def folder(bundle: Path) -> Path:
    return find_engines(Bundle(bundle), backend("cpu"))


def compiling(bundle: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "runtime.compile", str(bundle)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def whole(bundle: Path) -> bool:
    """Exactly one set of engines, which loads, and nothing half-written beside it."""
    load(bundle).close()
    left = sorted(path.name for path in (bundle / "engines").iterdir())
    return len(left) == 2 and left[0] == ".lock" and left[1].startswith("cpu-")


@pytest.mark.parametrize("middle", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_two_compiles_at_once_leave_whole_engines(copy: Path, middle: bool) -> None:
    """One while the other is in the middle, and started together."""
    first = compiling(copy)
    if middle:
        assert first.stderr
        while "optimizing" not in first.stderr.readline():
            assert first.poll() is None
    second = compiling(copy)
    said = [process.communicate()[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert whole(copy)


def test_who_waits_is_told(copy: Path) -> None:
    from runtime.bundle.locks import locked

    with locked(copy / "engines/.lock", "busy"):
        process = compiling(copy)
        assert process.stderr
        while "waiting for it to end" not in process.stderr.readline():
            assert process.poll() is None
        with pytest.raises(GumihoError, match="busy"), locked(copy / "engines/.lock", "busy"):
            pass
    process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_compile_leaves_the_engines_that_were_there(copy: Path, number: int) -> None:
    before = folder(copy)
    process = compiling(copy)
    assert process.stderr
    while "replaying" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode in (130, -signal.SIGKILL)
    assert folder(copy) == before
    assert "Traceback" not in said
    if number == signal.SIGKILL:
        assert list((copy / "engines").glob(".*partial*"))
        compile_engines(Bundle(copy), backend("cpu"))
    assert whole(copy)


@pytest.mark.parametrize("at", ["rename", "rmtree"])
def test_between_old_and_new_engines_never_neither(copy: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted at any step of putting the new ones in place, a bundle still loads."""
    steps = {"rename": (Path, "rename"), "rmtree": (shutil, "rmtree")}
    owner, name = steps[at]
    real: Callable[..., object] = getattr(owner, name)

    def watched(path: Path, *args: object, **kwargs: object) -> object:
        load(copy).close()
        result = real(path, *args, **kwargs)
        load(copy).close()
        if at == "rename":
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, watched)
    if at == "rename":
        with pytest.raises(KeyboardInterrupt):
            compile_engines(Bundle(copy), backend("cpu"))
    else:
        compile_engines(Bundle(copy), backend("cpu"))
    monkeypatch.undo()
    load(copy).close()


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["target.onnx", "draft.onnx", "extend.onnx", RECORD])
def test_a_flipped_bit_is_noticed(copy: Path, name: str) -> None:
    flip(folder(copy) / name)
    with pytest.raises(GumihoError, match=rf"{name} is (missing or )?damaged.*run `gumiho compile"):
        load(copy)


@pytest.mark.parametrize("text", ["null", "[]", "1", "", "{", "[" * 100_000, '{"key": {}, "files": {}}', "\0\0"])
def test_a_record_that_is_none_hides_no_other_engines(copy: Path, text: str) -> None:
    good = folder(copy)
    bad = shutil.copytree(good, good.with_name("cpu-newer"))
    (bad / RECORD).write_text(text)
    assert folder(copy) == good
    shutil.rmtree(good)
    with pytest.raises(GumihoError, match="engine.json is damaged.*run `gumiho compile"):
        load(copy)


@pytest.mark.parametrize("name", ["../../gumiho.json", "/etc/passwd", "a/b", ".hidden", ""])
def test_a_record_names_files_of_its_own_folder_alone(copy: Path, name: str) -> None:
    from dataclasses import asdict

    found = asdict(File.of(copy / "gumiho.json"))
    edit(folder(copy) / RECORD, lambda raw: raw["files"].update({name: found}))
    with pytest.raises(GumihoError, match="engine.json is damaged .*expected the name of a file"):
        load(copy)


def test_the_record_names_every_file(copy: Path) -> None:
    engines = folder(copy)
    assert set(read_record(engines).files) == {path.name for path in engines.iterdir()} - {RECORD}


def test_engines_that_are_replaced_while_they_load_are_looked_for_again(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compile ends between finding engines and reading them."""
    from runtime.backends.onnxruntime import Cpu

    real, calls = Cpu.open, list[Path]()

    def opened(self: Cpu, bundle: Bundle, engines: Path, threads: int, streams: int) -> object:
        calls.append(engines)
        if len(calls) == 1:
            engines.rename(engines.with_name(f"{engines.name}~1"))
        return real(self, bundle, engines, threads, streams)

    monkeypatch.setattr(Cpu, "open", opened)
    load(copy).close()
    assert len(calls) == 2


def test_engines_that_are_replaced_while_they_are_looked_for_are_looked_for_again(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compile ends after their folder was listed: before its record is read, or while its files are compared."""
    for name in ("read_record", "first_damaged"):
        real, compiled = getattr(store, name), list[Path]()

        def meanwhile(*given: object, real: Callable[..., object] = real, compiled: list[Path] = compiled) -> object:
            if not compiled:
                compiled.append(copy)
                compiled.append(compile_engines(Bundle(copy), backend("cpu"))[0])
            return real(*given)

        with monkeypatch.context() as patch:
            patch.setattr(store, name, meanwhile)
            found = folder(copy)
        assert found == compiled[1]
        assert whole(copy)


def test_replaced_engines_that_cannot_be_removed_are_removed_later(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("runtime.engines.store.shutil.rmtree", lambda *given, **more: None)
        compile_engines(Bundle(copy), backend("cpu"))
    load(copy).close()
    assert not whole(copy)
    compile_engines(Bundle(copy), backend("cpu"))
    assert whole(copy)
