"""What engines take, compared with what is free: by hand, and with files as Linux writes them."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime import GumihoError, load
from runtime.backends import backend, control_groups, memory, onnxruntime
from runtime.backends.memory import Free, MemoryNeeds, Space
from runtime.backends.shared_weights import nbytes
from runtime.bundle.reader import Bundle
from runtime.engines.memory_check import require
from runtime.engines.store import compile_engines
from tests.conftest import DEMO, EVERY_BACKEND, MakeBundle
from tests.seal import edit
from tests.test_stand_ins import amd, amd_apart, bundle, nvidia, read_once
from tests.weights_inside import as_older_exports_wrote_it

__all__ = ["amd", "amd_apart", "bundle", "nvidia", "read_once"]  # fixtures

GB = 10**9


class Linux:
    """The files that memory is read from."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.group = root, root / "cgroup/machine/service"
        self.group.mkdir(parents=True)
        monkeypatch.setattr(memory, "_MEMINFO", root / "meminfo")
        monkeypatch.setattr(control_groups, "_OWN", root / "own")
        monkeypatch.setattr(control_groups, "_ROOT", root / "cgroup")
        (root / "meminfo").write_text(
            "MemTotal: 9000 kB\nMemAvailable:    8000 kB\nSwapFree:  100 kB\nHugePages_Total:  0\n"
        )
        (root / "own").write_text("1:cpu:/other\n0::/machine/service\n")

    def limit(self, group: Path, most: object, used: int, cached: int = 0, swap: object = "max") -> None:
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 1\nactive_file {cached // 2}\ninactive_file {cached - cached // 2}\n")
        (group / "memory.swap.max").write_text(f"{swap}\n")
        (group / "memory.swap.current").write_text("10\n")


@pytest.fixture
def linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Linux:
    return Linux(tmp_path, monkeypatch)


def test_what_is_free_is_what_linux_says(linux: Linux) -> None:
    assert memory.host_free() == 8100 * 1024
    (linux.root / "own").unlink()
    assert memory.host_free() == 8100 * 1024
    (linux.root / "meminfo").unlink()
    assert memory.host_free() is None


def test_control_groups_allow_less(linux: Linux) -> None:
    linux.limit(linux.group, "max", 5)
    assert memory.host_free() == 8100 * 1024
    linux.limit(linux.group, 5000, 3000, cached=1001, swap=0)
    assert memory.host_free() == 5000 - 3000 + 1001
    linux.limit(linux.group, 5000, 3000, swap=310)
    assert memory.host_free() == 2000 + 300
    linux.limit(linux.group, 5000, 3000)
    assert memory.host_free() == 2000 + 100 * 1024
    linux.limit(linux.group.parent, 900, 800, swap=0)  # of a group around it
    assert memory.host_free() == 100
    linux.limit(linux.group.parent, 900, 1000, swap=0)
    assert memory.host_free() == 0


class Fake:
    NAME = "fake"

    def __init__(self, needs: MemoryNeeds, free: Free | None) -> None:
        self.needs, self.device = needs, free

    def memory(self, bundle: Any) -> MemoryNeeds:
        return self.needs

    def free(self) -> Free | None:
        return self.device


SMALL = Space(1 * GB, 1 * GB)


@pytest.mark.parametrize(
    ("running", "free", "message"),
    [
        (Space(10 * GB, 8 * GB), Free(8 * GB, False), None),
        (
            Space(10 * GB + 1),
            None,
            r"loading for fake needs about 10\.0 GB of memory, and 10\.0 GB are free, swap included: free",
        ),
        (Space(1 * GB, 9 * GB), Free(8 * GB, False), r"9\.0 GB on the device, and 8\.0 GB are free there: free"),
        (Space(4 * GB, 5 * GB), Free(9 * GB, True), None),
        (
            Space(4 * GB, 6 * GB),
            Free(7 * GB, True),
            None,
        ),  # what a Jetson calls free leaves out the files that are cached
        (
            Space(5 * GB, 6 * GB),
            Free(7 * GB, True),
            r"5\.0 GB for the host and 6\.0 GB for the device, and 10\.0 GB of the memory",
        ),
        (Space(5 * GB, 6 * GB), Free(7 * GB, False), None),
        (Space(1 * GB, 30 * GB), Free(20 * GB, True), r"30\.0 GB on the device, and 20\.0 GB are free there"),
    ],
)
def test_what_cannot_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, running: Space, free: Free | None, message: str | None
) -> None:
    monkeypatch.setattr(memory, "host_free", lambda: 10 * GB)
    fake: Any = Fake(MemoryNeeds(SMALL, running), free)
    if message is None:
        assert require(SimpleNamespace(), fake) == running  # type: ignore[arg-type]
        return
    with pytest.raises(GumihoError, match=message):
        require(SimpleNamespace(), fake)  # type: ignore[arg-type]
    monkeypatch.setenv("GUMIHO_IGNORE_MEMORY", "1")
    require(SimpleNamespace(), fake)  # type: ignore[arg-type]


def test_compiling_takes_what_it_takes_and_what_running_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_free", lambda: 10 * GB)
    fake: Any = Fake(MemoryNeeds(Space(20 * GB, 1), Space(1 * GB, 3 * GB)), Free(4 * GB, False))
    assert require(SimpleNamespace(), fake) == fake.needs.running  # type: ignore[arg-type]
    with pytest.raises(GumihoError, match=r"compiling for fake needs about 20\.0 GB of memory"):
        require(SimpleNamespace(), fake, compiling=True)  # type: ignore[arg-type]
    monkeypatch.setattr(memory, "host_free", lambda: None)  # where nobody says
    assert require(SimpleNamespace(), fake, compiling=True) == Space(20 * GB, 3 * GB)  # type: ignore[arg-type]


def heavy(bundle: Path, name: str) -> Bundle:
    """A bundle whose graphs say that they have 16, 4 and 2 GB of weights. TensorRT's targets of all sizes share
    theirs."""

    def change(manifest: dict[str, Any]) -> None:
        for graph in manifest["forms"][name]["graphs"]:
            weights = {"target": 16 * GB, "draft": 4 * GB, "extend": 2 * GB}.get(graph, 16 * GB * (name == "tensorrt"))
            manifest["forms"][name]["graphs"][graph]["weights"] = weights

    edit(bundle, change)
    return Bundle(bundle)


def test_migraphx_holds_shared_weights_once(amd: Any, bundle: Path) -> None:
    read = heavy(bundle, "migraphx")  # which its graphs do not contain
    running = nbytes(read.manifest.form("migraphx")) + memory.buffers(read, "migraphx")
    assert backend("migraphx").memory(read) == MemoryNeeds(Space(0), Space(0, running))
    amd.HELD = 0
    compile_engines(read, backend("migraphx"))
    with load(bundle, "migraphx") as model:
        blocks = [block.nbytes for block in model.decoder.device.blocks]  # type: ignore[attr-defined]
        assert blocks.count(nbytes(read.manifest.form("migraphx"))) == 1
        assert not amd.HELD, "a program has weights of its own"


def test_migraphx_holds_weights_of_older_bundles_on_both_sides(amd: Any, bundle: Path) -> None:
    as_older_exports_wrote_it(bundle, "migraphx")
    read = heavy(bundle, "migraphx")
    work = memory.buffers(read, "migraphx")
    assert work > read.caches("migraphx") + 4 * 8 * 2048
    # Saving the target takes four times its weights, loading it three times; then it stays once while the others come.
    assert backend("migraphx").memory(read) == MemoryNeeds(Space(64 * GB, 16 * GB), Space(48 * GB, 22 * GB + work))

    def turn(manifest: dict[str, Any]) -> None:
        graphs = manifest["forms"]["migraphx"]["graphs"]
        manifest["forms"]["migraphx"]["graphs"] = {name: graphs[name] for name in reversed(graphs)}

    edit(bundle, turn)
    assert backend("migraphx").memory(Bundle(bundle)).running.host == (2 + 4 + 3 * 16) * GB


def test_engines_are_neither_compiled_nor_loaded_where_they_cannot_fit(
    nvidia: Any, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bundle.parent / "before"
    shutil.copytree(bundle, before)
    with pytest.raises(
        GumihoError, match=r"compiling for tensorrt needs about 22\.\d GB on the device, and 17\.2 GB are free"
    ):
        compile_engines(heavy(bundle, "tensorrt"), backend("tensorrt"))
    assert not (bundle / "engines").exists()
    nvidia.cuda.UNIFIED = True
    monkeypatch.setattr(memory, "host_free", lambda: 23 * GB)
    with pytest.raises(
        GumihoError, match=r"2\.1 GB for the host and 22\.\d GB for the device, and 23\.0 GB of the memory"
    ):
        compile_engines(Bundle(bundle), backend("tensorrt"))
    nvidia.cuda.UNIFIED = False
    compile_engines(Bundle(before), backend("tensorrt"))
    nvidia.cuda.FREE = 1_000_000
    with pytest.raises(
        GumihoError, match=r"loading for tensorrt needs about \d+ MB on the device, and 1 MB are free there"
    ):
        load(before, "tensorrt")
    assert not nvidia.cuda.STREAMS


def test_the_processor_needs_its_weights_and_caches(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_bundle(DEMO, *EVERY_BACKEND)
    read = Bundle(path)
    need = require(read, backend("cpu"))
    assert need == Space(read.weights() + read.caches("cpu"))
    monkeypatch.setattr(memory, "host_free", lambda: need.host - 1)
    with pytest.raises(GumihoError, match="loading for cpu needs about"):
        load(path, "cpu")


@pytest.mark.parametrize("streams", [1, 2])
def test_passes_of_many_sizes_do_not_pile_up(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, streams: int) -> None:
    """Prompts end with any number of rows, behind any number of positions."""
    monkeypatch.setattr(onnxruntime, "_SMALL", 0)
    with load(demo_bundle, "cpu", streams=streams) as model:
        passes = model.decoder.target
        passes.read([5, 6, 7])
        before = passes.logits[:3].copy()
        for rows in range(1, passes.form.chunk + 1, 2):
            passes.read([5] * rows, last=True)
        assert 1 < len(passes._causal) < 40 < passes.form.chunk // 2
        passes.read([5, 6, 7])  # bound anew
        np.testing.assert_array_equal(passes.logits[:3], before)
        for engine in model._loaded.engines.values():
            # ONNX Runtime keeps a pattern for every combination of sizes that ever ran, 50 KB for each of SmolLM2's.
            assert engine._session.get_session_options().enable_mem_pattern is False  # type: ignore[attr-defined]
