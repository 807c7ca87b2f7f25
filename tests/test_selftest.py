"""The self-test passes where speculation is lossless, and fails where it is not."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import exp
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import load
from runtime.cli.checks.rows_alone import rows_alone
from runtime.cli.checks.selftest import chi_squared, counted, distribution, main
from runtime.decoding import acceptance, decoder
from tests.conftest import DEMO, MakeBundle
from tests.end_to_end.test_quantized import INT8
from tests.pairs import SMALL

LITTLE = ("--prompts", "2", "--max-new-tokens", "12", "--draws", "400")  # enough for a fault to show


@pytest.fixture(scope="module")
def bundle(make_bundle: MakeBundle) -> Path:
    return make_bundle(SMALL, "--capacity", "100")


def test_a_sound_bundle(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(bundle), *LITTLE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert all(line.startswith("ok  ") for line in lines)
    assert "400 texts of 3 tokens" in lines[-1]


def next_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a row that is alone has a logit that is the next number to its own."""
    feed = decoder.Decoder.feed

    def changed(self: decoder.Decoder, tokens: Sequence[int], last: bool = False) -> int:
        first = feed(self, tokens, last)
        if len(tokens) == 1:
            self.target.logits[0, 0] = np.nextafter(self.target.logits[0, 0], np.float32(np.inf))
        return first

    monkeypatch.setattr(decoder.Decoder, "feed", changed)


def test_rows_alone(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.cli.checks.rows_alone._SHORT", 4)
    with load(make_bundle(DEMO, "--weights", "int8", "--rows", "8", "--capacity", "200"), "cpu", threads=1) as model:
        rows, unequal = rows_alone(model, [5, 6, 7, 8])
        assert (unequal, rows % 8) == (0, 0)
        assert rows >= 16
        next_to_it(monkeypatch)
        assert rows_alone(model, [5, 6, 7, 8]) == (rows, rows)


@pytest.mark.exhaustive  # 27 s: the whole self-test twice, of a target whose every row is computed again
def test_rows_of_a_quantized_target(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are compared to the last bit: one next to it is found, though no token differs."""
    argv = [
        str(make_bundle(DEMO, *INT8)),
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
    next_to_it(monkeypatch)
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
    assert main([str(bundle), *LITTLE]) == 1
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


class Tabled:
    """A model whose logits [10] depend on the length of the text and its last token. rounding: the largest change of
    each of them."""

    def __init__(self, seed: int, precision: str, rounding: float = 0.0) -> None:
        self.table = np.random.default_rng(seed).normal(0, 3, (4, 10, 10))
        self.table[..., 4] = self.table[..., 3] - 1e-5  # nearly tied wherever one of them is the fourth
        self.table += np.random.default_rng(seed + 1).uniform(-rounding, rounding, self.table.shape)
        self.decoder = SimpleNamespace(
            clear=lambda: None,
            prefill=self.prefill,
            target=SimpleNamespace(
                row=lambda row: self.table[row], graphs={"target": SimpleNamespace(precision=precision)}
            ),
        )

    def prefill(self, text: list[int], speculate: bool) -> tuple[int, int]:
        return len(text) - 1, text[-1]

    @contextmanager
    def exclusive(self) -> Iterator[SimpleNamespace]:
        yield self.decoder

    @cache  # noqa: B019
    def likeliest(self, row: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and their probabilities."""
        logits = self.table[row]
        best = np.argsort(-logits)[:4]
        weights = np.exp(logits[best] / 1.5)
        return best, weights / weights.sum()

    def draw(self, prompt: int, rng: np.random.Generator) -> tuple[int, ...]:
        text = [prompt]
        for _ in range(3):
            best, probabilities = self.likeliest(self.prefill(text, False))
            text.append(int(rng.choice(best, p=probabilities)))
        return tuple(text[1:])


def chance(judge: Tabled, drawn: Tabled) -> float:
    rng, (expected, edges) = np.random.default_rng(0), distribution(judge, [0])  # type: ignore[arg-type]
    assert sum(expected.values()) == pytest.approx(1)
    return chi_squared(Counter(counted(drawn.draw(0, rng), edges) for _ in range(2000)), expected, 2000)[2]


@pytest.mark.parametrize("seeds", [8, pytest.param(40, marks=pytest.mark.exhaustive)])
def test_rounding_may_decide_who_is_last_of_top_k(seeds: int) -> None:
    """Passes of different shapes round differently: a token as likely as the last of top k is drawn in one and has no
    chance in the other."""
    tied = [seed for seed in range(seeds) if distribution(Tabled(seed, "float16"), [0])[1]]  # type: ignore[arg-type]
    assert len(tied) > seeds // 8
    coarse = [chance(Tabled(seed, "float16"), Tabled(seed, "float16", 2e-3)) for seed in tied]
    assert min(coarse) > 1e-4
    # whose rows are the same in every pass
    exact = [chance(Tabled(seed, "int8"), Tabled(seed, "int8", 2e-3)) for seed in tied]
    assert 0.0 in exact
    assert max(chance(Tabled(seed, "float16"), Tabled(seed + 100, "float16")) for seed in tied) < 1e-4
