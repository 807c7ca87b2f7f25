"""The golden run can fail: every way in which an engine is known to go wrong is shown to it."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exporter.options import config_of
from exporter.recipe.resolve import recipe_of
from exporter.writing.golden_recorder import record
from graphs.tree import TreeConfig
from runtime import GumihoError
from runtime.backends import backend
from runtime.backends.onnxruntime import Cpu
from runtime.backends.onnxruntime_engine import Engine
from runtime.bundle.reader import Bundle
from runtime.decoding.kv_cache import KVCache
from runtime.engines.devices import Host
from runtime.engines.golden_difference import chain_difference, choice_difference, tree_difference
from runtime.engines.golden_file import Drafted, malformed, read
from runtime.engines.golden_replay import replay
from runtime.engines.store import compile_engines, find_engines
from tests.conftest import MakeBundle
from tests.pairs import SMALL, RandomPair
from tests.seal import edit_golden, update
from tests.test_drafter import load

PAIR = replace(SMALL, seed=21, scale=2.0)  # whose graphs are SMALL's, but for the tree
FLAT = replace(PAIR, scale=0.25)  # whose best tokens are nearly tied
# whose rows are rounded to int8
ROUNDED = RandomPair({"vocab_size": 40, "hidden_size": 96, "intermediate_size": 64}, seed=5)
TOLERANCE = 0.01


@pytest.fixture(scope="module")
def bundle(make_bundle: MakeBundle) -> Path:
    return make_bundle(PAIR, "--rows", "16", "--capacity", "100")


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


# --- trees ------------------------------------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> Drafted:
    """Of distinct scores, as a drafter grows them: a path's tokens tell a row apart."""
    rows = draw(st.integers(2, 24))
    nodes: list[tuple[int, int, float]] = [(7, 0, 0.0)]  # token, parent, score
    used = {0: set[int]()}
    for i in range(1, rows):
        parent = draw(st.integers(0, i - 1))
        token = draw(st.integers(0, 99).filter(lambda t: t not in used[parent]))  # noqa: B023
        used[parent].add(token)
        used[i] = set()
        nodes.append((token, parent, nodes[parent][2] - draw(st.floats(0.001, 2.0))))
    return built(nodes)


def built(nodes: list[tuple[int, int, float]]) -> Drafted:
    """The tree of these nodes, best first, which are given with parents before children."""
    order = [0, *sorted(range(1, len(nodes)), key=lambda i: (-nodes[i][2], i))]
    place = {old: new for new, old in enumerate(order)}
    tokens, parents, scores = (np.array([nodes[old][k] for old in order]) for k in range(3))
    parents = np.array([place[int(parent)] for parent in parents])
    mask, depth = np.eye(len(nodes), dtype=np.bool_), np.zeros(len(nodes), np.int64)
    for i in range(1, len(nodes)):
        mask[i] |= mask[parents[i]]
        depth[i] = depth[parents[i]] + 1
    return Drafted(tokens, depth, parents, mask, scores.astype(np.float32))


def nodes_of(tree: Drafted) -> list[tuple[int, int, float]]:
    return list(zip(tree.tokens.tolist(), tree.parent.tolist(), tree.score.tolist(), strict=True))


@given(trees(), st.randoms(use_true_random=False))
def test_rounding_is_no_difference(tree: Drafted, random: Any) -> None:
    """Scores move by less than the tolerance, never above the parent's, and rows change places by that."""
    assert not tree_difference(tree, tree, TOLERANCE, 1.0)
    moved: list[tuple[int, int, float]] = []
    for token, parent, score in nodes_of(tree):
        off = random.uniform(-0.49, 0.49) * TOLERANCE if moved else 0.0
        moved.append((token, parent, min(score + off, moved[parent][2]) if moved else 0.0))
    assert not tree_difference(built(moved), tree, TOLERANCE, 1.0)


@given(trees(), st.data())
def test_another_parent_is_a_difference(tree: Drafted, data: st.DataObject) -> None:
    """Depths and mask fit the wrong parent, as they do where the graph's integer arithmetic is wrong."""
    nodes = nodes_of(tree)
    row = data.draw(st.integers(1, len(nodes) - 1))
    others = [p for p in range(row) if p != nodes[row][1] and nodes[row][2] <= nodes[p][2]]
    if not others or nodes[row][2] - tree.score.min() <= 2 * TOLERANCE:
        return
    nodes[row] = (nodes[row][0], data.draw(st.sampled_from(others)), nodes[row][2])
    found = built(nodes)
    paths = {tuple(found.tokens[np.flatnonzero(mask)].tolist()) for mask in found.mask}
    if paths == {tuple(tree.tokens[np.flatnonzero(mask)].tolist()) for mask in tree.mask}:
        return
    assert tree_difference(found, tree, TOLERANCE, 1.0)


@given(trees(), st.data())
def test_another_token_is_a_difference(tree: Drafted, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(tree.tokens) - 1))
    if tree.score[row] - tree.score.min() <= TOLERANCE:
        return
    tokens = tree.tokens.copy()
    tokens[row] = 100
    assert tree_difference(replace(tree, tokens=tokens), tree, TOLERANCE, 1.0)


@given(trees(), st.data())
def test_a_mask_or_depth_that_does_not_follow_from_the_parents_is_malformed(tree: Drafted, data: st.DataObject) -> None:
    assert not malformed(tree)
    row, column = (data.draw(st.integers(0, len(tree.tokens) - 1)) for _ in range(2))
    mask, depth = tree.mask.copy(), tree.depth.copy()
    mask[row, column] ^= True
    depth[row] += 1
    for broken in (replace(tree, mask=mask), replace(tree, depth=depth)):
        assert malformed(broken)
        assert tree_difference(broken, tree, TOLERANCE, 0.0)


@pytest.mark.parametrize("parents", [[0, 1, 0], [0, 2, 0], [0, -1, 0], [1, 0, 0]])
def test_parents_come_before_children(parents: list[int]) -> None:
    tree = built([(7, 0, 0.0), (8, 0, -1.0), (9, 1, -2.0)])
    assert malformed(replace(tree, parent=np.array(parents)))


def test_a_near_tie_allows_another_subtree_where_rounding_is_coarse() -> None:
    """Of two nodes as good as tied one is carried on; in fp16 it may be the other one."""
    common = [(7, 0, 0.0), (1, 0, -0.5), (2, 0, -1.0), (3, 0, -1.001), (4, 1, -0.9), (5, 1, -1.5)]
    recorded, found = built([*common, (6, 2, -1.2), (8, 5, -3.0)]), built([*common, (6, 3, -1.201), (8, 5, -3.0)])
    assert "1 of 7 rows are missing" in tree_difference(found, recorded, TOLERANCE, 1.0)
    assert not tree_difference(found, recorded, TOLERANCE, 0.5)
    elsewhere = replace(recorded, tokens=recorded.tokens + 1)
    assert tree_difference(elsewhere, recorded, TOLERANCE, 0.5)


@given(st.integers(1, 9), st.integers(2, 5), st.randoms(use_true_random=False))
def test_choices_differ_at_near_ties_alone(rows: int, k: int, random: Any) -> None:
    top = -np.sort(-np.array([[random.uniform(-9, 9) for _ in range(k)] for _ in range(rows)]), axis=1)
    recorded = np.arange(rows)
    row, largest = random.randrange(rows), np.abs(top).max()
    found = recorded.copy()
    assert not choice_difference(found, recorded, top, 0.01)
    found[row] = 99
    near = top[row, 0] - top[row, 1] <= 0.01 * largest
    assert bool(choice_difference(found, recorded, top, 0.01)) is not near
    found[row] = -1  # what a graph says where its logits are no numbers
    assert choice_difference(found, recorded, top, 0.01)


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(bundle: Path) -> tuple[Bundle, dict[str, Engine], Any]:
    read_bundle, made = Bundle(bundle), Cpu("")
    engines, device = made.open(read_bundle, find_engines(read_bundle, made))
    return read_bundle, engines, device


class Changed:
    """An engine whose outputs are changed behind each call."""

    def __init__(self, engine: Engine, change: Callable[[Mapping[str, np.ndarray]], None]) -> None:
        self.engine, self.change = engine, change

    def bind(self, buffers: Mapping[str, np.ndarray]) -> Callable[[], None]:
        call = self.engine.bind(buffers)

        def changed() -> None:
            call()
            self.change(buffers)

        return changed


def put(name: str, at: Any, value: Any) -> Callable[[Mapping[str, np.ndarray]], None]:
    def change(buffers: Mapping[str, np.ndarray]) -> None:
        if name in buffers:
            buffers[name][at] = value

    return change


def other_parent(buffers: Mapping[str, np.ndarray]) -> None:
    """The first leaf that can moves to another row of its parent's depth, its mask with it."""
    if "tree_parent" not in buffers:
        return
    depth, parent, mask, score = (buffers[f"tree_{part}"] for part in ("depth", "parent", "mask", "score"))
    for row in range(1, len(parent)):
        for other in np.flatnonzero(depth[:row] == depth[row] - 1):
            if other != parent[row] and row not in parent and score[row] - score.min() > 0.1:
                parent[row] = other
                mask[row] = mask[other]
                mask[row, row] = True
                return
    raise AssertionError("the tree has no such row")


@pytest.mark.parametrize(
    ("engine", "change", "said"),
    [
        ("target", put("logits", (0, 5), np.nan), "output 'logits' holds NaN"),
        ("target", put("logits", (0, 5), np.inf), "output 'logits' holds NaN or infinity"),
        ("target", put("hidden", (-1, 0), np.nan), "output 'hidden' holds NaN"),
        ("target", put("choice", 0, 3), "in its choice for row 0: token 3"),
        ("target", put("choice", -1, -1), "in its choice for row"),
        ("target", put("logits", 0, 0), "differs from the golden run by"),
        ("draft", put("tree_score", 3, np.nan), "output 'tree_score' holds NaN"),
        ("draft", put("tree_score", 3, -np.inf), "output 'tree_score' holds NaN or infinity"),
        ("draft", put("tree_tokens", 1, 3), "in its tree"),
        ("draft", put("tree_depth", 1, 3), "in its depths"),
        ("draft", put("tree_mask", (2, 0), False), "in its mask: row 2"),
        ("draft", other_parent, "in its tree"),
    ],
)
def test_what_an_engine_may_get_wrong_is_noticed(
    opened: tuple[Bundle, dict[str, Engine], Host], engine: str, change: Callable[[Any], None], said: str
) -> None:
    bundle, engines, device = opened
    assert max(replay(bundle, bundle.manifest.form("cpu"), engines, device).values()) < 1e-3
    with pytest.raises(GumihoError, match=said):
        replay(bundle, bundle.manifest.form("cpu"), {**engines, engine: Changed(engines[engine], change)}, device)


def test_a_row_that_has_other_numbers_alone_is_noticed(bundle: Path, make_bundle: MakeBundle) -> None:
    """The next number is enough. A target that does not round its rows may have it."""

    def next_to_it(buffers: Mapping[str, np.ndarray]) -> None:
        if len(buffers["tokens"]) == 1:
            buffers["logits"][0, 0] = np.nextafter(buffers["logits"][0, 0], np.float32(np.inf))

    rounded = make_bundle(ROUNDED, "--weights", "int8", "--capacity", "100", drafter=False)
    for folder, rounds in ((rounded, True), (bundle, False)):
        opened, made = Bundle(folder), Cpu("")
        engines, device = made.open(opened, find_engines(opened, made))
        replay(opened, opened.manifest.form("cpu"), engines, device)
        changed = {**engines, "target": Changed(engines["target"], next_to_it)}
        with pytest.raises(GumihoError, match="other numbers alone .*--weights none") if rounds else nullcontext():
            replay(opened, opened.manifest.form("cpu"), changed, device)


def test_unused_positions_hold_garbage(
    opened: tuple[Bundle, dict[str, Engine], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that attends to the position after the last one passes over zeroed caches by chance; not over these."""
    bundle, engines, device = opened
    caches = list[KVCache]()
    littered = KVCache.fill_garbage
    monkeypatch.setattr(KVCache, "fill_garbage", lambda cache: (littered(cache), caches.append(cache))[0])
    replay(bundle, bundle.manifest.form("cpu"), engines, device)
    assert len(caches) == 2
    for cache in caches:
        for slab in cache.slabs:
            unused = slab[:, int(cache.length[0]) + bundle.manifest.rows :]
            assert np.abs(unused).mean() > 5
            assert np.isfinite(slab).all()


# --- chains -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chain(make_bundle: MakeBundle) -> Path:
    return make_bundle(
        FLAT, "--draft-tree", "chain", "--serial-steps", "3", "--heads", "0", "--rows", "4", "--draft-weights", "int4"
    )


def test_the_best_tokens_behind_a_chain_are_those_of_a_wider_tree(tmp_path: Path) -> None:
    """Of a tree that expands the best node of each level and keeps eight, grown from the same inputs."""
    folders = FLAT.write(tmp_path)
    pair = recipe_of(config_of(["--target", str(folders[0]), "--ckpt", str(folders[1])])).pair
    narrow = TreeConfig(4, 3, heads=0, top_k=1, head_top_k=1, beam=1)
    target = pair.modules(narrow, 100, 103)["target"]
    sources = pair.target_sources(103)
    target.load_state_dict({name: torch.cat([*part.slices()]).float() for name, part in sources.items()}, assign=True)

    def recorded(tree: TreeConfig) -> dict[str, np.ndarray]:
        """A run of a drafter that grows this tree, with the same inputs."""
        drafter = load(pair.modules(tree, 100, 103)["draft"], pair, tree, 103)
        return record(target, drafter, replace(narrow, top_k=tree.top_k), torch.float32)  # type: ignore[arg-type]

    chain, wide = recorded(narrow), recorded(replace(narrow, rows=25, top_k=8))
    for name in ("tree", "next"):
        assert np.array_equal(chain[f"{name}.top_ids"][:, 0], chain[f"{name}.tokens"][1:])
        assert np.allclose(chain[f"{name}.top_scores"][:, 0], chain[f"{name}.score"][1:])
        for level in (1, 2, 3):
            rows = wide[f"{name}.depth"] == level
            assert chain[f"{name}.top_ids"][level - 1].tolist() == wide[f"{name}.tokens"][rows].tolist()
            assert np.allclose(chain[f"{name}.top_scores"][level - 1], wide[f"{name}.score"][rows], atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "scores", "said"),
    [
        ([7, 1, 2, 3], [0, -1, -2, -3], ""),
        ([7, 1, 5, 9], [0, -1, -2.005, -9], ""),
        ([7, 1, 9, 3], [0, -1, -2, -3], "token 9 instead of 2 in row 2"),
        ([7, 1, 5, 3], [0, -1, -2.1, -3], "token 5 instead of 2 in row 2"),
        ([7, 4, 5, 3], [0, -1.5, -2, -3], "token 4 instead of 1 in row 1"),
        ([8, 1, 2, 3], [0, -1, -2, -3], "from token 8"),
    ],
    ids=["the same", "a near tie", "an unknown token", "another score", "no near tie", "another root"],
)
def test_a_chain_may_take_the_other_of_two_nearly_tied_tokens(
    tokens: list[int], scores: list[float], said: str
) -> None:
    top_ids = np.array([[1, 4], [2, 5], [3, 6]])
    top_scores = np.array([[-1, -1.5], [-2, -2.005], [-3, -4]], np.float32)

    def chain_of(tokens: list[int], scores: list[float]) -> Drafted:
        return built(list(zip(tokens, [0, 0, 1, 2], scores, strict=True)))

    found = chain_difference(
        chain_of(tokens, scores), chain_of([7, 1, 2, 3], [0, -1, -2, -3]), top_ids, top_scores, TOLERANCE
    )
    assert said in found if said else not found


def test_a_chain_has_one_token_a_level() -> None:
    """The recorded tokens with the recorded scores, but all of them behind the root."""
    recorded = built([(7, 0, 0.0), (1, 0, -1.0), (2, 1, -2.0), (3, 2, -3.0)])
    star = built([(7, 0, 0.0), (1, 0, -1.0), (2, 0, -2.0), (3, 0, -3.0)])
    top = recorded.tokens[1:, None], recorded.score[1:, None]
    assert not chain_difference(recorded, recorded, *top, TOLERANCE)
    assert "with the parents [0, 0, 0, 0]" in chain_difference(star, recorded, *top, TOLERANCE)
    broken = replace(recorded, depth=recorded.depth + 1)
    assert "in its depths" in chain_difference(broken, recorded, *top, TOLERANCE)


@pytest.mark.parametrize("known", [True, False])
def test_an_engine_whose_rounding_changes_a_chain_passes(chain: Path, known: bool) -> None:
    """One of its tokens is another, and the text behind it, about which nothing is recorded. A token that was not among
    the best does not pass."""
    bundle, made = Bundle(chain), Cpu("")
    engines, device = made.open(bundle, find_engines(bundle, made))
    run = read(bundle)
    row = 1 + int((run["tree.top_scores"][:, 0] - run["tree.top_scores"][:, 1]).argmin())
    ids, scores = run["tree.top_ids"][row - 1], run["tree.top_scores"][row - 1]
    other = ids[1] if known else next(token for token in range(40) if token not in ids)

    def change(buffers: Mapping[str, np.ndarray]) -> None:
        if "tree_tokens" in buffers and buffers["tree_tokens"][0] == run["tree.tokens"][0]:
            buffers["tree_tokens"][row:], buffers["tree_score"][row:] = 0, scores[1] - 50
            buffers["tree_tokens"][row], buffers["tree_score"][row] = other, scores[1]

    changed = {**engines, "draft": Changed(engines["draft"], change)}
    if known:
        assert replay(bundle, bundle.manifest.form("cpu"), changed, device)["draft"] < 0.3
    else:
        with pytest.raises(GumihoError, match=f"in its chain: token {other} instead of {ids[0]} in row {row}"):
            replay(bundle, bundle.manifest.form("cpu"), changed, device)


# --- weights and the file itself --------------------------------------------------------------------------------------


def spoil(bundle: Path, parameter: str, value: float) -> None:
    """One number of a parameter in the weight files, checksums made to fit."""
    graph = onnx.load(str(bundle / "graphs/cpu/target.onnx"), load_external_data=False).graph
    tensor = next(t for t in graph.initializer if t.name == parameter)
    place = {entry.key: entry.value for entry in tensor.external_data}
    file = bundle / place["location"]
    content = bytearray(file.read_bytes())
    content[int(place["offset"]) : int(place["offset"]) + 4] = np.float32(value).tobytes()
    file.write_bytes(content)
    update(bundle, place["location"])


@pytest.mark.parametrize("parameter", ["norm.weight", "lm_head.weight", "layers.1.mlp.down_proj.weight", "rotary.cos"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_do_not_compile(copy: Path, parameter: str, value: float) -> None:
    spoil(copy, parameter, value)
    with pytest.raises(GumihoError, match="holds NaN or infinity"):
        compile_engines(Bundle(copy), backend("cpu"))
    assert not list((copy / "engines").glob(".*partial*"))


def test_a_golden_run_of_zeros_is_refused(copy: Path) -> None:
    zeros = {name: np.zeros_like(part) for name, part in np.load(copy / "golden.npz").items()}
    np.savez(copy / "golden.npz", **zeros)  # type: ignore[arg-type]
    with pytest.raises(GumihoError, match=r"golden.npz (is damaged|has \d+ bytes)"):
        compile_engines(Bundle(copy), backend("cpu"))
    update(copy, "golden.npz")
    with pytest.raises(GumihoError, match=r"golden.npz is damaged \(prompt.parts does not go from 0 to 48"):
        compile_engines(Bundle(copy), backend("cpu"))
    edit_golden(copy, lambda run: run.pop("prompt.parts"))  # as in older bundles
    with pytest.raises(GumihoError, match=r"golden.npz is damaged \(tree is malformed"):
        compile_engines(Bundle(copy), backend("cpu"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: run.pop("next.path"), "next.path is missing"),
        (lambda run: run.update({"prompt.tokens": run["prompt.tokens"].astype(np.int32)}), "prompt.tokens is int32"),
        (lambda run: run.update({"prompt.mask": run["prompt.mask"][:1]}), r"prompt.mask is bool"),
        (lambda run: run.update({"verify.tokens": run["verify.tokens"] + 10**6}), "expected 0 to 39"),
        (
            lambda run: run.update({"verify.top_logits": run["verify.top_logits"] * np.nan}),
            "verify.top_logits holds NaN",
        ),
        (lambda run: run.update({"tree.path": run["tree.path"] - 99}), "tree.path holds numbers from"),
        (lambda run: run.update({"prompt.tokens": np.zeros((0,), np.int64)}), "prompt has 0 rows"),
        (lambda run: run.update({"verify.hidden": run["verify.hidden"][:, :1]}), "verify.hidden is float32"),
        (lambda run: run.update({"tree.top_ids": run["tree.tokens"]}), "tree.top_ids is int64"),
    ],
)
def test_a_damaged_golden_run_is_refused(copy: Path, change: Callable[[dict[str, Any]], object], said: str) -> None:
    edit_golden(copy, change)
    with pytest.raises(GumihoError, match=said):
        read(Bundle(copy))


def test_an_archive_that_unpacks_to_more_than_it_is_refused(copy: Path) -> None:
    np.savez_compressed(copy / "golden.npz", zeros=np.zeros(1 << 26, np.uint8))
    update(copy, "golden.npz")
    with pytest.raises(GumihoError, match="unpacks to"):
        read(Bundle(copy))
