"""Each kind of error, provoked once through the public interface, so that callers can tell input, damage, misuse and
absence apart."""

import ast
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import load
from runtime.backends import backend, memory
from runtime.bundle.files import replaced
from runtime.bundle.reader import Bundle
from runtime.cli.checks import doctor
from runtime.decoding.text.chat_template import ChatTemplate
from runtime.device_check.main import main as device_check
from runtime.engines.memory_check import require
from runtime.engines.store import compile_engines, find_engines
from runtime.errors import DamageError, GumihoError, InputError, MisuseError, UnavailableError, reason
from tests.conftest import MakeBundle
from tests.pairs import SMALL
from tests.seal import update

PYTHONS = {
    "OSError",
    "ValueError",
    "UnicodeDecodeError",
    "UnicodeEncodeError",
    "KeyError",
    "IndexError",
    "TypeError",
    "RecursionError",
}


@pytest.fixture
def bundle(make_bundle: MakeBundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(make_bundle(SMALL, "--capacity", "100"), tmp_path / "bundle"))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def other_backend(bundle: Path) -> None:
    load(bundle, "tensorrt")


def no_bundle(bundle: Path) -> None:
    load(bundle / "weights")


def later_format(bundle: Path) -> None:
    (bundle / "gumiho.json").write_text(json.dumps({"format": 99}))
    load(bundle)


def text_without_tokenizer(bundle: Path) -> None:
    with load(bundle) as model:
        model.generate("text")


def file_in_no_folder(bundle: Path) -> None:
    with replaced(bundle / "nowhere/trace.html"):
        pass


def refused_conversation(bundle: Path) -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {}, "chat_template.jinja")
    template.render([{"role": "user", "content": "x"}])


def damaged_weights(bundle: Path) -> None:
    flip(bundle / "weights/target.bin")
    load(bundle)


def missing_file(bundle: Path) -> None:
    (bundle / "golden.npz").unlink()
    load(bundle)


def damaged_engines(bundle: Path) -> None:
    flip(find_engines(Bundle(bundle), backend("cpu")) / "target.onnx")
    load(bundle)


def damaged_record(bundle: Path) -> None:
    (find_engines(Bundle(bundle), backend("cpu")) / "engine.json").write_text("{}")
    load(bundle)


def damaged_golden_run(bundle: Path) -> None:
    (bundle / "golden.npz").write_bytes(b"damaged")
    update(bundle, "golden.npz")
    compile_engines(Bundle(bundle), backend("cpu"))


def template_that_does_not_parse(bundle: Path) -> None:
    (bundle / "chat_template.jinja").write_text("{% for %}")
    ChatTemplate.of(bundle)


def closed_engine(bundle: Path) -> None:
    opened = Bundle(bundle)
    engines, _ = backend("cpu").open(opened, find_engines(opened, backend("cpu")))
    engines["target"].close()
    engines["target"].bind({})


def no_engines(bundle: Path) -> None:
    shutil.rmtree(bundle / "engines")
    load(bundle)


def full_disk(bundle: Path) -> None:
    with replaced(bundle / "trace.html"):
        raise OSError(28, "No space left on device")


CASES: list[tuple[type[GumihoError], Callable[[Path], object]]] = [
    (InputError, lambda _: backend("abacus")),
    (InputError, lambda _: backend("cpu", "gpu:9")),
    (InputError, other_backend),
    (InputError, no_bundle),
    (InputError, lambda _: load("a\0b")),
    (InputError, later_format),
    (InputError, text_without_tokenizer),
    (InputError, file_in_no_folder),
    (InputError, refused_conversation),
    (InputError, lambda _: ChatTemplate("", {}, "here").render([])),
    (DamageError, damaged_weights),
    (DamageError, missing_file),
    (DamageError, damaged_engines),
    (DamageError, damaged_record),
    (DamageError, damaged_golden_run),
    (DamageError, template_that_does_not_parse),
    (MisuseError, closed_engine),
    (UnavailableError, no_engines),
    (UnavailableError, full_disk),
]


@pytest.mark.parametrize(("kind", "provoke"), CASES)
def test_each_error_has_its_kind(bundle: Path, kind: type[GumihoError], provoke: Callable[[Path], object]) -> None:
    with pytest.raises(GumihoError) as caught:
        provoke(bundle)
    assert type(caught.value) is kind, caught.value


@pytest.mark.parametrize("name", ["cuda", "tensorrt", "migraphx"])
def test_a_backend_without_its_library_is_unavailable(name: str) -> None:
    if doctor.look(name, "")[0]:
        pytest.skip(f"{name} runs here")
    with pytest.raises(UnavailableError):
        backend(name)


def test_too_little_memory_is_unavailable(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_free", lambda: 1000)
    with pytest.raises(UnavailableError, match="loading for cpu needs about"):
        require(Bundle(bundle), backend("cpu"))


def test_a_bad_option_of_a_command_is_one_line(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert device_check([str(bundle), "--minutes", "0"]) == 1
    assert capsys.readouterr().err == "error: --minutes is 0.0: give more than 0\n"


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "(No space left on device): free some space, or name another file"),
        (errno.EROFS, "(Read-only file system): make its place writable, or name another file"),
        (errno.EACCES, "(Permission denied): make its place writable, or name another file"),
        (errno.EIO, "(Input/output error): name another file"),
    ],
)
def test_what_to_do_about_a_file_depends_on_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number), "a file")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(GumihoError) as error, replaced(tmp_path / "x"):
        pass
    assert str(error.value) == f"'{tmp_path / 'x'}' cannot be written {says}"


@pytest.mark.parametrize(
    ("provoke", "says"),
    [
        (lambda: json.loads(""), "it is empty"),
        (lambda: json.loads("[1,\n}"), "line 2, column 1 is not JSON"),
        (lambda: b"ab\xff".decode(), "byte 2 is not UTF-8"),
        (lambda: "ab\ud800".encode(), "character 2 cannot be written as utf-8"),
        (lambda: Path("/nowhere/x").read_text(), "No such file or directory"),
        (lambda: {}["x"], "there is no 'x'"),
        (lambda: json.loads("[" * 100_000), "it is nested too deeply"),
        (lambda: int("x\n"), "invalid literal for int() with base 10: 'x\\n'"),
        (lambda: next(iter(())), "StopIteration"),
    ],
)
def test_causes_in_words(provoke: Callable[[], object], says: str) -> None:
    with pytest.raises(Exception) as error:  # noqa: PT011
        provoke()
    assert reason(error.value) == says


def test_no_message_quotes_an_exception_of_pythons_own() -> None:
    """``{error}`` in a message is an exception of ours, or of a library that has its own words; all others go through
    ``reason``."""
    quoted = set[str]()
    for file in (file for folder in ("runtime", "exporter") for file in Path(folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ExceptHandler) and node.name:
                caught = {one.id for one in ast.walk(node.type or ast.Tuple()) if isinstance(one, ast.Name)}
                shown = {
                    value.value.id
                    for value in ast.walk(node)
                    if isinstance(value, ast.FormattedValue) and isinstance(value.value, ast.Name)
                }
                if node.name in shown and caught & PYTHONS:
                    quoted.add(f"{file}: {', '.join(sorted(caught & PYTHONS))}")
    # json.dumps names the value
    assert quoted <= {"runtime/decoding/grammar.py: RecursionError, TypeError, ValueError"}
