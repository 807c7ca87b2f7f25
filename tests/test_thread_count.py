"""The number of CPU threads: which is chosen, that it is measured with engines opened with it, and that loading uses
it."""

import itertools
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import load
from runtime.backends import backend, control_groups, processor
from runtime.backends.onnxruntime import Cpu
from runtime.bundle.reader import Bundle
from runtime.decoding.decoder import Decoder
from runtime.decoding.prices import Costs
from runtime.engines import thread_count
from runtime.engines.store import compile_engines, find_engines
from runtime.engines.thread_count import OtherPrograms, fewer_threads
from runtime.errors import DamageError
from tests.conftest import MakeBundle
from tests.pairs import SMALL


@given(st.lists(st.floats(1, 1e12), min_size=10, max_size=10), st.integers(1, 1000))
def test_threads_are_halved_while_that_is_clearly_faster(times: list[float], cores: int) -> None:
    tried = list[int]()

    def time(threads: int) -> float:
        tried.append(threads)
        return times[len(tried)]

    chosen = fewer_threads(times[0], time, cores)
    halves = [cores >> n for n in range(1, 11) if cores >> n]
    assert tried == halves[: len(tried)]
    steps = [after < 0.85 * before for before, after in itertools.pairwise(times)]
    good = ([*steps[: len(halves)], False]).index(False)
    assert chosen == (halves[good - 1] if good else 0)
    assert len(tried) == min(good + 1, len(halves))


@pytest.fixture(scope="module")
def small_bundle(make_bundle: MakeBundle) -> Path:
    return make_bundle(SMALL, "--capacity", "100")


class Opened:
    """Notes the threads that engines are opened with, and pretends that texts take as long as given."""

    def __init__(self, patch: pytest.MonkeyPatch, cores: int, times: Mapping[int, float]) -> None:
        self.threads, self.measured = list[int](), list[int]()
        real = Cpu.open

        def opened(cpu: Cpu, bundle: Bundle, folder: Path, threads: int = 0, streams: int = 1) -> object:
            if streams == 1:  # not to replay the golden run
                self.threads.append(threads)
            return real(cpu, bundle, folder, min(threads, 2), streams)

        def measure(decoder: Decoder) -> Costs:
            self.measured.append(self.threads[-1])
            return Costs({1: 1e6, decoder.manifest.rows: 1e6 + self.threads[-1]}, 1e5, 6e4)

        patch.setattr(Cpu, "open", opened)
        patch.setattr("runtime.engines.store.measure", measure)
        patch.setattr("runtime.engines.store.physical_cores", lambda: cores)
        patch.setattr("runtime.engines.loaded.physical_cores", lambda: cores)
        patch.setattr(OtherPrograms, "in_the_way", False)
        patch.setattr("runtime.engines.store.text_time", lambda decoder: times[self.threads[-1]])


@pytest.mark.parametrize(
    ("cores", "times", "tried", "chosen"),
    [
        (8, {0: 10.0, 4: 9.0}, [4], 0),
        (8, {0: 10.0, 4: 8.0, 2: 7.0}, [4, 2], 4),
        (8, {0: 10.0, 4: 8.0, 2: 6.0, 1: 5.0}, [4, 2, 1], 1),
        (1, {}, [], 0),
    ],
)
def test_engines_are_measured_and_loaded_with_the_fastest_number_of_threads(
    small_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    times: Mapping[int, float],
    tried: list[int],
    chosen: int,
) -> None:
    bundle, steps = Path(shutil.copytree(small_bundle, tmp_path / "bundle")), list[str]()
    opened = Opened(monkeypatch, cores, times)
    compile_engines(Bundle(bundle), backend("cpu"), progress=steps.append)
    again = [chosen] if chosen else []
    assert opened.threads == [0, *tried, *again]
    assert opened.measured == [0, *again]
    assert [step for step in steps if "thread" in step] == [
        f"measuring with {n} thread{'' if n == 1 else 's'}" for n in [*tried, *again]
    ]
    costs = Costs.load(find_engines(Bundle(bundle), backend("cpu")))
    assert costs is not None
    assert (costs.threads, costs.target[max(costs.target)]) == (chosen, 1e6 + chosen)
    assert any("clearly faster" in line for line in costs.lines()) == bool(chosen)

    load(bundle).close()
    load(bundle, threads=2).close()
    # a copy of the bundle, or another share of the machine
    monkeypatch.setattr("runtime.engines.loaded.physical_cores", lambda: cores + 1)
    load(bundle).close()
    assert opened.threads[-3:] == [chosen, 2, 0]


def test_beside_other_programs_no_fewer_threads_are_tried(
    small_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cores look slow then, and the choice would stay when they are idle."""
    bundle, steps = Path(shutil.copytree(small_bundle, tmp_path / "bundle")), list[str]()
    opened = Opened(monkeypatch, 8, {0: 10.0, 4: 1.0, 2: 0.5, 1: 0.1})
    monkeypatch.setattr(OtherPrograms, "in_the_way", True)
    compile_engines(Bundle(bundle), backend("cpu"), progress=steps.append)
    assert opened.threads == [0]
    assert any("compile again while the machine is idle" in step for step in steps)
    costs = Costs.load(find_engines(Bundle(bundle), backend("cpu")))
    assert costs is not None
    assert costs.threads == 0


@pytest.mark.parametrize(
    ("busy", "own", "waited", "expected"),
    [
        (100, 100, 0, False),
        (100, 100, 90, False),  # threads that wait for each other
        (200, 100, 1, False),  # other programs on other cores
        (200, 100, 50, True),
        (105, 100, 50, False),
    ],
)
def test_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: int, own: int, waited: int, expected: bool
) -> None:
    """In hundredths of a second, over one second."""
    stat, task, clock = tmp_path / "stat", tmp_path / "task/1", [0, 0]
    task.mkdir(parents=True)
    monkeypatch.setattr(thread_count, "_STAT", stat)
    monkeypatch.setattr(thread_count, "_TASKS", task.parent)
    monkeypatch.setattr(thread_count, "perf_counter_ns", lambda: clock[0])
    monkeypatch.setattr(thread_count, "process_time_ns", lambda: clock[1])
    tick = os.sysconf("SC_CLK_TCK")

    def at(wall: int, busy: int, own: int, waited: int) -> None:
        clock[:] = wall * 10**7, own * 10**7
        stat.write_text(f"cpu  {busy * tick // 100} 0 0 999999 5 0 0 0 0 0\ncpu0 1 2 3\n")
        (task / "schedstat").write_text(f"{own * 10**7} {waited * 10**7} 12\n")

    at(1000, 5000, 300, 70)
    others = OtherPrograms()
    at(1100, 5000 + busy, 300 + own, 70 + waited)
    assert others.in_the_way == expected


def test_other_programs_where_the_system_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_count, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(thread_count, "_TASKS", tmp_path / "task")
    assert not OtherPrograms().in_the_way


@pytest.mark.parametrize("name", ["threads", "cores"])
@pytest.mark.parametrize("count", [-1, 1 << 20, 1.0, "2", True, None, [2]])
def test_a_stored_number_that_is_none_is_refused(tmp_path: Path, name: str, count: object) -> None:
    folder = tmp_path
    Costs({1: 1e6}, 0.0, 6e4).save(folder)
    content = json.loads((folder / "costs.json").read_text())
    (folder / "costs.json").write_text(json.dumps(content | {name: count}))
    with pytest.raises(DamageError, match="threads or cores is not a number of them"):
        Costs.read(folder)
    del content["threads"], content["cores"]  # engines that were compiled before it was chosen
    (folder / "costs.json").write_text(json.dumps(content))
    costs = Costs.read(folder)
    assert costs is not None
    assert costs.threads == 0


def test_cores_are_those_that_the_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight processors, two threads a core, of which a container gives four."""
    for cpu in range(8):
        (tmp_path / str(cpu)).write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(processor, "_SIBLINGS", str(tmp_path / "{}"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert processor.physical_cores() == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5, 7})
    assert processor.physical_cores() == 3
    monkeypatch.setattr(processor, "_SIBLINGS", str(tmp_path / "none/{}"))
    assert processor.physical_cores() == 4
    own, group = tmp_path / "own", tmp_path / "groups/machine/service"
    group.mkdir(parents=True)
    own.write_text("3:cpu,cpuacct:/docker/1\n1:name=systemd:/x\n0::/machine/service\n")
    monkeypatch.setattr(control_groups, "_OWN", own)
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path / "groups")
    for cpu_max, cores in (("max 100000", 4), ("250000 100000", 3), ("200000 100000", 2), ("1000 100000", 1)):
        (group / "cpu.max").write_text(f"{cpu_max}\n")
        assert processor.physical_cores() == cores
    (group / "cpu.max").unlink()
    (group.parent / "cpu.max").write_text("200000 100000\n")  # of a group around it
    assert processor.physical_cores() == 2
    (group.parent / "cpu.max").unlink()
    older = tmp_path / "groups/cpu,cpuacct"  # version 1; in a container, its own group is the root
    older.mkdir()
    (older / "cpu.cfs_period_us").write_text("100000\n")
    for quota, cores in ((-1, 4), (300_000, 3), (50_000, 1)):
        (older / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert processor.physical_cores() == cores
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert processor.physical_cores() == 8
