"""The checks of texts against plain decoding, and the comparison of many tokens, find differences."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime import Generation, Model, load
from runtime.cli.checks.lossless import NEAR
from runtime.decoding.checks import check_settings
from runtime.decoding.settings import Settings
from tools import compare_tokens
from tools.load import read_prompts
from tools.replay import Checks, Verdict, check, start

CHAT = {"messages": [{"role": "user", "content": "import "}], "max_tokens": 12, "seed": 3, "temperature": 0.8}


@pytest.fixture(scope="module")
def model(chat_bundle: Path) -> Iterator[Model]:
    with load(chat_bundle, threads=1) as model:
        yield model


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": [f"def f{i}(x):"]}) + "\n" for i in range(80)))
    return file


@pytest.mark.exhaustive
def test_texts_are_compared_with_plain_decoding(model: Model) -> None:
    right = "".join(start(model, CHAT))
    assert check(model, CHAT, right) == Verdict(12)
    for request, found in ((CHAT, right[:-1]), ({**CHAT, "seed": 4}, right)):
        verdict = check(model, request, found)
        assert (verdict.tokens, verdict.margins, len(verdict.differs)) == (12, (), 1)


def test_tokens_are_compared_and_near_ties_told_from_others(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    request = {"prompt": model.encode("import "), "max_tokens": 9}
    generation = start(model, request)
    assert list(generation)
    right = generation.ids
    assert check(model, request, right) == Verdict(9)
    wrong = [*right[:4], right[4] + 1, *right[5:]]
    assert len(check(model, request, wrong).differs) == 1
    assert len(check(model, request, right[:-1]).differs) == 1  # a text that ends early has no token that differs
    monkeypatch.setitem(NEAR, model.decoder.target.graphs["target"].precision, 10.0)
    near = check(model, request, wrong)
    assert not near.differs
    assert 0 < near.margins[0] < 10


def test_checks_go_on_in_other_processes(chat_bundle: Path, model: Model) -> None:
    right, seen = "".join(start(model, CHAT)), list[Verdict]()
    with Checks(chat_bundle, 1) as checks:
        checks.add(CHAT, right, seen.append)
        checks.add(CHAT, right + "!")
        verdict = checks.verdict()
        assert (verdict.tokens, len(verdict.differs), checks.waiting, seen) == (24, 1, 0, [Verdict(12)])
        checks.add({**CHAT, "max_tokens": "many"}, right, seen.append)
        with pytest.raises(Exception, match="max_new_tokens"):
            checks.verdict()


@pytest.mark.exhaustive
def test_many_tokens(
    chat_bundle: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All of them are compared, also after an interruption, and a wrong one is found."""
    out = tmp_path / "tokens.jsonl"
    options = [str(chat_bundle), "--prompts", str(prompts), "--streams", "2", "--new-tokens", "20"]
    assert compare_tokens.main([*options, "--out", str(out), "--tokens", "30"]) == 0
    first = out.read_text().splitlines()
    assert compare_tokens.main([*options, "--out", str(out), "--tokens", "90"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [json.loads(line) for line in first] == lines[: len(first)]
    assert len(lines) == len({line["number"] for line in lines})
    tokens = sum(line["tokens"] for line in lines)
    assert 90 <= tokens <= 90 + 2 * 20
    assert f"{tokens} tokens in {len(lines)} texts: no near-ties, 0 other differences" in capsys.readouterr().out

    generate = Model.generate

    def wrong(stream: Model, *args: Any, **options: Any) -> Generation:
        generation = generate(stream, *args, **options)
        assert list(generation)
        generation.ids[-1] ^= 1
        return generation

    monkeypatch.setattr(Model, "generate", wrong)
    assert compare_tokens.main([*options, "--out", str(tmp_path / "wrong.jsonl"), "--tokens", "30"]) == 1
    assert "0 other differences" not in capsys.readouterr().out


def test_requests_are_the_same_for_the_same_number(model: Model, prompts: Path) -> None:
    texts = read_prompts([prompts], 80)
    drawn = [compare_tokens.request(model, texts, number, 50) for number in range(60)]
    assert drawn == [compare_tokens.request(model, texts, number, 50) for number in range(60)]
    for one in drawn:
        check_settings(
            model.bundle.manifest,
            Settings.of(1, True, {n: v for n, v in one.items() if n not in ("prompt", "max_tokens")}),
        )  # type: ignore[arg-type]
    assert all(len(one["prompt"]) + one["max_tokens"] <= model.capacity for one in drawn)
    assert len({str(sorted(one.keys() - {"prompt", "max_tokens", "seed"})) for one in drawn}) > 6
