"""The soak test and the comparison of servers find what they are for (``tests/test_replay.py``: the check of texts)."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import Model, load
from tests.serving import served
from tools import load as load_tool
from tools import soak


@pytest.fixture(scope="module")
def model(chat_bundle: Path) -> Iterator[Model]:
    with load(chat_bundle, threads=1, streams=2) as model:
        yield model


def test_growth_counts_from_when_caches_are_warm() -> None:
    found = soak.Soak(0, [], 1, None)  # type: ignore[arg-type]
    found.samples = [(0, 10, 5, 0), (100, 50, 6, 0), (600, 60, 6, 0), (1200, 75, 8, 99)]
    assert found.growth() == (15, 2)
    found.samples = [(0, 10, 5, 0), (50, 20, 5, 0), (100, 25, 5, 99)]
    assert found.growth() == (5, 0)


def test_growth_is_not_that_of_a_pass_under_way() -> None:
    found = soak.Soak(0, [], 1, None)  # type: ignore[arg-type]
    found.samples = [
        (10 * i, 1000 + i + 500 * (i % 30 == 0), 5, 0) for i in range(361)
    ]  # with the first and the last that count
    assert found.growth() == (pytest.approx(270, abs=2), 0)


@pytest.mark.exhaustive
def test_a_short_soak(chat_bundle: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"def f{i}(x):"]}) + "\n" for i in range(40)))
    options = ["--prompts", str(prompts), "--minutes", "0.1", "--clients", "3", "--streams", "2", "--new-tokens", "20"]
    soak.main([str(chat_bundle), *options, "--out", str(tmp_path / "soak")])  # too short to judge memory by
    report = json.loads((tmp_path / "soak/soak.json").read_text())
    assert report["answers"] > 3
    assert report["tokens"] >= report["answers"]
    assert (report["differ"], report["problems"], report["exit_status"], report["files_grown"]) == ([], [], 0, 0)
    assert (tmp_path / "soak/before").is_dir()


def test_servers_are_compared(model: Model) -> None:
    with served(model) as address:
        answers, seconds = load_tool.run(address, ["a", "b", "c"], 2, 9)
    texts = ["".join(model.generate(model.chat([{"role": "user", "content": prompt}]), 9)) for prompt in "abc"]
    assert [answer.text for answer in answers] == texts
    assert [answer.tokens for answer in answers] == [9, 9, 9]
    assert all(0 < answer.first <= answer.whole <= seconds for answer in answers)
    assert "| 2 | ours |" in load_tool.table({(2, "ours"): (answers, seconds)})
