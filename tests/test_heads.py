"""Medusa and Hydra: their layouts, their trees against independent implementations, and that a drafter without caches
runs."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exporter.checkpoints.pair import Pair
from exporter.cli import main
from exporter.options import config_of
from exporter.recipe.resolve import recipe_of
from exporter.recipe.sources import open_pair
from exporter.recipe.trees import tree_config
from graphs.dialects.contrib import Contrib
from graphs.dialects.plain import Plain
from graphs.dialects.rounded import Rounded
from graphs.dialects.standard import Standard
from graphs.static_trees import MEDUSA
from graphs.tree import TreeConfig
from runtime import Generation, GumihoError, load
from tests.end_to_end import llama
from tests.heads import MEDUSA_LAYOUTS, RandomHydra, RandomMedusa
from tests.pairs import RandomPair
from tests.test_drafter import cycles, eager, onnx, tree_of
from tests.test_streams import assert_as_plain

MADE: dict[str, RandomMedusa | RandomHydra] = {
    "medusa": RandomMedusa(),
    "medusa, three heads of two blocks": RandomMedusa(heads=3, blocks=2),
    "medusa, the target's lm_head": RandomMedusa(tied=True),
    "hydra": RandomHydra(),
    "hydra, two heads of one block": RandomHydra(heads=2, blocks=0),
    "hydra++": RandomHydra(prefix=True),
}


def opened(argv: list[str], *more: str) -> Pair:
    return open_pair(config_of([*argv, *more]))


def trees(made: RandomMedusa | RandomHydra) -> list[tuple[TreeConfig, TreeConfig]]:
    """What the graph is given, and how the search finds the same: Medusa's heads are serial steps to it, each of which
    goes on from all nodes."""
    depth = made.heads
    paths = [path for path in MEDUSA if len(path) <= depth]
    if isinstance(made, RandomHydra):
        dynamic, static = tree_of(20, serial=depth, heads=0, top_k=6, beam=4, wide=True), TreeConfig.static(paths)
        return [(dynamic, dynamic), (static, static)]
    dynamic = TreeConfig(20, 0, depth, 14, 4, 14).fitted(1009)
    return [
        (dynamic, TreeConfig(20, depth, 0, 4, 1, 1 << 20, wide=True)),
        (TreeConfig.static(paths, heads=True), TreeConfig.static(paths)),
        (TreeConfig.static(paths[:7], heads=True), TreeConfig.static(paths[:7])),
    ]


@pytest.mark.parametrize("name", MADE)
def test_eager_trees_are_the_naive_ones(name: str, tmp_path: Path) -> None:
    made = MADE[name]
    pair = opened(made.write(tmp_path))
    assert pair.family == name[: len(pair.family)]
    assert pair.heads + (pair.reader.levels or 0) == made.heads
    for tree, searched in trees(made):
        cycles(eager(pair, tree), made.naive(), replace(searched, rows=tree.rows), 48, 1009, seed=tree.rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("medusa", Contrib),
        *(("hydra++", dialect) for dialect in (Contrib, Standard, Rounded)),
        *(pytest.param("medusa", dialect, marks=pytest.mark.exhaustive) for dialect in (Standard, Rounded)),
        *(pytest.param("hydra", dialect, marks=pytest.mark.exhaustive) for dialect in (Contrib, Standard, Rounded)),
    ],
)
def test_exported_trees_are_the_naive_ones(name: str, dialect: type[Plain], tmp_path: Path) -> None:
    made = MADE[name]
    made = replace(made, pair=replace(made.pair, target={"head_dim": 16}))
    pair = opened(made.write(tmp_path))
    for number, (tree, searched) in enumerate(trees(made)[:2]):
        folder = tmp_path / str(number)
        folder.mkdir()
        cycles(onnx(pair, tree, dialect, folder), made.naive(), replace(searched, rows=tree.rows), 48, 1009, seed=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", MEDUSA_LAYOUTS)
def test_medusas_layouts(layout: str, tmp_path: Path) -> None:
    """All of them are the same drafter, but V2's lm_heads are the target's."""
    made = RandomMedusa(tied=layout == "V2")
    pair, (tree, searched) = opened(made.write(tmp_path, layout)), trees(made)[0]
    assert pair.family == "medusa"
    cycles(eager(pair, tree), made.naive(), searched, 48, 1009, seed=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "matrices"),
    [
        (RandomMedusa(tied=True), 1),
        (RandomMedusa(), 5),
        (RandomHydra(tied=True), 1),
        (RandomHydra(), 4),
        (RandomHydra(tied=True, prefix=True), 1),
    ],
)
def test_lm_heads_that_are_the_targets_are_one(made: RandomMedusa | RandomHydra, matrices: int, tmp_path: Path) -> None:
    """And draft the same tree."""
    pair, (tree, searched) = opened(made.write(tmp_path)), trees(made)[0]
    heads = [name for name in pair.draft_sources(made.heads, positions=9) if "lm_head" in name and "weight" in name]
    assert len(heads) == matrices
    cycles(eager(pair, tree), made.naive(), searched, 48, 1009, seed=2)  # type: ignore[arg-type]


def test_a_bias_is_an_lm_head_of_its_own(tmp_path: Path) -> None:
    made = RandomHydra(tied=True)
    argv = made.write(tmp_path)
    state = made.state()
    state["hydra_lm_head.2.bias"][7] = 0.5
    torch.save(state, tmp_path / "drafter" / "hydra_lm_head.pt")
    assert not opened(argv).reader.one_head


def test_trees(tmp_path: Path) -> None:
    """The official list has 64 rows; its first paths are a smaller tree. No list uses a fifth level."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    medusa, hydra = RandomMedusa().write(tmp_path / "a"), RandomHydra().write(tmp_path / "b")

    def tree(argv: list[str], *more: str) -> TreeConfig:
        asked = config_of([*argv, *more])
        return tree_config(asked, open_pair(asked))

    assert len(MEDUSA) == len(set(MEDUSA)) == 63
    assert [sum(len(path) == depth for path in MEDUSA) for depth in range(1, 5)] == [10, 28, 23, 2]
    assert all(path[:-1] in (*MEDUSA[:i], ()) for i, path in enumerate(MEDUSA))
    assert tree(medusa, "--draft-tree", "static") == TreeConfig.static(MEDUSA, heads=True)
    assert tree(medusa, "--draft-tree", "static", "--rows", "8") == TreeConfig.static(MEDUSA[:7], heads=True)
    assert tree(hydra, "--draft-tree", "static") == TreeConfig.static(MEDUSA)
    # The root and those of its descendants that have children: 22 rows of heads.
    assert sum(tree(hydra, "--draft-tree", "static").expanded_nodes(depth) for depth in range(4)) == 22
    assert tree(medusa) == TreeConfig(8, 0, 5, 10, 35, 1)
    assert tree(hydra) == TreeConfig(8, 4, 0, 10, 35, 1, wide=True)
    assert tree(medusa, "--heads", "3").depth == 3
    assert tree(hydra, "--serial-steps", "2").depth == 2


def exported(folder: Path, argv: list[str], *options: str) -> Path:
    argv = [*argv, "--capacity", "200", "--out", str(folder / "out"), *options]
    assert main(argv) == 0
    return folder / "out"


@pytest.mark.parametrize("name", ["medusa", pytest.param("hydra", marks=pytest.mark.exhaustive), "hydra++"])
def test_greedy_texts_are_transformers(name: str, tmp_path: Path) -> None:
    made = MADE[name]
    made = replace(made, pair=RandomPair({"num_hidden_layers": 3, "head_dim": 16, "hidden_size": 96}, seed=8))
    bundle = exported(tmp_path, made.write(tmp_path), "--rows", "16", "--validate")
    with load(bundle) as model:
        assert ("stateless-drafter" in model.bundle.manifest.requires) == (name != "hydra++")
        for length in (1, 3, 130):
            prompt = [(5 * i * i + length) % 1000 + 2 for i in range(length)]
            generation = model.generate(prompt, 20, rows=16, lookup=False)
            list(generation.cycles())
            llama.assert_same(
                tmp_path / "target", prompt, generation.ids, llama.generate(tmp_path / "target", [prompt], 20)[0]
            )


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A quantized bundle of a static tree, by the name of its drafter."""

    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp("static")
        pair = RandomPair({"hidden_size": 96, "intermediate_size": 128, "head_dim": 16}, seed=4)
        argv = replace(MADE[name], pair=pair).write(folder)
        return exported(folder, argv, "--weights", "int8", "--draft-tree", "static", "--rows", "12")

    return made


@pytest.mark.parametrize("name", [pytest.param("medusa", marks=pytest.mark.exhaustive), "hydra"])
def test_the_output_is_that_of_plain_decoding(name: str, static: Callable[[str], Path]) -> None:
    """Quantized, sampled, going on with what is in the caches, and beside another stream."""
    prompts = [[(7 * i * i + length) % 1000 + 2 for i in range(length)] for length in (1, 130, 40)]
    prompts.append(prompts[1][:100] + prompts[2])
    with load(static(name), streams=2) as model:
        assert_as_plain(model, prompts, 12)


def test_sessions_without_caches_of_the_drafter(static: Callable[[str], Path], tmp_path: Path) -> None:
    """A conversation goes on, is saved and restored, with the drafts of an unbroken one."""
    first, then = list(range(5, 60)), list(range(300, 320))

    def steps(generation: Generation) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [(cycle.tokens, cycle.path) for cycle in generation.cycles()]

    with load(static("medusa")) as model, load(static("medusa")) as other:
        session = model.session()
        steps(session.generate(first, 20, rows=12, lookup=False))
        session.save(tmp_path / "session")
        restored, text = other.session(tmp_path / "session"), [*session.ids, *then]
        unbroken = steps(session.generate(text, 20, rows=12, lookup=False))
        assert steps(restored.generate(text, 20, rows=12, lookup=False)) == unbroken
        assert steps(model.generate(text, 20, rows=12, lookup=False)) == unbroken


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("medusa", "cuda"),
        ("hydra++", "migraphx"),
        *(
            pytest.param(name, backend, marks=pytest.mark.exhaustive)
            for name in ("medusa", "hydra", "hydra++")
            for backend in ("migraphx", "tensorrt", "cuda")
            if (name, backend) not in (("medusa", "cuda"), ("hydra++", "migraphx"))
        ),
    ],
)
def test_every_backend(name: str, backend: str, tmp_path: Path) -> None:
    bundle = exported(tmp_path, MADE[name].write(tmp_path), "--backend", backend, "--rows", "16")
    manifest = json.loads((bundle / "gumiho.json").read_text())
    assert ("extend" in manifest["forms"][backend]["graphs"]) == (name == "hydra++")


@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_fewer_tokens_can_be_drafted(name: str, tmp_path: Path) -> None:
    made = MADE[name]
    planned = recipe_of(config_of([*made.write(tmp_path), "--draft-vocab", "300", "--out", str(tmp_path / "out")]))
    sources = planned.pair.draft_sources(made.heads, positions=9)
    ids, whole = sources["token_ids"].whole(), made.state()
    heads = [
        sources[name] for name in sorted(sources) if name.startswith("lm_heads.") or name.endswith("lm_head.weight")
    ]
    stored = [tensor for tensor in whole.values() if len(tensor) == 1009 and tensor.dim() == 2]
    assert len(heads) == len(stored) == made.heads
    assert all(torch.equal(source.whole(), tensor[ids]) for source, tensor in zip(heads, stored, strict=True))


FEWER = [("--heads", "3"), ("--rows", "3"), ("--draft-tree", "static", "--rows", "64")]


@pytest.mark.parametrize("options", FEWER, ids=str)
def test_heads_that_are_not_used_are_not_packed(options: tuple[str, ...], tmp_path: Path) -> None:
    """Of the official list of four levels a fifth head is none either."""
    made = recipe_of(config_of([*RandomMedusa().write(tmp_path), *options]))
    used = {
        name.split(".")[1] for name in made.sources()["weights/draft.bin"] if name.startswith(("heads.", "lm_heads."))
    }
    assert len(used) == made.tree.depth < 5


@pytest.mark.parametrize(
    "options", [FEWER[0], *(pytest.param(few, marks=pytest.mark.exhaustive) for few in FEWER[1:])], ids=str
)
def test_fewer_heads_are_exported(options: tuple[str, ...], tmp_path: Path) -> None:
    exported(tmp_path, RandomMedusa().write(tmp_path), *options, "--validate")


def test_levels_of_hydra_that_are_not_used_are_not_packed(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    exported(tmp_path, RandomHydra().write(tmp_path), "--serial-steps", "2", "--validate")
    made = recipe_of(config_of([*RandomHydra().write(tmp_path / "again"), "--serial-steps", "2"]))
    used = {name.split(".")[1] for name in made.sources()["weights/draft.bin"] if name.startswith("heads.")}
    assert used == {"0", "1"}


@pytest.mark.parametrize(("rows", "kept"), [(300, 300), (1009, 300)])
def test_vllms_token_map(rows: int, kept: int, tmp_path: Path) -> None:
    """lm_heads have the rows of the map, or all."""
    argv, ids = RandomMedusa().write(tmp_path, "vLLM"), torch.arange(7, 907, 3)
    file = tmp_path / "drafter" / "model.safetensors"
    state = load_file(file) | {"token_map": ids}
    heads = {name: tensor for name, tensor in state.items() if name.startswith("lm_heads.")}
    save_file(state | {name: tensor[ids] if rows == 300 else tensor for name, tensor in heads.items()}, file)
    found = opened(argv).draft_sources(5, positions=9)
    assert torch.equal(found["token_ids"].whole(), ids)
    for name, tensor in heads.items():
        assert torch.equal(found[name].whole(), tensor[ids])
    with pytest.raises(GumihoError, match="leave --draft-vocab out"):
        recipe_of(config_of([*argv, "--draft-vocab", "100"]))
    if rows == 300:  # what is exported is the same
        exported(tmp_path, argv, "--validate")


def test_vllms_one_lm_head_for_all(tmp_path: Path) -> None:
    argv = RandomMedusa().write(tmp_path, "vLLM")
    file = tmp_path / "drafter" / "model.safetensors"
    state = load_file(file)
    save_file(
        {name: tensor for name, tensor in state.items() if not name.startswith("lm_heads.") or ".0." in name}, file
    )
    found = opened(argv).draft_sources(5, positions=9)
    assert all(torch.equal(found[f"lm_heads.{i}.weight"].whole(), state["lm_heads.0.weight"]) for i in range(5))


@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_prefixes_in_the_cache_are_not_read_again(name: str, static: Callable[[str], Path]) -> None:
    """A drafter without caches lacks none of them."""
    with load(static(name)) as model:
        list(model.generate(list(range(5, 105)), 4).cycles())
        assert model.decoder.resume([*range(5, 105), 900, 901], speculate=True) == 100


@pytest.mark.parametrize("fields", [{"hidden_state_offset": 1}, {"hydra_head_arch": "eagle-attn"}])
def test_other_hydras_are_refused(fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = RandomHydra().write(tmp_path)
    file = tmp_path / "drafter" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    assert main([*argv, "--out", str(tmp_path / "out")]) == 1
    assert "which are not supported: give one of kind mlp or prefix-mlp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("medusa", ("--serial-steps", "2"), "has 0: leave it out"),
        ("medusa", ("--top-k", "6"), "has no serial levels: leave --top-k and --beam out"),
        ("medusa", ("--heads", "6"), "has 5: give at most that many"),
        ("medusa", ("--heads", "0"), "has nothing else: give 1 to 5"),
        ("medusa", ("--taps", "1"), "--taps and --norm-before-residual are for an EAGLE-3"),
        ("medusa", ("--backend", "vllm"), "is of the family medusa, which vLLM runs as it is"),
        ("hydra", ("--serial-steps", "5"), "has 4: give at most 4"),
        ("hydra", ("--heads", "1"), "has 0: give at most that many"),
        ("hydra", ("--backend", "vllm"), "is of the family hydra, which vLLM does not run"),
    ],
)
def test_what_is_refused(
    name: str, options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = MADE[name].write(tmp_path)
    assert main([*argv, "--out", str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("medusa", {"3.0.linear.weight": None}, "lacks what would be 'heads.3.0.linear.weight' of its 5 heads"),
        ("medusa", {"3.0.linear.bias": None}, "lacks what would be 'heads.3.0.linear.bias'"),
        ("medusa", {"3.1.weight": None}, "lacks what would be 'lm_heads.3.weight'"),
        (
            "medusa",
            {"3.1.weight": torch.zeros(1008, 48)},
            "tensor '3.1.weight' has shape [1008, 48], expected [1009, 48]",
        ),
        ("medusa", {"0.0.linear.weight": torch.zeros(40, 40)}, "does not belong to target"),
        ("medusa", {"1.0.linear.weight": torch.zeros(40, 40)}, "has shape [40, 40], expected [48, 48]"),
        ("hydra", {"hydra_mlp.2.0.linear.bias": None}, "lacks what would be 'heads.2.linear.bias' of its 4 heads"),
        ("hydra", {"hydra_mlp.1.2.linear.weight": None}, "lacks what would be 'heads.1.blocks.1.linear.weight'"),
        ("hydra", {"hydra_lm_head.1.bias": None}, "lacks what would be 'heads.1.lm_head.bias'"),
        ("hydra", {"hydra_mlp.1.0.linear.weight": torch.zeros(48, 96)}, "has shape [48, 96], expected [48, 144]"),
        ("hydra", {"hydra_attn.0.weight": torch.zeros(4)}, "has the tensor 'hydra_attn.0.weight'"),
        ("hydra++", {"prefix_embeding_layer.norm.weight": None}, "lacks what would be 'norm.weight'"),
        (
            "hydra++",
            {"prefix_embeding_layer.layers.1.mlp.up_proj.weight": torch.zeros(4)},
            "has the tensor 'prefix_embeding_layer.layers.1.mlp.up_proj.weight'",
        ),
    ],
)
def test_tensors_that_are_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = MADE[name].write(tmp_path)
    file = next((tmp_path / "drafter").glob("*.pt"))
    state = torch.load(file) | change
    torch.save({key: tensor for key, tensor in state.items() if tensor is not None}, file)
    assert main([*argv, "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
