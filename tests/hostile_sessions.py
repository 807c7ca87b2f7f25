"""Spoiled files of ``Session.save`` for ``tests.mutations``: what the next turn makes of them."""

import hashlib
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from runtime import GumihoError, Model, load
from tests import hostile_bundles
from tests.hostile_bundles import one_line, spoil_arrays
from tests.mutations import Apply

_FILE = "session.npz"
_whole: dict[str, Any] = {}


def prepare(folder: Path) -> None:
    """A saved session, and a model to restore it with."""
    bundle = folder.parent / "bundle"
    hostile_bundles.prepare(bundle)
    model = _whole["model"] = load(bundle, threads=1)
    shutil.rmtree(bundle)  # it is loaded
    folder.mkdir()
    session = model.session()
    list(session.generate([5, 6, 7, 5, 6], 9).cycles())
    session.save(folder / _FILE)
    _whole.update(ids=session.ids, next=_next(model, session.ids), content=(folder / _FILE).read_bytes())


def _next(model: Model, ids: list[int], file: Path | None = None) -> list[int]:
    turn = model.session(file).generate(ids, 6) if file else model.generate(ids, 6)  # the latter reads all of it
    list(turn.cycles())
    return turn.ids


def attempt(folder: Path) -> str:
    """Restores, and generates. Returns ``refused`` or ``restored``; what is not sealed again must be what was saved."""
    model, file = _whole["model"], folder / _FILE
    same = file.is_file() and file.read_bytes() == _whole["content"]
    try:
        found = _next(model, _whole["ids"], file)
    except GumihoError as error:
        one_line(str(error))
        found = None
    assert _next(model, _whole["ids"]) == _whole["next"], "the model is not what it was"
    if found is None:
        assert not same
        return "refused"
    content = file.read_bytes()
    if hashlib.sha256(content[:-64]).hexdigest().encode() == content[-64:] and not same:
        return "restored, sealed"  # numbers in the caches can be any
    assert same, "damage is used silently"
    assert found == _whole["next"]
    return "restored"


def _sealed(file: Path, rng: random.Random) -> tuple[str, Apply] | None:
    """Another array, under a checksum that fits."""
    with np.load(file) as raw:
        parts = {name: raw[name] for name in raw.files}
    said = spoil_arrays(parts, rng)

    def apply(copy: Path) -> None:
        copy.unlink()
        with copy.open("wb") as out:
            np.savez(out, **parts)
        content = copy.read_bytes()
        copy.write_bytes(content + hashlib.sha256(content).hexdigest().encode())

    return f"{said}, sealed", apply


WAYS = (_sealed,) * 15
