"""The self-test passes where speculation is lossless, and fails where it is not."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from math import exp
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.decoding import acceptance, decoder
from runtime.selftest import chi_squared, main
from tests.conftest import DEMO, MakeBundle
from tests.end_to_end.test_quantized import WHOLE
from tests.pairs import SMALL


@pytest.fixture(scope="module")
def bundle(make_bundle: MakeBundle) -> Path:
    return make_bundle(SMALL, "--capacity", "100")


def test_a_sound_bundle(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(bundle), "--prompts", "3", "--max-new-tokens", "20", "--draws", "1500"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert all(line.startswith("ok  ") for line in lines)
    assert "1500 texts of 3 tokens" in lines[-1]


def test_rows_of_a_quantized_target(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are compared to the last bit: one next to it is found, though no token differs."""
    argv = [
        str(make_bundle(DEMO, *WHOLE)),
        "--prompts",
        "2",
        "--max-new-tokens",
        "8",
        "--draws",
        "200",
    ]
    assert main(argv) == 0
    line = capsys.readouterr().out.splitlines()[-2]
    assert (
        found := re.fullmatch(
            r"ok      rows: (\d+) of (\d+) in trees are bitwise equal to the same rows computed one by one", line
        )
    )
    assert int(found[1]) == int(found[2]) >= 16
    feed = decoder.Decoder.feed

    def next_to_it(self: decoder.Decoder, tokens: Sequence[int], last: bool = False) -> int:
        first = feed(self, tokens, last)
        if len(tokens) == 1:
            self.passes.logits[0, 0] = np.nextafter(self.passes.logits[0, 0], np.float32(np.inf))
        return first

    monkeypatch.setattr(decoder.Decoder, "feed", next_to_it)
    assert main(argv) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line[:6] for line in lines] == ["ok    "] * 6 + ["FAILED", "ok    "]
    assert lines[-2] == f"FAILED  rows: 0 of {found[2]} in trees are bitwise equal to the same rows computed one by one"


def test_a_walk_that_prefers_what_was_drafted(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Following the first child every third time is fast, and wrong: both halves say so."""
    walk, calls = acceptance.accept_path, Counter[str]()

    def wrong(tokens: Sequence[int], parents: Sequence[int], take: Callable[[int], int | None]) -> list[int]:
        calls["walk"] += 1
        if calls["walk"] % 3 or len(tokens) < 2:
            return walk(tokens, parents, take)
        owner = take.__self__  # type: ignore[attr-defined]
        if owner.selector.add(tokens[1]) is None:
            return [0]
        take(1)
        return [0, 1]

    monkeypatch.setattr(acceptance, "accept_path", wrong)
    assert main([str(bundle), "--prompts", "3", "--max-new-tokens", "20", "--draws", "1500"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAILED")
    assert lines[-1].startswith("FAILED")


@given(st.integers(1, 6), st.integers(0, 1000))
def test_the_probability_of_a_deviation(freedom: int, seed: int) -> None:
    """Against the exact one, which is a sum where there are 2, 4 or 6 degrees of freedom."""
    cells, draws = 2 * freedom + 1, 6000
    counts = np.random.default_rng(seed).multinomial(draws, [1 / cells] * cells)
    value, found, chance = chi_squared(
        Counter({(i,): int(n) for i, n in enumerate(counts)}), {(i,): 1 / cells for i in range(cells)}, draws
    )
    assert found == 2 * freedom
    assert value == pytest.approx(sum((n - draws / cells) ** 2 / (draws / cells) for n in counts))
    term, exact = 1.0, 0.0
    for i in range(freedom):
        exact += term
        term *= value / 2 / (i + 1)
    assert chance == pytest.approx(exact * exp(-value / 2), abs=0.02)


def test_impossible_texts_are_never_fair() -> None:
    assert chi_squared(Counter({(1,): 50, (2,): 1}), {(1,): 1.0}, 51)[2] == 0.0


@pytest.mark.parametrize("option", [["--prompts", "0"], ["--max-new-tokens", "-4"], ["--draws", "3"]])
def test_nothing_is_not_proof(bundle: Path, option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(bundle), *option]) == 1
    assert f"{option[0]} is {option[1]}: give" in capsys.readouterr().err
