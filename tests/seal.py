"""Bundles changed on purpose: the checksums are made to fit, so that what is checked behind them has to notice."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bundle.hashes import File
from runtime.bundle.manifest import MANIFEST
from runtime.bundle.records import SEAL, sealed
from runtime.engines.store import RECORD


def edit(record: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a sealed JSON file, or a bundle's manifest, and seals it again. The file is written anew: it may be a
    hard link."""
    file = record / MANIFEST if record.is_dir() else record
    raw = json.loads(file.read_text("utf-8"))
    raw.pop(SEAL)
    change(raw)
    file.unlink()
    file.write_text(sealed(raw), "utf-8")


def without_shared(raw: dict[str, Any]) -> None:
    """Leaves the graph of passes over rows of several streams out of a manifest."""
    del raw["forms"]["cpu"]["graphs"]["shared"]
    raw["requires"].remove("shared-passes")


def edit_golden(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a bundle's golden run, an array by name."""
    run = dict(np.load(bundle / "golden.npz"))
    change(run)
    np.savez(bundle / "golden.npz", **run)
    update(bundle, "golden.npz")


def update(bundle: Path, *names: str) -> None:
    """Takes the files' new sizes and hashes into the manifest, and into the keys of the engines that were compiled from
    them."""
    files = {name: File.of(bundle / name) for name in names}
    edit(bundle, lambda raw: raw["files"].update({name: asdict(file) for name, file in files.items()}))
    hashes = {name: file.sha256 for name, file in files.items()}
    for record in (bundle / "engines").glob(f"*/{RECORD}"):
        edit(record, lambda raw: raw["key"].update({name: hashes[name] for name in hashes.keys() & raw["key"].keys()}))
