"""Backends whose hardware is not here, on stand-ins for their libraries: the project's own half of driving them.

The stand-ins compute with ONNX Runtime on the processor and assert that the libraries' rules are kept; each file says
which.
"""

import asyncio
import gc
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from runtime import GumihoError, InputError, Model, UnavailableError, load
from runtime.backends import backend, close
from runtime.backends.migraphx_compile import Job
from runtime.backends.migraphx_compile import _compile as compile_job
from runtime.bundle import hashes as bundle_hashes
from runtime.bundle.reader import Bundle
from runtime.engines.plans_without_device import build_plans
from runtime.engines.store import compile_engines, find_engines, read_record
from runtime.serve.slots import Slots
from tests import test_backends as promises
from tests.conftest import DEMO, EVERY_BACKEND, MakeBundle
from tests.end_to_end.test_quantized import fp8_bundle
from tests.seal import edit
from tests.serving import logged
from tests.stand_ins.sessions import KEPT
from tests.weights_inside import as_older_exports_wrote_it

IMPORTERS = (
    "runtime.backends.tensorrt",
    "runtime.backends.tensorrt_rtx",
    "runtime.backends.migraphx",
    "runtime.backends.onnxruntime_cuda",
    "runtime.engines.devices.cuda",
)
SHORT = [5, 6, 7]
# less than a pass, more than a chunk, to the end
PROMPTS = ((SHORT, 12), (list(range(2, 70)), 8), (list(range(9, 199)), 50))


def hide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Forgets a module, now and again behind the test."""
    # without it nothing would be undone where there was no module
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    del sys.modules[name]
    package, _, attribute = name.rpartition(".")
    monkeypatch.setattr(import_module(package), attribute, None, raising=False)


def put(monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, ModuleType]) -> None:
    """Stand-ins under the names of what they stand in for; what imports them is imported anew, now and behind the
    test."""
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in IMPORTERS:
        hide(monkeypatch, name)


def fresh(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    hide(monkeypatch, f"tests.stand_ins.{name}")
    return import_module(f"tests.stand_ins.{name}")


@pytest.fixture(scope="module")
def read_once(make_bundle: MakeBundle) -> Iterator[None]:
    """A file that has not changed is hashed once, and what an export left in memory is no garbage: both would take
    longer than what is tested."""
    digest, hashes = bundle_hashes.file_hash, dict[Any, str]()

    def hash_once(file: Path) -> str:
        stat = file.stat()
        key = stat.st_ino, stat.st_mtime_ns, stat.st_size
        if key not in hashes:
            hashes[key] = digest(file)
        return hashes[key]

    make_bundle(DEMO, *EVERY_BACKEND)
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle_hashes, "file_hash", hash_once)
        yield
    KEPT.clear()


def copied(bundle: Path, to: Path) -> Path:
    """Without engines. Weights are linked, since no test changes them."""

    def copy(source: str, target: str) -> object:
        return (os.link if Path(source).parent.name == "weights" else shutil.copy2)(source, target)

    return Path(shutil.copytree(bundle, to, ignore=shutil.ignore_patterns("engines"), copy_function=copy))


@pytest.fixture
def bundle(make_bundle: MakeBundle, read_once: None, tmp_path: Path) -> Path:
    return copied(make_bundle(DEMO, *EVERY_BACKEND), tmp_path / "bundle")


@pytest.fixture(scope="module")
def expected(make_bundle: MakeBundle) -> list[list[int]]:
    with load(make_bundle(DEMO, *EVERY_BACKEND), "cpu", threads=1) as cpu:
        return [ids(cpu, *prompt) for prompt in PROMPTS]


def ids(model: Model, prompt: list[int], count: int, speculate: bool = True) -> list[int]:
    generation = model.generate(prompt, count, speculate)
    list(generation.cycles())
    return generation.ids


def elsewhere(work: Callable[[], object]) -> object:
    """On another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def compiled(bundle: Path, name: str) -> tuple[Path, list[str]]:
    """The engines' folder, and what was told meanwhile."""
    told: list[str] = []
    return compile_engines(Bundle(bundle), backend(name), progress=told.append)[0], told


def keeps_its_promises(bundle: Path, name: str) -> None:
    """Of single engines, as ``test_backends`` asks for them where the backend runs."""
    bench = promises.Bench(bundle, name, "")
    promises.test_a_call_reads_its_inputs_when_it_is_made(bench)
    promises.test_outputs_without_a_buffer_are_dropped(bench)
    promises.test_an_input_without_a_buffer_is_refused(bench)
    promises.refuses_calls_once_closed(bench)
    promises.test_devices_are_closed_once((name, ""), bundle)


def kept(bundle: Path) -> list[Path]:
    return [path for path in (bundle / "engines").glob("*") if path.is_dir()]


def left(bundle: Path) -> list[str]:
    return [path.name for path in (bundle / "engines").iterdir()]


def free(nvidia: ModuleType) -> bool:
    """Whether nothing is left of anything."""
    gc.collect()
    cuda = nvidia.cuda
    return not (cuda.LIVE or cuda.PINNED or cuda.STREAMS or cuda.GRAPHS or nvidia.CONTEXTS)


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in for TensorRT; ``nvidia.cuda`` is that for CUDA's runtime. Every test has to free all."""
    cuda = fresh(monkeypatch, "cuda_runtime")
    top, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    top.bindings, bindings.runtime = bindings, cuda  # type: ignore[attr-defined]
    put(monkeypatch, {"cuda": top, "cuda.bindings": bindings, "cuda.bindings.runtime": cuda})
    tensorrt = fresh(monkeypatch, "tensorrt")
    put(monkeypatch, {"tensorrt": tensorrt})
    yield tensorrt
    assert free(tensorrt)


def test_tensorrt_gives_the_cpus_tokens(nvidia: ModuleType, bundle: Path, expected: list[list[int]]) -> None:
    folder, _ = compiled(bundle, "tensorrt")
    assert json.loads((folder / "attention.json").read_text()) == {"attention": "fused", "reason": ""}
    nvidia.cuda.CALLS.clear()
    with load(bundle, "tensorrt") as model:
        assert list(model.decoder.form.targets) == [1, 2, 8, 128]
        allocated, calls = len(nvidia.cuda.LIVE), 0
        for prompt, wanted in zip(PROMPTS, expected, strict=True):
            generation = model.generate(*prompt)
            list(generation.cycles())
            calls += 2 * generation.stats.cycles
            assert generation.ids == wanted
            assert ids(model, *prompt, speculate=False) == wanted
        # Each kind of call is run once and then recorded.
        assert nvidia.cuda.CALLS["capture"] < 20
        assert nvidia.cuda.CALLS["launch"] > calls
        assert len(nvidia.cuda.LIVE) == allocated
    assert free(nvidia)
    assert not nvidia.LATE, "freed behind the memory it works in"


def test_tensorrts_engines_keep_their_promises(nvidia: ModuleType, bundle: Path) -> None:
    compiled(bundle, "tensorrt")
    keeps_its_promises(bundle, "tensorrt")
    bench = promises.Bench(bundle, "tensorrt", "")
    tensors = {
        name: tensor for name, tensor in bench.cache.bindings(bench.graph).items() if not name.startswith("present")
    }
    bench.engine.bind({**bench.inputs(0), **tensors})()  # caches are written where they are read, asked for or not
    bench.close()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("UNBUILDABLE", "no kernel for fused attention"),
        ("UNSIZED", "no profile for fused attention"),
        ("WRONG", "golden"),
    ],
)
def test_tensorrt_falls_back_to_decomposed_attention(
    nvidia: ModuleType, bundle: Path, expected: list[list[int]], wrong: str, reason: str
) -> None:
    getattr(nvidia, wrong).add("fused")
    folder, told = compiled(bundle, "tensorrt")
    chosen = json.loads((folder / "attention.json").read_text())
    assert chosen["attention"] == "decomposed"
    assert reason in chosen["reason"]
    assert f"fused attention does not work here: {chosen['reason']}" in told
    assert nvidia.BUILT[-3:] == ["decomposed"] * 3
    with load(bundle, "tensorrt") as model:
        assert ids(model, *PROMPTS[0]) == expected[0]


def test_tensorrt_keeps_no_wrong_engines(nvidia: ModuleType, bundle: Path) -> None:
    nvidia.WRONG |= {"fused", "decomposed", "basic"}
    with pytest.raises(GumihoError, match="golden"):
        compiled(bundle, "tensorrt")
    assert not kept(bundle)


@pytest.mark.parametrize("version", ["10.3.0", pytest.param("10.13.3.9", marks=pytest.mark.exhaustive)])
def test_a_tensorrt_that_cannot_write_caches_gets_primitives(
    nvidia: ModuleType, bundle: Path, expected: list[list[int]], version: str
) -> None:
    nvidia.__version__ = version
    folder, _ = compiled(bundle, "tensorrt")
    assert set(nvidia.BUILT) == {"basic"}
    assert json.loads((folder / "attention.json").read_text())["attention"] == "basic"
    with load(bundle, "tensorrt") as model:
        assert model.decoder.form.dialect == "basic"
        for prompt, wanted in zip(PROMPTS, expected, strict=True):
            assert ids(model, *prompt) == ids(model, *prompt, speculate=False) == wanted


def test_a_tensorrt_that_cannot_write_caches_says_so(nvidia: ModuleType, bundle: Path) -> None:
    edit(bundle, lambda raw: raw["forms"]["tensorrt"]["spares"].pop("basic", None))
    nvidia.__version__ = "10.13.3.9"
    with pytest.raises(
        GumihoError, match=r"TensorRT 10\.13\.3\.9 cannot update caches in place, and the bundle has no graphs"
    ):
        compiled(bundle, "tensorrt")
    nvidia.__version__ = "10.1.0"
    with pytest.raises(GumihoError, match=r"TensorRT 10\.1\.0 is too old: install 10\.3 or newer"):
        backend("tensorrt")


def test_the_last_resort_are_primitives(nvidia: ModuleType, bundle: Path, expected: list[list[int]]) -> None:
    nvidia.UNBUILDABLE |= {"fused", "decomposed"}
    compiled(bundle, "tensorrt")
    assert set(nvidia.BUILT) == {"basic"}
    with load(bundle, "tensorrt") as model:
        assert ids(model, *PROMPTS[0]) == expected[0]


@pytest.mark.parametrize(("machine", "jetson"), [("aarch64", True), ("x86_64", False)])
def test_a_jetson_is_told_where_its_tensorrt_is(monkeypatch: pytest.MonkeyPatch, machine: str, jetson: bool) -> None:
    hide(monkeypatch, "runtime.backends.tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # type: ignore[arg-type]
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(GumihoError, match="needs the Python module 'tensorrt'") as refused:
        backend("tensorrt")
    assert ("--system-site-packages" in str(refused.value)) == jetson


def test_tensorrt_takes_fp8_where_the_device_does(nvidia: ModuleType, make_bundle: MakeBundle, tmp_path: Path) -> None:
    bundle = copied(fp8_bundle(make_bundle), tmp_path / "bundle")
    nvidia.cuda.Properties.major, nvidia.cuda.Properties.minor = 8, 6
    with pytest.raises(
        GumihoError, match=r"need compute capability 8\.9 .* has 8\.6: export again with --weights int4 or none"
    ):
        compiled(bundle, "tensorrt")
    assert not kept(bundle)
    nvidia.cuda.Properties.minor = 9
    compiled(bundle, "tensorrt")
    with load(bundle, "tensorrt") as model:
        for prompt in PROMPTS:
            assert ids(model, *prompt) == ids(model, *prompt, speculate=False)


def test_tensorrt_refuses_other_ways_to_take_tensors(nvidia: ModuleType, bundle: Path) -> None:
    nvidia.ALIASES = False  # so that only the graphs that return their rows will do
    choice = json.loads((compiled(bundle, "tensorrt")[0] / "attention.json").read_text())
    assert choice["attention"] == "basic"
    assert "does not update cache 'past_key.0' in place" in choice["reason"]
    shutil.rmtree(bundle / "engines")
    nvidia.ALIASES, nvidia.ON_HOST = True, {"count"}
    with pytest.raises(GumihoError, match="takes 'count' as .*HOST"):
        compiled(bundle, "tensorrt")
    assert not kept(bundle)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_tensorrts_build(nvidia: ModuleType, bundle: Path, number: signal.Signals) -> None:
    before = {each: signal.signal(each, signal.default_int_handler) for each in (signal.SIGINT, signal.SIGTERM)}
    nvidia.SIGNAL = number
    try:
        with pytest.raises(KeyboardInterrupt):
            compiled(bundle, "tensorrt")
        assert not nvidia.BUILT, "the build went on"
        assert nvidia.LOGGERS[0].error == "cancelled"
        assert {signal.getsignal(each) for each in before} == {signal.default_int_handler}
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert not kept(bundle)


@pytest.mark.parametrize("found", [b"timings of another GPU", b"no timings"])
def test_timings_of_another_device_are_replaced(nvidia: ModuleType, bundle: Path, found: bytes) -> None:
    timings = bundle / "engines/tensorrt-timings.bin"
    timings.parent.mkdir()
    timings.write_bytes(found)
    compiled(bundle, "tensorrt")
    assert timings.read_bytes() == nvidia.TIMINGS


def test_damaged_tensorrt_engines_say_the_command(nvidia: ModuleType, bundle: Path) -> None:
    folder, _ = compiled(bundle, "tensorrt")
    assert folder == find_engines(Bundle(bundle), backend("tensorrt"))
    (folder / "draft.plan").write_bytes(b"of another version")
    command = rf"run `gumiho compile {bundle} --backend tensorrt`"
    with pytest.raises(GumihoError, match=rf"draft\.plan is missing or damaged: {command}"):
        load(bundle, "tensorrt")
    # What hashes do not show: a driver that no longer takes what it took.
    with pytest.raises(GumihoError, match=rf"draft\.plan \(the magic tag does not match\): {command}"):
        backend("tensorrt").open(Bundle(bundle), folder)
    for broken in ('{"attention": "of a later version"}', "[]", ""):
        (folder / "attention.json").write_text(broken)
        with pytest.raises(GumihoError, match=rf"attention\.json .*: {command}"):
            backend("tensorrt").open(Bundle(bundle), folder)


def test_tensorrt_on_two_devices_from_two_threads(nvidia: ModuleType, bundle: Path, expected: list[list[int]]) -> None:
    compiled(bundle, "tensorrt")
    first, second = load(bundle, "tensorrt", "0"), load(bundle, "tensorrt", "1")
    for model in (first, second, first):
        assert ids(model, *PROMPTS[0]) == expected[0]
    assert elsewhere(lambda: [ids(model, *PROMPTS[0]) for model in (second, first, second)]) == [expected[0]] * 3
    assert ids(first, *PROMPTS[0]) == expected[0]
    both = [model.generate(*PROMPTS[0]) for model in (first, second)]
    list(zip_longest(*(generation.cycles() for generation in both)))  # a cycle of each in turn
    assert [generation.ids for generation in both] == [expected[0]] * 2
    elsewhere(second.close)
    assert {device for _, device, _ in nvidia.cuda.LIVE.values()} == {0}
    first.close()
    assert free(nvidia)
    assert not nvidia.LATE
    made = backend("tensorrt", "0")
    backend("tensorrt", "1")  # is now the thread's device
    engines, device = made.open(Bundle(bundle), find_engines(Bundle(bundle), made))
    for engine in engines.values():
        engine.close()
    device.close()
    with pytest.raises(GumihoError, match="no NVIDIA GPU 2: this machine shows 2"):
        load(bundle, "tensorrt", "2")


@pytest.fixture
def onnxruntime_gpu(nvidia: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in for ONNX Runtime with CUDA; every test has to free all."""
    provider = fresh(monkeypatch, "onnxruntime_cuda")
    monkeypatch.setattr("runtime.backends.onnxruntime_engine.ort", provider)
    return provider


def test_cuda_gives_the_cpus_tokens(
    nvidia: ModuleType, onnxruntime_gpu: ModuleType, bundle: Path, expected: list[list[int]]
) -> None:
    """Over one set of weights, with a target of several sizes."""
    compiled(bundle, "cuda")
    read = Bundle(bundle)
    form, runs = read.manifest.form("cuda"), onnxruntime_gpu.RUNS
    smallest, *trees, chunk = form.targets
    assert (smallest, trees[-1]) == (1, read.manifest.rows)
    with load(bundle, "cuda") as model:
        held = sum(nbytes for nbytes, *_ in nvidia.cuda.LIVE.values())
        # Beside weights and what is counted there are the inputs of every bound call, and a copy of outputs that go to
        # the host.
        counted = backend("cuda").memory(read).running.device - (1 << 29)  # what CUDA's libraries take besides
        assert 0 <= held - counted < 4 << 20
        allocated, recorded = len(nvidia.cuda.LIVE), onnxruntime_gpu.RECORDED.total()
        for prompt, wanted in zip(PROMPTS, expected, strict=True):
            runs.clear()
            assert ids(model, *prompt, speculate=False) == wanted
            last = next(size for size in form.targets if size >= len(prompt[0]) % chunk)
            assert runs == Counter([last, *[chunk] * (len(prompt[0]) // chunk), *[1] * (len(wanted) - 1)])
            runs.clear()
            assert ids(model, *prompt) == wanted
            assert runs.keys() <= {chunk, *trees, 1}
            assert runs[trees[-1]]
        assert len(nvidia.cuda.LIVE) == allocated
        assert onnxruntime_gpu.RECORDED.total() == recorded  # all while loading


def test_cuda_records_in_no_text_of_asyncio_and_of_the_server(onnxruntime_gpu: ModuleType, bundle: Path) -> None:
    """Recordings belong to threads: the first text of asyncio finds a new one, and no other text does."""
    compiled(bundle, "cuda")
    recorded = onnxruntime_gpu.RECORDED

    async def read(model: Model) -> str:
        return "".join([piece async for piece in model.agenerate("def main(argv):", 12)])

    async def serve(slots: Slots) -> list[list[int]]:
        for slot in slots._all:
            await slot.run(lambda: None)  # what it begins with is done
        before = recorded.total()
        found = [await slot.run(lambda slot=slot: ids(slot.stream, SHORT, 12)) for slot in slots._all]
        assert recorded.total() == before
        return found

    with load(bundle, "cuda", streams=2) as model:
        first = asyncio.run(read(model))
        before = recorded.total()
        assert asyncio.run(read(model)) == first
        assert recorded.total() == before
        slots = Slots(model.streams, 0)
        assert asyncio.run(serve(slots)) == [ids(model, SHORT, 12)] * 2
        slots.close()


@pytest.mark.exhaustive
def test_cuda_keeps_int4_inside(onnxruntime_gpu: ModuleType, make_bundle: MakeBundle, tmp_path: Path) -> None:
    """The fast product of int4 rearranges constants only, so each session has its own weights, and the target one
    size."""
    made = make_bundle(DEMO, "--backend", "cuda", "--weights", "int4", "--dtype", "fp32", "--rows", "8")
    bundle = copied(made, tmp_path / "bundle")
    form = Bundle(bundle).manifest.form("cuda")
    assert (form.weights, list(form.targets)) == ({}, [8])
    compiled(bundle, "cuda")
    assert all(entries["ep.cuda.fpa_intb_gemm"] == "1" for entries in onnxruntime_gpu.ENTRIES)
    with load(bundle, "cuda") as model:
        for prompt in PROMPTS:
            assert ids(model, *prompt) == ids(model, *prompt, speculate=False)
        assert onnxruntime_gpu.RUNS.keys() == {8}


def test_cudas_engines_keep_their_promises(onnxruntime_gpu: ModuleType, bundle: Path) -> None:
    compiled(bundle, "cuda")
    keeps_its_promises(bundle, "cuda")


def test_cuda_refuses_nodes_on_the_host(onnxruntime_gpu: ModuleType, bundle: Path) -> None:
    onnxruntime_gpu.ELSEWHERE.append("TopK")
    with pytest.raises(
        GumihoError, match=r"does not run all of .*onnx on CUDA \(TopK on CPUExecutionProvider\): try another"
    ):
        compiled(bundle, "cuda")
    assert not kept(bundle)


def test_cuda_frees_all_if_an_engine_does_not_load(onnxruntime_gpu: ModuleType, bundle: Path) -> None:
    folder, _ = compiled(bundle, "cuda")
    (folder / "extend.onnx").write_bytes(b"no graph")
    with pytest.raises(GumihoError, match=r"cannot load .*extend\.onnx"):
        backend("cuda").open(Bundle(bundle), folder)


@pytest.fixture
def amd_apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in for MIGraphX. Every test has to close its devices."""
    migraphx = fresh(monkeypatch, "migraphx")
    monkeypatch.setattr("runtime.engines.devices.hip.Hip", migraphx.Hip)
    put(monkeypatch, {"migraphx": migraphx})
    monkeypatch.syspath_prepend(Path(__file__).parent / "stand_ins/apart")  # for children
    yield migraphx
    assert not migraphx.DEVICES


@pytest.fixture
def amd(amd_apart: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """It compiles in this process: another one takes longer to start than to compile."""

    def compile_here(
        job: Job, scratch: Path, environment: Mapping[str, str], progress: Callable[[str], object]
    ) -> None:
        before = set(amd_apart.DEVICES)
        try:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                compile_job(job, progress)
        finally:
            for stream in amd_apart.DEVICES.keys() - before:
                amd_apart.DEVICES[stream].close()  # as the end of a process does

    monkeypatch.setattr(import_module("runtime.backends.migraphx"), "compile_apart", compile_here)
    return amd_apart


@pytest.mark.parametrize("tenth", ["main:#output_{}", "main:#output_:{:05}"])
def test_migraphx_names_its_tenth_output_in_two_ways(
    amd: ModuleType, bundle: Path, expected: list[list[int]], tenth: str
) -> None:
    """Up to ROCm 7.2.2, and since."""
    amd.TENTH = tenth
    assert len(Bundle(bundle).manifest.form("migraphx").graphs["target"].outputs) > 11
    compiled(bundle, "migraphx")
    with load(bundle, "migraphx") as model:
        assert ids(model, *PROMPTS[1]) == expected[1]


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"main:#output_:00099": "logits"}, "parameter 'main:#output_:00099', which is neither"),
        ({"main:#output_1_0": "logits"}, "parameter 'main:#output_1_0', which is neither"),
        ({"main:#output_0": "logits"}, "parameter 'main:#output_0' of another shape than its output 'choice'"),
        ({"main:#output_:00001": "logits"}, "two parameters for its output 'logits'"),
    ],
)
def test_migraphx_parameters_of_no_meaning_are_refused(
    amd: ModuleType, bundle: Path, odd: dict[str, str], message: str
) -> None:
    amd.ODD = odd
    with pytest.raises(GumihoError, match=message):
        compiled(bundle, "migraphx")
    assert not kept(bundle)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("2.12.0.dev+9c2f1", "MIGraphX 2.12.0.dev.* leaves the order of equal TopK values undefined"),
        ("2.13.0.dev", "ROCm 7.0 cannot compile TopK for some sizes: install ROCm 7.1"),
        ("2.14.0.dev", r"no graph.*: try another version$"),
    ],
)
def test_migraphx_releases_with_a_wrong_kernel_are_named(
    amd: ModuleType, bundle: Path, version: str, message: str
) -> None:
    """What cannot be compiled is told apart from what is not here to be compiled."""
    amd.__version__ = version
    read = Bundle(bundle)
    (bundle / read.manifest.form("migraphx").graphs["target"].file).write_bytes(b"no graph at all")
    with pytest.raises(GumihoError, match=message):
        backend("migraphx").compile(read, bundle, False, lambda _: None, lambda: None)
    made_on_ref = import_module("runtime.backends.migraphx").MIGraphX("ref")
    assert made_on_ref.versions()["migraphx"] == version


@pytest.mark.parametrize(
    ("fate", "message"),
    [
        ("killed", "was killed by SIGKILL while compiling target for gpu: free memory"),
        ("exits", "ended with status 3 while compiling target for gpu: see its output above"),
    ],
)
def test_a_compiler_that_dies_says_how(
    amd_apart: ModuleType, bundle: Path, monkeypatch: pytest.MonkeyPatch, fate: str, message: str
) -> None:
    monkeypatch.setenv("STAND_IN_FATE", fate)
    with pytest.raises(GumihoError, match=message):
        compiled(bundle, "migraphx")
    assert left(bundle) == [".lock"]


def gone(process: int) -> bool:
    """Whether a process has ended, seen or not by its parent."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_migraphxs_compilation(
    amd_apart: ModuleType, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """With the compilers that MIGraphX has started, and what it has dumped."""
    log = tmp_path / "processes"
    monkeypatch.setenv("STAND_IN_FATE", "waits")
    monkeypatch.setenv("STAND_IN_LOG", str(log))

    def interrupt() -> None:
        while not (log.exists() and log.read_text().endswith("\n")):
            time.sleep(0.05)
        assert list((bundle / "engines").rglob("dump.mxr")), "it has no temporary folder of its own"
        os.kill(os.getpid(), number)

    before = {each: signal.signal(each, signal.default_int_handler) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                compiled(bundle, "migraphx")
            future.result()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    while not all(gone(int(process)) for process in log.read_text().split()):
        time.sleep(0.05)  # killed, but on a busy machine not yet gone
    assert left(bundle) == [".lock"]


@pytest.mark.exhaustive
def test_migraphxs_solutions_outlive_a_compilation(
    amd_apart: ModuleType, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("STAND_IN_LOG", str(log))

    def found(**options: bool) -> list[int]:
        """How many solutions were known before each graph."""
        log.unlink(missing_ok=True)
        compile_engines(Bundle(bundle), backend("migraphx"), **options)
        return [json.loads(line)[0] for line in log.read_text().splitlines()]

    count = len(Bundle(bundle).manifest.form("migraphx").graphs)
    new, known = list(range(count)), [count] * count
    assert found() == new
    assert found() == known
    assert found(tune=True) == new, "what was found without looking long would stop it from looking longer"
    for file in (bundle / "engines").glob("migraphx-problems-*.json"):
        file.write_text("damaged")
    assert found() == new
    monkeypatch.setenv("MIGRAPHX_PROBLEM_CACHE", str(tmp_path / "mine.json"))
    assert found() == new
    assert found() == known
    assert json.loads((tmp_path / "mine.json").read_text())


@pytest.mark.parametrize(
    ("architecture", "weights", "mine", "expected"),
    [
        ("gfx942", "int4", None, "fused,dot"),
        ("gfx942", "int4", "attention", "attention"),
        ("gfx1151", "int4", None, None),
        ("gfx942", "none", None, None),
    ],
)
def test_int4_on_gfx9_keeps_products_from_hipblaslt(
    amd_apart: ModuleType,
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    weights: str,
    mine: str | None,
    expected: str | None,
) -> None:
    amd_apart.ARCHITECTURE = architecture
    edit(bundle, lambda manifest: manifest.update(weights={} if weights == "none" else {"target": weights}))
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    if mine:
        monkeypatch.setenv("MIGRAPHX_MLIR_USE_SPECIFIC_OPS", mine)
    (bundle / "engines").mkdir()
    backend("migraphx").compile(Bundle(bundle), tmp_path, False, lambda _: None, lambda: None)
    assert {json.loads(line)[2] for line in (tmp_path / "log").read_text().splitlines()} == {expected}


def test_weights_of_older_bundles_that_went_to_the_hosts_memory_are_refused(
    amd: ModuleType, bundle: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_older_exports_wrote_it(bundle, "migraphx")
    compiled(bundle, "migraphx")
    with load(bundle, "migraphx") as model:
        assert ids(model, *PROMPTS[0]) == expected[0]

    def opens() -> None:
        made = backend("migraphx")
        close(*made.open(Bundle(bundle), find_engines(Bundle(bundle), made)))

    amd.ARRIVING = 0.7
    message = (
        r"weights of target take (\d+) MB, of which \d+ MB fit on Stand-in GPU .* and the rest is in the host's "
        r"memory: free"
    )
    with pytest.raises(GumihoError, match=message):
        load(bundle, "migraphx")
    monkeypatch.setattr(amd.Hip, "unified", True)
    opens()  # it is one memory
    monkeypatch.setattr(amd.Hip, "unified", False)
    monkeypatch.setenv("GUMIHO_IGNORE_MEMORY", "1")
    opens()


def test_an_empty_migraphx_names_the_pythons_it_is_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of that name on the path, or the registry's package of that name, has nothing in it."""
    (tmp_path / "lib").mkdir()
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    put(monkeypatch, {"migraphx": ModuleType("migraphx")})
    with pytest.raises(
        GumihoError, match=r"is empty\): install ROCm's package migraphx \(the package of that name on PyPI"
    ):
        backend("migraphx")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    (tmp_path / "lib/libmigraphx_py_3.8.so.2015").touch()
    (tmp_path / "lib/migraphx.cpython-39-x86_64-linux-gnu.so").touch()
    with pytest.raises(
        GumihoError, match=rf"{tmp_path} has it for Python 3\.8 and 3\.9, and this is {here}: make an env"
    ):
        backend("migraphx")
    (tmp_path / f"lib/libmigraphx_py_{here}.so").touch()
    with pytest.raises(GumihoError, match=rf"is empty\): put {tmp_path}/lib on PYTHONPATH$"):
        backend("migraphx")


def test_hips_library_is_the_one_that_migraphx_has_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hip = import_module("runtime.engines.devices.hip")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libamdhip64.so").touch()
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    assert hip.candidates()[0] == f"{tmp_path}/lib/libamdhip64.so"
    maps = (
        "7f00-7f10 r--p 00000000 08:01 12   /opt/rocm-7.2.0/lib/libmigraphx.so.2015000\n"
        "7f10-7f20 r-xp 00000000 08:01 13   /opt/rocm 7/lib/libamdhip64.so.7.2.70200\n"
        "7f20-7f30 r--p 00000000 08:01 13   /opt/rocm 7/lib/libamdhip64.so.7.2.70200\n"
        "7f30-7f40 rw-p 00000000 00:00 0\n"
        "7f40-7f50 r--p 00000000 08:01 14   /usr/lib/libamdhip64.so.json\n"
    )
    assert hip.mapped(maps) == ["/opt/rocm 7/lib/libamdhip64.so.7.2.70200"]
    monkeypatch.setattr(hip, "_MAPS", tmp_path / "maps")
    (tmp_path / "maps").write_text(maps)
    assert hip.candidates()[:2] == ["/opt/rocm 7/lib/libamdhip64.so.7.2.70200", f"{tmp_path}/lib/libamdhip64.so"]


LOOSE = pytest.mark.parametrize("loose", [set(), {"choice", "tree_parent", "tree_mask"}], ids=["bound", "loose"])


@LOOSE
def test_migraphxs_engines_keep_their_promises(amd: ModuleType, bundle: Path, loose: set[str]) -> None:
    amd.LOOSE = loose
    compiled(bundle, "migraphx")
    keeps_its_promises(bundle, "migraphx")


@LOOSE
def test_migraphx_gives_the_cpus_tokens(
    amd: ModuleType, bundle: Path, expected: list[list[int]], loose: set[str]
) -> None:
    amd.LOOSE = loose
    compiled(bundle, "migraphx")
    with load(bundle, "migraphx") as model:
        (device,) = amd.DEVICES.values()
        allocated = len(device.blocks)
        for prompt, wanted in zip(PROMPTS, expected, strict=True):
            assert ids(model, *prompt) == ids(model, *prompt, speculate=False) == wanted
        assert elsewhere(lambda: ids(model, *PROMPTS[0])) == expected[0]
        assert ids(model, *PROMPTS[0]) == expected[0]
        assert len(device.blocks) == allocated
    assert not device.blocks


def test_a_failed_run_of_migraphx_is_told(amd: ModuleType, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(bundle, "migraphx")
    run, failing = amd.program.run_async, list[str]()

    def run_or_fail(*arguments: object) -> object:
        if failing:
            raise RuntimeError(*failing)
        return run(*arguments)

    monkeypatch.setattr(amd.program, "run_async", run_or_fail)
    told = r"MIGraphX failed to run an engine \(hip_error: out of memory\): free memory or"
    with load(bundle, "migraphx") as model:
        failing.append("hip_error: out of memory\nat line 9")
        with pytest.raises(GumihoError, match=told):
            ids(model, [5, 6], 4)
    with pytest.raises(GumihoError, match=told):
        load(bundle, "migraphx")  # which makes every call once


@pytest.fixture
def rtx(nvidia: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in for TensorRT for RTX, on a GeForce RTX 40; ``nvidia`` has its settings."""
    monkeypatch.setattr(nvidia.cuda.Properties, "major", 8)
    monkeypatch.setattr(nvidia.cuda.Properties, "minor", 9)
    library = fresh(monkeypatch, "tensorrt_rtx")
    put(monkeypatch, {"tensorrt_rtx_bindings": library})
    return library


def test_tensorrt_for_rtx_gives_the_cpus_tokens(
    rtx: ModuleType, nvidia: ModuleType, bundle: Path, expected: list[list[int]]
) -> None:
    """Kernels that one process has compiled are there for the next, and with an unreadable file for none."""
    folder, _ = compiled(bundle, "tensorrt-rtx")
    assert json.loads((folder / "attention.json").read_text()) == {"attention": "fused", "reason": ""}
    rtx.COMPILED.clear()
    for damaged, kernels in ((False, 0), (True, 3)):
        if damaged:
            for file in (bundle / "engines/kernels").iterdir():
                file.write_bytes(b"nothing that was compiled")
        with load(bundle, "tensorrt-rtx") as model:
            assert list(model.decoder.form.targets) == [1, 2, 8, 128]
            for prompt, wanted in zip(PROMPTS, expected, strict=True):
                assert ids(model, *prompt) == wanted
                assert ids(model, *prompt, speculate=False) == wanted
        assert len(rtx.COMPILED) == kernels
    keeps_its_promises(bundle, "tensorrt-rtx")
    assert nvidia.cuda.CALLS["capture"]


def test_tensorrt_for_rtx_tells_what_can_be_recorded(
    rtx: ModuleType, nvidia: ModuleType, bundle: Path, expected: list[list[int]]
) -> None:
    compiled(bundle, "tensorrt-rtx")
    rtx.CAPTURABLE = False
    nvidia.cuda.CALLS.clear()
    with load(bundle, "tensorrt-rtx") as model:
        assert ids(model, *PROMPTS[0]) == expected[0]
    assert not nvidia.cuda.CALLS["capture"]


def test_plans_that_were_built_elsewhere_are_used_until_compiled(
    rtx: ModuleType, nvidia: ModuleType, bundle: Path, expected: list[list[int]]
) -> None:
    """Those of other cards are not. Once the golden run was replayed here, those engines are used, whichever is
    newer."""
    opened = Bundle(bundle)
    build_plans(opened, "sm86")
    with pytest.raises(UnavailableError, match="were compiled for capability sm86, and here it is sm89: run `gumiho"):
        load(bundle, "tensorrt-rtx")
    ahead = build_plans(opened, "rtx-4090")
    record = read_record(ahead)
    assert not record.proven
    assert "device" not in record.key
    with logged("gumiho.model") as lines, load(bundle, "tensorrt-rtx") as model:
        assert ids(model, *PROMPTS[0]) == expected[0]
    assert "have not been checked on it: run `gumiho compile" in lines[0]
    here, _ = compiled(bundle, "tensorrt-rtx")
    later = (here / "engine.json").stat().st_mtime_ns + 10**9
    os.utime(ahead / "engine.json", ns=(later, later))
    assert find_engines(opened, backend("tensorrt-rtx")) == here
    with logged("gumiho.model") as lines, load(bundle, "tensorrt-rtx") as model:
        assert ids(model, *PROMPTS[0]) == expected[0]
    assert not any("have not been checked" in line for line in lines)


def test_tensorrt_for_rtx_falls_back_to_decomposed_attention(
    rtx: ModuleType, nvidia: ModuleType, bundle: Path, expected: list[list[int]]
) -> None:
    nvidia.WRONG.add("fused")
    folder, _ = compiled(bundle, "tensorrt-rtx")
    assert json.loads((folder / "attention.json").read_text())["attention"] == "decomposed"
    with load(bundle, "tensorrt-rtx") as model:
        assert ids(model, *PROMPTS[0]) == expected[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight: {**weight, "shape": [*weight["shape"][:-1], 5]}, r"takes '.*' as \[.*\], but in the bundle"),
        (lambda weight: {**weight, "dtype": "float16"}, r"takes '.*' as \('float32', .*\), but in the bundle"),
        (lambda weight: None, "it takes '.*', which the bundle does not have"),
    ],
)
def test_a_plan_with_other_inputs_than_the_manifests_is_refused(
    rtx: ModuleType, bundle: Path, change: Callable[[Any], Any], message: str
) -> None:
    def edited(raw: Any) -> None:
        weights = raw["forms"]["tensorrt-rtx"]["weights"]["target"]
        if (weight := change(weights.pop("norm.weight"))) is not None:
            weights["norm.weight"] = weight

    edit(bundle, edited)
    with pytest.raises(GumihoError, match=message):
        compiled(bundle, "tensorrt-rtx")
    assert not kept(bundle)


def test_tensorrt_for_rtx_refuses_other_devices(rtx: ModuleType, nvidia: ModuleType) -> None:
    nvidia.cuda.Properties.major, nvidia.cuda.Properties.minor = 9, 0
    with pytest.raises(UnavailableError, match=r"Stand-in GPU \(sm_90\): TensorRT for RTX is not for .* \(Hopper\)"):
        backend("tensorrt-rtx")


@pytest.mark.parametrize("name", ["migraphx", "tensorrt", "cuda"])
def test_cpu_threads_are_refused_where_none_compute(request: pytest.FixtureRequest, bundle: Path, name: str) -> None:
    request.getfixturevalue({"migraphx": "amd", "tensorrt": "nvidia", "cuda": "onnxruntime_gpu"}[name])
    compiled(bundle, name)
    with pytest.raises(
        InputError, match=f"threads is 2, and engines of {name} do not compute with CPU threads: leave it out"
    ):
        load(bundle, name, threads=2)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=() if (name == "logits") == (how == "half") else pytest.mark.exhaustive)
        for name in ("mask", "logits", "choice")
        for how in ("strided", "half")
    ],
)
def test_migraphx_refuses_another_layout(amd: ModuleType, bundle: Path, name: str, how: str) -> None:
    """Of an input, of an output with a parameter, and of one without."""
    amd.LOOSE, amd.STRANGE = {"choice"}, {name: how}
    with pytest.raises(GumihoError, match=f"lays out '{name}' differently"):
        compiled(bundle, "migraphx")
    assert not kept(bundle)
