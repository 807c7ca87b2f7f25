"""The graphs made for accelerators give the CPU's tokens, through the decode loop that drives them there.

ONNX Runtime's CPU provider runs them in place of the accelerator: on the host, and behind the fake accelerator, whose
memory is apart and whose stream is late. What is left for the hardware to prove is its own compiler.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from runtime import GumihoError, Model, load
from runtime.backends.onnxruntime import Cpu
from runtime.bundle.reader import Bundle
from runtime.engines.devices import Device, Host
from runtime.engines.devices.accelerator import Recorded
from runtime.engines.loaded import LoadedBundle
from runtime.engines.store import compile_engines
from tests.accelerator import Lazy, LazyEngine
from tests.conftest import DEMO, EVERY_BACKEND, ODD, SIZES, MakeBundle
from tests.pairs import RandomPair
from tests.weights_inside import put_inside

BACKENDS = ("cpu", "migraphx", "tensorrt", "cuda")


def stand_in(form: str, lazy: bool) -> type[Cpu]:
    """The CPU provider in a backend's place."""

    class StandIn(Cpu):
        NAME = form

        def compile(
            self,
            bundle: Bundle,
            folder: Path,
            tune: bool,
            progress: Callable[[str], object],
            check: Callable[[], object],
        ) -> None:
            """ONNX has scales of blocks from opset 21 on; MIGraphX' parser, which asks for no opset, has them in the 18
            it is given."""
            own = bundle.manifest.forms[form]
            for name, graph in own.graphs.items():
                model = onnx.load(bundle.path / graph.file, load_external_data=False)
                put_inside(model, own.inputs(name))
                onnx_own = next(opset for opset in model.opset_import if not opset.domain)
                onnx_own.version = max(21, onnx_own.version)
                (folder / f"{name}-21.onnx").write_bytes(model.SerializeToString())
            files = {name: replace(graph, file=str(folder / f"{name}-21.onnx")) for name, graph in own.graphs.items()}
            manifest = replace(bundle.manifest, forms={form: replace(own, graphs=files)})
            super().compile(SimpleNamespace(path=bundle.path, manifest=manifest), folder, tune, progress, check)  # type: ignore[arg-type]

        def open(
            self, bundle: Bundle, folder: Path, threads: int = 0, streams: int = 1
        ) -> tuple[Mapping[str, object], Device]:  # type: ignore[override]
            engines, device = super().open(bundle, folder, threads, streams)
            if not lazy or streams > 1:
                return engines, device
            accelerator = Lazy()
            # Only TensorRT's calls are recorded.
            sessions: dict[str, ort.InferenceSession] = {name: engine._session for name, engine in engines.items()}  # type: ignore[misc]
            return {n: LazyEngine(s, accelerator, form == "tensorrt") for n, s in sessions.items()}, accelerator

    return StandIn


_compiled: dict[tuple[Path, str, str], Path] = {}  # bundle, form and spare form: engines


def opened(bundle: Path, form: str, lazy: bool) -> Model:
    """form: a backend, and after a dash the name of one of its spare forms."""
    form, _, spare = form.partition("-")
    read, made = Bundle(bundle), stand_in(form, lazy)("")
    if spare:
        own = read.manifest.form(form)
        read.manifest = replace(read.manifest, forms={form: replace(own, graphs=own.spares[spare])})
    folder = _compiled.get((bundle, form, spare), bundle / "none yet")
    if not folder.exists():  # or another process has replaced it
        folder, errors = compile_engines(read, made)
        assert max(errors.values()) < 5e-4
        _compiled[bundle, form, spare] = folder
    engines, device = made.open(read, folder)
    assert isinstance(device, Lazy if lazy else Host)
    model = Model(LoadedBundle(read, read.manifest.form(form), engines, device))  # type: ignore[arg-type]
    model.warm_up()  # as loading does
    return model


def tokens(
    model: Model, prompt: list[int], count: int, speculate: bool = True
) -> tuple[list[int], list[tuple[int, ...]]]:
    generation = model.generate(prompt, count, speculate)
    paths = [cycle.path for cycle in generation.cycles()]
    return generation.ids, paths


FORMS = (*BACKENDS[1:], "tensorrt-decomposed", "tensorrt-basic")
# The host adds nothing to what the accelerator shows, and the odd pair little to what the demo pair does.
CASES = [
    pytest.param(
        pair,
        form,
        lazy,
        id=f"{name}-{form}-{'accelerator' if lazy else 'host'}",
        marks=() if lazy and pair is DEMO else pytest.mark.exhaustive,
    )
    for name, pair in (("demo", DEMO), ("odd", ODD))
    for form in FORMS
    for lazy in (False, True)
]


@cache
def of_the_cpu(bundle: Path) -> list[tuple[list[int], int, tuple[list[int], list[tuple[int, ...]]]]]:
    """Prompts, how many tokens, and those tokens with the accepted paths."""
    draw = np.random.default_rng(0)
    with load(bundle, "cpu", threads=1) as cpu:
        vocabulary = cpu.bundle.manifest.vocabulary
        texts = [
            (draw.integers(2, vocabulary, length).tolist(), count)
            for length, count in ((1, 24), (7, 16), (8, 24), (9, 16), (127, 12), (129, 12), (190, 50), (200, 5))
        ]
        return [(prompt, count, tokens(cpu, prompt, count)) for prompt, count in texts]


@pytest.mark.parametrize(("pair", "form", "lazy"), CASES)
def test_forms_equal_the_cpu(make_bundle: MakeBundle, pair: Path | RandomPair, form: str, lazy: bool) -> None:
    """Tokens and accepted paths alike, from prompts around the edges of a pass (8 rows) and a chunk, to the last
    position."""
    bundle = make_bundle(
        pair, *(EVERY_BACKEND if pair is DEMO else ("--backend", "cpu", form.partition("-")[0], *SIZES))
    )
    with opened(bundle, form, lazy) as model:
        for prompt, count, expected in of_the_cpu(bundle):
            assert tokens(model, prompt, count) == expected
            assert tokens(model, prompt, count, speculate=False)[0] == expected[0]


def test_every_call_is_one_launch(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where calls may be recorded, all of them are while the model is loaded."""
    run, calls = Recorded.__call__, list[Recorded]()

    def logged(recorded: Recorded, enqueue: Callable[[], None]) -> None:
        calls.append(recorded)
        run(recorded, enqueue)

    with opened(make_bundle(DEMO, *EVERY_BACKEND), "tensorrt", lazy=True) as model:
        monkeypatch.setattr(Recorded, "__call__", logged)
        generation = model.generate([5, 6, 7], 60)
        list(generation.cycles())
        device = model.decoder.device
        assert isinstance(device, Lazy)
        assert len(calls) >= 2 * generation.stats.cycles
        assert device.launches == len(calls)


def test_sizes_are_pinned(make_bundle: MakeBundle) -> None:
    manifest = Bundle(make_bundle(DEMO, *EVERY_BACKEND)).manifest
    assert list(manifest.forms) == ["cpu", "migraphx", "tensorrt", "tensorrt-rtx", "cuda"]
    for name in ("migraphx", "tensorrt", "tensorrt-rtx"):
        assert list(manifest.forms[name].targets) == [1, 2, 8, 128]
        tensors = [p for g in manifest.forms[name].graphs.values() for p in (*g.inputs, *g.outputs)]
        assert all(isinstance(size, int) for tensor in tensors for size in tensor.shape)
    assert manifest.forms["migraphx"].graphs["target"].appends
    assert not manifest.forms["tensorrt"].graphs["target"].appends
    spares = manifest.forms["tensorrt"].spares
    assert {name: graphs["target"].appends for name, graphs in spares.items()} == {"decomposed": False, "basic": True}
    assert {graph.file for graph in spares["basic"].values()} == {
        f"graphs/tensorrt-basic/{name}.onnx" for name in ("target", "draft", "extend")
    }


def test_a_form_that_is_not_there(demo_bundle: Path) -> None:
    with pytest.raises(GumihoError, match=r"has graphs for cpu and none for tensorrt: .*--backend cpu tensorrt"):
        load(demo_bundle, "tensorrt")
