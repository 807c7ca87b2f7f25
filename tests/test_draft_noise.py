"""The drafter's copy of the noise of draws, against the draws' own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.decoding import sampling
from runtime.decoding.draft_noise import DraftNoise, rounded_noise
from runtime.decoding.noise import products
from runtime.decoding.sampling import Sampler
from runtime.decoding.settings import Settings
from runtime.engines.devices import Host
from tests.accelerator import Lazy
from tests.conftest import examples

DEPTH, VOCABULARY = 4, 300


@given(st.integers(0, 2**63 - 1), st.integers(0, 1 << 24), st.integers(1, 200_000))
@examples(60)
def test_it_is_the_noise_of_draws(seed: int, position: int, count: int) -> None:
    ids = np.arange(count)
    exact = sampling.noise(seed, position, ids)
    rounded = rounded_noise(seed, position, products(ids))
    assert rounded.dtype == np.float32
    # Digits are few only where noise is so large or so small that one token in a million has it.
    usual = (exact < 13) & (exact > -2.2)
    np.testing.assert_allclose(rounded[usual], exact[usual], atol=2e-3)
    np.testing.assert_allclose(rounded, exact, atol=0.5)


def rows_of(sampler: Sampler, ids: np.ndarray, position: int) -> np.ndarray:
    """What every level of a tree should get, from the sampler's noise and settings."""
    s, rows = sampler.settings, []
    for level in range(DEPTH):
        most = {0.9: 1 - np.log(0.1), 0.5: 1 - np.log(0.5)}.get(s.top_p, np.inf)  # docs/decoding.md
        row = s.temperature * np.minimum(sampling.noise(sampler.seed, position + level, ids), most)
        for token, bias in s.logit_bias.items():
            row[ids == token] += bias
        row[np.isin(ids, list(s.banned))] = -np.inf
        rows.append(row)
    return np.stack(rows)


@pytest.mark.parametrize("on", ["host", "device"])
@given(
    st.lists(st.integers(-2, DEPTH + 2), max_size=8),
    st.sampled_from(
        [{}, {"logit_bias": {3: 2.0, 290: -7.5}}, {"banned": [5, 6, 7]}, {"top_p": 0.9}, {"top_p": 0.5, "top_k": 40}]
    ),
    st.sampled_from([0.0, 0.7, 1.0]),
)
@examples(40)
def test_rows_follow_the_text(on: str, steps: list[int], more: dict[str, object], temperature: float) -> None:
    """Wherever the next tree begins, and whichever text it is of."""
    device = Host() if on == "host" else Lazy()
    ids = np.random.default_rng(1).permutation(VOCABULARY)[:200]
    rows = device.zeros((DEPTH, len(ids)), np.float32)
    noise, position = DraftNoise(rows, device, ids), 20
    samplers = [
        Sampler(Settings(9, temperature=temperature, **more), seed, [1, 2], VOCABULARY, frozenset(), None)
        for seed in (7, 8)
    ]
    for i, step in enumerate(steps):
        sampler = samplers[i // 3 % 2]
        position = max(3, position + step)
        noise.put(sampler, position)
        expected = rows_of(sampler, ids, position)
        found = device.read(rows)
        np.testing.assert_allclose(found[np.isfinite(expected)], expected[np.isfinite(expected)], atol=0.05)
        assert (found[~np.isfinite(expected)] == -1e6).all()
        greedy = Sampler(Settings(9), 7, [1, 2], VOCABULARY, frozenset(), None)
        if i == 4:
            noise.put(greedy, position)
            assert not device.read(rows).any(), "greedy trees are those without noise"


@pytest.mark.parametrize("lossy", [{"tree": "fta"}, {"accept": "typical"}])
def test_trees_that_change_the_text_have_none(lossy: dict[str, str]) -> None:
    """Neither acceptance draws: a tree of draws would be another text's."""
    rows = np.ones((DEPTH, VOCABULARY), np.float32)
    noise = DraftNoise(rows, Host(), np.arange(VOCABULARY))
    drawn, changed = (
        Sampler(Settings(9, temperature=1.0, **more), 7, [1, 2], VOCABULARY, frozenset(), None)  # type: ignore[arg-type]
        for more in ({}, lossy)
    )
    noise.put(drawn, 3)
    assert rows.any()
    noise.put(changed, 3)
    assert not rows.any()


def test_penalties_and_the_earliest_end_are_known() -> None:
    settings = Settings(9, temperature=0.5, presence_penalty=1.0, frequency_penalty=0.5, min_new_tokens=3)
    sampler = Sampler(settings, 7, [1, 2], VOCABULARY, frozenset([9]), None)
    for token in (4, 4, 5):
        sampler.accept(token)
    ids = np.arange(VOCABULARY)
    rows = np.zeros((DEPTH, VOCABULARY), np.float32)
    noise = DraftNoise(rows, Host(), ids)
    noise.put(sampler, 3)  # as if it were behind two tokens
    drawn = 0.5 * np.stack([sampling.noise(7, 3 + level, ids) for level in range(DEPTH)])
    np.testing.assert_allclose((rows - drawn)[:, 4], -2.0, atol=0.01)
    np.testing.assert_allclose((rows - drawn)[:, 5], -1.5, atol=0.01)
    assert (rows[:, 9] < -1e5).tolist() == [True, True, False, False], "its index is position - 2"
