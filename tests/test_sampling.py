"""runtime.decoding.sampling against transformers' own processors, against loops, and against the distributions it
should draw from."""

from collections.abc import Callable, Sequence
from itertools import product
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from runtime.decoding.noise import noise
from runtime.decoding.sampling import Sampler, candidates
from runtime.decoding.settings import Settings
from runtime.errors import GumihoError

PROCESSING = ("logit_bias", "repetition_penalty", "no_repeat_ngram", "min_new_tokens", "banned")
FILTERS = ("top_k", "top_p", "min_p")


def sampler(
    settings: Settings,
    vocabulary: int,
    prompt: Sequence[int] = (0,),
    text: Sequence[int] = (),
    ends: Sequence[int] = (),
    matcher: Any = None,
    seed: int = 0,
) -> Sampler:
    """A sampler that has accepted a text."""
    made = Sampler(settings, seed, prompt, vocabulary, frozenset(ends), matcher)
    for token in text:
        made.accept(token)
    return made


@st.composite
def rows(draw: st.DrawFn, least: int = 5, most: int = 200) -> np.ndarray:
    """Logits float32 [V], peaked or flat, with and without ties and -inf."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = rng.normal(0, draw(st.sampled_from([0.0, 0.3, 3.0, 30.0])), draw(st.integers(least, most)))
    if draw(st.booleans()):
        row = row.round()
    if draw(st.booleans()):
        row[rng.random(len(row)) < 0.4] = -inf
        row[rng.integers(len(row))] = 0.0
    return row.astype(np.float32)


@st.composite
def texts(draw: st.DrawFn, vocabulary: int) -> tuple[list[int], list[int]]:
    """A prompt and the text behind it, of few different tokens, so that runs come again."""
    some = st.sampled_from(draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=4)))
    return draw(st.lists(some, min_size=1, max_size=25)), draw(st.lists(some, max_size=25))


def draw_settings(data: st.DataObject, steps: Sequence[str], vocabulary: int) -> dict[str, Any]:
    ids = st.integers(0, vocabulary - 1)
    drawn = {
        "logit_bias": st.dictionaries(ids, st.floats(-9, 9, width=32), min_size=1, max_size=8),
        "repetition_penalty": st.floats(0.5, 2.0).filter(lambda penalty: penalty != 1),
        "no_repeat_ngram": st.integers(1, 4),
        "min_new_tokens": st.integers(1, 40),
        "banned": st.lists(ids, min_size=1, max_size=vocabulary // 2),
        "top_k": st.integers(1, 220),
        "top_p": st.floats(0.01, 0.999),
        "min_p": st.one_of(st.floats(0.001, 1.0), st.just(1.0)),
    }
    return {step: data.draw(drawn[step], step) for step in steps}


def their_row(
    row: np.ndarray, asked: dict[str, Any], prompt: list[int], text: list[int], ends: list[int]
) -> np.ndarray:
    """What transformers' generate makes of a row before it looks at the temperature, in its order."""
    makers = {
        "logit_bias": lambda bias: hf.SequenceBiasLogitsProcessor({(token,): by for token, by in bias.items()}),
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram": hf.NoRepeatNGramLogitsProcessor,
        "min_new_tokens": lambda count: hf.MinNewTokensLengthLogitsProcessor(len(prompt), count, ends),
        "banned": hf.SuppressTokensLogitsProcessor,
    }
    steps = LogitsProcessorList([makers[step](asked[step]) for step in PROCESSING if step in asked])
    return steps(torch.tensor([prompt + text]), torch.from_numpy(row)[None]).numpy()[0]


def their_logits(row: np.ndarray, temperature: float, asked: dict[str, Any], slack: float = 0.0) -> torch.Tensor:
    """float64 [V] behind transformers' warpers in its order. slack: added to the shares that top-p and min-p keep."""
    steps = LogitsProcessorList([hf.TemperatureLogitsWarper(temperature)])
    if "top_k" in asked:
        steps.append(hf.TopKLogitsWarper(asked["top_k"]))
    if "top_p" in asked:
        steps.append(hf.TopPLogitsWarper(asked["top_p"] + slack))
    if "min_p" in asked:
        steps.append(hf.MinPLogitsWarper(min(1.0, asked["min_p"] * (1 - slack))))
    return steps(torch.zeros((1, 0), dtype=torch.int64), torch.from_numpy(row).double()[None])[0]


@pytest.mark.parametrize("steps", [*((step,) for step in PROCESSING), PROCESSING], ids="+".join)
@given(st.data(), rows())
def test_processed_is_transformers(steps: tuple[str, ...], data: st.DataObject, row: np.ndarray) -> None:
    """Each step alone and all of them in a row leave the same logits and the same -inf. The given row is left as it
    is."""
    prompt, text = data.draw(texts(len(row)))
    ends = data.draw(st.lists(st.integers(0, len(row) - 1), min_size=1, max_size=3))
    asked, before = draw_settings(data, steps, len(row)), row.copy()
    ours = sampler(Settings(**asked), len(row), prompt, text, ends).processed(row)
    np.testing.assert_allclose(ours, their_row(row, asked, prompt, text, ends), rtol=1e-6)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(row, before)


@given(st.data(), rows(), st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_equal_a_loop(
    data: st.DataObject, row: np.ndarray, presence: float, frequency: float
) -> None:
    """Of the text alone, not of the prompt; once and as often as a token is there."""
    prompt, text = data.draw(texts(len(row)))
    expected = [
        value - (presence * (token in text) + frequency * text.count(token)) for token, value in enumerate(row.tolist())
    ]
    asked = Settings(presence_penalty=presence, frequency_penalty=frequency)
    np.testing.assert_allclose(sampler(asked, len(row), prompt, text).processed(row), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "steps", [(), *((step,) for step in FILTERS), FILTERS], ids=lambda steps: "+".join(steps) or "none"
)
@given(st.data(), st.one_of(rows(), rows(600, 5000)), st.sampled_from([0.01, 0.5, 0.7, 1.0, 1.3, 5.0]))
def test_kept_is_transformers(steps: tuple[str, ...], data: st.DataObject, row: np.ndarray, temperature: float) -> None:
    """As many tokens stay, and they are the likeliest, of equal ones the lower ids; ties at the edge of top-k all stay.

    What lies within rounding of the edge of top-p or min-p may stay or go.
    """
    asked = draw_settings(data, steps, len(row))
    defaults = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    ids, values = candidates(row, temperature, **{**defaults, **asked})
    fewest, most = (int((their_logits(row, temperature, asked, slack) > -inf).sum()) for slack in (-1e-9, 1e-9))
    assert fewest <= len(ids) <= most
    likeliest = np.argsort(-row, kind="stable")[: len(ids)]
    np.testing.assert_array_equal(ids, np.sort(likeliest))
    np.testing.assert_allclose(values, (row[ids].astype(np.float64) - row.max()) / temperature, rtol=1e-9, atol=1e-9)


def test_a_temperature_near_zero_draws_the_likeliest() -> None:
    """Logits over the temperature may be beyond the largest float; what they are apart is what counts."""
    row = np.array([1, 30, 29, 30, -inf], np.float32)
    for temperature in (1e-30, 1e-308, 5e-324):
        settings = Settings(temperature=temperature, top_k=4, top_p=0.99, min_p=0.01)
        assert {sampler(settings, 5, seed=seed).choose(row) for seed in range(40)} == {1, 3}


@given(st.data(), rows(), st.integers(0, 2**64 - 1), st.sampled_from([0.1, 1.0, 2.0]))
def test_choice_is_the_argmax_over_all_that_is_kept(
    data: st.DataObject, row: np.ndarray, seed: int, temperature: float
) -> None:
    """No token that could win is passed over, and the noise is that of the seed and of the place in prompt and text."""
    prompt, text = data.draw(texts(len(row)))
    asked = draw_settings(data, data.draw(st.sets(st.sampled_from(FILTERS))), len(row))
    ids, values = candidates(row, temperature, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **asked})
    expected = ids[(values + noise(seed, len(prompt) + len(text), ids)).argmax()]
    made = sampler(Settings(temperature=temperature, **asked), len(row), prompt, text, seed=seed)
    assert made.choose(row) == expected == made.choose(row)


@given(st.data(), rows(), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 1000))
def test_margin_is_what_a_logit_lacks(data: st.DataObject, row: np.ndarray, temperature: float, seed: int) -> None:
    """With so much more the token is chosen and with less it is not; no more is enough for one that is banned."""
    token, banned = data.draw(st.permutations(range(len(row))))[:2]
    asked = draw_settings(data, data.draw(st.sets(st.sampled_from(FILTERS))), len(row))
    made = sampler(Settings(temperature=temperature, banned=[banned], **asked), len(row), seed=seed)
    assume(row[token] > -inf)
    margin = made.margin(row, token)
    more, less = row.copy(), row.copy()
    more[token] += margin + 1e-4
    less[token] += margin - 1e-4
    assert made.choose(more) == token
    assert margin < 1e-4 or made.choose(less) != token
    assert made.margin(row, banned) == inf


class FakeMatcher:
    """Allows the odd tokens alone."""

    def __init__(self) -> None:
        self.saw: list[np.ndarray] = []
        self.accepted: list[int] = []

    def mask(self, row: np.ndarray) -> None:
        self.saw.append(row.copy())
        row[::2] = -inf

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@given(st.data(), rows())
def test_processors_then_grammar_then_forced(data: st.DataObject, row: np.ndarray) -> None:
    """The caller's processors get the ids and the row behind every penalty, in turn; the grammar masks what they leave;
    a forced token that fits it is chosen whatever else was said before, and only at its place."""
    prompt, text = data.draw(texts(len(row)))
    asked = {**draw_settings(data, PROCESSING, len(row)), "presence_penalty": 0.5, "frequency_penalty": 0.25}
    calls: list[tuple[str, list[int], np.ndarray]] = []

    def first(ids: Sequence[int], scores: np.ndarray) -> None:
        calls.append(("first", list(ids), scores.copy()))
        scores[0] += 1

    def second(ids: Sequence[int], scores: np.ndarray) -> None:
        calls.append(("second", list(ids), scores.copy()))
        scores[:] = np.arange(len(scores))

    plain = sampler(Settings(**asked), len(row), prompt, text, [2]).processed(row)
    matcher, at, token = FakeMatcher(), data.draw(st.integers(0, 3)), data.draw(st.integers(0, len(row) - 1))
    made = Settings(**asked, processors=[first, second], forced={len(text) + at: token})
    guided = sampler(made, len(row), prompt, text, [2], matcher)
    assert matcher.accepted == text
    if at == 0 and token % 2 == 0:
        with pytest.raises(
            GumihoError, match=f"token {token}, forced at index {len(text)}, is not allowed by the grammar"
        ):
            guided.processed(row)
        return
    out = guided.processed(row)
    assert [(name, ids) for name, ids, _ in calls] == [("first", prompt + text), ("second", prompt + text)]
    np.testing.assert_array_equal(calls[0][2], plain)
    plain[0] += 1
    np.testing.assert_array_equal(calls[1][2], plain)
    np.testing.assert_array_equal(matcher.saw[0], np.arange(len(row)))
    expected = [i == token if at == 0 else i % 2 == 1 for i in range(len(row))]
    np.testing.assert_array_equal(out > -inf, expected)
    assert guided.choose(row) == (token if at == 0 else max(i for i in range(len(row)) if i % 2))


def test_idle_says_that_the_largest_logit_is_the_choice() -> None:
    """Nothing that bears on the choice is idle; filters of a draw that does not take place are. Places count from the
    text."""
    for asked in (
        {},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"seed": 3},
        {"stop": ["x"]},
        {"stop_token_ids": [1]},
    ):
        assert sampler(Settings(**asked), 8, [1, 2], [3]).idle
    for asked in (
        {"temperature": 0.1},
        {"logit_bias": {1: 0.1}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"no_repeat_ngram": 2},
        {"banned": [1]},
        {"processors": [lambda ids, row: None]},
    ):
        assert not sampler(Settings(**asked), 8, [1, 2], [3]).idle
    assert not sampler(Settings(), 8, matcher=FakeMatcher()).idle
    made, idle = sampler(Settings(forced={1: 5, 3: 6}, min_new_tokens=1), 8, [1, 2]), []
    for token in range(5):
        idle.append(made.idle)
        made.accept(token)
    assert idle == [False, False, True, False, True]


@given(st.data(), rows())
def test_choice_of_an_idle_sampler(data: st.DataObject, row: np.ndarray) -> None:
    """Whatever the settings: if the sampler is idle, its choice is the largest logit, of equal ones the lowest id."""
    asked = draw_settings(data, data.draw(st.sets(st.sampled_from((*FILTERS, "min_new_tokens")))), len(row))
    made = sampler(Settings(**asked), len(row), *data.draw(texts(len(row))), [1])
    assume(made.idle)
    assert made.choose(row) == row.tolist().index(row.max())


# The draws themselves.


def p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """How likely counts are to lie as far from those expected (chi-squared test); the rare ones are put together."""
    rare = expected < 10
    seen, wanted = (np.append(counts[~rare], counts[rare].sum()) for counts in (observed, expected))
    x, freedom = ((seen - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum(), len(wanted) - 1 - (not rare.any())
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(x / 2).double()))


SETTINGS: list[tuple[float, dict[str, float], dict[str, Any]]] = [
    (1.0, {}, {}),
    (0.6, {}, {"repetition_penalty": 1.3, "banned": [4]}),
    (1.5, {"top_k": 6}, {}),
    (1.0, {"top_p": 0.8}, {}),
    (1.2, {"min_p": 0.08}, {"logit_bias": {3: 2.0, 17: 1.5}}),
    (0.9, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}, {"min_new_tokens": 10**6}),
]


@pytest.mark.parametrize(
    ("along", "temperature", "filters", "penalties"),
    [
        pytest.param(
            along, *settings, marks=() if along == "positions" or settings is SETTINGS[-1] else pytest.mark.exhaustive
        )
        for along in ("positions", "seeds")
        for settings in SETTINGS
    ],
)
def test_draws_follow_the_softmax(along: str, temperature: float, filters: dict, penalties: dict) -> None:
    """Thousands of draws, of one seed along a text or of many seeds at one place, against the softmax that transformers
    draws from; what it leaves out is never drawn."""
    vocabulary, draws, prompt = 40, 8000, [0, 3, 5, 7]
    row = np.random.default_rng(5).normal(0, 2, vocabulary).astype(np.float32)
    row[11] = -inf
    ends = [int(row.argmax())]
    exact = torch.softmax(their_logits(their_row(row, penalties, prompt, [], ends), temperature, filters), 0).numpy()
    settings, counts = Settings(temperature=temperature, **filters, **penalties), np.zeros(vocabulary)
    if along == "seeds":
        for seed in range(draws):
            counts[sampler(settings, vocabulary, prompt, ends=ends, seed=seed).choose(row)] += 1
    else:
        made = sampler(settings, vocabulary, prompt, ends=ends, seed=77)
        for i in range(draws):
            counts[made.choose(row)] += 1
            made.accept(prompt[i % 4])  # tokens that the repetition penalty has already seen
    assert not counts[exact == 0].any()
    assert p_value(counts[exact > 0], draws * exact[exact > 0]) > 1e-5


def test_near_rows_nearly_always_draw_the_same() -> None:
    """Two rows whose distributions are d apart (total variation) agree at least as often as (1 - d) / (1 + d), which is
    what Gumbel noise in common promises; rows drawn from apart would agree a few times in a hundred."""
    rng = np.random.default_rng(3)
    row = rng.normal(0, 1, 100).astype(np.float32)
    for scale in (1e-4, 0.05, 0.3):
        other = (row + rng.normal(0, scale, 100)).astype(np.float32)
        d = float(
            np.abs(np.subtract(*(torch.softmax(torch.from_numpy(r).double(), 0).numpy() for r in (row, other)))).sum()
            / 2
        )
        made = [sampler(Settings(temperature=1.0), 100, seed=seed) for seed in range(3000)]
        same = np.mean([s.choose(row) == s.choose(other) for s in made])
        least = (1 - d) / (1 + d)
        assert same >= least - 4 * np.sqrt(least * (1 - least) / 3000)


MASK, GOLDEN, MIX = (1 << 64) - 1, 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def split_mix(state: int) -> int:
    """SplitMix64's next output, in Python's integers, from a state that has already been stepped."""
    for shift, by in zip((30, 27), MIX, strict=True):
        state = ((state ^ (state >> shift)) * by) & MASK
    return state ^ (state >> 31)


def unsplit_mix(out: int) -> int:
    """The state that gives an output."""

    def unshift(x: int, shift: int) -> int:
        y = x
        for _ in range(64 // shift):
            y = x ^ (y >> shift)
        return y

    out = unshift(out, 31) * pow(MIX[1], -1, 1 << 64) & MASK
    out = unshift(out, 27) * pow(MIX[0], -1, 1 << 64) & MASK
    return unshift(out, 30)


def test_the_generator_is_split_mix() -> None:
    """The functions above give the published first outputs of the seed 1234567, so they can stand in judgement
    below."""
    states = [(1234567 + i * GOLDEN) & MASK for i in (1, 2, 3, 4, 5)]
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [split_mix(state) for state in states] == outputs
    assert [unsplit_mix(out) for out in outputs] == states


def stream(seed: int, position: int) -> int:
    """The state from which a position's tokens take their outputs."""
    return split_mix((split_mix((seed + GOLDEN) & MASK) + position * GOLDEN) & MASK)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.lists(st.integers(0, 2**31), min_size=1, max_size=9))
def test_noise_depends_on_seed_position_and_id_alone(seed: int, position: int, ids: list[int]) -> None:
    """Each token's noise is what integers give for it by itself, whichever tokens are asked for along with it: a seed
    means the same text wherever and whenever it is used."""
    ours = noise(seed, position, np.array(ids))
    for token, value in zip(ids, ours.tolist(), strict=True):
        uniform = split_mix((stream(seed, position) + (token + 1) * GOLDEN) & MASK) / 2**64
        assert np.exp(-np.exp(-value)) == pytest.approx(uniform, abs=1e-15)
        assert noise(seed, position, np.array([token]))[0] == pytest.approx(value, rel=1e-12)


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**20),
    st.sampled_from([1, 7, 3000, 2**14, 40_000]),
    st.sampled_from([1e-300, 1e-6, 0.05, 0.7, 1.0, 5.0, 1e9]),
    st.sampled_from([0.0, 1e-7, 1.0, 8.0, 1e30]),
)
def test_a_draw_is_the_best_of_all_tokens(
    seed: int, position: int, size: int, temperature: float, spread: float
) -> None:
    """Of which only a few are looked at: every token's noise is added to its logit here."""
    rng = np.random.default_rng(seed)
    row = (spread * np.round(rng.normal(0, 1, size), int(rng.integers(0, 3)))).astype(np.float32)
    row[rng.random(size) < 0.1] = -inf
    row[rng.integers(size)] = row.max() if row.max() > -inf else 0.0
    chosen = Sampler(Settings(9, temperature=temperature), seed, [0] * position, size, frozenset(), None).choose(row)
    with np.errstate(over="ignore"):
        values = (row.astype(np.float64) - row.max()) / temperature + noise(seed, position, np.arange(size))
    assert chosen == values.argmax()


def test_noise_is_finite_at_its_ends() -> None:
    """The ids whose outputs are the least and the largest there are."""
    seed, position = 5, 9
    ends = [(unsplit_mix(out) - stream(seed, position)) * pow(GOLDEN, -1, 1 << 64) - 1 & MASK for out in (0, MASK)]
    least, largest = noise(seed, position, np.array(ends, np.uint64)).tolist()
    assert -4 < least < 0 < 36 < largest < inf


def kolmogorov(values: np.ndarray) -> float:
    """The distance of values' distribution from Gumbel's, times the root of how many; above 2.5 once in 100,000
    times."""
    cdf = np.sort(np.exp(-np.exp(-values)))
    steps = np.arange(len(cdf) + 1) / len(cdf)
    return float(max((cdf - steps[:-1]).max(), (steps[1:] - cdf).max()) * np.sqrt(len(cdf)))


def test_noise_is_gumbel_along_every_axis() -> None:
    """Over ids, over positions and over seeds, from small and from large ones."""
    one = np.array([7])
    for base in (0, 10**6, 2**40 + 3):
        assert kolmogorov(noise(base, 3, np.arange(128256))) < 2.5
        assert kolmogorov(np.concatenate([noise(1, base + i, one) for i in range(10000)])) < 2.5
        assert kolmogorov(np.concatenate([noise(base + i, 1, one) for i in range(10000)])) < 2.5


def test_neighbouring_noise_is_independent() -> None:
    """Neither the next seed, position or id nor any mixture of steps, such as the next position's previous id, tells of
    a token's noise: pairs fill a grid evenly, and do not correlate."""
    shape, cells = (40, 40, 64), 8
    values = np.stack([[noise(seed, position, np.arange(64)) for position in range(40)] for seed in range(40)])
    uniform = np.exp(-np.exp(-values))
    bins = np.minimum((uniform * cells).astype(int), cells - 1)
    for step in product((-1, 0, 1), repeat=3):
        if step <= (0, 0, 0):
            continue
        here = tuple(slice(max(0, -by), size - max(0, by)) for by, size in zip(step, shape, strict=True))
        there = tuple(slice(max(0, by), size + min(0, by)) for by, size in zip(step, shape, strict=True))
        counts = np.bincount((bins[here] * cells + bins[there]).ravel(), minlength=cells**2)
        assert p_value(counts, np.full(cells**2, counts.sum() / cells**2)) > 1e-5, step
        assert abs(np.corrcoef(uniform[here].ravel(), uniform[there].ravel())[0, 1]) < 4.5 / np.sqrt(counts.sum()), step


def peaked(rng: np.random.Generator) -> np.ndarray:
    """As a target's mostly are: some hundred tokens far above the rest."""
    row = rng.normal(0, 1.5, 128256)
    row[rng.choice(len(row), 300, replace=False)] += 12
    return row


@pytest.mark.parametrize(
    ("row", "temperature", "filters"),
    [
        *(
            (peaked, 0.8, filters)
            for filters in ({"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}, {})
        ),
        (peaked, 0.01, {"top_p": 0.9}),  # next to all weigh nothing, and are equal
        (lambda rng: np.maximum(peaked(rng), 6.0), 0.8, {"top_p": 0.9}),
        (lambda rng: rng.normal(0, 1, 128256), 0.3, {"top_p": 0.3}),
    ],
)
def test_a_row_is_not_sorted(
    row: Callable[[np.random.Generator], np.ndarray], temperature: float, filters: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 128k logits no more than some hundreds are put in order, or ten times those that top-p keeps."""
    logits, sizes = row(np.random.default_rng(1)).astype(np.float32), [0]

    def spy(name: str) -> None:
        real = getattr(np, name)

        def spied(a: Any, *args: Any, **kwargs: Any) -> Any:
            sizes.append(np.size(a))
            return real(a, *args, **kwargs)

        monkeypatch.setattr(f"runtime.decoding.sampling.np.{name}", spied)

    few = len(candidates(logits, temperature, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters})[0])
    for name in ("sort", "argsort", "lexsort", "unique", "sort_complex"):
        spy(name)
    sampler(Settings(temperature=temperature, **filters), len(logits)).choose(logits)
    assert ("top_p" in filters) == (sum(sizes) > 0)
    assert sum(sizes) <= 1100 + 10 * few * ("top_p" in filters)
    assert max(sizes) < len(logits) / 8


# What is refused.


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((n, [-1, nan]) for n in ("max_new_tokens", "min_new_tokens", "no_repeat_ngram", "top_k", "max_seconds")),
        ("temperature", [-0.1, nan, inf]),
        ("top_p", [0, -0.5, 1.1, nan]),
        ("min_p", [-0.5, -1, 1.1, nan]),
        ("repetition_penalty", [0, -1.2, nan, inf]),
        *((n, [nan, inf, -inf]) for n in ("presence_penalty", "frequency_penalty")),
        ("logit_bias", [{3: nan}, {1: 0.5, 2: inf}]),
        ("seed", [-1, 2**64]),
        ("stop", ["", [""], ["a", ""]]),
        ("tree", ["", "full", "typical"]),
        ("accept", ["", "greedy", "fta"]),
    ],
)
def test_settings_that_mean_nothing(name: str, values: list) -> None:
    """Each is refused in words that name it."""
    for value in values:
        with pytest.raises(GumihoError, match=rf"^{name} "):
            Settings(**{name: value})


def test_settings_at_their_limits() -> None:
    """The least and the largest that mean something, together."""
    Settings(
        max_new_tokens=0,
        max_seconds=0,
        temperature=0,
        top_k=0,
        top_p=1,
        min_p=0,
        repetition_penalty=1e-3,
        seed=2**64 - 1,
        logit_bias={1: -inf},
        presence_penalty=-2,
    )
    Settings(top_p=1e-9, min_p=1, seed=0, tree="fta", max_seconds=inf)


@pytest.mark.parametrize("token", [-1, 8, 10**9])
def test_ids_outside_the_vocabulary(token: int) -> None:
    """Refused where the user names them, and let be where the target's own ends of text are concerned."""
    asked = {
        "banned": [1, token],
        "logit_bias": {1: 1.0, token: 1.0},
        "forced": {0: token},
        "stop_token_ids": [1, token],
    }
    for name, value in asked.items():
        with pytest.raises(GumihoError, match=f"^{name} names token id {token},"):
            sampler(Settings(**{name: value}), 8)
    row = np.arange(8, dtype=np.float32)
    np.testing.assert_array_equal(
        sampler(Settings(min_new_tokens=5), 8, ends=[2, token]).processed(row) > -inf, row != 2
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraints_that_leave_nothing(temperature: float) -> None:
    """Everything banned, by whatever name, ends in an error that says where; one token left is chosen, however
    unlikely."""
    everything, row = list(range(8)), np.zeros(8, np.float32)
    for asked in (
        {"banned": everything},
        {"logit_bias": dict.fromkeys(everything, -inf)},
        {"no_repeat_ngram": 1},
        {"banned": everything[:-1], "min_new_tokens": 9},
        {"processors": [lambda ids, scores: scores.fill(-inf)]},
    ):
        made = sampler(Settings(temperature=temperature, top_k=3, top_p=0.5, **asked), 8, everything, [1, 2], [7])
        with pytest.raises(GumihoError, match="^no token is allowed at position 10"):
            made.choose(row)
    assert sampler(Settings(temperature=temperature, banned=everything[:-1]), 8).choose(row - 60 * np.eye(8)[7]) == 7


@pytest.mark.parametrize("value", [nan, inf])
def test_logits_that_cannot_be_drawn_from(value: float) -> None:
    """What a processor may leave by mistake is no distribution, and is not drawn from."""

    def process(ids: Sequence[int], scores: np.ndarray) -> None:
        scores[3] = value

    with pytest.raises(GumihoError, match=f"a logit at position 1 is {value}"):
        sampler(Settings(temperature=1.0, processors=[process]), 8).choose(np.zeros(8, np.float32))
