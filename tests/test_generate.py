"""``python -m runtime.generate`` as people type it."""

import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest

from runtime import Model, load
from runtime.cli.generate import main as command
from runtime.cli.generate_options import parser, read_prompts
from runtime.gumiho import COMMANDS
from runtime.gumiho import main as gumiho

PROMPT = "def main(argv=None):\n"


def generate(*argv: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runtime.generate", *map(str, argv)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=Path(__file__).parent.parent)


def here(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int | str | None, str, str]:
    """The command in this process: its status and what it printed."""
    status: int | str | None
    try:
        status = command([str(word) for word in argv])
    except SystemExit as exit:
        status = exit.code
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture(scope="module")
def opened(demo_bundle: Path) -> Iterator[Model]:
    with load(demo_bundle) as model:
        yield model


@pytest.fixture
def resident(demo_bundle: Path, opened: Model, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo bundle, which the command finds loaded."""
    monkeypatch.setattr("runtime.cli.generate.load", lambda *_: nullcontext(opened))
    return demo_bundle


def test_prompt_from_everywhere(resident: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt").write_text(PROMPT)
    done = generate(resident, "--max-new-tokens", "24", stdin=PROMPT)
    outputs = [
        (done.returncode, done.stdout, done.stderr),
        here(capsys, resident, "--prompt", PROMPT, "--max-new-tokens", "24"),
        here(capsys, resident, "--prompt-file", tmp_path / "prompt", "--max-new-tokens", "24"),
        here(capsys, resident, "--prompt", PROMPT, "--max-new-tokens", "24", "--no-speculation"),
        here(capsys, resident, "--prompt", PROMPT, "--max-new-tokens", "24", "--no-lookup"),
    ]
    assert all(status == 0 and err == "" for status, _, err in outputs), outputs
    assert len({out for _, out, _ in outputs}) == 1
    assert outputs[0][1].strip()


def test_stats_for_programs(resident: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = here(
        capsys, resident, "--prompt", PROMPT, "--max-new-tokens", "50", "--stats", "json", "--compare"
    )
    report = json.loads(out)
    stats = report["stats"]
    assert status == 0
    assert report["compare"]["identical"] is True
    assert report["compare"]["first_difference"] is None
    assert report["compare"]["speed_ratio"] > 0
    assert stats["tokens"] == len(report["ids"]) <= 50
    assert stats["tau"] == pytest.approx((stats["tokens"] - 1) / stats["cycles"], abs=1e-3)
    # Every cycle emits the accepted tokens and the target's own next one, save the last one where it was cut.
    assert stats["tau"] == pytest.approx(1 + sum(stats["acceptance_by_depth"]), abs=1.01 / stats["cycles"] + 0.01)
    assert report["plain"]["tau"] == 1.0
    assert report["plain"]["acceptance_by_depth"] == []


def test_stats_for_readers(resident: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = here(capsys, resident, "--prompt", PROMPT, "--max-new-tokens", "20", "--stats", "--compare")
    for word in (
        "tau",
        "draft",
        "target",
        "host",
        "first token",
        "tokens/s",
        "accepted",
        "plain decoding",
        "identical tokens",
    ):
        assert word in err
    assert "tau" not in out


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["nowhere", "--prompt", "x"], 1, "'nowhere' is not a bundle"),
        (
            ["BUNDLE", "--prompt-file", "nowhere"],
            1,
            "'nowhere' cannot be read as the prompt (No such file or directory): give a readable UTF-8 file\n",
        ),
        (
            ["BUNDLE", "--prompt-file", ""],
            2,
            "argument --prompt-file: the name is empty: give that of a file or folder (",
        ),
        (["BUNDLE", "--prompt", "x", "--grammar", ""], 2, "argument --grammar: the name is empty"),
        (
            ["BUNDLE", "--prompt", "x", "--json-schema", " "],
            1,
            "--json-schema is empty: give a file, or the schema itself ({} for any JSON)\n",
        ),
        (
            ["BUNDLE", "--prompt-file", os.devnull],
            1,
            f"'{os.devnull}' cannot be read as the prompt (it is not a regular file)",
        ),
        (["BUNDLE", "--prompt", "x = 1\n" * 1000], 1, "the bundle's capacity is 1024"),
        (["BUNDLE", "--prompt", "x", "--max-new-tokens", "-3"], 1, "max_new_tokens is -3"),
        (["BUNDLE", "--prompt", "x", "--backend", "abacus"], 1, "there is no backend 'abacus'"),
        (["BUNDLE", "--prompt", "x", "--threads", "-1"], 1, "threads is -1"),
        (["BUNDLE", "--prompt", "x", "--compare", "--no-speculation"], 1, "leave out --no-speculation"),
        (["BUNDLE", "--prompt", "x", "--warp"], 2, "unrecognized arguments: --warp"),
        (
            ["BUNDLE", "--rows", "1.5"],
            2,
            "error: argument --rows: '1.5' is not a whole number: give one (python -m runtime.generate --help lists "
            "the options)\n",
        ),
        (["BUNDLE", "--top-p", "x"], 2, "error: argument --top-p: 'x' is not a number: give one ("),
        (["BUNDLE", "--prompt", "x", "--prompt-file", "y"], 2, "not allowed with"),
    ],
)
def test_bad_input(
    demo_bundle: Path, argv: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = here(capsys, *[demo_bundle if word == "BUNDLE" else word for word in argv])
    assert (found, out) == (status, "")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_reader_that_leaves(demo_bundle: Path) -> None:
    """``generate | head -c 1`` ends quietly."""
    command = f"{sys.executable} -m runtime.generate {demo_bundle} --prompt 'def f' --max-new-tokens 200 | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, errors="replace", cwd=Path(__file__).parent.parent
    )
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_a_seed_is_told_and_gives_the_text_again(resident: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        resident,
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        "30",
        "--temperature",
        "1.2",
        "--top-p",
        "0.95",
        "--stats",
        "json",
    )
    first, other = (json.loads(here(capsys, *options)[1]) for _ in range(2))
    assert first["stats"]["seed"] != other["stats"]["seed"]
    again = here(capsys, *options, "--seed", str(first["stats"]["seed"]), "--no-speculation", "--check-lossless")
    assert again[0] == 0
    assert json.loads(again[1])["ids"] == first["ids"]
    assert f"lossless: plain decoding chooses each of the {len(first['ids'])} tokens" in again[2]


def test_every_option_reaches_the_choice(resident: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each changes the text from what it is without, and in its own way."""
    base = (resident, "--prompt", PROMPT, "--max-new-tokens", "24", "--stats", "json")
    plain = json.loads(here(capsys, *base)[1])
    first, word = plain["ids"][0], plain["text"].split()[3]
    (tmp_path / "lark").write_text('start: "7" | "8"')

    def ids(*more: str) -> list[int]:
        found: list[int] = json.loads(here(capsys, *base, *more)[1])["ids"]
        return found

    assert first not in ids("--ban", str(first))
    assert set(ids("--logit-bias", f"{first}=1000")) == {first}
    runs = ids("--no-repeat-ngram", "2")
    assert len(set(pairwise(runs))) == len(runs) - 1
    for penalty in ("--repetition-penalty", "--presence-penalty", "--frequency-penalty"):
        assert len(set(ids(penalty, "10"))) > len(set(plain["ids"]))
    drawn = [
        ids("--temperature", "1.5", "--seed", "3", *more)
        for more in ((), ("--top-k", "2"), ("--top-p", "0.3"), ("--min-p", "0.4"))
    ]
    assert len({tuple(one) for one in [plain["ids"], *drawn]}) == 5
    stopped = json.loads(here(capsys, *base, "--stop", word)[1])
    assert stopped["text"] == plain["text"][: plain["text"].index(word)]
    assert ids("--stop-token", str(plain["ids"][5])) == plain["ids"][: plain["ids"].index(plain["ids"][5]) + 1]
    assert len(ids("--stop-token", str(first), "--min-new-tokens", "4")) >= 4
    assert json.loads(here(capsys, *base, "--max-seconds", "0")[1])["stats"]["finish_reason"] == "time"
    assert json.loads(here(capsys, *base, "--regex", "(ab|c)d?")[1])["text"] in ("ab", "abd", "c", "cd")
    assert json.loads(here(capsys, *base, "--grammar", str(tmp_path / "lark"))[1])["text"] in ("7", "8")
    made = json.loads(
        here(capsys, *base, "--json-schema", '{"type": "array", "items": {"enum": [1, "x"]}, "maxItems": 2}')[1]
    )
    assert all(item in (1, "x") for item in json.loads(made["text"]))


def test_many_prompts(resident: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"prompt": PROMPT}, {"turns": ["class A:", "never read"]}, {"prompt": "import os\n"}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    options = (resident, "--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", "30", "--stats", "json")
    status, out, _ = here(capsys, *options, "--compare")
    made = json.loads(out)
    assert (status, made["compare"]["outputs"], made["compare"]["outputs_that_differ"]) == (0, 3, 0)
    alone = [
        json.loads(here(capsys, resident, "--prompt", text, "--max-new-tokens", "30", "--stats", "json")[1])
        for text in (PROMPT, "class A:", "import os\n")
    ]
    assert made["texts"] == [one["text"] for one in alone]
    assert made["stats"]["tokens"] == sum(one["stats"]["tokens"] for one in alone)
    assert made["finish_reasons"] == [one["stats"]["finish_reason"] for one in alone]
    (tmp_path / "long.jsonl").write_text(
        json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + "\n" + json.dumps({"prompt": "x = 1\n" * 999})
    )
    status, out, err = here(capsys, resident, "--prompts", tmp_path / "long.jsonl")
    assert (status, out) == (1, "")
    assert "prompt 2: the prompt has" in err


@pytest.mark.parametrize("named", [("--accept", "typical"), ("--tree", "fta")], ids=" ".join)
def test_lossy_ways_say_so_and_by_how_much(
    resident: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], named: tuple[str, str]
) -> None:
    prompts = [{"prompt": f"def {name}(path):"} for name in ("open", "split")]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    options = (resident, "--prompts", tmp_path / "p.jsonl", "--max-new-tokens", "30", *named, "--compare")
    status, _, err = here(capsys, resident, "--prompt", "x", "--max-new-tokens", "4", *named, "--compare")
    assert status == 0
    assert f"note: with {' '.join(named)} the output may differ from the target's" in err
    assert "of exact speculation" in err
    made = json.loads(here(capsys, *options, "--stats", "json")[1])["compare"]
    assert made["tau"] >= made["other_tau"]
    if named[0] == "--accept":
        assert made["outputs_that_differ"] > 0
        assert made["first_difference"] is not None
        assert here(capsys, *options[:-1], "--check-lossless")[0] == 1


def test_a_trace_is_written(resident: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = {}
    for name in ("t.jsonl", "t.html"):
        options = (
            resident,
            "--prompt",
            PROMPT,
            "--max-new-tokens",
            "20",
            "--trace",
            tmp_path / name,
            "--stats",
            "json",
        )
        status, out, _ = here(capsys, *options)
        assert status == 0
        made[name] = json.loads(out)
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert (lines[0]["type"], lines[-1]["type"]) == ("run", "end")
    assert [token["id"] for line in lines[1:-1] for token in line["tokens"]] == made["t.jsonl"]["ids"]
    assert "<script" in (tmp_path / "t.html").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--temperature", "-1"], "temperature is -1"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--seed", "-1"], "seed is -1"),
        (["--stop", ""], "none of them empty"),
        (
            ["--stop", "\udcff"],
            "stop is ['\\udcff']: give a string or a list of strings of UTF-8 text, none of them empty\n",
        ),
        (
            ["--regex", "\udcff"],
            "the regex grammar is not Unicode (it has a byte that is not UTF-8, or half a character): give UTF-8 "
            "text\n",
        ),
        (["--logit-bias", ""], "--logit-bias is '': give a token id and a number, such as 42=-1.5\n"),
        (["--ban", "999999"], "banned names token id 999999, outside the vocabulary of 2048: give 0 to 2047\n"),
        (["--logit-bias", "seven"], "--logit-bias is 'seven'"),
        (["--regex", "(a"], "grammar is wrong"),
        (["--json-schema", "nowhere.json"], "'nowhere.json' cannot be read as the schema"),
        (["--chat"], "has no chat template"),
        (["--trace", "page.pdf"], "let it end in .html"),
        (["--trace", "nowhere/page.html"], "nowhere"),
        (["--system", "be brief"], "has no chat template"),
        (["--system", "be brief", "--raw"], "--raw uses no chat template: leave out --system"),
        (["--chat", "--raw"], "--raw uses no chat template: leave out --chat"),
        (["--special-tokens", "--raw"], "--raw uses no chat template: leave out --special-tokens"),
        (["--logprobs", "2"], "--logprobs are printed as JSON: add --stats json"),
        (["--logprobs", "-1", "--stats", "json"], "logprobs is -1"),
        (["--logprobs", "0", "--stats", "json", "--accept", "typical"], "accept 'typical' does not compute logprobs"),
        (["--compare", "--max-seconds", "1"], "leave out --max-seconds"),
        (["--accept", "typical", "--top-k", "1"], "does not apply top_k"),
        (["--accept", "typical", "--tree", "fta"], "exclude each other"),
        (["--rows", "1"], "rows is 1"),
    ],
)
def test_bad_settings(resident: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = here(capsys, resident, "--prompt", "x", *argv)
    assert (status, out) == (1, "")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("option", [["--compare"], ["--check-lossless"], ["--trace", "t.html"], ["--stats", "json"]])
def test_proofs_are_for_prompts(resident: Path, option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = here(capsys, resident, "--chat", *option)
    assert (status, out) == (1, "")
    assert "is for prompts, not for conversations" in err


def test_a_full_disk_behind_standard_output(demo_bundle: Path) -> None:
    line = f"{sys.executable} -m runtime.generate {demo_bundle} --prompt x --max-new-tokens 3 > /dev/full"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 1
    assert "standard output cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ('{"prompt": "x"}\n\n{', "line 3, column 2 is not JSON"),
        ('{"prompt": "x"}\n[1]', "line 2 has no prompt that is a string"),
        ('{"turns": []}', "line 1 has no prompt that is a string"),
        ('{"turns": "hello"}', "line 1 has no prompt that is a string"),
        ('{"prompt": null}', "line 1 has no prompt that is a string"),
        ("[" * 100_000, "it is nested too deeply"),
    ],
)
def test_bad_prompts(
    resident: Path, tmp_path: Path, content: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    said = (
        f"error: '{tmp_path}/p.jsonl' is not a file of prompts ({cause}): give one JSON object per line, with a "
        "'prompt'\n"
    )
    assert here(capsys, resident, "--prompts", tmp_path / "p.jsonl") == (1, "", said)


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("--prompts", "the prompts"),
        ("--prompt-file", "the prompt"),
        ("--grammar", "the grammar"),
        ("--json-schema", "the schema"),
    ],
)
def test_empty_files(
    resident: Path, tmp_path: Path, option: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_text("\n")
    found = here(
        capsys, resident, option, tmp_path / "x", *(["--prompt", "x"] if what in ("the grammar", "the schema") else [])
    )
    assert found == (1, "", f"error: '{tmp_path / 'x'}' is empty: write {what} in it, or name another file\n")


def test_an_empty_standard_input(
    resident: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    said = "error: the prompt on standard input is empty: write one, or give --prompt '' to continue nothing\n"
    assert here(capsys, resident) == (1, "", said)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_told_what_is_waited_for(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = io.StringIO("a\nb\n")
    typed.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", typed)
    assert read_prompts(parser().parse_args(["bundle"])) == ["a\nb\n"]
    assert capsys.readouterr().err == "type the prompt; Ctrl-D on a line of its own ends it\n" * terminal


@pytest.mark.parametrize("name", [name for name, (module, _, _) in COMMANDS.items() if module.startswith("runtime")])
def test_help_names_the_command_that_was_called(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("runtime.cli.command.through_gumiho", "")
    with pytest.raises(SystemExit):
        gumiho([name, "--help"])
    out = capsys.readouterr().out
    assert out.startswith(f"usage: gumiho {name} ")
    assert ("Holds a conversation" in out) == (name == "chat")


@pytest.mark.parametrize("example", sorted(Path("examples").glob("*.py")), ids=lambda example: example.stem)
def test_examples_say_what_they_need(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(example)])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(example), run_name="__main__")
    assert f"python {example} BUNDLE" in str(left.value.code)


@pytest.mark.parametrize("example", sorted(Path("examples").glob("*.py")), ids=lambda example: example.stem)
def test_examples_refuse_what_is_no_bundle(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(example), "nowhere"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(example), run_name="__main__")
    assert left.value.code == "error: 'nowhere' is not a bundle (it has no gumiho.json): make one with gumiho-export"
