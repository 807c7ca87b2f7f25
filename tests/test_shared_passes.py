"""Passes over rows of several streams: what each row gets is what a pass of its own would give, and none is lost or
waits for nothing."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter.checkpoints.checkpoint import Checkpoint
from exporter.checkpoints.pair import Pair
from graphs.shared_target import LANES, SharedTarget
from graphs.target import Target
from graphs.tree import TreeConfig
from runtime import gumiho, load
from runtime.backends import onnxruntime
from runtime.backends.onnxruntime import Cpu
from runtime.backends.onnxruntime_lanes import Lanes
from runtime.bundle.reader import Bundle
from runtime.engines.golden_replay import check_shared_passes
from runtime.engines.memory_check import require
from runtime.engines.store import find_engines
from runtime.errors import DamageError, GumihoError, MisuseError
from tests.conftest import DEMO, MakeBundle, examples
from tests.end_to_end.test_quantized import WHOLE
from tests.pairs import SMALL
from tests.seal import edit, without_shared
from tests.test_streams import finished, run

PRECISIONS: dict[str, tuple[str, ...]] = {
    "fp32": (),  # other tests use this bundle and that of w8a8, too
    "int8": ("--weights", "int8", "--capacity", "600"),
    "w8a8": WHOLE,
    "int4": ("--weights", "int4", "--capacity", "600"),
}
# A stream's part of a pass: the rows it has already, and those of the pass.
PARTS = st.lists(st.tuples(st.sampled_from([0, 1, 100, 129, 300, 450]), st.integers(1, 9)), min_size=1, max_size=LANES)


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=pytest.mark.exhaustive if n in ("int8", "int4") else ()) for n in PRECISIONS],
)
def bundle(request: pytest.FixtureRequest, make_bundle: MakeBundle) -> Path:
    return make_bundle(DEMO, *PRECISIONS[request.param])


def engines_here(bundle: Bundle, cpu: Cpu) -> Path:
    """Raises UnavailableError where the processor cannot multiply bytes, as loading does: there are no engines of w8a8
    either."""
    require(bundle, cpu)
    return find_engines(bundle, cpu)


@pytest.fixture(scope="module")
def opened(bundle: Path) -> Iterator[tuple[Bundle, Any, Lanes]]:
    read, made = Bundle(bundle), Cpu("")
    folder = engines_here(read, made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "_SMALL", 0)  # passes of one stream go through the shared graph too
        engines = [made.open(read, folder, 1, streams)[0] for streams in (1, 2)]
    assert isinstance(engines[1]["target"], Lanes)
    yield read, engines[0]["target"], engines[1]["target"]
    for each in engines:
        for engine in each.values():
            engine.close()


def buffers(bundle: Bundle, past: int, rows: int, wanted: list[int], seed: int) -> dict[str, np.ndarray]:
    """Of a pass over random rows, in a random tree, behind a random past."""
    rng, manifest = np.random.default_rng(seed), bundle.manifest
    graph = manifest.form("cpu").graphs["target"]
    parents = [-1, *(int(rng.integers(0, row)) for row in range(1, rows))]
    mask, depth = np.eye(rows, dtype=np.bool_), np.zeros(rows, np.int64)
    for row in range(1, rows):
        mask[row] |= mask[parents[row]]
        depth[row] = depth[parents[row]] + 1
    made: dict[str, np.ndarray] = {
        "tokens": rng.integers(0, manifest.vocabulary, rows),
        "depth": depth,
        "mask": mask,
        "wanted": np.array(wanted, np.int64),
        "past_length": np.array([past]),
        "choice": np.zeros(len(wanted), np.int64),
        "logits": np.zeros((len(wanted), manifest.vocabulary), manifest.dtype),
        "hidden": np.zeros((rows, manifest.hidden), manifest.dtype),
    }
    for tensor in graph.caches:
        heads, width = int(tensor.shape[1]), int(tensor.shape[3])
        cache = rng.standard_normal((1, heads, graph.cache_positions(manifest.capacity), width)).astype(manifest.dtype)
        made[tensor.name] = made[tensor.name.replace("past", "present")] = cache
    return made


@settings(examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=PARTS, last=st.booleans(), seed=st.integers(0, 1 << 30))
def test_rows_get_what_a_pass_of_their_own_gives(
    opened: tuple[Bundle, Any, Lanes], parts: list[tuple[int, int]], last: bool, seed: int
) -> None:
    """To the last bit, whatever the precision, in the same kernels: rows do not meet but in products, whose rows are
    summed alone."""
    bundle, target, lanes = opened
    least = Cpu("").form(bundle, Path()).least
    parts = [(past, max(least, rows)) for past, rows in parts]
    wanted = [[rows - 1] if last else list(range(rows)) for _, rows in parts]
    made = [
        [
            buffers(bundle, past, rows, w, seed + i)
            for i, ((past, rows), w) in enumerate(zip(parts, wanted, strict=True))
        ]
        for _ in "12"
    ]
    for own in made[0]:
        target.bind(own)()
    passes = [lanes.bind(own) for own in made[1]]
    lanes.run(passes)
    exact = bundle.manifest.weights.get("target", "").startswith(("w8a8", "int8"))
    for alone, together, own in zip(*made, passes, strict=True):
        assert own.done
        assert own.ns > 0
        for name, expected in alone.items():
            tolerance = 0 if exact else 2e-4 * max(1, float(np.abs(expected.astype(float)).max()))
            np.testing.assert_allclose(
                together[name].astype(float), expected.astype(float), rtol=0, atol=tolerance, err_msg=name
            )


@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [3, 1, 4, 1], [2, 7, 1, 5]])
@torch.inference_mode()
def test_eager_is_the_targets_own_passes(counts: list[int], tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(len(counts))
    target, drafter = SMALL.write(tmp_path)
    pair = Pair(Checkpoint(str(target), "target"), Checkpoint(str(drafter), "drafter"))
    weights = {n: torch.cat(list(source.slices())).float() for n, source in pair.target_sources(40).items()}
    modules = pair.modules(TreeConfig(8, 2, 0, 4, 4, 4), 40, 40)
    for name in ("target", "shared"):
        modules[name].load_state_dict(weights, assign=True)
    own, shared, shape = modules["target"], modules["shared"], pair.target_shape
    assert isinstance(shared, SharedTarget)
    assert isinstance(own, Target)
    rows = counts + [0] * (LANES - len(counts))
    past = [torch.tensor([3 * lane + 1]) for lane in range(LANES)]
    tokens = torch.randint(0, shape.vocabulary, (sum(counts),), generator=draw)
    depth = torch.cat([torch.arange(n) for n in rows])
    masks = [torch.ones(n, n, dtype=torch.bool).tril() for n in rows]
    held = [torch.randn(1, shape.kv_heads, 40, shape.head_dim, generator=draw) for _ in range(2 * shape.layers * LANES)]
    wanted = torch.arange(sum(counts))
    choice, logits, hidden, *written = shared(tokens, depth, torch.tensor(rows), wanted, masks, past, held)
    at = 0
    for lane, n in enumerate(counts):
        part = slice(at, at + n)
        mine = [held[layer * 2 * LANES + 2 * lane + kind] for layer in range(shape.layers) for kind in (0, 1)]
        expected = own(tokens[part], depth[part], masks[lane], None, past[lane], mine)
        found = [written[layer * 2 * LANES + 2 * lane + kind] for layer in range(shape.layers) for kind in (0, 1)]
        for a, b in zip((choice[part], logits[part], hidden[part], *found), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
        at += n


# --- streams that share them ------------------------------------------------------------------------------------------


def test_streams_share_passes_and_none_changes_anothers_text(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, real = list[int](), Lanes.run

    def counted(lanes: Lanes, passes: Any, beside: bool) -> None:
        counts.append(len(passes))
        real(lanes, passes, beside)

    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 900, size).tolist() for size in (5, 80, 300, 20, 1, 130)]
    with load(bundle, "cpu", threads=1) as alone:
        expected = [finished(alone, prompt, 40, {}) for prompt in prompts]
    monkeypatch.setattr(Lanes, "run", counted)
    found: dict[int, list[int]] = {}
    with load(bundle, "cpu", threads=1, streams=len(prompts)) as model:

        def work(number: int) -> None:
            found[number] = finished(model.streams[number], prompts[number], 40, {})

        run(*(lambda number=number: work(number) for number in range(len(prompts))))
        assert max(counts) == LANES  # of six streams
        assert sum(count > 1 for count in counts) > len(counts) / 2
    assert [found[number] for number in range(len(prompts))] == expected


def test_a_failed_pass_is_everyones_and_the_next_one_is_not(
    opened: tuple[Bundle, Any, Lanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, _, lanes = opened
    made = [buffers(bundle, 3, 2, [0, 1], seed) for seed in (1, 2)]
    passes = [lanes.bind(own) for own in made]
    with monkeypatch.context() as patch:
        patch.setattr(Lanes, "_run", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        lanes.run(passes)
    for one in passes:
        with pytest.raises(GumihoError, match="no memory"):
            one.result()
    lanes.run(passes)
    assert all(one.result() > 0 for one in passes)
    with pytest.raises(DamageError, match="'mask' has no buffer"):
        lanes.bind({name: buffer for name, buffer in made[0].items() if name != "mask"})


@pytest.mark.parametrize("small", [0, 1e9])
def test_of_a_small_target_a_stream_alone_has_an_engine_of_its_own(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, small: float
) -> None:
    monkeypatch.setattr(onnxruntime, "_SMALL", small)
    counts, real = list[int](), Lanes._run

    def counted(lanes: Lanes, session: Any, passes: Any) -> None:
        counts.append(len(passes))
        real(lanes, session, passes)

    monkeypatch.setattr(Lanes, "_run", counted)
    with load(bundle, threads=1) as own, load(bundle, threads=1, streams=2) as model:
        prompt = list(range(3, 150))
        assert finished(model, prompt, 40, {}) == finished(own, prompt, 40, {})
    assert set(counts) == (set() if small else {1})


def test_closed(bundle: Path) -> None:
    read, made = Bundle(bundle), Cpu("")
    lanes = made.open(read, engines_here(read, made), 1, 2)[0]["target"]
    own = buffers(read, 0, 1, [0], 1)
    call = lanes.bind(own)
    lanes.close()
    with pytest.raises(MisuseError, match="closed"):
        call()
    with pytest.raises(MisuseError, match="closed"):
        lanes.bind(own)


def test_lanes_that_differ_fail_the_golden_run(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, made, real = Bundle(bundle), Cpu(""), Lanes.run
    folder = engines_here(read, made)
    check_shared_passes(read, made, folder)

    def wrong(lanes: Lanes, passes: Any) -> None:
        real(lanes, passes)
        passes[2].buffers["logits"][0] += np.abs(passes[2].buffers["logits"]).max()

    monkeypatch.setattr(Lanes, "run", wrong)
    with pytest.raises(GumihoError, match="the compiled shared engine is discarded"):
        check_shared_passes(read, made, folder)


# --- bundles ----------------------------------------------------------------------------------------------------------


def test_bundles_without_the_graph_decode_by_turns(bundle: Path, tmp_path: Path) -> None:
    require(Bundle(bundle), Cpu(""))
    shutil.copytree(bundle, tmp_path / "old", ignore=shutil.ignore_patterns("engines"))
    edit(tmp_path / "old", without_shared)
    assert gumiho.main(["compile", str(tmp_path / "old")]) == 0
    prompts = [[5, 6, 7], list(range(3, 90))]
    with load(tmp_path / "old", streams=2) as old, load(bundle) as new:
        assert not old._loaded.joins_passes
        found: dict[int, list[int]] = {}
        run(*(lambda n=n: found.update({n: finished(old.streams[n], prompts[n], 20, {})}) for n in (0, 1)))
        assert [found[n] for n in (0, 1)] == [finished(new, prompt, 20, {}) for prompt in prompts]


def unnamed(raw: dict[str, Any]) -> None:
    raw["requires"].remove("shared-passes")


def one_lane(raw: dict[str, Any]) -> None:
    own = raw["forms"]["cpu"]["graphs"]["shared"]
    own["inputs"] = [
        tensor for tensor in own["inputs"] if not tensor["name"].startswith("mask.") or tensor["name"] == "mask.0"
    ]


def other_rows(raw: dict[str, Any]) -> None:
    next(t for t in raw["forms"]["cpu"]["graphs"]["shared"]["inputs"] if t["name"] == "mask.2")["shape"] = [
        "rows_1",
        "rows_2",
    ]


def missing_cache(raw: dict[str, Any]) -> None:
    own = raw["forms"]["cpu"]["graphs"]["shared"]
    own["outputs"] = own["outputs"][:-1]


def elsewhere(raw: dict[str, Any]) -> None:
    raw["forms"]["cuda"] = {**raw["forms"]["cpu"]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (unnamed, "shared-passes"),
        (one_lane, "streams"),
        (other_rows, "mask.2"),
        (missing_cache, "shared"),
        (elsewhere, "a graph 'shared'"),
    ],
)
def test_contradicting_manifests_are_refused(bundle: Path, tmp_path: Path, change: Any, said: str) -> None:
    shutil.copytree(bundle, tmp_path / "copy", ignore=shutil.ignore_patterns("engines", "weights"))
    edit(tmp_path / "copy", change)
    with pytest.raises(DamageError, match=said):
        Bundle(tmp_path / "copy")
