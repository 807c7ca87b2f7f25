"""What a bundle's manifest may say, and that nothing of it is used unseen."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import GumihoError, load
from runtime.bundle.hashes import File, file_hash, first_damaged
from runtime.bundle.manifest_reader import parse_manifest
from runtime.bundle.reader import Bundle
from runtime.cli.checks.doctor import main as doctor
from runtime.cli.compile import main as compile_bundle
from tests.conftest import DEMO, EVERY_BACKEND, MakeBundle
from tests.pairs import SMALL
from tests.seal import edit, update


@pytest.fixture
def copy(make_bundle: MakeBundle, tmp_path: Path) -> Path:
    """Of a small bundle, since its files are read again and again."""
    return Path(shutil.copytree(make_bundle(SMALL, "--capacity", "100"), tmp_path / "copy", symlinks=True))


def snapshot(folder: Path, without: Path) -> dict[str, str]:
    """Hashes of all files of a folder but for those in another one."""
    files = (p for p in folder.rglob("*") if p.is_file() and not p.is_relative_to(without))
    return {str(p): file_hash(p) for p in files}


def moved(raw: dict[str, Any], old: str, new: str) -> None:
    raw["files"][new] = raw["files"].pop(old)


def graph(raw: dict[str, Any], form: str = "cpu", name: str = "target") -> Any:
    return raw["forms"][form]["graphs"][name]


def renamed(raw: dict[str, Any], new: str) -> None:
    graphs = raw["forms"]["cpu"]["graphs"]
    graphs[new] = graphs.pop("target")


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a graph's name is a path": (lambda raw: renamed(raw, "../../../victim"), r"\.\./victim'?, expected one of target"),
    "a graph's name is unknown": (lambda raw: renamed(raw, "other"), "expected one of target, shared, draft, extend"),
    "a graph is missing": (lambda raw: raw["forms"]["cpu"]["graphs"].pop("extend"), "has no graph 'extend'"),
    "a graph's file is outside": (lambda raw: graph(raw).update(file="../evil.onnx"), "which is not among the files"),
    "a file is outside": (lambda raw: moved(raw, "golden.npz", "../../etc/passwd"), "not a path inside the bundle"),
    "a file is absolute": (lambda raw: moved(raw, "golden.npz", "/etc/passwd"), "not a path inside the bundle"),
    "a file is spelled in another way": (
        lambda raw: moved(raw, "golden.npz", "./golden.npz"),
        "not a path inside the bundle",
    ),
    "a file is an engine": (lambda raw: moved(raw, "golden.npz", "engines/x"), "not a path inside the bundle"),
    "a file has no name": (lambda raw: moved(raw, "golden.npz", ""), "not a path inside the bundle"),
    "no forms": (lambda raw: raw.update(forms={}), "forms is empty"),
    "a backend that is none": (lambda raw: raw["forms"].update(x=raw["forms"]["cpu"]), "forms.*'x', expected one of"),
    "a huge capacity": (lambda raw: raw.update(capacity=2**62), "capacity is .*expected 1 to"),
    "a capacity the caches lack": (
        lambda raw: raw.update(capacity=9999),
        "caches of .* positions, expected 9999 or more",
    ),
    "no chunk": (lambda raw: raw["forms"]["cpu"].update(chunk=0), "chunk is 0"),
    "a chunk below the rows": (
        lambda raw: raw["forms"]["cpu"].update(static=True, chunk=4),
        "chunk is 4, expected 8 or more",
    ),
    "another width": (lambda raw: raw.update(hidden=64), r"output is hidden float32 \['rows', 48\], expected hidden"),
    "another vocabulary": (lambda raw: raw.update(vocabulary=2049), "expected logits float32"),
    "another dtype": (lambda raw: raw.update(dtype="float16"), "expected .* float16"),
    "rows beyond the tree's": (lambda raw: raw.update(rows=9), r"expected 9 or more|expected tree_tokens int64 \[9\]"),
    "as deep as it has rows": (lambda raw: raw.update(depth=8), "depth is 8, expected less than the 8 rows"),
    "an end that is no token": (lambda raw: raw.update(eos_token_ids=[10**9]), "eos_token_ids holds 1000000000"),
    "a negative end": (lambda raw: raw.update(eos_token_ids=[-5]), r"eos_token_ids\[0\] is -5"),
    "a truth value for a number": (lambda raw: raw.update(depth=True), "depth is True, expected a whole number"),
    "a cache of other heads": (lambda raw: graph(raw)["inputs"][4].update(shape=[1, 99, 128, 8]), "expected past_"),
    "a missing output": (lambda raw: graph(raw)["outputs"].pop(), "outputs are"),
    "a symbol of no axis": (
        lambda raw: graph(raw)["inputs"][0].update(shape=["columns"]),
        "expected the name of an axis",
    ),
    "a later feature": (
        lambda raw: raw.update(requires=["ladder"]),
        "needs 'ladder', which this version does not know",
    ),
    "a hash that is none": (lambda raw: raw["files"]["golden.npz"].update(sha256="0"), "expected one of|SHA-256"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_manifests_are_refused_and_nothing_is_touched(
    copy: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim.onnx"
    victim.write_bytes(b"precious")
    change, said = HOSTILE[case]
    edit(copy, change)
    with pytest.raises(GumihoError, match=said) as caught:
        load(copy)
    assert len(str(caught.value).splitlines()) == 1
    before = snapshot(tmp_path, copy / "engines")
    assert compile_bundle([str(copy)]) == 1
    assert doctor([str(copy), "--backend", "cpu"]) == 1
    assert snapshot(tmp_path, copy / "engines") == before
    assert "Traceback" not in capsys.readouterr().err


def test_what_a_later_version_adds_is_passed_over(copy: Path) -> None:
    edit(copy, lambda raw: (raw.update(comment="x"), graph(raw).update(more=[1])))
    load(copy).close()


def test_damage_is_noticed_without_any_hash_of_the_manifest_itself(copy: Path) -> None:
    manifest = copy / "gumiho.json"
    raw = json.loads(manifest.read_text())
    raw["eos_token_ids"] = [7]
    manifest.write_text(json.dumps(raw))
    with pytest.raises(GumihoError, match="content does not match its checksum"):
        load(copy)


def test_other_formats_are_named(copy: Path) -> None:
    manifest, raw = copy / "gumiho.json", json.loads((copy / "gumiho.json").read_text())
    for found, said in (
        (2, "has bundle format 2 and this version reads 3: export it again"),
        (10**30, "format unknown"),
        ("3", "damaged"),
    ):
        manifest.write_text(json.dumps({**raw, "format": found}))
        with pytest.raises(GumihoError, match=said):
            load(copy)


@pytest.mark.parametrize(
    "name",
    ["weights/target.bin", "weights/draft.bin", "golden.npz", "graphs/cpu/target.onnx", "generation_config.json"],
)
@pytest.mark.parametrize("damage", ["zeros", "a bit", "cut off"])
def test_damaged_files_are_refused_when_loading(copy: Path, name: str, damage: str) -> None:
    file = copy / name
    if not file.exists():
        pytest.skip(f"the pair has no {name}")
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 1
    file.write_bytes(
        {"zeros": bytes(len(content)), "a bit": bytes(content), "cut off": bytes(content[:middle])}[damage]
    )
    with pytest.raises(GumihoError, match=name.rsplit("/")[-1]):
        load(copy)


def test_large_files_are_sampled_when_loading_and_read_whole_when_asked(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros show in a sample; a flipped bit between samples shows once every byte is read."""
    monkeypatch.setattr("runtime.bundle.hashes._READ_WHOLE", 0)
    file = copy / "weights/target.bin"
    with file.open("ab") as grown:
        grown.truncate(40 << 20)
    update(copy, "weights/target.bin")
    bundle = Bundle(copy)
    bundle.verify(quick=True)
    with file.open("r+b") as opened:
        opened.seek(20 << 20)
        opened.write(b"x")
    bundle.verify(quick=True)
    with pytest.raises(GumihoError, match="target.bin is damaged"):
        bundle.verify()
    with file.open("r+b") as opened:
        opened.seek(16 << 20)
        opened.write(b"x")
    with pytest.raises(GumihoError, match="target.bin is damaged"):
        bundle.verify(quick=True)


def test_small_files_are_read_whole_before_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.bundle.hashes._READ_WHOLE", 300_000)
    files = {}
    for name, size in (("large", 400_000), ("small", 200_000)):
        (tmp_path / name).write_bytes(bytes(size))
        files[name] = File.of(tmp_path / name)
        content = bytearray(size)
        content[size // 2] = 1
        (tmp_path / name).write_bytes(content)
    assert first_damaged(tmp_path, files, quick=True) == "small"
    (tmp_path / "small").write_bytes(bytes(200_000))
    assert first_damaged(tmp_path, files, quick=True) is None
    assert first_damaged(tmp_path, files, quick=False) == "large"


def test_links_may_not_leave_the_bundle(copy: Path, tmp_path: Path) -> None:
    (copy / "golden.npz").rename(tmp_path / "elsewhere")
    (copy / "golden.npz").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GumihoError, match="is a link that leaves the bundle"):
        load(copy)


def test_pipes_do_not_keep_anyone_waiting(copy: Path) -> None:
    (copy / "gumiho.json").unlink()
    os.mkfifo(copy / "gumiho.json")
    with pytest.raises(GumihoError, match="is not a bundle"):
        load(copy)


@pytest.mark.parametrize("name", ["x" * 5000, "~nouser/x", "a\0b", ""])
def test_names_that_no_file_system_takes(name: str) -> None:
    with pytest.raises(GumihoError) as caught:
        load(name)
    assert len(str(caught.value)) < 300


def test_the_manifest_is_read_as_it_is_written(make_bundle: MakeBundle) -> None:
    manifest = Bundle(make_bundle(DEMO, *EVERY_BACKEND)).manifest
    assert parse_manifest(manifest.to_json(), Path("x")) == manifest
