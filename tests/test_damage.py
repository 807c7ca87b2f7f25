"""Odd files, arguments and circumstances that the commands meet: each is refused in one line, and harms nothing."""

import errno
import gc
import hashlib
import io
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from exporter.cli import main as export
from runtime import GumihoError, Model, load
from runtime.bundle.files import replaced
from runtime.bundle.reader import Bundle
from runtime.cli.command import run
from runtime.cli.generate import main as generate
from runtime.errors import GumihoError as Error
from tests import hostile_bundles, hostile_checkpoints
from tests.limits import full_disk
from tests.seal import update

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage") / "bundle"
    hostile_bundles.prepare(folder)
    return folder


@pytest.fixture
def model(bundle: Path) -> Iterator[Model]:
    with load(bundle, threads=1) as model:
        yield model


# --- files that are replaced ------------------------------------------------------------------------------------------


def write(path: Path) -> None:
    with replaced(path) as file:
        file.write(b"new")


def test_links_to_files_are_written_through(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").write_bytes(b"old")
    (tmp_path / "there/file").chmod(0o640)
    (tmp_path / "link").symlink_to("there/file")
    (tmp_path / "dangling").symlink_to("there/other")
    for name in ("link", "dangling"):
        write(tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "there/file").stat().st_mode) == 0o640
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == ["file", "other"]


@pytest.mark.parametrize("kind", ["device", "link to a device", "pipe", "socket", "folder", "loop", "long", "null"])
def test_what_is_no_file_stays(kind: str, tmp_path: Path) -> None:
    path = {"device": Path("/dev/full"), "long": tmp_path / ("a" * 5000), "null": tmp_path / "a\0b"}.get(
        kind, tmp_path / "x"
    )
    if kind == "link to a device":
        path.symlink_to("/dev/full")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    before = sorted((p.name, p.lstat().st_mode) for p in tmp_path.iterdir())
    with pytest.raises(GumihoError, match="cannot be written"):
        write(path)
    assert sorted((p.name, p.lstat().st_mode) for p in tmp_path.iterdir()) == before
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


# --- how commands end -------------------------------------------------------------------------------------------------


def test_an_error_is_one_line() -> None:
    said = str(Error("a\nb\r\n  c\x1b[2J\ud800" + "x" * 5000 + "\nway out"))
    assert said.startswith("a b c?[2J?xxx")
    assert said.endswith("way out")
    assert said.isprintable()
    assert len(said) < 1300


def test_an_error_of_the_system_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> int:
        return len(Path("/nowhere/at/all").read_bytes())

    def none_left() -> int:
        raise OSError(24, "Too many open files")

    for work, said in (
        (missing, "error: '/nowhere/at/all' cannot be used (No such file"),
        (none_left, "refused a request (Too many"),
    ):
        assert run(work) == 1
        error = capsys.readouterr().err
        assert said in error
        assert "standard output" not in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("to", ["> /dev/full", pytest.param(">&-", marks=pytest.mark.exhaustive)])
def test_compile_without_standard_output(bundle: Path, tmp_path: Path, to: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m runtime.compile {bundle} {to}"], capture_output=True, text=True, cwd=ROOT
    )
    lines = [line for line in done.stderr.splitlines() if not line.endswith(" ...")]
    if "full" in to:
        assert lines == [
            "error: standard output cannot be written (No space left on device): free some space, or write it elsewhere"
        ]
    else:
        assert not lines
    assert done.returncode == ("full" in to)


INTERRUPTED = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    raise ImportError("initialization failed")
"""


@pytest.mark.parametrize(
    ("loads", "command"),
    [
        ("logging", ["-m", "runtime.generate"]),
        ("logging", ["-mruntime.serve.main"]),
        ("logging", ["-m", "exporter.cli"]),
        ("logging", ["gumiho", "chat"]),
        ("logging", ["gumiho-export"]),
        ("numpy", ["gumiho", "generate"]),
        ("onnxruntime", ["-m", "runtime.doctor", "--backend", "cpu"]),
    ],
)
def test_an_interruption_while_libraries_load(loads: str, command: list[str], tmp_path: Path) -> None:
    """It comes as one of them is imported. What pip installs are scripts such as these."""
    (tmp_path / f"{loads}.py").write_text(INTERRUPTED)
    (tmp_path / "gumiho").write_text("from runtime.gumiho import main; main()")
    (tmp_path / "gumiho-export").write_text("from exporter.cli import main; main()")
    place = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, *command], capture_output=True, env=place, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, b"")


def test_an_interruption_of_a_program_that_uses_the_package() -> None:
    """It is the program's, whatever its arguments are."""
    code = "import runtime, signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run(
        [sys.executable, "-c", code, "-m", "runtime.generate"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout == "True\n"


def test_a_background_process_still_ignores_interruptions() -> None:
    """Which a shell started with SIGINT ignored."""
    code = (
        "import sys; sys.argv = ['gumiho']; import runtime, signal; print(signal.getsignal(signal.SIGINT) is "
        "signal.SIG_IGN)"
    )
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout == "True\n"


def test_a_full_disk_under_compile(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library says something else, and a file that is written then fails."""
    from runtime.backends.onnxruntime import Cpu
    from runtime.cli.compile import main

    def fails(*_: Any) -> None:
        filled.enter_context(full_disk())
        raise GumihoError("Protobuf serialization failed")

    monkeypatch.setattr(Cpu, "compile", fails)
    with ExitStack() as filled:
        assert main([str(bundle)]) == 1
    assert "File too large): raise the limit on the size of files" in capfd.readouterr().err


MANY = "9" * 23
ODD = [
    (["--logit-bias", f"{MANY}=1"], "outside the vocabulary"),
    (["--ban", MANY], "outside the vocabulary"),
    (["--threads", "3000000000"], "threads is"),
    (["--threads", "1000"], "threads is 1000"),
    (["--json-schema", '{"a":' * 5000 + "1" + "}" * 5000], "nested too deeply"),
]


@pytest.mark.parametrize(("argv", "says"), ODD)
def test_odd_arguments(bundle: Path, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate([str(bundle), "--prompt", "AB", *argv]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert says in error
    assert error.startswith("error: ")


@pytest.mark.parametrize("name", ["~nouser", "a" * 5000, "a\0b", "two\nlines"])
def test_odd_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate([name, "--prompt", "x"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert len(error) < 1500


@pytest.mark.parametrize("kind", ["pipe", "folder", "binary", "/dev/zero"])
@pytest.mark.parametrize("option", ["--prompt-file", "--prompts", "--json-schema", "--grammar"])
def test_prompts_that_are_no_text(
    bundle: Path, tmp_path: Path, kind: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(kind) if kind.startswith("/") else tmp_path / "x"
    {"pipe": os.mkfifo, "folder": Path.mkdir}.get(kind, lambda path: None)(file)
    if kind == "binary":
        file.write_bytes(bytes(range(256)))
    assert generate([str(bundle), *([] if "prompt" in option else ["--prompt", "AB"]), option, str(file)]) == 1
    assert "cannot be read" in capsys.readouterr().err


# --- saved sessions ---------------------------------------------------------------------------------------------------


def sealed(parts: dict[str, Any]) -> bytes:
    content = io.BytesIO()
    np.savez(content, **parts)
    return content.getvalue() + hashlib.sha256(content.getvalue()).hexdigest().encode()


CHANGES = {
    "rank of ids": ("ids", lambda a: a[None]),
    "text": ("ids", lambda a: a.astype(str)),
    "numbers": ("ids", lambda a: a * 1.0),
    "too large": ("ids", lambda a: a + 10**6),
    "negative": ("ids", lambda a: -a - 1),
    "few": ("ids", lambda a: a[:3]),
    "many": ("ids", lambda a: np.zeros(10**4, np.int64)),
    "NaN": ("target", lambda a: a * np.float32("nan")),
    "infinite": ("drafter", lambda a: a + np.float32("inf")),
    "rank": ("target", lambda a: a[None]),
    "layers": ("target", lambda a: a[:1]),
    "width": ("drafter", lambda a: a[..., 1:]),
    "dtype": ("target", lambda a: a.astype(np.float16)),
    "rows": ("target", lambda a: a[:, :2]),
    "no rows": ("target", lambda a: a[:, :0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_sessions_that_were_changed_on_purpose(model: Model, tmp_path: Path, change: str) -> None:
    session, file = model.session(), tmp_path / "s"
    list(session.generate([5, 6, 7], 9).cycles())
    session.save(file)
    with np.load(file) as raw:
        parts = {name: raw[name] for name in raw.files}
    file.write_bytes(sealed(parts))
    model.session(file)  # as it was
    name, edit = CHANGES[change]
    file.write_bytes(sealed({**parts, name: edit(parts[name])}))
    with pytest.raises(GumihoError, match="save (it|them) again"):
        model.session(file)


@pytest.mark.exhaustive
def test_a_session_that_unpacks_to_much_is_not_unpacked(model: Model, tmp_path: Path) -> None:
    import resource

    content = io.BytesIO()
    np.savez_compressed(
        content, bundle=np.array("x"), ids=np.zeros(1 << 27, np.int64), target=np.zeros(1), drafter=np.zeros(1)
    )
    (tmp_path / "s").write_bytes(content.getvalue() + hashlib.sha256(content.getvalue()).hexdigest().encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(GumihoError, match=r"unpacks to|bytes, expected"):
        model.session(tmp_path / "s")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # KiB; numpy has held more to make it


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_a_session_that_is_no_file(model: Model, tmp_path: Path, make: Any) -> None:
    make(tmp_path / "s")
    with pytest.raises(GumihoError, match="cannot be read as a saved session"):
        model.session(tmp_path / "s")


# --- tokenizers -------------------------------------------------------------------------------------------------------


def test_a_tokenizer_of_another_model(bundle: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    raw = json.loads((copy / "tokenizer.json").read_text())
    raw["model"]["vocab"] = {piece: 1000 + i for piece, i in raw["model"]["vocab"].items()}
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").write_text(json.dumps(raw))
    update(copy, "tokenizer.json")
    with (
        load(copy, threads=1) as model,
        pytest.raises(GumihoError, match=r"token id 1\d\d\d, outside the vocabulary of 61"),
    ):
        model.generate("AB")


def test_a_text_with_a_token_that_the_target_lacks(model: Model) -> None:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    words.add_tokens(["<pad>"])
    model.bundle.__dict__["tokenizer"] = words
    with pytest.raises(
        GumihoError,
        match=r"^the text holds '<pad>' \(token id 61\), which the target does not know: its vocabulary is 61; write "
        r"something",
    ):
        model.encode("w1<pad>")


def test_a_tokenizer_that_panics(model: Model) -> None:
    class Panic(BaseException):
        pass

    class Broken:
        def encode(self, *_: object, **__: object) -> None:
            raise Panic("index out of bounds")

    model.bundle.__dict__["tokenizer"] = Broken()
    with pytest.raises(GumihoError, match="tokenizer fails on this text \\(index out of bounds"):
        model.encode("AB")


# --- permissions ------------------------------------------------------------------------------------------------------


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of files that this user may not read, which the system itself would let an administrator read."""
    names: set[str] = set()

    def guarded(opens: Callable[..., Any]) -> Callable[..., Any]:
        def opening(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int) and Path(os.fsdecode(path)).name in names:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fsdecode(path))
            return opens(path, *args, **kwargs)

        return opening

    for module in (io, os):
        monkeypatch.setattr(module, "open", guarded(module.open))
    return names


MAY_NOT = "cannot be read (Permission denied): let this user read it, and the folders above it"


@pytest.mark.parametrize(
    "name", ["gumiho.json", "tokenizer.json", "target.bin", "draft.bin", "target.onnx", "golden.npz"]
)
def test_a_bundle_s_file_that_may_not_be_read(bundle: Path, forbidden: set[str], name: str) -> None:
    forbidden.add(name)

    def opened() -> None:
        found = Bundle(bundle)
        _ = found.tokenizer
        found.verify(quick=True)

    with pytest.raises(GumihoError) as caught:
        opened()
    assert str(caught.value) == f"{next(bundle.rglob(name))} {MAY_NOT}"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    hostile_checkpoints.prepare(folder)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "target/config.json",
        "target/model-00001-of-00002.safetensors",
        "target/tokenizer.json",
        "target/tokenizer_config.json",
        "target/generation_config.json",
        "target/chat_template.jinja",
        "drafter/pytorch_model.bin",
    ],
)
def test_a_checkpoint_s_file_that_may_not_be_read(
    checkpoints: Path, forbidden: set[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    forbidden.add(Path(name).name)
    sources = [
        "--ckpt",
        str(checkpoints / "drafter"),
        "--target",
        str(checkpoints / "target"),
        *hostile_checkpoints.OPTIONS,
    ]
    assert export([*sources, "--out", str(checkpoints / "out"), "--dry-run"]) == 1
    assert capsys.readouterr().err == f"error: {checkpoints / name} {MAY_NOT}\n"


# --- threads and memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one iterator", "an iterator each", "pieces"])
def test_threads_share_a_generation(model: Model, kind: str) -> None:
    prompt = model.encode("ABCAB")
    wanted = model.generate(prompt, 40)
    text = "".join(wanted)
    generation, found, errors = model.generate(prompt, 40), list[Any](), list[Exception]()
    shared: Any = {"one iterator": generation.cycles(), "pieces": generation.pieces()}.get(kind)

    def draw() -> None:
        try:
            for one in generation.cycles() if shared is None else shared:
                found.append(one)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=draw) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert generation.ids == wanted.ids
    assert (
        sorted("".join(found)) == sorted(text)
        if kind == "pieces"
        else sum(len(cycle.tokens) for cycle in found) == 40 or generation.finish_reason != "length"
    )


def test_pieces_from_within_a_cycle(model: Model) -> None:
    generation = model.generate("AB", 5, callback=lambda *_: next(pieces))
    pieces = iter(generation)
    with pytest.raises(GumihoError, match="in the middle of a cycle"):
        next(pieces)


def test_a_model_that_nobody_has_is_freed(bundle: Path) -> None:
    """At once, not when garbage is collected, which little work in Python makes happen late."""
    gc.collect()
    gc.disable()
    try:
        model = load(bundle, threads=1)
        list(model.generate("ABC", 9))
        list(model.session().generate("ABC", 9, rows=2).cycles())
        seen = weakref.ref(model), weakref.ref(model.decoder), weakref.ref(model.decoder.engines["target"])
        del model
        assert [one() for one in seen] == [None] * 3
    finally:
        gc.enable()
