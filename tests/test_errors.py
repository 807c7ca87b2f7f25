"""Each kind of error, provoked once through the public interface, so that callers can tell input, damage, misuse and absence apart."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import doctor, load
from runtime.backends import backend, memory
from runtime.bundle.files import replaced
from runtime.bundle.reader import Bundle
from runtime.device_check.main import main as device_check
from runtime.engines.memory_check import require
from runtime.engines.store import compile_engines, find_engines
from runtime.errors import DamageError, GumihoError, InputError, MisuseError, UnavailableError
from runtime.text.chat_template import ChatTemplate
from tests.conftest import MakeBundle
from tests.pairs import SMALL
from tests.seal import update


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
