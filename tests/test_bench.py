"""The benchmark: what it reads, how it talks to peers, what it makes of failures, and its numbers."""

import json
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from runtime import InputError, load
from tests import fake_peer
from tests.conftest import DEMO
from tools import bench, costs, parity, report
from tools.bench import Bench
from tools.bench_setup import Prompt, tokenized


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "turns.jsonl",
            '{"id": 81, "category": "writing", "turns": ["one\\ntwo", "again"]}\n{"id": 82, "turns": ["three"]}\n',
        ),
        ("prompts.jsonl", '{"prompt": "one\\ntwo"}\n\n{"prompt": "three"}\n'),
        ("texts.jsonl", '{"text": "one\\ntwo"}\n{"text": "three"}'),
    ],
)
def test_prompt_files(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert parity.read(tmp_path / name) == ["one\ntwo", "three"]


def test_questions_go_through_the_chat_template_and_are_never_cut(tmp_path: Path) -> None:
    shutil.copytree(DEMO / "target", tmp_path / "target")
    args = Namespace(
        pair=tmp_path,
        bundles=[],
        prompts=[tmp_path / "a.jsonl"],
        chat=True,
        count=1,
        new_tokens=24,
        longest=300,
        contexts=None,
    )
    asked = ["word " * 500, "import os", "import re", "import json", "import abc"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in asked))
    with pytest.raises(InputError, match="no chat template: leave out --chat"):
        tokenized(args)
    (tmp_path / "target/chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    tokenizer = Tokenizer.from_file(str(DEMO / "target/tokenizer.json"))
    prompts, tuning, cut = tokenized(args)
    assert [(prompt.number, tokenizer.decode(prompt.ids)) for prompt in prompts] == [(1, "<import os>")]
    assert [tokenizer.decode(prompt.ids) for prompt in tuning] == ["<import re>", "<import json>"]
    args.chat = False
    prompts, _, cut = tokenized(args)
    assert (len(prompts[0].ids), prompts[0].number, cut) == (300, 0, 1)


def test_pieces_of_given_lengths(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"prompt": f"import {word} as name"}) + "\n" for word in range(50))
    )
    args = Namespace(
        pair=DEMO, bundles=[], prompts=[tmp_path / "a.jsonl"], chat=False, count=2, new_tokens=24, longest=60
    )
    args.contexts = [16, 5]
    prompts, tuning, cut = tokenized(args)
    assert [(prompt.set, prompt.number, len(prompt.ids)) for prompt in prompts] == [
        ("5 positions", 0, 5),
        ("5 positions", 1, 5),
        ("16 positions", 0, 16),
        ("16 positions", 1, 16),
    ]
    assert ([len(prompt.ids) for prompt in tuning], cut) == ([5, 5], 0)
    tokenizer = Tokenizer.from_file(str(DEMO / "target/tokenizer.json"))
    whole = [token for word in range(50) for token in tokenizer.encode(f"import {word} as name").ids]
    assert prompts[2].ids + prompts[3].ids == whole[:32]
    for contexts, said in (
        ([61], "at most 60"),
        ([60], "needs 240 tokens of text for 2 prompts and 2 to choose settings"),
    ):
        args.contexts = contexts
        args.prompts = [tmp_path / "b.jsonl"]
        args.prompts[0].write_text('{"prompt": "import os"}\n')
        with pytest.raises(InputError, match=said):
            tokenized(args)


def test_plain_text_is_one_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('{"prompt": "as it is"}\n\nmore')
    assert parity.read(tmp_path / "a.txt") == ['{"prompt": "as it is"}\n\nmore']


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a run over the fake peer finds, by way."""
    return run(tmp_path_factory.mktemp("found"))


def run(folder: Path) -> dict[str, dict[str, Any]]:
    (folder / "pair/target").mkdir(parents=True, exist_ok=True)
    (folder / "pair/target/config.json").write_text("{}")
    args = Namespace(
        pair=folder / "pair",
        draft_model=None,
        envs=folder,
        models=folder / "models",
        out=folder,
        threads=1,
        new_tokens=5,
        rounds=2,
    )
    made = Bench(args)
    made.add("fake", fake_peer, fake_peer.ways())
    saved = list[int]()
    prompts = [Prompt("a", 0, [7]), Prompt("a", 1, [1, 20]), Prompt("b", 0, [30])]
    made.measure(prompts, [Prompt("a", 2, [3])], lambda: saved.append(len(made.results[0]["texts"])))
    assert sorted(set(saved)) == ([1, 2, 3] if made.programs else [0])  # an interrupted run has what it found
    assert all(program.worker is None for program in made.programs)
    return {result["name"]: result for result in made.results}


def test_round_trip(found: dict[str, dict[str, Any]]) -> None:
    plain = found["plain"]
    assert [(text["set"], text["prompt"], text["prompt_tokens"]) for text in plain["texts"]] == [
        ("a", 0, 1),
        ("a", 1, 2),
        ("b", 0, 1),
    ]
    assert [text["tokens"] for text in plain["texts"]] == [
        [8, 9, 10, 11, 12],
        [21, 22, 23, 24, 25],
        [31, 32, 33, 34, 35],
    ]
    assert plain["versions"] == {"fake": "1.0"}
    assert 1 < plain["peak_mb"] < 1000


def test_the_fastest_setting_is_taken(found: dict[str, dict[str, Any]]) -> None:
    drafting = found["drafting"]
    assert drafting["setting"] == {"wait": 0.0}
    assert [one["setting"] for one in drafting["tried"]] == [{"wait": 0.02}, {"wait": 0.0}]


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("no draft model", "no --draft-model was given"),
        ("cannot load", "ValueError: no such weights at all"),
        ("cannot convert", "NotImplementedError: no fp8 here"),
        ("cannot convert either", "NotImplementedError: no fp8 here"),
        ("dies", "its process ended with status 9: out of something"),
    ],
)
def test_failures_are_listed_with_their_reasons(found: dict[str, dict[str, Any]], way: str, reason: str) -> None:
    assert found[way]["failed"] == reason
    assert not found["plain"]["failed"]
    row = next(row for row in report.rows(whole(found), "a") if row["way"] == way)
    assert row == {"way": way, "weights": found[way]["weights"], "failed": reason}
    assert f"| {way} | {found[way]['weights']} | failed: {reason} | - |" in report.markdown(whole(found))


def test_what_is_converted_is_converted_once(tmp_path: Path) -> None:
    for _ in range(2):
        run(tmp_path)
    assert (tmp_path / "models/converted").read_text().split() == ["fp32", "int4", "fp8", "fp8"]  # fp8 fails once a run


def test_peers_that_cannot_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = list[list[str]]()

    def refuse(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        done = subprocess.CompletedProcess(command, "pip" in command, "", "looking\nERROR: no such package\na notice")
        done.check_returncode()
        return done

    monkeypatch.setattr(fake_peer, "REQUIREMENTS", (("no-such-package",),))
    monkeypatch.setattr("tools.bench_setup.subprocess.run", refuse)
    reasons = {way["failed"] for way in run(tmp_path).values()}
    assert reasons == {"no --draft-model was given", "installing fake failed: ERROR: no such package"}
    assert [command[-1] for command in commands] == [str(tmp_path / "fake"), "no-such-package"]  # once for all its ways


def test_peers_that_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(python: Path) -> None:
        assert python == tmp_path / "fake/bin/python"
        raise subprocess.CalledProcessError(1, "cmake", "CMake Error: no compiler\nsee the log", "")

    monkeypatch.setattr(fake_peer, "REQUIREMENTS", ((),))
    monkeypatch.setattr(fake_peer, "build", build, raising=False)
    monkeypatch.setattr("tools.bench_setup.subprocess.run", lambda *_, **__: None)
    reasons = {way["failed"] for way in run(tmp_path).values()}
    assert reasons == {"no --draft-model was given", "installing fake failed: CMake Error: no compiler"}


def whole(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    about = {"new tokens": 5}
    return {
        "about": about,
        "prompts": {"a": 2, "b": 1},
        "lengths": [],
        "reference": "plain",
        "ways": list(found.values()),
    }


def test_without_memory_for_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, dict[str, Any]]
) -> None:
    """They are started one after another, round by round, and find the same texts."""
    monkeypatch.setattr(Bench, "fits", lambda self, program: False)
    apart = run(tmp_path)
    for name, result in found.items():
        assert [text["tokens"] for text in apart[name]["texts"]] == [text["tokens"] for text in result["texts"]]


def test_table_of_a_run(found: dict[str, dict[str, Any]]) -> None:
    rows = {row["way"]: row for row in report.rows(whole(found), "a")}
    # Four tokens behind the first, of 10 ms each, or two in 10 ms.
    assert rows["plain"]["tokens/s"] == pytest.approx(100)
    assert rows["drafting"]["tokens/s"] == pytest.approx(200)
    assert rows["drafting"]["of plain"] == rows["drafting"]["of reference"] == pytest.approx(2)
    assert (rows["plain"]["tau"], rows["drafting"]["tau"]) == (1, 2)
    assert rows["plain"]["first token, ms"] == pytest.approx(1)
    assert (rows["plain"]["of plain"], rows["plain"]["texts as plain"]) == (None, "-")
    assert rows["drafting"]["texts as plain"] == rows["plain"]["as reference"] == "2 of 2"
    assert rows["wrong"]["as reference"] == "0 of 2 (0:2)"
    together = {row["way"]: row for row in report.rows(whole(found), report.ALL)}  # sets number their prompts alike
    assert together["drafting"]["as reference"] == "3 of 3"
    assert together["drafting"]["of plain"] == pytest.approx(2)
    assert "## all sets, 3 prompts" in report.markdown(whole(found))


Speeds = st.lists(st.tuples(st.integers(2, 50), st.floats(0.1, 10)), min_size=1, max_size=9)


def texts(speeds: list[tuple[int, float]], factor: float = 1.0) -> list[dict[str, Any]]:
    return [
        {
            "set": "a",
            "prompt": i,
            "tokens": [*range(n)],
            "first_tokens": 1,
            "first_seconds": 3.0,
            "seconds": 3.0 + spent / factor,
            "passes": n - 1,
        }
        for i, (n, spent) in enumerate(speeds)
    ]


@given(Speeds, st.floats(0.1, 10))
def test_ratios(speeds: list[tuple[int, float]], factor: float) -> None:
    """Everything faster by a factor is by that factor, whatever the texts are, and so are single texts that vary around
    it."""
    plain, fast = texts(speeds), texts(speeds, factor)
    assert report.ratio(fast, plain) == pytest.approx(factor)
    assert report.speed(*plain) == pytest.approx(sum(n - 1 for n, _ in speeds) / sum(spent for _, spent in speeds))
    assert report.tau(plain) == pytest.approx(1)
    assert report.ratio(fast, [{**plain[0], "prompt": len(plain)}]) is None


Tokens = st.lists(st.integers(0, 2), max_size=6)


@given(Tokens, Tokens)
def test_differences(ours: list[int], theirs: list[int]) -> None:
    place = report.difference(ours, theirs)
    if place is None:
        assert ours == theirs
    else:
        assert ours[:place] == theirs[:place]
        assert ours[place : place + 1] != theirs[place : place + 1]


def test_plots(tmp_path: Path, found: dict[str, dict[str, Any]]) -> None:
    report.plot(whole(found), tmp_path)
    assert {file.name for file in tmp_path.glob("bench-*") if file.stat().st_size > 1000} == {
        "bench-a.png",
        "bench-a.svg",
        "bench-b.png",
        "bench-b.svg",
        "bench-all-sets.png",
        "bench-all-sets.svg",
    }


@pytest.mark.exhaustive
def test_lengths_are_plotted_and_not_added_up(tmp_path: Path, found: dict[str, dict[str, Any]]) -> None:
    run = whole(found) | {"prompts": {"1 positions": 2, "7 positions": 1}, "lengths": [1, 7]}
    names_of = {"a": "1 positions", "b": "7 positions"}
    run["ways"] = [
        {**way, "texts": [{**text, "set": names_of[text["set"]]} for text in way["texts"]]} for way in run["ways"]
    ]
    report.plot(run, tmp_path)
    names = {"bench-1-positions", "bench-7-positions", "bench-lengths"}
    assert {file.stem for file in tmp_path.glob("bench-*") if file.stat().st_size > 1000} == names
    assert report.ALL not in report.markdown(run)


def test_ours_beside_transformers(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command over our own ways alone: its tokens are those of transformers."""
    monkeypatch.setattr(report, "plot", lambda run, folder: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    (tmp_path / "code.txt").write_text("def read_lines(path):\n")
    argv = [
        str(demo_bundle),
        "--pair",
        str(DEMO),
        "--prompts",
        str(tmp_path / "code.txt"),
        "--new-tokens",
        "12",
        "--threads",
        "1",
    ]
    assert bench.main([*argv, "--out", str(tmp_path), "--peers"]) == 0
    ways = json.loads((tmp_path / "bench.json").read_text())["ways"]
    target = LlamaForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32)
    ids = torch.tensor([Tokenizer.from_file(str(DEMO / "target/tokenizer.json")).encode("def read_lines(path):\n").ids])
    wanted = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[
        0, ids.shape[1] :
    ]
    assert [way["texts"][0]["tokens"] for way in ways] == [wanted.tolist()] * 3
    assert ways[2]["texts"][0]["passes"] == 11
    shown = capsys.readouterr().out
    assert (tmp_path / "bench.md").read_text() in shown
    assert bench.main(["--again", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--pair", "nowhere"], "nowhere has no target/tokenizer.json"),
        (["--new-tokens", "5000"], "leaves no room for a prompt"),
        (["no/bundle"], "no/bundle"),
        (["--again", "--out", "nowhere"], "run without --again first"),
    ],
)
def test_bad_requests(
    argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    assert bench.main(argv) == 1
    assert message in capsys.readouterr().err


@given(st.floats(0.1, 3), st.lists(st.integers(1, 999), min_size=2, max_size=6, unique=True).map(sorted))
def test_growth_of_powers(exponent: float, sizes: list[int]) -> None:
    assert costs.growth(sizes, [3 * size**exponent for size in sizes]) == pytest.approx(exponent)
    assert costs.growth([0, *sizes], [9, *(3 * size**exponent for size in sizes)]) == pytest.approx(exponent)


def test_costs_of_a_bundle(demo_bundle: Path) -> None:
    with load(demo_bundle, threads=1) as model, model.exclusive() as decoder:
        found = costs.costs(decoder, [1, 8], [0, 16, 900], 1)
        assert decoder.target.length == 0
        assert [[len(spent) for spent in found[name]] for name in ("target", "draft")] == [[3, 3], [3]]
        assert all(0 < ms < 1e5 for spent in (*found["target"], *found["draft"]) for ms in spent)
        most, capacity = len(decoder.target.choice), decoder.manifest.capacity
        with pytest.raises(costs.InputError, match=f"takes at most {most} rows, not {most + 1}"):
            costs.costs(decoder, [most + 1], [0], 1)
        with pytest.raises(costs.InputError, match="exceed the capacity"):
            costs.costs(decoder, [1], [capacity - decoder.manifest.rows + 1], 1)
