"""The paper's table: its numbers are those of the texts, it goes on where it stopped, and what is not lossless
shows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from runtime import load
from tests.conftest import DEMO, with_template
from tools import check_texts, paper_table

TEMPLATE = "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}"
SETS = {
    "code": [{"turns": ["def read_lines(path):", "class Reader:"]}, {"prompt": "import os"}, {"prompt": "import re"}],
    "text": [{"prompt": "A list of names, sorted"}, {"prompt": "word " * 600}],
}


@pytest.fixture(scope="module")
def bundle(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(demo_bundle, tmp_path_factory.mktemp("chat") / "demo", TEMPLATE)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    for name, lines in SETS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def results(bundle: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "results.jsonl"
    assert paper_table.main(argv(bundle, prompts, out)) == 0
    return out


def argv(bundle: Path, prompts: Path, out: Path) -> list[str]:
    ways = ["--ways", "plain", "trees", "--count", "2", "--new-tokens", "12"]
    return [str(bundle), "--prompts", str(prompts), "--out", str(out), *ways, "--longest", "300"]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_turns_follow_the_plain_answer(results: Path, bundle: Path) -> None:
    greedy = [line for line in read(results) if line["temperature"] == 0]
    assert [(line["set"], line["number"], line["turn"]) for line in greedy] == [
        ("code", 0, 0),
        ("code", 0, 1),
        ("code", 1, 0),
        ("text", 0, 0),  # the long one is left out
    ]
    with load(bundle) as model:
        answer = "".join(model.generate(greedy[0]["prompt"], 12, speculate=False))
        text = f"# user\ndef read_lines(path):\n# assistant\n{answer}\n# user\nclass Reader:\n"
        assert greedy[1]["prompt"] == model.encode(text, special=False)


def test_the_numbers_are_those_of_the_texts(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = read(results)
    for temperature in (0.0, 1.0):
        header, _, row = paper_table.tables(lines, temperature)
        cells = dict(zip(header.split(" | "), row.split(" | "), strict=True))
        taus = []
        for group in ("code", "text"):
            own = [line["ways"] for line in lines if line["set"] == group and line["temperature"] == temperature]
            emitted = sum(len(ways["trees"]["ids"]) - 1 for ways in own)  # the prompt's pass gives the first
            passes = sum(ways["trees"]["cycles"] for ways in own)
            times = [sum(ways[way]["seconds"] for ways in own) for way in ("plain", "trees")]
            assert all(ways["plain"]["cycles"] == len(ways["plain"]["ids"]) - 1 for ways in own)
            assert cells[group] == f"{times[0] / times[1]:.2f}x {emitted / passes:.2f}"
            taus.append(emitted / passes)
        assert cells["mean"].endswith(f" {sum(taus) / 2:.2f}")
        own = [line["ways"]["trees"] for line in lines if line["temperature"] == temperature]
        assert all(0 < way["draft_seconds"] < way["seconds"] for way in own if way["cycles"])
        assert cells["draft"] == f"{sum(way['draft_seconds'] for way in own) / sum(way['seconds'] for way in own):.0%}"
        assert cells["texts as plain |"] == "4 of 4 |"


def test_an_interrupted_run_goes_on(results: Path, bundle: Path, prompts: Path, tmp_path: Path) -> None:
    whole = results.read_text().splitlines(keepends=True)
    out = tmp_path / "again.jsonl"
    out.write_text("".join(whole[:4]) + whole[4][:40])
    assert paper_table.main(argv(bundle, prompts, out)) == 0
    again = out.read_text().splitlines(keepends=True)
    assert again[:4] == whole[:4]
    texts = [[[way["ids"] for way in json.loads(line)["ways"].values()] for line in lines] for lines in (again, whole)]
    assert texts[0] == texts[1]


def test_another_text_than_the_plain_one_shows(
    results: Path, bundle: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = read(results)
    lines[2]["ways"]["trees"]["ids"][3] += 1
    out = tmp_path / "lossy.jsonl"
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert paper_table.main(argv(bundle, prompts, out)) == 1
    assert "3 of 4" in capsys.readouterr().out


def test_transformers_chooses_the_same(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--target", str(DEMO / "target")]
    assert check_texts.main([str(results), *arguments]) == 0
    assert re.search(r"4 texts, 4\d tokens: 0 are not", capsys.readouterr().out)
    lines = read(results)
    lines[0]["ways"]["plain"]["ids"][5] += 1
    (tmp_path / "wrong.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert check_texts.main([str(tmp_path / "wrong.jsonl"), *arguments]) == 1
    assert "code 0, turn 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no .jsonl"),
        ({"a.jsonl": "{"}, "a.jsonl' cannot be read as prompts"),
        ({"a.jsonl": '{"text": "x"}'}, "a.jsonl' cannot be read as prompts"),
    ],
)
def test_folders_that_hold_no_prompts(
    bundle: Path, tmp_path: Path, files: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert paper_table.main(argv(bundle, tmp_path, tmp_path / "out.jsonl")) == 1
    assert message in capsys.readouterr().err
