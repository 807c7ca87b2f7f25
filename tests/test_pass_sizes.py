"""Targets with graphs for several numbers of rows: which one a pass takes, and that every one is checked."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import DamageError, GumihoError, Model, load
from runtime.bundle.graphs import Form, Graph
from runtime.bundle.manifest_reader import parse_manifest
from runtime.bundle.reader import Bundle
from runtime.decoding.planner import Planner
from runtime.decoding.prices import Costs
from runtime.engines.devices import DeviceArray
from runtime.engines.store import compile_engines
from tests.accelerator import LazyEngine
from tests.conftest import DEMO, EVERY_BACKEND, MakeBundle
from tests.end_to_end.test_forms import opened, stand_in, tokens
from tests.seal import edit, update

PROMPT = [5, 6, 7, 300, 40]
GRAPH = Graph("", 0, 0, "float32", (), ())


@given(st.sets(st.integers(1, 300), max_size=4), st.integers(1, 400))
def test_a_pass_takes_the_smallest_graph_that_has_room(sizes: set[int], rows: int) -> None:
    chunk = max(sizes | {300}) + 1
    graphs = {"target": GRAPH, "draft": GRAPH, "extend": GRAPH, **{f"target-{size}": GRAPH for size in sizes}}
    form = Form("basic", chunk, True, graphs, {})
    fitting = [size for size in [*sizes, chunk] if size >= rows]
    if fitting:
        size = min(fitting)
        assert form.target(rows) == ("target" if size == chunk else f"target-{size}", size)
    assert replace(form, static=False).target(rows) == ("target", rows)


@pytest.fixture(scope="module")
def ran() -> Iterator[list[LazyEngine]]:
    """The engines that were launched, in order."""
    engines: list[LazyEngine] = []
    bind = LazyEngine.bind

    def spied(self: LazyEngine, buffers: Any) -> Any:
        call = bind(self, buffers)
        launch = call.launch

        def told(places: dict[str, DeviceArray]) -> None:
            engines.append(self)
            launch(places)

        call.launch = told
        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LazyEngine, "bind", spied)
        yield engines


@pytest.fixture(scope="module")
def bundle(make_bundle: MakeBundle) -> Path:
    return make_bundle(DEMO, *EVERY_BACKEND)


@pytest.fixture(scope="module")
def model(bundle: Path, ran: list[LazyEngine]) -> Iterator[Model]:
    with opened(bundle, "migraphx", lazy=True) as model:
        yield model


@pytest.fixture(scope="module")
def cpu(bundle: Path) -> Iterator[Model]:
    with load(bundle, "cpu", threads=1) as cpu:
        yield cpu


def targets(model: Model, ran: list[LazyEngine]) -> list[str]:
    """The target's graphs among those that ran since the last call."""
    names = {id(engine): name for name, engine in model.decoder.engines.items()}
    found = [names[id(engine)] for engine in ran]
    ran.clear()
    return [name for name in found if name.startswith("target")]


def test_passes_take_the_graph_of_their_size(model: Model, cpu: Model, ran: list[LazyEngine]) -> None:
    assert list(model.decoder.form.targets) == [1, 2, 8, 128]
    ran.clear()
    for length, read in ((1, ["target-1"]), (5, ["target-8"]), (9, ["target"]), (130, ["target", "target-2"])):
        prompt = (PROMPT * 30)[:length]
        assert tokens(model, prompt, 6, speculate=False) == tokens(cpu, prompt, 6, speculate=False)
        assert targets(model, ran) == [*read, *["target-1"] * 5]
    for rows, verified in ((2, "target-2"), (5, "target-8"), (8, "target-8")):
        generation, expected = (m.generate(PROMPT, 20, rows=rows) for m in (model, cpu))
        assert [cycle.path for cycle in generation.cycles()] == [cycle.path for cycle in expected.cycles()]
        assert targets(model, ran) == ["target-8", *[verified] * generation.stats.cycles]


@pytest.mark.parametrize(
    ("prices", "allowed"), [({1: 1.0, 2: 1.0, 8: 50.0}, {0, 1, 2}), ({1: 1.0, 2: 1.0, 8: 1.0}, {0, 1, 8})]
)
def test_the_planner_chooses_among_them(
    model: Model, cpu: Model, monkeypatch: pytest.MonkeyPatch, prices: dict[int, float], allowed: set[int]
) -> None:
    planner = Planner(
        Costs({rows: 1e6 * price for rows, price in prices.items()}, 1e4, 1e4), model.bundle.manifest.depth
    )
    planner._target.measured = lambda rows, elapsed: False  # type: ignore[method-assign]  # the prices stay what they are
    monkeypatch.setattr(model.decoder, "planners", [planner] * 2)
    generation = model.generate(PROMPT, 60, lookup=False)
    rows = {cycle.rows for cycle in generation.cycles()}
    assert rows <= allowed
    assert max(rows) == max(allowed)
    assert generation.ids == tokens(cpu, PROMPT, 60, speculate=False)[0]


@pytest.mark.parametrize(
    "graph",
    ["target", "target-1", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("target-2", "target-8"))],
)
def test_the_golden_run_checks_every_size(bundle: Path, tmp_path: Path, graph: str) -> None:
    bundle = Path(shutil.copytree(bundle, tmp_path / "bundle", ignore=shutil.ignore_patterns("engines")))
    file = bundle / Bundle(bundle).manifest.form("migraphx").graphs[graph].file
    model = onnx.load(file, load_external_data=False)
    [node for node in model.graph.node if node.op_type == "Mul"][-1].op_type = "Add"
    file.unlink()
    file.write_bytes(model.SerializeToString())
    update(bundle, str(file.relative_to(bundle)))
    with pytest.raises(GumihoError, match="the compiled target engine is discarded"):
        compile_engines(Bundle(bundle), stand_in("migraphx", lazy=False)(""))


def renamed(raw: dict[str, Any], old: str, new: str, form: str = "migraphx") -> None:
    graphs = raw["forms"][form]["graphs"]
    graphs[new] = graphs.pop(old)


def other_caches(raw: dict[str, Any]) -> None:
    for tensor in raw["forms"]["migraphx"]["graphs"]["target-2"]["inputs"]:
        if tensor["name"].startswith("past_key"):
            tensor["shape"][2] += 64


def weight(raw: dict[str, Any], **changes: object) -> None:
    next(iter(raw["forms"]["migraphx"]["weights"]["draft"].values())).update(changes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: renamed(raw, "target-2", "target-128"), "has 'target-128', expected sizes below its chunk of 128"),
        (lambda raw: renamed(raw, "target-2", "target-3"), r"tokens int64 \[2\], expected tokens int64 \[3\]"),
        (
            lambda raw: renamed(raw, "target-2", "target-02"),
            "is 'target-02', expected one of target, shared, draft, .*target-N",
        ),
        (
            lambda raw: raw["forms"]["migraphx"]["graphs"].pop("target-8"),
            "has passes of 1, 2, 128 rows, expected one of 8",
        ),
        (
            lambda raw: raw["forms"]["cpu"]["graphs"].update({"target-2": raw["forms"]["cpu"]["graphs"]["target"]}),
            "has 'target-2', expected sizes below its chunk of .*, and only if it is static",
        ),
        (other_caches, "target and target-2 have different caches"),
        (lambda raw: raw["requires"].remove("pass-sizes"), "expected 'pass-sizes' if a target has several graphs"),
        (lambda raw: raw["requires"].remove("bound-weights"), "expected 'bound-weights' if a form has weights"),
        (lambda raw: weight(raw, file="weights/none.bin"), "names weights/none.bin, which is not among the files"),
        (lambda raw: weight(raw, offset=1 << 40), "ends behind weights/"),
        (lambda raw: weight(raw, shape=[1 << 31, 1 << 31]), "ends behind weights/"),
        (lambda raw: weight(raw, dtype="float64"), "dtype is 'float64', expected one of float32"),
    ],
)
def test_contradicting_manifests_are_refused(bundle: Path, tmp_path: Path, change: Any, said: str) -> None:
    record = tmp_path / "gumiho.json"
    shutil.copyfile(bundle / record.name, record)
    edit(tmp_path, change)
    with pytest.raises(DamageError, match=said):
        parse_manifest(record.read_text(), record)
