"""Weights that graphs take as inputs are in memory once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime import DamageError
from runtime.backends import shared_weights
from runtime.backends.shared_weights import SharedWeights, nbytes
from runtime.bundle.manifest import Form, Weight
from runtime.bundle.reader import Bundle
from runtime.devices import DeviceArray
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


def test_a_file_that_became_shorter_is_named(bundle: Any) -> None:
    (bundle.path / "two.bin").write_bytes(bytes(40))
    with pytest.raises(DamageError, match=r"two\.bin ends before its weights do: copy the bundle again"):
        SharedWeights(bundle, FORM, Lazy())


def test_all_sizes_share_one_set(make_bundle: MakeBundle, tmp_path: Path) -> None:
    """Every matrix of the demo pair's four target graphs and two drafter graphs is listed once, where the CPU's graphs find it too."""
    manifest = Bundle(make_bundle(DEMO, *EVERY_BACKEND)).manifest
    form = manifest.form("migraphx")
    assert [len(form.targets), sorted(form.weights)] == [4, ["draft", "target"]]
    stored = sum(file.size for name, file in manifest.files.items() if name.startswith("weights/"))
    assert sum(graph.weights for graph in form.graphs.values()) > 2 * nbytes(form)
    assert nbytes(form) <= stored
    assert not any("signed" in name for name in manifest.files)
