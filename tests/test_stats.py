"""Counts and times against sums done by hand."""

import pytest

from runtime.cli.stats_table import table
from runtime.decoding.stats import Stats


def test_tau_counts_emitted_tokens_only() -> None:
    stats = Stats(prompt_tokens=4, tokens=1)
    for emitted in (3, 1, 5, 2):
        stats.count(emitted, (1000, 3000, 500))
        stats.tokens += emitted
    summary = stats.summary()
    assert stats.tau == 11 / 4
    assert summary["acceptance_by_depth"] == [0.75, 0.5, 0.25, 0.25]
    assert summary["tokens"] == 12
    assert (summary["draft_us_per_cycle"], summary["target_us_per_cycle"], summary["host_us_per_cycle"]) == (
        1.0,
        3.0,
        0.5,
    )
    assert stats.tokens_per_second == pytest.approx(11 / 18e-6)


def test_what_was_looked_up_was_not_drafted() -> None:
    stats = Stats()
    stats.count(3, (1000, 3000, 500))
    stats.count(6, (0, 3000, 500), rows=8, lookup=True)
    both = Stats()
    both.add(stats)
    both.add(stats)
    for found, times in ((stats, 1), (both, 2)):
        summary = found.summary()
        assert (summary["lookups"], summary["looked_up"]) == (times, 5 * times)
        assert summary["acceptance_by_depth"] == [0.5, 0.5]
        assert found.tau == 4.5


def test_nothing_decoded() -> None:
    assert Stats().summary()["tau"] == 0.0
    assert Stats().tokens_per_second == 0.0


def test_the_table_s_sources_add_up() -> None:
    stats = Stats(prompt_tokens=40, cached_tokens=30, tokens=1, prefill_ns=12_340_000, seed=7, finish_reason="stop")
    for emitted, rows, lookup in ((3, 8, False), (1, 1, False), (5, 4, True)):
        stats.count(emitted, (1_000_000, 3_000_000, 500_000), rows, lookup)
        stats.tokens += emitted
    lines = {line[:10].strip(): line[10:].strip() for line in table(stats).splitlines()}
    assert lines["prompt"] == "40 tokens (30 cached), first token after 12.34 ms"
    assert lines["generated"].startswith("10 tokens (stop), ")
    assert lines["per pass"] == "3 tokens (tau) in 4.5 ms: draft 1, target 3, host 0.5 (3 passes)"
    assert lines["from"] == "target 4, drafter 2, prompt lookup 4"
    assert lines["rows"].startswith("1: 1, 4: 1, 8: 1 ")
    assert lines["accepted"].startswith("1: 33%, 2: 33% ")
    assert lines["seed"] == "7"
