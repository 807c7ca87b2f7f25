"""``make demo``'s program: what it compares, and what it says of what it finds."""

import json
from pathlib import Path

import pytest

from runtime import Cycle, Stats
from runtime.decoding.decoder import Decoder
from tools import demo

COUNT = "12"


@pytest.fixture
def argv(demo_bundle: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"kind": "a loop", "prompt": "for i in"}, {"kind": "a function", "prompt": "def read(path):\n"}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    return [str(demo_bundle), "--prompts", str(prompts), "--new-tokens", COUNT, "--seconds", "0"]


def test_equal_tokens(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    assert demo.main([*argv, "--name", "Tiny", "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    rows = {
        line[:12].strip(): line[12:].split() for line in out.splitlines() if "tokens/s" in line and " a pass" in line
    }
    assert list(rows) == ["a loop", "a function", "total"]
    assert [row[0] for row in rows.values()] == [COUNT, COUNT, str(2 * int(COUNT))]
    assert float(rows["total"][5]) > 1  # tokens a pass
    assert "Tiny, fp32, " in out
    assert "every token is the same" in out
    assert '"type": "run"' in trace.read_text()


def test_other_tokens(argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokens after accepted rows come from the root's logits, as if a decoder read the wrong row. Plain decoding
    has no other row."""
    right = Decoder.next_token
    monkeypatch.setattr(Decoder, "next_token", lambda self, row: right(self, 0))
    assert demo.main(argv) == 1
    done = capsys.readouterr()
    assert "every token is the same" not in done.out
    assert "tokens differ" in done.err
    assert "a loop, drafting" in done.err


@pytest.mark.parametrize(
    ("text", "message"), [("", "has no prompts"), ("{}", "'kind' and 'prompt'"), ("x", "cannot be read")]
)
def test_bad_prompts(argv: list[str], text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(argv[2]).write_text(text)
    assert demo.main(argv) == 1
    assert message in capsys.readouterr().err


def result(plain: float, drafting: float, tokens: int = 2, draft: float = 0.5) -> demo.Result:
    """Ten passes of plain decoding in ``plain`` seconds, and five cycles in ``drafting`` seconds, each of so many
    ``tokens``; ``draft`` is the drafter's share of a cycle."""
    times = round(draft * drafting * 2e8), round((1 - draft) * drafting * 2e8), 0
    ours, other = Stats(), Stats()
    for _ in range(5):
        ours.count(tokens, times, rows=4)
    for _ in range(10):
        other.count(1, (0, round(plain * 1e8), 0))
    drafted = demo.Answer([], "", ours, [Cycle(tuple(range(tokens)), 4, (0,), None, times)] * 5)
    return demo.Result(
        "x", {demo.PLAIN: demo.Answer([], "", other, []), demo.DRAFTING: drafted, demo.LOOKUPS: drafted}, set()
    )


def test_verdict_of_a_gain() -> None:
    assert demo.verdict("M", [result(2, 1)]) == (
        "M: 10 tokens/s with drafting instead of 5.0 plain (2.0 times as fast), and every token is the same."
    )


@pytest.mark.parametrize(("seconds", "word"), [(1.95, "hardly pays"), (2.5, "does not pay")])
def test_verdict_where_drafting_does_not_pay(seconds: float, word: str) -> None:
    said = demo.verdict("M", [result(2, seconds)] * 2)
    assert f"Drafting {word}" in said
    assert f"{2 / seconds:.2f} times" in said
    assert f"{seconds:.2f} tokens to break even, and it brought 2.00" in said


def test_the_prompts_of_the_repository() -> None:
    kinds = [kind for kind, _ in demo.prompts(demo.ROOT / "demo/prompts.jsonl")]
    assert len(set(kinds)) == 3
