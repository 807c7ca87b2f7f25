"""Spoiled bundles for ``tests.mutations``: what the commands of the runtime make of them.

A file that was changed must be noticed. A change that was sealed again may take effect, since it says what it means;
then nothing may crash, hang, or reach out of the bundle.
"""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from exporter.cli import main as export
from runtime import GumihoError, load
from runtime.bundle.hashes import File
from runtime.bundle.manifest import MANIFEST
from runtime.bundle.records import Damage, parse, unsealed
from runtime.cli import compile, generate
from runtime.cli.checks import doctor, selftest
from runtime.engines.store import RECORD
from tests import hostile_checkpoints
from tests.mutations import Apply, captured, dumped, general, spoil
from tests.seal import edit, update

TEMPLATE = (
    "{% for m in messages %}<{{ m.role | upper }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<A>{% endif "
    "%}"
)
_PROMPTS = (["--prompt", "ABCAB"], ["--chat", "--prompt", "AB", "--temperature", "1", "--seed", "3"])
_whole: dict[str, Any] = {}


def prepare(folder: Path) -> None:
    """A small bundle with its engines, a tokenizer and a chat template."""
    pair = folder.parent / "pair"
    hostile_checkpoints.prepare(pair)
    (pair / "target" / "chat_template.jinja").write_text(TEMPLATE)
    argv = ["--ckpt", str(pair / "drafter"), "--target", str(pair / "target"), "--out", str(folder)]
    with captured() as read:
        status = export([*argv, *hostile_checkpoints.OPTIONS])
    assert status == 0, read()
    shutil.rmtree(pair)
    _whole.update(records=_records(folder), texts=_texts(folder))


def attempt(folder: Path) -> str:
    """Runs every command. Returns ``refused``, ``whole`` for the same output, or ``changed`` where the change was
    sealed."""
    records = _records(folder)
    sealed = records != _whole["records"]
    outcome = "changed" if sealed else "whole"
    texts = _texts(folder)
    if None in texts:
        outcome = "refused" if texts == [None] * len(texts) else "refused in part"
    if not sealed:
        differ = [
            (text, whole) for text, whole in zip(texts, _whole["texts"], strict=True) if text not in (None, whole)
        ]
        assert not differ, f"damage is used silently: {differ}"
    run(doctor.main, ["--backend", "cpu", str(folder)], quiet=False)
    copy = folder.parent / "compiled"
    try:
        shutil.copytree(folder, copy, symlinks=True)
        if run(compile.main, [str(copy)]) is not None and not sealed:
            assert _texts(copy)[0] in (None, _whole["texts"][0]), "engines compiled from damage are used silently"
    except shutil.Error:
        pass  # pipes cannot be copied
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    if outcome == "changed":
        _use(folder)
    assert [p.name for p in folder.parent.iterdir()] == [folder.name], "something was written beside the bundle"
    assert not (folder.parent.parent / "victim").exists(), "something was written outside the bundle"
    return outcome


def _texts(folder: Path) -> list[str | None]:
    """What each prompt is continued by; None where that was refused."""
    return [
        run(generate.main, [str(folder), *prompt, "--max-new-tokens", "8", "--threads", "1"]) for prompt in _PROMPTS
    ]


def _use(folder: Path) -> None:
    try:
        with load(folder, threads=1) as model:
            selftest.compare(model, selftest.prompts(model, 1)[0], 3, {})
            model.chat([{"role": "user", "content": "A"}])
    except GumihoError as error:
        one_line(str(error))


def _records(folder: Path) -> list[Any]:
    """The content of the bundle's records; None for what is damaged."""
    found = []
    for file in (folder / MANIFEST, *sorted(folder.glob(f"engines/*/{RECORD}"))):
        try:
            found.append(
                unsealed(parse(file.read_bytes())) if file.is_file() and file.stat().st_size < 1 << 20 else None
            )
        except (Damage, AttributeError, ValueError):
            found.append(None)
    return found


def one_line(error: str) -> None:
    assert error.isprintable(), f"not one printable line: {error[:300]!r}"
    assert len(error) < 2000, f"a sentence of {len(error)} characters"


def run(main: Callable[[list[str]], int], argv: list[str], quiet: bool = True) -> str | None:
    """What a command prints; None where it ends with status 1, having said why in one line. quiet: whether that line
    must be there."""
    with captured() as read:
        status = main(argv)
    out, error = read()
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    rest = [
        line
        for line in error.splitlines()
        if line and not line.startswith(("error: ", "note: ")) and not line.endswith(" ...")
    ]
    assert status in (0, 1), f"status {status}"
    assert len(lines) == status or (not quiet and not lines), error
    assert not rest, error
    for line in lines:
        one_line(line)
    return None if status else out


# --- mutations that are sealed again ----------------------------------------------------------------------------------


def _resealed(whole: Path) -> tuple[Path, bool]:
    """The bundle that a file belongs to, and whether the file is one of the engines'."""
    bundle = next((folder for folder in whole.parents if (folder / MANIFEST).is_file()), None)
    if bundle is None:  # an earlier mutation may have taken its manifest away
        raise FileNotFoundError(MANIFEST)
    return bundle, bundle / "engines" in whole.parents


def reseal(file: Path) -> None:
    """Takes a file's content into the record that names it."""
    bundle, engines = _resealed(file)
    if engines:
        edit(file.parent / RECORD, lambda raw: raw["files"].update({file.name: asdict(File.of(file))}))
    else:
        update(bundle, str(file.relative_to(bundle)))


def _content(file: Path, rng: random.Random) -> tuple[str, Apply] | None:
    """A mutation of a file, and its new hash in the record."""
    if file.name in (MANIFEST, RECORD):
        return None
    made = general(file, rng)
    if made is None:
        return None
    what, change = made

    def apply(copy: Path) -> None:
        change(copy)
        if copy.is_file():
            reseal(copy)

    return f"{what}, sealed", apply


def _record(file: Path, rng: random.Random) -> tuple[str, Apply] | None:
    """A value of the manifest or of the engines' record."""
    if file.name not in (MANIFEST, RECORD):
        return None
    content = unsealed(json.loads(file.read_text("utf-8")))
    said = spoil(content, rng)

    def apply(copy: Path) -> None:
        try:
            new = json.loads(dumped(content))
        except (ValueError, RecursionError):  # what no JSON holds cannot be sealed
            return

        def change(raw: dict[str, Any]) -> None:
            raw.clear()
            raw.update(new)

        edit(copy, change)

    return f"{said}, sealed", apply


def _golden(file: Path, rng: random.Random) -> tuple[str, Apply] | None:
    if file.suffix != ".npz":
        return None
    with np.load(file) as raw:
        parts = {name: raw[name] for name in raw.files}
    said = spoil_arrays(parts, rng)

    def apply(copy: Path) -> None:
        copy.unlink()
        np.savez(copy, **parts)  # type: ignore[arg-type]
        reseal(copy)

    return f"{said}, sealed", apply


def spoil_arrays(parts: dict[str, Any], rng: random.Random) -> str:
    """Changes one of some arrays; says what."""
    name = rng.choice(sorted(parts))
    way, array = rng.choice(("value", "value", "delete", "cast", "rank", "cut", "longer", "text", "empty")), parts[name]
    value = rng.choice((float("nan"), float("inf"), -1, 10**9, 2**62, 0))
    if way == "delete":
        del parts[name]
    elif way == "value" and array.size and array.dtype.kind in "fi":
        array = parts[name] = array.copy()
        with np.errstate(all="ignore"):
            array.reshape(-1)[rng.randrange(array.size)] = (
                value if array.dtype.kind == "f" or np.isfinite(value) else -5
            )
    elif way == "cast":
        with np.errstate(all="ignore"):
            parts[name] = (
                np.array(7)
                if array.dtype.kind == "U"
                else array.astype(rng.choice((np.float64, np.int8, np.complex64, np.bool_)))
            )
    elif way == "rank":
        parts[name] = array[None]
    elif way == "cut":
        parts[name] = array[..., :-1] if array.ndim else array
    elif way == "longer":
        parts[name] = np.concatenate([array, array], axis=min(1, array.ndim - 1)) if array.ndim else array
    elif way == "text":
        parts[name] = np.array(rng.choice(("x", "a" * 9999, "")))
    else:
        parts[name] = np.zeros((0,) * max(1, array.ndim), array.dtype)
    return f"{way} of {name}, {value}"


WAYS = (_content, _content, _record, _record, _record, _record, _record, _record, _golden)
