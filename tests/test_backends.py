"""What every backend promises of its engines, on every one that can run where the tests are; the others are skipped by
name."""

import importlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from runtime import GumihoError, Model, load
from runtime.backends import Backend, backend, onnxruntime_cuda
from runtime.backends import onnxruntime as ort_backend
from runtime.bundle.reader import Bundle
from runtime.cli.checks import doctor
from runtime.cli.compile import main as compile_bundle
from runtime.decoding.kv_cache import KVCache
from runtime.engines.devices import Device
from runtime.engines.store import compile_engines, find_engines, key, read_record
from tests.conftest import DEMO, EVERY_BACKEND, ODD, SIZES, MakeBundle
from tests.pairs import SMALL
from tests.seal import update

ROWS, CAPACITY = 8, 200
RUNNING = [("cpu", ""), ("migraphx", "ref"), ("migraphx", "gpu"), ("cuda", ""), ("tensorrt", "")]
# Largest difference of two logits, relative to the largest one, that rounding to fp16 may turn around: twice the
# largest error of fp16 logits over thousands of positions (docs/backends.md).
HALF = 2 * 4.7e-3


def made(name: str, device: str) -> Backend:
    try:
        return backend(name, device)
    except GumihoError as error:
        pytest.skip(f"{name} {device}: {error}")


@pytest.fixture(scope="module")
def bundle(make_bundle: MakeBundle) -> Path:
    return make_bundle(DEMO, *EVERY_BACKEND)


@pytest.fixture(params=RUNNING, ids=lambda p: " ".join(p).strip(), scope="module")
def running(request: pytest.FixtureRequest, bundle: Path) -> tuple[str, str]:
    """Name and device of a backend, its engines compiled."""
    name, device = request.param
    compile_engines(Bundle(bundle), made(name, device))
    return name, device


class Bench:
    """The target's engine with buffers of its own, a causal pass at a time."""

    def __init__(self, bundle: Path, name: str, device: str) -> None:
        read, self.backend = Bundle(bundle), made(name, device)
        engines, self.device = self.backend.open(read, find_engines(read, self.backend))
        form = read.manifest.form(name)
        target, _ = form.target(ROWS)
        self.manifest, self.graph, self.engine = read.manifest, form.graphs[target], engines[target]
        self.all, self.cache = engines, KVCache(self.device, self.graph)

    def inputs(self, seed: int) -> dict[str, np.ndarray]:
        tokens = np.random.default_rng(seed).integers(2, self.manifest.vocabulary, ROWS)
        wanted = {"wanted": np.arange(ROWS)} if self.graph.selects else {}
        return {"tokens": tokens, "depth": np.arange(ROWS), "mask": np.tri(ROWS, dtype=np.bool_), **wanted}

    def close(self) -> None:
        for engine in self.all.values():
            engine.close()
        self.device.close()


@pytest.fixture
def bench(running: tuple[str, str], bundle: Path) -> Iterator[Bench]:
    made = Bench(bundle, *running)
    yield made
    made.close()


def test_a_call_reads_its_inputs_when_it_is_made(bench: Bench) -> None:
    """Two calls of one engine, bound to different buffers, interleaved, give what each gives alone."""
    tensors = bench.cache.bindings(bench.graph)
    given, chosen, logits = [bench.inputs(seed) for seed in (0, 1)], [], []
    for _ in given:
        chosen.append(np.zeros(ROWS, np.int64))
        logits.append(bench.device.zeros((ROWS, bench.manifest.vocabulary), bench.manifest.dtype))
    calls = [
        bench.engine.bind({**inputs, **tensors, "choice": choice, "logits": out})
        for inputs, choice, out in zip(given, chosen, logits, strict=True)
    ]
    alone = []
    for call, choice in zip(calls, chosen, strict=True):
        call()
        alone.append(choice.copy())
    assert alone[0].tolist() != alone[1].tolist()
    for i in (1, 0, 0, 1):
        chosen[i][:] = -1
        calls[i]()
        assert chosen[i].tolist() == alone[i].tolist()
        assert bench.device.read(logits[i]).argmax(1).tolist() == alone[i].tolist()
    given[0]["tokens"][:] = given[1]["tokens"]  # the same buffers, with other tokens in them
    calls[0]()
    assert chosen[0].tolist() == alone[1].tolist()


def test_outputs_without_a_buffer_are_dropped(bench: Bench) -> None:
    tensors = bench.cache.bindings(bench.graph)
    inputs = bench.inputs(3)
    choice = np.zeros(ROWS, np.int64)
    both = np.zeros(ROWS, np.int64)
    hidden = bench.device.zeros((ROWS, bench.manifest.hidden), bench.manifest.dtype)
    bench.engine.bind({**inputs, **tensors, "choice": both, "hidden": hidden, "a name of no port": np.zeros(3)})()
    past = {name: tensor for name, tensor in tensors.items() if not name.startswith("new_")}
    bench.engine.bind({**inputs, **past, "choice": choice})()
    assert choice.tolist() == both.tolist()
    assert np.isfinite(bench.device.read(hidden)).all()


def test_an_input_without_a_buffer_is_refused(bench: Bench) -> None:
    with pytest.raises(GumihoError, match="input 'mask' has no buffer"):
        bench.engine.bind(
            {**bench.cache.bindings(bench.graph), "tokens": np.zeros(ROWS, np.int64), "depth": np.arange(ROWS)}
        )


def test_a_closed_engine_is_refused(running: tuple[str, str], bundle: Path) -> None:
    refuses_calls_once_closed(Bench(bundle, *running))


def refuses_calls_once_closed(bench: Bench) -> None:
    bench.close()
    with pytest.raises(GumihoError, match="is closed"):
        bench.engine.bind({**bench.inputs(0), "choice": np.zeros(ROWS, np.int64)})


def ids(model: Model, prompt: list[int], count: int, speculate: bool = True) -> list[int]:
    generation = model.generate(prompt, count, speculate)
    list(generation.cycles())
    return generation.ids


def prompts(model: Model, lengths: tuple[int, ...]) -> list[list[int]]:
    text = model.encode(
        'def main(argv=None):\n    """Run the program."""\n    parser = argparse.ArgumentParser()\n' * 8
    )
    return [text[i : i + length] for i, length in enumerate(lengths)]


def test_tokens_equal_the_cpus(running: tuple[str, str], bundle: Path) -> None:
    """The trained pair, from prompts around the edge of a pass, and to the last position."""
    with load(bundle, "cpu") as cpu, load(bundle, *running) as model:
        for prompt in prompts(cpu, (1, 7, 8, 9, 40)):
            expected = ids(cpu, prompt, 16)
            assert ids(model, prompt, 16) == expected
        full = prompts(cpu, (CAPACITY - 12,))[0]
        assert ids(model, full, 99) == ids(model, full, 99, speculate=False) == ids(cpu, full, 99)


def test_an_odd_pairs_tokens_equal_the_cpus(running: tuple[str, str], make_bundle: MakeBundle) -> None:
    if running[0] == "cpu":
        pytest.skip("these are the CPU's tokens")
    path = make_bundle(ODD, "--backend", "cpu", running[0], *SIZES)
    compile_engines(Bundle(path), made(*running))
    with load(path, "cpu") as cpu, load(path, *running) as model:
        for length in (3, 17):
            prompt = [(7 * i * i + length) % 900 + 2 for i in range(length)]
            assert ids(model, prompt, 24) == ids(cpu, prompt, 24)


def test_half_precision_differs_at_near_ties_only(
    running: tuple[str, str], bundle: Path, make_bundle: MakeBundle
) -> None:
    name, device = running
    if name == "cpu":
        pytest.skip("cpu computes in fp32")
    path = make_bundle(DEMO, "--backend", name, "--rows", str(ROWS), "--capacity", str(CAPACITY))
    assert Bundle(path).manifest.dtype == "float16"
    compile_engines(Bundle(path), made(name, device))
    with load(bundle, "cpu") as cpu, load(path, name, device) as model:
        for prompt in prompts(cpu, (5, 30, 60)):
            found, expected = ids(model, prompt, 40), ids(cpu, prompt, 40)
            at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
            if at is None:
                continue
            cpu.decoder.clear()
            last = cpu.decoder.prefill([*prompt, *expected[:at]], speculate=False)
            assert last is not None
            row = cpu.decoder.target.row(last)
            assert (row.max() - row[found[at]]) / np.abs(row).max() < HALF


def test_the_key_names_all_that_engines_depend_on(running: tuple[str, str], bundle: Path) -> None:
    read, here = Bundle(bundle), made(*running)
    parts = key(read, here.NAME, here.versions())
    assert parts["backend"] == running[0]
    assert parts.keys() >= here.versions().keys() | {"weights/target.bin", "weights/draft.bin"}
    assert {graph.file for graph in read.manifest.form(running[0]).graphs.values()} <= parts.keys()
    assert read_record(find_engines(read, here)).key == {**parts, "tune": "False"}


def test_damaged_engines_say_what_to_do(running: tuple[str, str], bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy, symlinks=True)
    here = made(*running)
    for file in find_engines(Bundle(copy), here).iterdir():
        if file.stem == "draft":
            file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(GumihoError, match="draft"):
        load(copy, *running)


def test_a_failed_compilation_leaves_nothing(running: tuple[str, str], bundle: Path, tmp_path: Path) -> None:
    """A graph the backend cannot read: its hash is made to fit, so that the backend itself has to refuse it."""
    name, device = running
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy, ignore=shutil.ignore_patterns("engines"))
    for graphs in Bundle(copy).manifest.form(name).variants().values():
        (copy / graphs["draft"].file).write_bytes(b"this is no graph at all")
        update(copy, graphs["draft"].file)
    with pytest.raises(GumihoError, match="draft"):
        compile_engines(Bundle(copy), made(name, device))
    assert not [path for path in (copy / "engines").glob("*") if path.is_dir()]


def test_an_interrupted_compilation_leaves_nothing(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy, ignore=shutil.ignore_patterns("engines"))

    def interrupt(what: str) -> None:
        if what == "optimizing draft":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_engines(Bundle(copy), backend("cpu"), progress=interrupt)
    assert [path.name for path in (copy / "engines").iterdir()] == [".lock"]


def test_compile_reports_what_it_needs_and_does(
    make_bundle: MakeBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(make_bundle(SMALL, "--capacity", "100"), copy, ignore=shutil.ignore_patterns("engines"))
    capsys.readouterr()  # what the export said
    assert compile_bundle([str(copy)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("needs about ")
    assert {"checking the bundle's files ...", "optimizing target ...", "replaying the golden run ..."} <= set(lines)


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("cpu", "0", "there is no device '0' of backend cpu"),
        ("cuda", "", "onnxruntime-gpu"),
        ("tensorrt", "", "needs the Python module 'tensorrt'"),
        ("migraphx", "", "'migraphx'|libamdhip64"),
        ("abacus", "", "there is no backend 'abacus': expected one of cpu, cuda, migraphx, tensorrt"),
    ],
)
def test_what_cannot_run_says_what_is_missing(name: str, device: str, message: str) -> None:
    try:
        backend(name, device)
    except GumihoError as refused:
        reason = str(refused)
    else:
        pytest.skip(f"{name} runs here")
    assert re.search(message, reason), reason


@pytest.mark.parametrize(
    "said",
    [
        "... Opset 24 is under development ... Current official support for domain ai.onnx is till opset 23.",  # 1.23
        "... Could not find an implementation for TensorScatter(24) node with name 'node__symbolic_7'",  # 1.24
    ],
)
def test_an_onnxruntime_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """What those versions said of a quantized target for the CPU, word for word."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(said)

    (tmp_path / "target.onnx").touch()
    monkeypatch.setattr(ort, "InferenceSession", refuse)
    with pytest.raises(GumihoError, match=r"is too old for .*target\.onnx: install onnxruntime 1\.25 or newer"):
        ort_backend.open_session(tmp_path / "target.onnx", ort.SessionOptions(), "CPUExecutionProvider", {})


def distribution(site: Path, name: str) -> None:
    """What a package leaves beside its files."""
    folder = site / f"{name.replace('-', '_')}-1.31.1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.31.1\n")


def test_two_onnxruntimes_in_one_folder(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    distribution(first, "onnxruntime")
    distribution(second, "onnxruntime-gpu")
    for site in (second, first):
        monkeypatch.syspath_prepend(site)
    backend("cpu")  # one hides the other whole
    distribution(first, "onnxruntime-gpu")
    importlib.invalidate_caches()
    message = (
        rf"onnxruntime and onnxruntime-gpu are both installed in {first}/? and .*: pip uninstall -y onnxruntime "
        rf"onnxruntime-gpu, "
        r"then, for an NVIDIA GPU, pip install 'onnxruntime-gpu\[cuda,cudnn\]>=1\.31' .*, or else pip install "
        r"onnxruntime$"
    )
    for name in ("cpu", "cuda"):
        with pytest.raises(GumihoError, match=message):
            backend(name)
    with pytest.raises(GumihoError, match=message):
        load(demo_bundle)
    assert doctor.main([str(demo_bundle), "--backend", "cpu"]) == 1
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("weights", "mine", "expected"), [("int4", None, "1"), ("int4", "0", None), ("int8", None, None)]
)
def test_int4_on_cuda_is_multiplied_as_it_is(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, weights: str, mine: str | None, expected: str | None
) -> None:
    read = Bundle(demo_bundle)
    monkeypatch.setattr(read, "manifest", replace(read.manifest, weights={"draft": weights}))
    if mine:
        monkeypatch.setenv("ORT_FPA_INTB_GEMM", mine)
    options = onnxruntime_cuda.Cuda._options(read)
    if expected:
        assert options.get_session_config_entry("ep.cuda.fpa_intb_gemm") == expected
    else:
        with pytest.raises(Exception, match="fpa_intb_gemm"):
            options.get_session_config_entry("ep.cuda.fpa_intb_gemm")


def test_a_provider_that_falls_back_is_refused(demo_bundle: Path) -> None:
    """ONNX Runtime takes the CPU for a provider that it cannot load, with no more than a warning."""
    if onnxruntime_cuda.CUDA in ort.get_available_providers():
        pytest.skip("CUDA's provider is here")
    options = ort_backend.session_options(Bundle(demo_bundle), 1)
    with pytest.raises(GumihoError, match="placed .* on CPUExecutionProvider instead of CUDAExecutionProvider"):
        ort_backend.open_session(demo_bundle / "graphs/cpu/extend.onnx", options, onnxruntime_cuda.CUDA, {})


def test_devices_are_closed_once(running: tuple[str, str], bundle: Path) -> None:
    model = load(bundle, *running)
    device: Device = model.decoder.device
    model.close()
    model.close()
    device.close()
