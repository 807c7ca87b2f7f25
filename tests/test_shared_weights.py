"""Weights that graphs take as inputs are in memory once."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime import DamageError
from runtime.backends import shared_weights
from runtime.backends.shared_weights import SharedWeights, nbytes
from runtime.bundle.graphs import Form, Weight
from runtime.bundle.manifest import MANIFEST
from runtime.bundle.manifest_reader import parse_manifest
from runtime.bundle.reader import Bundle
from runtime.bundle.records import SEAL, sealed
from runtime.engines.devices import DeviceArray
from runtime.engines.store import key
from tests.accelerator import Lazy
from tests.conftest import DEMO, EVERY_BACKEND, MakeBundle

SIZES = {"one.bin": 5000, "two.bin": 777}
TARGET = {
    "a": Weight("float32", (100, 3), "one.bin", 0),
    "b": Weight("int8", (2111,), "one.bin", 2889),  # up to the last byte, and from an odd one
    "tied": Weight("float32", (100, 3), "one.bin", 0),
    "part": Weight("float32", (50, 3), "one.bin", 0),
}
DRAFT = {"a": Weight("float16", (5, 7), "two.bin", 2), "embedding": Weight("float32", (100, 3), "one.bin", 0)}
FORM = Form("basic", 1, True, {}, {}, {"target": TARGET, "draft": DRAFT})


@pytest.fixture
def bundle(tmp_path: Path) -> Any:
    for name, size in SIZES.items():
        (tmp_path / name).write_bytes(np.random.default_rng(size).bytes(size))
    return SimpleNamespace(path=tmp_path)


def content(bundle: Any, weight: Weight) -> bytes:
    return bytes((bundle.path / weight.file).read_bytes()[weight.offset : weight.offset + weight.nbytes])


def test_the_host_maps_them(bundle: Any) -> None:
    shared = SharedWeights(bundle, FORM, None)
    for weights in (TARGET, DRAFT):
        for name, address in shared.addresses(weights).items():
            array = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * weights[name].nbytes).from_address(address))
            assert array.tobytes() == content(bundle, weights[name])


@pytest.mark.parametrize("staging", [64, 100, 1 << 20])
def test_a_device_has_them_once(bundle: Any, monkeypatch: pytest.MonkeyPatch, staging: int) -> None:
    """Even though its stream reads the staging memory as late as it may."""
    monkeypatch.setattr(shared_weights, "_STAGING", staging)
    device = Lazy()
    shared = SharedWeights(bundle, FORM, device)
    for weights in (TARGET, DRAFT):
        addresses = shared.addresses(weights)
        for name, address in addresses.items():
            whole = DeviceArray(address, (weights[name].nbytes,), np.uint8)
            assert device.read(whole).tobytes() == content(bundle, weights[name])
    assert addresses["embedding"] == shared.addresses(TARGET)["a"] == shared.addresses(TARGET)["tied"]
    block, *staged = [len(block) for block in device.blocks]
    assert staged == [2 * staging]
    assert block == nbytes(FORM) == 1280 + 2304 + 256  # multiples of 256
    starts = np.array(sorted({*addresses.values(), *shared.addresses(TARGET).values()}))
    assert not ((starts - starts[0]) % 256).any()


@pytest.mark.parametrize("device", [None, Lazy()], ids=["host", "device"])
@pytest.mark.parametrize(("file", "left"), [("two.bin", 71), ("two.bin", 0), ("one.bin", 4999)])
def test_a_file_that_became_shorter_is_named(bundle: Any, device: Lazy | None, file: str, left: int) -> None:
    os.truncate(bundle.path / file, left)
    with pytest.raises(DamageError, match=rf"{file} ends before its weights do: copy the bundle again"):
        SharedWeights(bundle, FORM, device)


@pytest.mark.parametrize("device", [None, Lazy()], ids=["host", "device"])
def test_a_file_that_is_gone_is_named(bundle: Any, device: Lazy | None) -> None:
    (bundle.path / "two.bin").unlink()
    with pytest.raises(
        DamageError, match=r"two\.bin cannot be read \(No such file or directory\): copy the bundle again"
    ):
        SharedWeights(bundle, FORM, device)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights.update(past_length=weights.popitem()[1]),
            "has 'past_length', which is an input or output",
        ),
        (
            lambda weights: weights.update({"past_key.0": weights.popitem()[1]}),
            "has 'past_key.0', which is an input or output",
        ),
        (lambda weights: weights.update(logits=weights.popitem()[1]), "has 'logits', which is an input or output"),
        (lambda weights: next(iter(weights.values())).update(offset=1), "begins at 1, which no float32 does"),
        (lambda weights: next(iter(weights.values())).update(offset=1 << 40), "ends behind"),
    ],
)
def test_weights_that_cannot_be_are_refused(
    make_bundle: MakeBundle, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    manifest = (make_bundle(DEMO, *EVERY_BACKEND) / MANIFEST).read_text()
    raw = json.loads(manifest)
    raw.pop(SEAL)
    change(raw["forms"]["migraphx"]["weights"]["target"])
    with pytest.raises(DamageError, match=message):
        parse_manifest(sealed(raw), Path(MANIFEST))


def test_engines_are_not_used_with_weights_from_elsewhere(make_bundle: MakeBundle) -> None:
    """Two matrices of one shape change places: the files and the graphs are the same."""
    bundle = Bundle(make_bundle(DEMO, *EVERY_BACKEND))
    form = bundle.manifest.form("migraphx")
    weights = dict(form.weights["target"])
    one, other = next(
        (one, other)
        for one, other in combinations(weights, 2)
        if weights[one].shape == weights[other].shape and weights[one] != weights[other]
    )
    weights[one], weights[other] = weights[other], weights[one]
    swapped = replace(form, weights={**form.weights, "target": weights})
    edited = SimpleNamespace(manifest=replace(bundle.manifest, forms={"migraphx": swapped}))
    before, after = (key(one, "migraphx", {"migraphx": "1"}) for one in (bundle, edited))  # type: ignore[arg-type]
    assert [part for part in before if before[part] != after[part]] == ["weights"]


def test_all_sizes_share_one_set(make_bundle: MakeBundle, tmp_path: Path) -> None:
    """Every matrix of the demo pair's four target graphs and two drafter graphs is listed once, where the CPU's graphs
    find it too."""
    manifest = Bundle(make_bundle(DEMO, *EVERY_BACKEND)).manifest
    form = manifest.form("migraphx")
    assert [len(form.targets), sorted(form.weights)] == [4, ["draft", "target"]]
    stored = sum(file.size for name, file in manifest.files.items() if name.startswith("weights/"))
    assert sum(graph.weights for graph in form.graphs.values()) > 2 * nbytes(form)
    assert nbytes(form) <= stored
    assert not any("signed" in name for name in manifest.files)
