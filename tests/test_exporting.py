"""exporter: an export is what was asked for, a recipe, and what was written; a Python caller makes the same as the
command line."""

import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

import exporter
from exporter import DraftTree, ExportConfig
from exporter.options import config_of, parser
from exporter.recipe.resolve import recipe_of
from runtime import load
from runtime.bundle.reader import Bundle
from runtime.errors import InputError
from tests.conftest import DEMO

ROOT = Path(__file__).parent.parent
PAIR = ["--ckpt", str(DEMO / "drafter"), "--target", str(DEMO / "target")]
CONFIG = ExportConfig(ckpt=(str(DEMO / "drafter"),), target=str(DEMO / "target"))


def test_the_readme_s_example_writes_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), flags=re.S)
    (example,) = (block for block in blocks if "from exporter import" in block)
    (tmp_path / "demo").symlink_to(DEMO)
    monkeypatch.chdir(tmp_path)
    names = dict[str, Any]()
    exec(example, names)
    assert names["bundle"] == Path("drafter-cpu")
    Bundle(tmp_path / "drafter-cpu").verify()
    with load(tmp_path / "drafter-cpu", "cpu") as model:
        assert "".join(model.generate("def main():", max_new_tokens=8))


def test_a_config_is_what_the_command_line_makes(tmp_path: Path) -> None:
    assert config_of(PAIR) == CONFIG
    more = [
        "--backend",
        "cpu",
        "cuda",
        "cpu",
        "--taps",
        "1",
        "2",
        "--draft-text",
        str(tmp_path),
        "--norm-before-residual",
        "no",
        "--rows",
        "4",
    ]
    assert config_of([*PAIR, *more, "--draft-tree", "chain"]) == replace(
        CONFIG,
        backend=("cpu", "cuda"),
        taps=("1", "2"),
        draft_text=(tmp_path,),
        norm_before_residual=False,
        rows=4,
        draft_tree=DraftTree(policy="chain"),
    )


def test_resolving_changes_nothing_that_was_asked_for() -> None:
    config = replace(CONFIG, preset="small")
    recipe = recipe_of(replace(config, ckpt=(DEMO / "drafter",), target=DEMO / "target"))
    assert (config.weights, config.draft_weights) == (None, None)
    assert recipe.quantized == {"target": "int4", "draft": "int4"}
    with pytest.raises(FrozenInstanceError):
        recipe.capacity = 8  # type: ignore[misc]
    pair = recipe.pair
    assert pair.drafting(None).draft_vocabulary is None
    assert pair.drafting(None) is not pair


def test_the_numbers_of_a_tree_are_python_s() -> None:
    tree = recipe_of(replace(CONFIG, rows=9, draft_tree=DraftTree(heads=1, top_k=3, head_top_k=4, beam=2))).tree
    assert (tree.rows, tree.heads, tree.top_k, tree.head_top_k, tree.beam) == (9, 1, 3, 4, 2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dtype": "fp8"}, "dtype is 'fp8': give one of fp32, fp16, bf16"),
        ({"backend": ("cpu", "tpu")}, "backend is 'tpu': give one of cpu, "),
        ({"backend": ()}, "backend is empty"),
        ({"ckpt": "demo/drafter"}, "ckpt is 'demo/drafter': give a tuple"),
        ({"ckpt": (), "target": None}, "nothing to export"),
    ],
)
def test_what_no_export_has_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        replace(CONFIG, **wrong)
    with pytest.raises(InputError, match="policy is 'bush'"):
        DraftTree(policy="bush")


def test_what_contradicts_itself_is_refused_before_anything_is_read() -> None:
    with pytest.raises(InputError, match="--draft-tree chain is for a drafter"):
        exporter.export(ExportConfig(target="nowhere", draft_tree=DraftTree(policy="chain")))
    with pytest.raises(InputError, match="--rows means nothing to --backend vllm"):
        exporter.export(replace(CONFIG, backend=("vllm",), rows=8))


# --- the command's options --------------------------------------------------------------------------------------------


def listed(every: bool) -> list[str]:
    return re.findall(r"^  (?:-h, )?(--[\w-]+)", parser(every).format_help(), flags=re.M)


def test_help_is_short_and_help_all_has_at_most_30_options(capsys: pytest.CaptureFixture[str]) -> None:
    first, every = listed(False), listed(True)
    assert set(first) < set(every)
    assert len(first) <= 16
    assert len(every) <= 30
    with pytest.raises(SystemExit) as left:
        config_of(["--help-all"])
    assert left.value.code == 0
    assert "--draft-rope-theta" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("earlier", "now", "said"),
    [
        (["--policy", "chain"], DraftTree(policy="chain"), "--policy chain is --draft-tree chain now"),
        (["--policy", "static"], DraftTree(policy="static"), "--policy static is --draft-tree static now"),
        (["--compat", "reference"], DraftTree(reference=True), "--compat reference is --draft-tree reference now"),
        (
            ["--serial-steps", "3"],
            DraftTree(serial_steps=3),
            "--serial-steps 3 is exporter.DraftTree(serial_steps=3) in Python now",
        ),
        (["--heads", "0"], DraftTree(heads=0), "--heads 0 is exporter.DraftTree(heads=0) in Python now"),
        (["--top-k", "3"], DraftTree(top_k=3), "--top-k 3 is exporter.DraftTree(top_k=3) in Python now"),
        (
            ["--head-top-k", "3"],
            DraftTree(head_top_k=3),
            "--head-top-k 3 is exporter.DraftTree(head_top_k=3) in Python now",
        ),
        (["--beam", "3"], DraftTree(beam=3), "--beam 3 is exporter.DraftTree(beam=3) in Python now"),
    ],
)
def test_earlier_spellings_work_and_say_what_they_are_now(
    earlier: list[str], now: DraftTree, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config_of([*PAIR, *earlier]).draft_tree == now
    assert capsys.readouterr().err == f"note: {said}, and goes with the next release\n"
    if earlier[0] in ("--policy", "--compat"):
        assert config_of([*PAIR, "--draft-tree", earlier[1]]).draft_tree == now
        assert capsys.readouterr().err == ""
        with pytest.raises(SystemExit):
            config_of([*PAIR, "--draft-tree", "dynamic", *earlier])
