"""Quantized targets on the CPU: a row's numbers to the last bit, whatever rows a pass has beside it and wherever its
ancestors lie."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.dialects import exact
from graphs.dialects.exact import Exact
from graphs.dialects.standard import Standard
from runtime import Generation, Model, load
from runtime.backends.onnxruntime import Cpu
from runtime.backends.processor import one_row_differs
from runtime.bundle import graphs
from runtime.bundle.manifest_reader import parse_manifest
from runtime.bundle.reader import Bundle
from runtime.cli.checks.lossless import differences
from runtime.engines import golden_replay
from runtime.errors import DamageError
from tests.conftest import DEMO, MakeBundle
from tests.end_to_end.test_quantized import CPU4, INT8, ODD, WHOLE
from tests.pairs import RandomPair
from tests.seal import edit, without_shared

# A head of keys for every head of queries, so that a row's products with the keys are of one row.
FULL = RandomPair(ODD.target | {"num_key_value_heads": 4, "max_position_embeddings": 1152}, seed=4)
# Values in five parts, which is no power of two.
WIDE = RandomPair(
    ODD.target | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 80, "max_position_embeddings": 1152},
    seed=5,
)
LONGER = dataclasses.replace(ODD, target=ODD.target | {"max_position_embeddings": 1152})
ROWS = (2, 8, 17, 60)
MOST = max(ROWS)
# The parents of rows whose places are almost as far as possible from their positions: those of a chain beside one row,
# and those of five rows behind many.
DEEP = [0, 0, 0, *range(2, MOST - 1)]
LATE = [0] * (MOST - 4) + list(range(MOST - 5, MOST - 1))
PAST = 0, 37, 230, 442, 900, 966, 975, 1022, 1024, 1080
LONG = "--capacity", "1150", "--rows", f"{MOST}"
DEMOS = "--capacity", "510"
Numbers = tuple[np.ndarray, np.ndarray]  # logits and hidden, of the rows of a pass


def random_tree(draw: np.random.Generator, rows: int) -> list[int]:
    return [0, *(int(draw.integers(max(0, row - 6), row)) for row in range(1, rows))]


def tree_pass(model: Model, tokens: Sequence[int], parents: Sequence[int]) -> Numbers:
    """All rows at once, behind what the cache holds."""
    decoder, n = model.decoder, len(tokens)
    mask, depth = np.eye(n, dtype=np.bool_), np.zeros(n, np.int64)
    for row in range(1, n):
        mask[row] |= mask[parents[row]]
        depth[row] = depth[parents[row]] + 1
    decoder.target._bind(np.array(tokens), depth, mask)()
    return decoder.target.logits[:n].copy(), decoder.target.hidden[:n].copy()


def one_by_one(model: Model, tokens: Sequence[int], parents: Sequence[int]) -> Numbers:
    """Every row in a pass of its own, behind its ancestors."""
    decoder, n = model.decoder, len(tokens)
    past, rows, found = decoder.target.length, [0], {}
    while rows:
        row = rows.pop()
        depth = 0 if row == 0 else found[parents[row]][0] + 1
        decoder.target.keep(past + depth)  # its ancestors' rows are those in front: children come next
        decoder.feed([tokens[row]])
        found[row] = depth, decoder.target.logits[0].copy(), decoder.target.hidden[0].copy()
        rows += [child for child in range(row + 1, n) if parents[child] == row]
    decoder.target.keep(past)
    return np.stack([found[row][1] for row in range(n)]), np.stack([found[row][2] for row in range(n)])


def in_panels(past: int, parents: Sequence[int]) -> list[bool]:
    """Whether each row, and every ancestor of it, is written in the panel of its position."""
    fits, depths = list[bool](), list[int]()
    for row, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if row else 0)
        own = (past + row) // graphs.PANEL == (past + depths[row]) // graphs.PANEL
        fits.append(own and (row == 0 or fits[parent]))
    return fits


def pairs_of_passes(model: Model, within: bool = True) -> Iterator[tuple[Numbers, Numbers]]:
    """Random trees, and the same text in chunks: what many rows at once give, and what one at a time. within: of the
    trees' rows, those in the panels of their positions, or all others."""
    draw, decoder, capacity = np.random.default_rng(0), model.decoder, model.capacity
    vocabulary = model.bundle.manifest.vocabulary
    first = 700 if capacity > 1000 else 0  # the text's beginning is read in chunks only
    text = draw.integers(2, vocabulary, min(first + 445, capacity)).tolist()

    def read(end: int) -> None:
        decoder.clear()
        for start in range(0, end, decoder.form.chunk):
            decoder.feed(text[start : min(end, start + decoder.form.chunk)])

    for past in (past for past in PAST if past + MOST <= capacity):
        read(past)
        for parents in [random_tree(draw, rows) for rows in ROWS] if past < 900 else [DEEP, LATE]:
            tokens = draw.integers(2, vocabulary, len(parents)).tolist()
            together, alone = tree_pass(model, tokens, parents), one_by_one(model, tokens, parents)
            compared = [row for row, fits in enumerate(in_panels(past, parents)) if fits == within]
            yield (together[0][compared], together[1][compared]), (alone[0][compared], alone[1][compared])
    if not within:
        return
    read(first)
    alone = one_by_one(model, text[first:], [max(0, row - 1) for row in range(len(text) - first)])
    for chunks in ((128, 128, 128, 61), (1, 2, 7, 31, 64, 85, 128, 127)):
        read(start := first)
        for most in chunks:
            if not (n := min(most, len(text) - start)):
                break
            decoder.feed(text[start : start + n])
            own = slice(start - first, start - first + n)
            yield (decoder.target.logits[:n].copy(), decoder.target.hidden[:n].copy()), (alone[0][own], alone[1][own])
            start += n


def bundle_of(make_bundle: MakeBundle, pair: Path | RandomPair, options: tuple[str, ...]) -> Path:
    return make_bundle(pair, *options, drafter=pair not in (FULL, WIDE))


def unlike(model: Model, within: bool = True) -> int:
    """Rows that are not the same to the last bit. within: see ``pairs_of_passes``."""
    return sum(
        int((a != b).any(axis=1).sum())
        for together, alone in pairs_of_passes(model, within)
        for a, b in zip(together, alone, strict=True)
    )


QUANTIZED = pytest.mark.parametrize(
    ("pair", "options"),
    [
        pytest.param(DEMO, (*CPU4, *DEMOS), id="demo int4", marks=pytest.mark.exhaustive),
        pytest.param(DEMO, ("--weights", "int8", *DEMOS), id="demo int8, target alone", marks=pytest.mark.exhaustive),
        pytest.param(LONGER, (*INT8, *LONG), id="odd int8", marks=pytest.mark.exhaustive),
        pytest.param(FULL, ("--weights", "int4", *LONG), id="full heads int4, no drafter"),
        pytest.param(
            WIDE, ("--weights", "int4", *LONG), id="wide heads int4, no drafter", marks=pytest.mark.exhaustive
        ),
        pytest.param(DEMO, WHOLE, id="demo w8a8"),
    ],
)


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
@QUANTIZED
def test_rows_are_the_same_to_the_last_bit(
    make_bundle: MakeBundle, pair: Path | RandomPair, options: tuple[str, ...], threads: int
) -> None:
    with load(bundle_of(make_bundle, pair, options), "cpu", threads=threads) as model:
        assert model.decoder.target.graphs["target"].precision == "int8"
        assert unlike(model) == 0
        # Else any tree would do.
        assert (unlike(model, within=False) > 0) == (model.capacity > graphs.PANEL)


def ended(generation: Generation) -> Generation:
    list(generation.cycles())
    return generation


@QUANTIZED
def test_texts_are_the_same(make_bundle: MakeBundle, pair: Path | RandomPair, options: tuple[str, ...]) -> None:
    draw = np.random.default_rng(1)
    with load(bundle_of(make_bundle, pair, options), "cpu", threads=1) as model:
        session = model.session()
        for i, length in enumerate((1, 9, 129)):
            prompt = draw.integers(2, model.bundle.manifest.vocabulary, length).tolist()
            for sampled in ({}, {"temperature": 1.5, "top_p": 0.9, "seed": i}):
                plain = ended(model.generate(prompt, 20, speculate=False, **sampled))
                speculative = ended(model.generate(prompt, 20, **sampled))
                assert ended(session.generate(prompt, 20, **sampled)).ids == speculative.ids == plain.ids
                assert differences(model, speculative) == []


@pytest.mark.exhaustive  # 21 s: texts to the last position, eight ways
def test_a_row_is_never_alone_where_it_would_differ(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last position of caches that are whole blocks, which leave no room for a second row."""
    bundle, texts = make_bundle(DEMO, *CPU4, "--capacity", "256"), []
    prompts = [np.random.default_rng(3).integers(2, 500, length).tolist() for length in (1, 128, 129, 256)]
    for alone in (True, False):
        monkeypatch.setattr("runtime.backends.onnxruntime.one_row_differs", lambda alone=alone: not alone)
        assert Cpu("").form(Bundle(make_bundle(DEMO, *WHOLE)), bundle).least == 1
        for streams in (1, 2):
            with load(bundle, "cpu", threads=1, streams=streams) as model:
                own = [ended(model.generate(p, 256, speculate)).ids for p in prompts for speculate in (True, False)]
                target = model.decoder.target
                sizes = [*target._verifications, *(rows for rows, _ in target._causal)]
                assert min(sizes) == (1 if alone else 2)
            assert own[::2] == own[1::2] or (alone and one_row_differs())
            texts.append(own)
    assert texts[2] == texts[3]
    assert texts[0] == texts[2] or one_row_differs()


def test_attention_that_adds_up_in_single_precision_would_not_do(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else there would be no need for ``Exact``, or no power in what is tested here."""
    for name in ("attention_mask", "_attention", "value_part"):
        monkeypatch.setattr(Exact, name, getattr(Standard, name))
    # With AVX-512 the golden run notices it.
    monkeypatch.setattr(golden_replay, "_AMONG", 1)
    with load(make_bundle(FULL, "--weights", "int4", "--capacity", "255", drafter=False), "cpu", threads=1) as model:
        assert unlike(model) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("columns", [64, 80])
def test_values_are_summed_in_so_many_columns(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Products of more columns sum fewer terms in one order."""
    monkeypatch.setattr(exact, "_COLUMNS", columns)
    with load(
        make_bundle(WIDE, "--weights", "int4", "--capacity", f"{min(445 + columns, 511)}", drafter=False),
        "cpu",
        threads=1,
    ) as model:
        assert unlike(model) > 0


def test_graphs_and_runtime_agree() -> None:
    assert exact.BLOCK == graphs.BLOCK
    assert graphs.PANEL % graphs.BLOCK == 0


@pytest.fixture(scope="module")
def demo_w8a8(make_bundle: MakeBundle) -> Iterator[Model]:
    with load(make_bundle(DEMO, *WHOLE), "cpu", threads=1) as model:
        yield model


@settings(deadline=None)
@given(data=st.data(), begin=st.sampled_from((0, 1000, 1010, 2040)), rows=st.integers(1, 8))
def test_verified_rows_are_in_the_panels_of_their_positions(
    demo_w8a8: Model, data: st.DataObject, begin: int, rows: int
) -> None:
    target = demo_w8a8.decoder.target
    parents = [data.draw(st.integers(0, max(0, row - 1))) for row in range(target.rows)]
    past, depths = begin + data.draw(st.integers(0, 16)), [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    target.tree["tree_depth"][:] = depths
    target.keep(past)
    fits = in_panels(past, parents)
    assert target.in_order(rows) == ([*fits[:rows], False].index(False))
    target.keep(0)


def test_trees_stop_at_borders(make_bundle: MakeBundle) -> None:
    """Their rows and ancestors are in the panels of their positions, and they are no smaller than that takes."""
    prompt = np.random.default_rng(6).integers(2, LONGER.target["vocab_size"], 1008).tolist()
    options = "--weights", "int8", "--capacity", "1050", "--rows", "17"
    with load(make_bundle(LONGER, *options), "cpu", threads=2) as model:
        past, sizes = len(prompt), dict[int, int]()
        for cycle in model.generate(prompt, 20, rows=17, trace=True).cycles():
            if cycle.tree:
                assert all(in_panels(past, cycle.tree.parents))
                sizes[past] = cycle.rows
            past += len(cycle.path)
    assert past > graphs.PANEL > min(past for past, rows in sizes.items() if rows < 17) > graphs.PANEL - 17
    assert {rows for past, rows in sizes.items() if not graphs.PANEL - 17 < past < graphs.PANEL} == {17}


def test_a_layer_has_few_nodes(make_bundle: MakeBundle) -> None:
    """Each costs microseconds: norms are joined with additions, queries and keys rotated together."""
    bundle = Bundle(make_bundle(DEMO, *WHOLE))
    graph = ir.load(bundle.path / bundle.manifest.form("cpu").graphs["target"].file).graph
    kinds = [node.op_type for node in graph.all_nodes()]
    layers = kinds.count("TensorScatter") // 2
    counted = [kinds.count(kind) for kind in ("Exp", "FusedMatMul", "RMSNormalization", "If", "Softmax", "Either")]
    assert counted == [layers, 3 * layers, 1, 0, 0, 0]
    assert len([node for node in graph if str(node.name).startswith("layers.1.")]) <= 53


def opened(graph: dict[str, Any], positions: int | str) -> None:
    """Gives a graph of a raw manifest caches of so many positions."""
    for tensor in (*graph["inputs"], *graph["outputs"]):
        if "_key." in tensor["name"] or "_value." in tensor["name"]:
            tensor["shape"][2] = positions


def values_of(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """The caches of values of the target."""
    tensors = (*raw["target"]["inputs"], *raw["target"]["outputs"])
    return [tensor for tensor in tensors if "_value." in tensor["name"]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw.update(requires=[]), "has caches of 'positions' positions"),
        (
            lambda raw: opened(raw["forms"]["cpu"]["graphs"]["target"], 510),
            "expected 'open-caches' if a target's caches are open",
        ),
        (lambda raw: opened(raw["forms"]["cpu"]["graphs"]["target"], "rows"), "has caches of 'rows' positions"),
        (
            lambda raw: [opened(raw["forms"]["cpu"]["graphs"][name], "positions") for name in ("draft", "extend")],
            "'positions' positions",
        ),
        (lambda raw: raw["requires"].remove("split-values"), "expected past_value.0 float32"),
        (
            lambda raw: [tensor["shape"].__setitem__(1, 3) for tensor in values_of(raw["forms"]["cpu"]["graphs"])],
            "expected past_value.0 float32",
        ),
        (lambda raw: raw["forms"]["cpu"].update(static=True), "has caches of 'positions' positions"),
        (lambda raw: raw["forms"].update(cuda=raw["forms"].pop("cpu")), "has caches of 'positions' positions"),
        (
            lambda raw: raw["forms"]["cpu"]["graphs"]["target"]["inputs"][0].update(shape=["positions"]),
            "expected tokens int64",
        ),
    ],
)
def test_caches_of_any_length_are_the_cpus(
    make_bundle: MakeBundle, tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    record = tmp_path / "gumiho.json"
    shutil.copyfile(make_bundle(DEMO, *WHOLE) / record.name, record)
    assert parse_manifest(record.read_text(), record).requires == (
        "open-caches",
        "split-values",
        "wanted-rows",
        "shared-passes",
        "draft-noise",
    )
    edit(tmp_path, without_shared)
    edit(tmp_path, change)
    with pytest.raises(DamageError, match=said):
        parse_manifest(record.read_text(), record)


def test_what_overflowed_in_one_text_is_not_read_in_the_next(make_bundle: MakeBundle) -> None:
    """A pass reads whole blocks: what an earlier text left behind the used positions is among them, and NaN would
    spread."""
    prompt = np.random.default_rng(2).integers(2, 500, 400).tolist()
    with load(make_bundle(DEMO, *WHOLE), "cpu", threads=1) as model:
        wanted = ended(model.generate(prompt, 20)).ids
        for slab in model.decoder.target.cache.slabs:
            slab[:] = np.nan
        model.decoder.clear()
        with pytest.raises(DamageError, match="NaN or infinity after 400 tokens"):
            ended(model.generate(prompt, 20))
        assert ended(model.generate(prompt, 20)).ids == wanted
