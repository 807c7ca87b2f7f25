"""Which family a drafter's checkpoint is of, and the trees that each family grows."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exporter.cli import main
from exporter.options import config_of
from exporter.recipe.sources import open_pair
from exporter.recipe.trees import tree_config
from graphs.static_trees import EAGLE_1
from graphs.tree import TreeConfig
from tests.pairs import RandomPair

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return _made(tmp_path_factory.mktemp("eagle"), layers=1, heads=0)


@pytest.fixture(scope="module")
def gumiho(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return _made(tmp_path_factory.mktemp("gumiho"), layers=2, heads=1)


def _made(folder: Path, layers: int, heads: int) -> list[str]:
    RandomPair(SHAPE, layers=layers, heads=heads).write(folder)
    return ["--ckpt", str(folder / "drafter"), "--target", str(folder / "target")]


def tree(argv: list[str], *more: str) -> TreeConfig:
    asked = config_of([*argv, *more])
    return tree_config(asked, open_pair(asked))


def test_tensors_tell_the_family(tmp_path: Path) -> None:
    for layers, heads, family in ((1, 0, "eagle"), (2, 0, "gumiho"), (1, 1, "gumiho"), (2, 5, "gumiho")):
        argv = _made(tmp_path / f"{layers}-{heads}", layers, heads)
        assert open_pair(config_of(argv)).family == family


def test_eagle_grows_its_papers_tree(eagle: list[str]) -> None:
    """The paper's depth 6 and 60 rows, of ten tokens a node and ten nodes a level."""
    expected = TreeConfig(60, 6, 0, 10, 35, 10, wide=True)
    assert tree(eagle, "--rows", "60", "--draft-tree", "reference") == expected
    assert tree(eagle, "--rows", "60") == replace(expected, beam=9)
    assert tree(eagle, "--rows", "64") == replace(expected, rows=64)
    # On the CPU smaller trees, of fewer levels.
    assert tree(eagle) == TreeConfig(8, 5, 0, 10, 35, 1, wide=True)
    assert tree(eagle, "--draft-tree", "chain").depth == 5
    assert tree(eagle, "--serial-steps", "3", "--top-k", "4", "--beam", "2") == TreeConfig(8, 3, 0, 4, 35, 2, wide=True)


def test_eagle_1_has_a_static_tree(eagle: list[str]) -> None:
    whole = TreeConfig.static(EAGLE_1)
    assert (whole.rows, whole.depth, whole.serial_steps) == (26, 5, 5)
    # Depths and expanded nodes as in the official list.
    assert [whole.level_size(depth) for depth in range(1, 6)] == [4, 8, 8, 3, 2]
    assert 1 + sum(whole.expanded_nodes(depth) for depth in range(1, 5)) == 11
    assert tree(eagle, "--draft-tree", "static") == whole
    assert tree(eagle, "--draft-tree", "static", "--rows", "9") == replace(whole, rows=9)
    assert tree(eagle, "--draft-tree", "static", "--rows", "60") == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--draft-tree", "static", "--top-k", "3"), "--draft-tree static fixes levels and tokens"),
        (("--draft-tree", "static", "--serial-steps", "3"), "--draft-tree static fixes levels and tokens"),
        (("--draft-tree", "static", "--rows", "1"), "--rows is 1: give 2 or more"),
        (("--heads", "1"), "has 0: give at most that many"),
    ],
)
def test_what_eagle_cannot_have(
    eagle: list[str], options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*eagle, "--out", str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_gumiho_has_no_static_tree(gumiho: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*gumiho, "--out", str(tmp_path / "out"), "--draft-tree", "static"]) == 1
    assert "--draft-tree static is for EAGLE" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["speculator.emb.0.weight", "0.0.linears.weight"])
def test_other_families_are_refused_by_their_tensors(
    eagle: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(eagle[1], tmp_path / "drafter")
    torch.save({name: torch.zeros(2, 2)}, tmp_path / "drafter" / "pytorch_model.bin")
    argv = ["--ckpt", str(tmp_path / "drafter"), *eagle[2:], "--out", str(tmp_path / "out")]
    assert main(argv) == 1
    assert f"is of no family that is known, by its tensors ('{name}' and others)" in capsys.readouterr().err


def test_a_dry_run_says_what_it_found(eagle: list[str], gumiho: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*eagle, "--dry-run", "--draft-tree", "static"]) == 0
    said = capsys.readouterr().out
    assert "an EAGLE.\n" in said
    assert "Draft tree: 26 rows, depth 5, the best of the 25 paths of EAGLE-1.\n" in said
    assert main([*eagle, "--dry-run"]) == 0
    assert "Draft tree: 8 rows, depth 5, beam 1, top-k 10.\n" in capsys.readouterr().out
    assert main([*gumiho, "--dry-run"]) == 0
    assert "2 serial layers and 1 heads.\n" in capsys.readouterr().out
