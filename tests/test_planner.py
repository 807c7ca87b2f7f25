"""Plans: the rows that pay by brute force, drafting that rests and returns, and texts that no plan changes."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from runtime import GumihoError, Model, load
from runtime.backends.onnxruntime import Cpu
from runtime.bundle.reader import Bundle
from runtime.decoding.decoder import Decoder
from runtime.decoding.planner import Planner
from runtime.decoding.prices import FILE, Costs, Longer, Prices, sizes
from runtime.engines.pass_times import measure
from runtime.engines.store import find_engines
from runtime.errors import DamageError
from tests.conftest import DEMO, EVERY_BACKEND, MakeBundle, examples
from tests.end_to_end.test_forms import opened

PROMPTS = ("def main(argv=None):\n", "class Reader:\n    def __init__(self", "import os\n")


class Any:
    """In a planner's place: drafts where it is told to, and verifies so many rows, or tokens instead that are told by
    how many were emitted."""

    def __init__(
        self,
        drafts: Callable[[int], bool],
        rows: Callable[[int], int],
        lookup: Callable[[int], Sequence[int]] = lambda i: (),
    ) -> None:
        self._drafts, self._rows, self._lookup, self.cycles, self.steps, self._emitted = drafts, rows, lookup, 0, 0, 0
        self.plain_pass_due = False

    def begin(self, prompt: Sequence[int]) -> None:
        self._emitted = 0

    def lookup(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        self._emitted += len(tokens)
        return self._lookup(self._emitted)[:most]

    @property
    def drafting(self) -> bool:
        return self._drafts(self.cycles + self.steps)

    def choose_rows(self, scores: np.ndarray, depths: np.ndarray) -> int:
        return self._rows(self.cycles)

    def behind(self, positions: int, drafter: int) -> None:
        pass

    def prompt_read(self, elapsed: int) -> None:
        assert elapsed > 0

    def drafted(self, *_: object) -> None:
        self.cycles += 1

    def decoded(self, *_: object) -> None:
        self.steps += 1


def ids(model: Model, prompt: str | list[int], count: int, **more: object) -> list[int]:
    generation = model.generate(prompt, count, **more)  # type: ignore[arg-type]
    list(generation.cycles())
    return generation.ids


@cache
def plain(model: Model, prompt: str, count: int, **more: float) -> list[int]:
    """What plain decoding gives."""
    return ids(model, prompt, count, speculate=False, **more)


@pytest.fixture(scope="module")
def model(demo_bundle: Path) -> Model:
    return load(demo_bundle, threads=1)


@examples(60)
@given(
    st.lists(st.booleans(), min_size=1, max_size=12),
    st.lists(st.integers(1, 8), min_size=1, max_size=7),
    st.integers(0, 2),
    st.sampled_from([{}, {"temperature": 1.0, "seed": 9}]),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
)
def test_no_plan_changes_a_text(
    model: Model,
    drafts: list[bool],
    rows: list[int],
    prompt: int,
    asked: dict[str, float],
    found: list[tuple[int, int]],
) -> None:
    """Whenever drafting rests and returns, and whatever is verified, be it right, wrong, or wrong from some token
    on."""
    wanted = plain(model, PROMPTS[prompt], 70, **asked)

    def lookup(emitted: int) -> list[int]:
        count, right = found[emitted % len(found)]
        return [token if i < right else token ^ 1 for i, token in enumerate(wanted[emitted : emitted + count])]

    plan = Any(lambda i: drafts[i % len(drafts)], lambda i: rows[i % len(rows)], lookup)
    model.decoder.planners = [plan] * 2  # type: ignore[assignment]
    assert ids(model, PROMPTS[prompt], 70, **asked) == wanted
    assert plan.cycles + plan.steps > 0
    model.decoder.planners = [None] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "form", ["migraphx", *(pytest.param(form, marks=pytest.mark.exhaustive) for form in ("tensorrt", "cuda"))]
)
def test_no_plan_changes_a_text_on_accelerators(make_bundle: MakeBundle, form: str) -> None:
    with opened(make_bundle(DEMO, *EVERY_BACKEND), form, lazy=True) as model:
        for prompt in PROMPTS:
            wanted = ids(model, prompt, 90, speculate=False)

            def lookup(emitted: int, wanted: list[int] = wanted) -> list[int]:
                """Every other time what follows, or that with a mistake behind four tokens."""
                count, mistaken = emitted % 2 * 7, emitted % 3 > 0
                return [token ^ (mistaken and i > 3) for i, token in enumerate(wanted[emitted : emitted + count])]

            for drafts in (lambda i: i % 3 == 0, lambda i: i > 60, lambda i: i < 5):
                model.decoder.planners = [Any(drafts, lambda i: 8, lookup)] * 2  # type: ignore[assignment]
                assert ids(model, prompt, 90) == wanted
            model.decoder.planners = [None] * 2


def test_what_the_drafter_puts_off_it_reads(model: Model) -> None:
    """After few plain tokens its cache is what it would have been, so the next tree is the same; after many it lacks a
    piece."""
    prompt, count = PROMPTS[0], 25
    model.decoder.planners = [Any(lambda i: False, lambda i: 8)] * 2  # type: ignore[assignment]
    text = [*model.encode(prompt), *ids(model, prompt, count)]
    decoder = model.decoder
    decoder.catch_up()
    length = decoder.draft.length
    found = decoder.draft.cache.rows(length)
    assert decoder.history.positions.tolist() == list(range(len(text) - 2))
    decoder.planners = [None] * 2
    session = model.session()
    session.generate(text, 1)
    list(session._turn.cycles())  # type: ignore[union-attr]
    np.testing.assert_allclose(decoder.draft.cache.rows(length), found, rtol=1e-4, atol=1e-5)

    # The same text, most of it verified at once: more rows are accepted than a draft reads.
    emitted = text[len(model.encode(prompt)) :]
    decoder.planners = [Any(lambda i: False, lambda i: 8, lambda i: emitted[i : i + 7])] * 2  # type: ignore[assignment]
    assert ids(model, prompt, count) == emitted
    assert (decoder.planner.steps, len(decoder.history.accepted.rows)) == (3, 1)  # type: ignore[union-attr]
    decoder.catch_up()
    assert (decoder.history.positions.tolist(), decoder.history.pending) == (list(range(len(text) - 2)), [])
    np.testing.assert_allclose(decoder.draft.cache.rows(len(text) - 2), found, rtol=1e-4, atol=1e-5)

    decoder.planners = [Any(lambda i: False, lambda i: 8)] * 2  # type: ignore[assignment]
    begun = len(model.encode(prompt)) - 1
    ids(model, prompt, 100)
    decoder.catch_up()
    assert decoder.history.positions.tolist() == [*range(begun), *range(begun + 99 - 32, begun + 99)]
    decoder.planners = [None] * 2


def test_a_prompt_is_read_when_drafting_begins(model: Model) -> None:
    prompt = np.random.default_rng(0).integers(2, 2000, 100).tolist()
    decoder = model.decoder
    for begins, most in ((99, 50), (40, 50)):
        planner = Any(lambda i, begins=begins: i >= begins, lambda i: 8)  # type: ignore[misc]
        decoder.planners = [planner] * 2  # type: ignore[assignment]
        ids(model, prompt, most)
        positions = decoder.history.positions.tolist()
        assert positions[:99] == ([] if begins > most else list(range(99)))
        assert decoder.history.pending == ([*range(99), *range(99 + 49 - 32, 99 + 49)] if begins > most else [])
    decoder.planners = [None] * 2


def test_sessions_leave_out_what_was_left_out(model: Model) -> None:
    """A resumed turn has the target read nothing again for a drafter that lacks a piece of the text."""
    decoder, session = model.decoder, model.session()
    decoder.planners = [Any(lambda i: i >= 80, lambda i: 8)] * 2  # type: ignore[assignment]
    turn = session.generate(PROMPTS[0], 120)
    list(turn.cycles())
    decoder.planners = [None] * 2
    begun, more = len(model.encode(PROMPTS[0])) - 1, [*session.ids, 5, 6, 7]
    list((again := session.generate(more, 40)).cycles())
    assert again.stats.cached_tokens >= len(turn.prompt) + len(turn.ids) - 2
    held = decoder.history.positions.tolist()
    assert held == [*range(begun), *range(held[begun], held[-1] + 1)]
    assert held[begun] == begun + 80 - 32  # the first draft came after 80 tokens
    assert again.ids == ids(model, more, 40, speculate=False)


def costs(draft: float, row: float = 0.0, base: float = 1e6, rows: int = 8) -> Costs:
    return Costs({size: base + row * size for size in sizes(rows)}, draft, 0.0)


@given(st.integers(0, 10_000), st.floats(0, 1e6), st.floats(0, 3e5))
def test_rows_that_pay(seed: int, draft: float, row: float) -> None:
    """Of all sizes the one with the most expected tokens per time, the draft's included, or where plain decoding is
    faster, the one that loses least against it. At first more is expected than scores say, the more the deeper, but of
    no depth more than of the one before.
    """
    random = np.random.default_rng(seed)
    planner, scores = Planner(costs(draft, row), 4), np.sort(-random.exponential(2, 8))[::-1]
    scores[0] = 0.0
    depths = [0]
    while len(depths) < 8:
        depths.append(1 + random.choice([depth for depth in depths if depth < 4]))
    found = planner.choose_rows(scores, depths)
    expected = [1.0]
    for score, depth in zip(scores[1:], depths[1:], strict=True):
        above, beside = (sum(e for e, d in zip(expected, depths, strict=False) if d == depth - up) for up in (1, 0))
        expected.append(min(float(np.exp(score)) * 1.5**depth, above - beside))
    spent = {size: 1e6 + row * size for size in sizes(8)}
    paces = {size: sum(expected[:size]) / (spent[size] + draft) for size in spent}
    if max(paces.values()) > 1 / spent[1]:
        assert paces[found] == pytest.approx(max(paces.values()))
    else:
        saved = {size: sum(expected[:size]) - spent[size] / spent[1] for size in spent}
        assert saved[found] == pytest.approx(max(saved.values()))


def simulate(
    planner: Planner,
    cost: Costs,
    accepted: Callable[[], int],
    tokens: int,
    text: int = 400,
    score: float = -0.7,
    prompt: int = 0,
) -> tuple[float, int]:
    """Time per token of texts whose trees are accepted to a depth, and how many cycles drafted. score: of each row
    after the other. prompt: nanoseconds in which the drafter reads one, before its first draft behind it."""
    scores, depths = score * np.arange(8.0), np.array([0, 1, 2, 3, 4, 5, 6, 7])
    spent, made, drafted = 0.0, 0, 0
    while made < tokens:
        if made % text == 0:
            planner.begin()
            unread = prompt
        if planner.drafting and not planner.plain_pass_due:
            if unread:
                planner.prompt_read(unread)
                spent, unread = spent + unread, 0
            rows = planner.choose_rows(scores, depths)
            depth = min(rows - 1, accepted())
            planner.drafted(
                scores[:rows], depths[:rows], depth, (int(cost.draft), int(cost.target[rows]), int(cost.host))
            )
            spent, made, drafted = spent + cost.draft + cost.target[rows] + cost.host, made + depth + 1, drafted + 1
        else:
            planner.decoded(int(cost.target[1]))
            spent, made = spent + cost.target[1] + cost.host, made + 1
    return spent / made, drafted


def resting(cost: Costs) -> Planner:
    """One whose first draft was far too dear."""
    planner = Planner(cost, 7)
    for _ in range(100):
        planner.drafted([0.0, -9.0], [0, 1], 0, (10**9, int(cost.target[2]), 0))
    return planner


@given(st.integers(0, 7), st.floats(0, 1e6), st.floats(0, 6e5), st.booleans(), st.floats(0.1, 3))
def test_looked_up_tokens_that_pay(most: int, draft: float, row: float, drafts: bool, score: float) -> None:
    """Of all numbers of tokens the one with the most expected per time, or none where plain decoding or drafts promise
    more. At first every other repetition is expected to go on."""
    cost = costs(draft, row)
    planner, pace = Planner(cost, 7) if drafts else resting(cost), 1 / cost.target[1]
    if drafts:
        scores = [-score * depth for depth in range(8)]
        planner.choose_rows(scores, range(8))
        expected = np.cumsum(
            np.minimum.accumulate([min(1.0, float(np.exp(s)) * 1.5**depth) for depth, s in enumerate(scores)])
        )
        pace = max(pace, *(expected[rows - 1] / (spent + draft) for rows, spent in cost.target.items()))
    assert planner.drafting == drafts
    planner.begin([1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1])
    found = planner.lookup([2], most)
    paces = dict[int, float]()
    for rows, spent in cost.target.items():
        count = min(rows - 1, most, 6)  # a seventh is not worth a thought
        paces[count] = max(paces.get(count, 0), (2 - 0.5**count) / spent)
    if max(paces.values()) > pace * (1 + 1e-9):
        assert paces[len(found)] == pytest.approx(max(paces.values()))
        assert list(found) == list(range(3, 3 + len(found)))
    else:
        assert len(found) == 0


def looked_up(text: Sequence[int], planner: Planner, cost: Costs) -> float:
    """Time per token of a text that only lookups speed up."""
    planner.begin(text[:1])
    spent, made, emitted = 0.0, 1, [text[0]]
    while made < len(text) - 8:
        found = planner.lookup(emitted, 0 if planner.plain_pass_due else 7)
        alike = 0
        while alike < len(found) and found[alike] == text[made + alike]:
            alike += 1
        emitted = list(text[made : made + alike + 1])
        took = cost.target[next(rows for rows in sorted(cost.target) if rows > len(found))]
        planner.decoded(int(took), 1 + len(found))
        spent, made = spent + took, made + len(emitted)
    return spent / made


def test_a_text_that_repeats_itself_is_looked_up() -> None:
    cost = costs(draft=1e9, row=2e4)
    assert looked_up([*range(20)] * 40, resting(cost), cost) < 1.2 * cost.target[8] / 8  # of 40 rounds the first is new


def test_sessions_go_on_with_what_they_know() -> None:
    """The next turn's prompt begins with the text so far; another text is another one."""
    cost, text = costs(draft=1e9), [1, 2, 3, 4, 5, 6, 7]
    for prompt, expected in ((text, [3, 4]), ([9, 8], []), (text, [3, 4]), ([*text, 1, 2, 3], [4, 5])):
        planner = resting(cost)
        planner.begin(prompt[:5])
        planner.lookup(prompt[5:6], 2)
        planner.begin(prompt)
        assert list(planner.lookup([1, 2] if expected == [3, 4] else (), 2)) == expected


def test_a_lookup_pays_for_what_the_drafter_has_to_read_then() -> None:
    cost = costs(draft=1e5)
    planner = Planner(cost, 7)

    def found(late: int) -> int:
        planner.drafted([0.0, -0.1], [0, 1], 1, (10**5, int(cost.target[2]), 0), late)
        planner.choose_rows([0.0] + [-9.0] * 7, [0, *[1] * 7])
        planner.begin([1, 2, 3, 4, 5, 1])
        planner.drafted([0.0, -0.1], [0, 1], 1, (10**5, int(cost.target[2]), 0))
        return len(planner.lookup([2], 7))

    planner._lookups.hits = [0.9 * trials for trials in planner._lookups.trials]
    assert found(0) > 0
    planner.decoded(int(cost.target[1]))
    assert found(10**8) == 0


def test_repetitions_that_lead_nowhere_cost_two_percent() -> None:
    """Pairs come again all the time, and what follows is another one."""
    random = np.random.default_rng(0)
    pairs = [[2 * i, 2 * i + 1] for i in range(50)]
    text = [token for i in random.integers(0, 50, 1000) for token in pairs[i]]
    cost = costs(draft=1e9, row=5e4)
    assert looked_up(text, resting(cost), cost) < 1.02 * cost.target[1]


def test_drafting_that_never_pays_costs_two_percent() -> None:
    cost = costs(draft=3e5, row=1e5)
    pace, drafted = simulate(Planner(cost, 7), cost, lambda: 0, 4000)
    assert pace < 1.02 * cost.target[1]
    assert drafted > 0


@pytest.mark.parametrize(("draft", "row"), [(3e5, 1e5), (5e5, 3e5), (1e5, 3e4)])
def test_a_confident_drafter_that_is_never_right_costs_little(draft: float, row: float) -> None:
    """Whatever a draft and a row cost."""
    cost = costs(draft, row)
    for tokens, most in ((128, 1.05), (400, 1.03), (4000, 1.01)):
        pace, _ = simulate(Planner(cost, 7), cost, lambda: 0, tokens, score=-0.05)
        assert pace < most * cost.target[1]


def test_prompts_that_are_read_in_vain_cost_little() -> None:
    """A drafter that is never right, for texts of 64 tokens. It reads a prompt before the first draft behind it."""
    cost = costs(draft=4e5, row=1e5)
    pace, drafted = simulate(Planner(cost, 7), cost, lambda: 0, 60 * 64, text=64, prompt=2_500_000)
    assert drafted
    assert pace < 1.025 * (cost.target[1] + cost.host)


@pytest.mark.parametrize("draft", [4e6, 8e6])
def test_drafts_dearer_than_plain_passes_are_seldom_tried(draft: float) -> None:
    cost = costs(draft, row=1e5)
    assert simulate(Planner(cost, 7), cost, lambda: 0, 6000, text=64)[0] < 1.03 * cost.target[1]


def test_drafting_that_pays_is_kept() -> None:
    cost = costs(draft=2e5, row=2e4)
    pace, _ = simulate(Planner(cost, 7), cost, lambda: 4, 4000)
    assert pace < 1.02 * (cost.draft + cost.target[5]) / 5


def test_a_text_that_changes_changes_the_plan() -> None:
    cost = costs(draft=2e5, row=5e4)
    planner = Planner(cost, 7)
    assert simulate(planner, cost, lambda: 0, 1500)[0] > 0.98 * cost.target[1]
    pace, _ = simulate(planner, cost, lambda: 5, 3000)
    assert pace < 0.6 * cost.target[1]
    pace, _ = simulate(planner, cost, lambda: 0, 3000)
    assert pace < 1.05 * cost.target[1]


def test_pauses_of_the_machine_change_nothing() -> None:
    """Every tenth pass takes a hundred times as long."""
    cost, turn = costs(draft=2e5, row=2e4), iter(range(10**6))
    planner = Planner(cost, 7)
    scores, depths = -0.3 * np.arange(8.0), np.arange(8)
    for _ in range(300):
        assert planner.drafting
        rows, late = planner.choose_rows(scores, depths), 100 if next(turn) % 10 == 0 else 1
        planner.drafted(scores[:rows], depths[:rows], rows - 1, (200_000 * late, int(cost.target[rows]) * late, 0))
    assert rows == 8


@st.composite
def falsified(draw: st.DrawFn) -> tuple[Costs, Costs]:
    """Costs of a device, and what a costs.json says of them: all of it wrong by one factor, and each entry by one of
    its own."""
    row, draft = draw(st.floats(0, 3e5)), draw(st.floats(2e4, 5e5))
    growth = draw(
        st.sampled_from(
            [lambda n: row * n, lambda n: 8 * row * ((n - 1) / 7) ** 0.5, lambda n: row * ((n > 1) + 2 * (n > 4))]
        )
    )
    true = Costs({n: 1e6 + growth(n) for n in sizes(8)}, draft, draw(st.sampled_from([1e4, 1e5])))
    factors = [draw(st.sampled_from([1.0, 0.1, 20.0]) | st.floats(0.1, 20)) for _ in range(9)]
    if draw(st.booleans()):
        factors = factors[:1] * 9
    target = {n: cost * factor for factor, (n, cost) in zip(factors, true.target.items(), strict=False)}
    return true, Costs(target, draft * factors[7], true.host * factors[8])


# Dear drafts and rows, and stored prices that are all twenty times too high.
DEAREST = Costs({n: 1e6 + 2.4e6 * ((n - 1) / 7) ** 0.5 for n in sizes(8)}, 5e5, 1e4)
TOO_DEAR = Costs({n: 20 * cost for n, cost in DEAREST.target.items()}, 20 * DEAREST.draft, 20 * DEAREST.host)


@examples(150)
@example((DEAREST, TOO_DEAR), -0.3)
@given(falsified(), st.sampled_from([-0.05, -0.3, -0.7, -1.5]))
def test_no_stored_costs_let_a_drafter_that_is_never_right_cost_much(costs: tuple[Costs, Costs], score: float) -> None:
    true, stored = costs
    for tokens, most in ((128, 1.05), (400, 1.03)):
        pace, _ = simulate(Planner(stored, 7), true, lambda: 0, tokens, score=score)
        assert pace <= most * (true.target[1] + true.host)


@settings(max_examples=6)
@given(falsified(), st.sampled_from([-0.05, -0.7]))
def test_nor_over_a_long_text(costs: tuple[Costs, Costs], score: float) -> None:
    true, stored = costs
    assert simulate(Planner(stored, 7), true, lambda: 0, 4000, score=score)[0] <= 1.01 * (true.target[1] + true.host)


def right(score: float, seed: int) -> Callable[[], int]:
    """Accepts each row as often as its score says."""
    random = np.random.default_rng(seed)
    return lambda: int(random.geometric(1 - np.exp(score))) - 1


@pytest.mark.exhaustive
@given(falsified(), st.sampled_from([-0.1, -0.2, -0.4]))
def test_no_stored_costs_put_a_good_drafter_to_rest(costs: tuple[Costs, Costs], score: float) -> None:
    """Of the time that drafting saves with the device's own costs, at most a twentieth is lost: in the mean, since a
    single text's luck makes up to a ninth. Where little is saved, chance decides."""
    true, stored = costs
    plain = true.target[1] + true.host

    def pace(known: Costs) -> float:
        return float(
            np.mean([simulate(Planner(known, 7), true, right(score, seed), 400, score=score)[0] for seed in range(8)])
        )

    best = pace(true)
    assume(best < 0.6 * plain)
    assert pace(stored) - best <= 0.05 * (plain - best)


def test_a_plain_pass_dearer_than_more_rows_does_not_keep_a_random_drafter_drafting() -> None:
    """As a busy machine wrote it."""
    true = costs(draft=1.6e7, row=1e6, base=4.4e7)
    stored = Costs({**true.target, 1: 8.8e7, 2: 5.2e7}, true.draft, true.host)
    pace, drafted = simulate(Planner(stored, 7), true, lambda: 0, 128)
    assert pace < 1.05 * true.target[1]
    assert 0 < drafted < 10


def test_plain_passes_are_measured_while_drafting() -> None:
    """The first pass of a process, another one soon, and then one of a hundred."""
    cost, planner, at = costs(draft=1e5), Planner(costs(draft=1e5), 7), []
    for i in range(300):
        if planner.plain_pass_due:
            at.append(i)
            planner.decoded(int(cost.target[1]))
        elif i % 3:
            planner.drafted([0.0, -0.1], [0, 1], 1, (10**5, 10**6, 0))
        else:
            planner.decoded(10**6, rows=2)
    assert at == [0, 9, 106, 203]


def test_measured_passes_bound_the_others() -> None:
    """Fewer rows cost no more and more rows no less; between measured sizes, and behind them, a dear guess gives way to
    a line."""
    guesses = {1: 100.0, 2: 120.0, 3: 900.0, 4: 900.0, 6: 900.0, 8: 900.0}
    prices = Prices(guesses)
    assert prices.now == guesses
    assert prices.measured(4, 140)
    assert prices.now == pytest.approx(
        {1: 100, 2: 100 + 40 / 3, 3: 100 + 80 / 3, 4: 140, 6: 100 + 200 / 3, 8: 100 + 280 / 3}
    )
    prices.measured(1, 200)
    assert prices.now == pytest.approx(dict.fromkeys((1, 2, 3, 4, 6, 8), 140))
    for _ in range(5):
        prices.measured(4, 500)
    prices.measured(2, 300)
    assert prices.now == pytest.approx({1: 200, 2: 300, 3: 400, 4: 500, 6: 700, 8: 900})
    prices.measured(8, 450)
    assert prices.now == pytest.approx({1: 200, 2: 300, 3: 375, 4: 450, 6: 450, 8: 450})


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(0, 30), st.integers(1, 9)), max_size=60))
def test_prices_that_are_kept_are_those_reckoned_anew(measured: list[tuple[int, int, int]]) -> None:
    prices = Prices(dict.fromkeys((1, 2, 3, 4, 8), 5.0))
    for rows, times, elapsed in measured:
        for _ in range(times):
            prices.measured(rows, elapsed)
            kept = prices.now
            prices._update()
            assert prices.now == kept


def test_what_was_measured_long_ago_bounds_nothing() -> None:
    prices = Prices(dict.fromkeys((1, 4, 8), 100.0))
    for elapsed in (50, 50):
        prices.measured(8, elapsed)
    for _ in range(128):
        prices.measured(1, 200)
    assert prices.now == {1: 50, 4: 50, 8: 50}
    assert not prices.measured(1, 200)
    assert prices.now == {1: 200, 4: 200, 8: 200}
    assert prices.measured(8, 210)


def test_the_first_drafts_of_a_process_verify_neither_few_rows_nor_many() -> None:
    """Few would teach nothing of what rows cost if the stored costs are too dear, and many could take long."""
    scores, depths = -0.01 * np.arange(64.0), np.arange(64)
    for most, row in ((64, 0.0), (64, 1e9), (8, 1e9), (3, 1e9)):
        planner = Planner(costs(draft=1e5, row=row, rows=most), 63)
        planner.decoded(10**6)
        for _ in range(2):
            assert planner.choose_rows(scores[:most], depths[:most]) == min(4, most)
            planner.drafted(scores[:4], depths[:4], 3, (10**5, 10**6, 0))
        if most > 4:
            assert planner.choose_rows(scores[:most], depths[:most]) > 4


def test_a_slow_first_draft_does_not_put_drafting_to_rest() -> None:
    """Its weights may wait for the disk."""
    for slow in (5, 1000):
        cost = costs(draft=2e5, row=2e4)
        planner, scores, depths = Planner(cost, 7), -0.3 * np.arange(8.0), np.arange(8)
        planner.decoded(int(cost.target[1]))
        for at in range(6):
            rows = planner.choose_rows(scores, depths)
            late = 1 if at else slow
            planner.drafted(scores[:rows], depths[:rows], rows - 1, (200_000 * late, int(cost.target[rows]) * late, 0))
            assert planner.drafting
        assert rows == 8


def test_random_pauses_change_little() -> None:
    """One of ten passes takes up to a hundred times as long, whichever it is. A good drafter still drafts nearly
    always."""
    cost, plain = costs(draft=2e5, row=2e4), list[int]()
    scores, depths = -0.3 * np.arange(8.0), np.arange(8)
    for seed in range(60):
        random, planner = np.random.default_rng(seed), Planner(cost, 7)
        plain.append(0)
        for _ in range(400):
            late = random.uniform(2, 100) if random.random() < 0.1 else 1.0
            if planner.drafting and not planner.plain_pass_due:
                rows = planner.choose_rows(scores, depths)
                times = int(cost.draft * late), int(cost.target[rows] * late), 0
                planner.drafted(scores[:rows], depths[:rows], rows - 1, times)
            else:
                plain[-1] += 1
                planner.decoded(int(cost.target[1] * late))
    assert np.median(plain) < 8
    assert np.mean(plain) < 20
    assert max(plain) < 200


def test_costs_are_measured_kept_and_read(make_bundle: MakeBundle, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(make_bundle(DEMO, *EVERY_BACKEND), tmp_path / "bundle"))
    read, made = Bundle(bundle), Cpu("")
    folder = find_engines(read, made)
    assert Costs.load(folder) is None
    engines, device = made.open(read, folder)
    decoder, capacity = Decoder(read.manifest, read.manifest.form("cpu"), engines, device), read.manifest.capacity
    found = measure(decoder)
    decoder.close()
    assert tuple(found.target) == (1, 8, 2, 3, 4, 5, 6)
    assert all(cost > 0 for cost in (*found.target.values(), found.draft, found.host))
    assert [longer.context for longer in found.longer] == [n for n in (512, 2048) if n < capacity - 8] + [capacity - 8]
    assert all(
        list(longer.target) == [1, 8] and min(*longer.target.values(), longer.draft) > 0 for longer in found.longer
    )
    found.save(folder)
    assert Costs.load(folder) == found
    with load(bundle, "cpu", threads=1) as model:
        assert model.decoder.planner is not None
        wanted = ids(model, PROMPTS[1], 120, speculate=False)
        generation = model.generate(PROMPTS[1], 120)
        cycles = list(generation.cycles())
        assert generation.ids == wanted
        counted = generation.stats.summary()["cycles_by_rows"]
        assert sum(counted.values()) == generation.stats.cycles
        assert {str(cycle.rows) for cycle in cycles[1:]} == counted.keys()
        fixed = model.generate(PROMPTS[1], 120, rows=4)
        list(fixed.cycles())
        assert fixed.ids == wanted
        assert fixed.stats.summary()["cycles_by_rows"].keys() <= {"4", "3", "2", "1"}
    (folder / FILE).write_text(json.dumps({"target": [[1, 1e6], [9, 2e6]], "draft": 1e5, "host": 6e4}))
    with pytest.raises(GumihoError, match="target has an impossible number of rows"):
        load(bundle, "cpu")


def stored(target: object = ((1, 1e6), (8, 2e6)), draft: object = 1e5, host: object = 6e4, **more: object) -> str:
    return json.dumps({"target": target, "draft": draft, "host": host, **more})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "[" * 100_000,
        '{"a":' * 100_000,
        " " * (1 << 20) + stored(),
        stored() + "x",
        "{}",
        stored(target=[]),
        stored(target={}),
        stored(target=3),
        stored(target="ab"),
        stored(target=None),
        stored(target=[3]),
        stored(target=[[1, 1e6, 2], [8, 2e6]]),
        stored(target=[["1", 1e6], [8, 2e6]]),
        stored(target=[[1.0, 1e6], [8, 2e6]]),
        stored(target=[[True, 1e6], [8, 2e6]]),
        stored(target=[[2, 1e6], [8, 2e6]]),
        stored(target=[[1, 1e6], [2, 2e6]]),
        stored(target=[[0, 1e6], [1, 1e6], [8, 1e6]]),
        stored(target=[[1, 1e6], [8, 1e6], [9, 1e6]]),
        *(
            stored(longer=wrong)
            for wrong in (
                3,
                {},
                [3],
                [[512, [[1, 1e6], [8, 1e6]]]],
                [[128, [[1, 1e6], [8, 1e6]], 1.0]],
                [[True, [[1, 1e6], [8, 1e6]], 1.0]],
                [[1 << 25, [[1, 1e6], [8, 1e6]], 1.0]],
                [[512, [[1, 1e6]], 1.0]],
                [[512, [[1, 1e6], [3, 1e6], [8, 1e6]], 1.0]],
                [[512, [[1, 1e6], [8, 1e6]], -1]],
                [[512.0, [[1, 1e6], [8, 1e6]], 1]],
                [[512, [[1, 1e6], [8, 1e6]], 1]] * 2,
            )
        ),
        stored(target=[[1, 1e6], [1, 2e6], [8, 2e6]]),
        stored(target=[[1, 1e6], [10**40, 1e6], [8, 1e6]]),
        *(
            stored(target=[[1, wrong], [8, 2e6]])
            for wrong in (0, -1, 1e-300, float("nan"), float("inf"), 1e300, 10**400, "1", None, [], True)
        ),
        *(stored(draft=wrong) for wrong in (-1, float("nan"), float("inf"), 1e300, "1", None, [], False)),
        *(stored(host=wrong) for wrong in (-1, float("nan"), {}, "6e4")),
        stored().replace("100000.0", "1" * 5000),
        "\0",
        "\ud800",
    ],
)
def test_damaged_costs(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(
        DamageError, match=r"^[^\n]*costs.json is damaged \([^\n]+\): compile the engines again$"
    ) as error:
        Costs.load(tmp_path, 8)
    assert len(str(error.value)) < 300 + len(str(tmp_path))


def test_costs_never_fall_with_rows_and_are_told(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(stored([[1, 88e6], [8, 97e6], [2, 52e6], [4, 60e6]], 90e6))
    read, loaded = Costs.read(tmp_path, 8), Costs.load(tmp_path, 8)
    assert read
    assert loaded
    assert loaded.target == {1: 52e6, 8: 97e6, 2: 52e6, 4: 60e6}
    assert (loaded.draft, loaded.host) == (read.draft, read.host) == (90e6, 6e4)
    table, rest, *warnings = read.lines()
    assert table == "milliseconds of a pass by rows: 1: 88, 2: 52, 4: 60, 8: 97"
    assert rest == "draft 90, host 0.06"
    assert [warning.split(":")[0] for warning in warnings] == ["warning", "warning"]
    assert "1 row was measured at 88 ms and 2 rows at 52 ms" in warnings[0]
    assert "a draft takes longer than a plain pass" in warnings[1]
    assert len(costs(draft=1e5, row=1e4).lines()) == 2


LONG = Costs(
    {1: 1e6, 2: 1.1e6, 4: 1.2e6, 8: 1.4e6},
    5e5,
    6e4,
    (
        Longer(512, {1: 2e6, 8: 3.1e6}, 6e5),
        Longer(4096, {1: 3e6, 4: 1e7, 8: 3e7}, 7e5),
    ),
)


def test_costs_behind_more_positions() -> None:
    """Lines between what was measured, by positions and by rows; never less than behind fewer."""
    assert LONG.at(0) == LONG.at(128) == LONG
    assert (LONG.at(512).target, LONG.at(512).draft) == ({1: 2e6, 2: 2.2e6, 4: 2.5e6, 8: 3.1e6}, 6e5)
    there = LONG.at(4096).target
    assert there == pytest.approx({1: 3e6, 2: 1.1e6 + 2e6 + (8.8e6 - 2e6) / 3, 4: 1e7, 8: 3e7})
    assert LONG.at(10**6) == LONG.at(4096)
    half = LONG.at((512 + 4096) // 2)
    assert half.target == pytest.approx({n: (LONG.at(512).target[n] + there[n]) / 2 for n in there})
    assert (half.draft, half.host, half.longer) == (pytest.approx(6.5e5), 6e4, ())
    # the lower one holds, and no less
    contradicting = replace(LONG, longer=(*LONG.longer, Longer(8000, {1: 1e6, 8: 2e6}, 1.0)))
    assert contradicting.at(8000) == contradicting.at(4096)
    assert contradicting.at(4096).target == pytest.approx({1: 1e6, 2: 1.1e6 + 6e5 / 7, 4: 1.2e6 + 3 * 6e5 / 7, 8: 2e6})
    assert contradicting.at(4096).draft == 5e5


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=5))
def test_a_planner_reckons_with_the_length_of_the_text(lengths: list[int]) -> None:
    """Whatever it was before, and what was measured behind another length is scaled."""
    planner, slow = Planner(LONG, 7), 1.5
    for i, length in enumerate(lengths):
        planner.behind(length, length)
        fresh = Planner(LONG.at(length), 7)
        near = 64 * 1.5e6 / 384  # nanoseconds of a plain pass that lengths apart by less than 64 positions differ in
        if not i:
            assert planner.plain_pass_ns == pytest.approx(fresh.plain_pass_ns, abs=near)
            planner.decoded(int(slow * planner.plain_pass_ns))
        else:
            assert planner.plain_pass_ns == pytest.approx(slow * fresh.plain_pass_ns, abs=slow * near)


def test_what_trees_promise_follows_the_length_of_the_text() -> None:
    planner, scores, depths = Planner(LONG, 7), -0.1 * np.arange(8.0), np.arange(8)
    planner.choose_rows(scores, depths)
    promised, plain = planner._draft_rate, planner.plain_pass_ns
    planner.behind(4096, 4096)
    assert planner._draft_rate == pytest.approx(promised * plain / planner.plain_pass_ns)
    assert planner.plain_pass_ns == pytest.approx(3 * plain)


def test_rows_that_are_dear_behind_a_long_text_are_not_verified() -> None:
    scores, depths = -0.1 * np.arange(8.0), np.arange(8)  # every row is expected to be accepted
    for length, rows in ((128, 8), (4096, 4)):
        planner, here = Planner(LONG, 7), LONG.at(length)
        planner.behind(length, length)
        assert planner.choose_rows(scores, depths) == rows
        assert rows == max(here.target, key=lambda n: n / (here.target[n] + here.draft + here.host))


@pytest.mark.parametrize("forms", [("cpu", "migraphx"), pytest.param(("cuda",), marks=pytest.mark.exhaustive)], ids=str)
def test_measured_costs_never_fall_with_rows(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, forms: tuple[str, ...]
) -> None:
    """Whatever else the machine does while they are measured."""
    taken = {  # of a draft, of 1 row, of the tree's rows, of fewer
        "cpu": [1e6, 9e6, 8e6, 5e6, 6e6, 4e6, 7e6, 8.5e6],
        "migraphx": [1e6, 9e6, 8e6, 7e6],
        "cuda": [9e6, 8e6],
    }
    wanted = {
        "cpu": {1: 4e6, 2: 4e6, 3: 4e6, 4: 4e6, 5: 7e6, 6: 8e6, 8: 8e6},
        "migraphx": {1: 7e6, 2: 7e6, 8: 8e6},  # sizes that it has graphs for
        "cuda": {1: 8e6, 8: 8e6},  # in int4 it has one size; the second is with the draft
    }
    for form in forms:
        rounds = [[2 * one for one in taken[form]], taken[form], *[[3 * one for one in taken[form]]] * 3]
        times = chain(*rounds, repeat(1e9))  # behind more positions
        options = (*EVERY_BACKEND, "--weights", "int4") if form == "cuda" else EVERY_BACKEND
        bundle = make_bundle(DEMO, *options)
        with load(bundle, "cpu", threads=1) if form == "cpu" else opened(bundle, form, lazy=True) as model:
            lengths = list[tuple[int, int]]()

            def once(call: object, times: chain[float] = times, model: Model = model, lengths: list = lengths) -> float:  # type: ignore[type-arg]
                lengths.append((model.decoder.target.length, model.decoder.draft.length))
                return next(times)

            monkeypatch.setattr("runtime.engines.pass_times.once", once)
            found, most = measure(model.decoder), model.capacity - 8
            assert dict(sorted(found.target.items())) == wanted[form]
            assert found.draft == (0 if form == "cuda" else 1e6)
            contexts = [n for n in (512, 2048) if n < most] + [most] if form == "cpu" else []
            assert [longer.context for longer in found.longer] == contexts
            assert lengths[5 * len(taken[form]) :] == [(n, n) for n in contexts for _ in range(3 * 5)]


def test_rows_that_mean_nothing() -> None:
    from runtime import Settings

    with pytest.raises(GumihoError, match="rows is 1: give 2 or more"):
        Settings(rows=1)


@pytest.mark.parametrize(
    ("ladder", "guess"), [((1, 16, 64), {1: 1e6, 16: 1.5e6, 64: 3e6}), ((16, 64), {1: 1e6, 16: 1e6, 64: 2e6})]
)
def test_passes_of_fixed_sizes_have_the_price_of_the_size_that_took_them(
    ladder: tuple[int, ...], guess: dict[int, float]
) -> None:
    """Lookups have any number of rows. If larger passes take far longer than guessed, they are soon no longer
    chosen."""
    planner, period, looked_up, emitted = Planner(Costs(guess, 0.0, 1e4), 1, drafts=False, fixed=True), 10, 0, [0]
    planner.begin([*range(period)] * 3)
    position = 3 * period + 1
    for _ in range(1000):
        found = planner.lookup(emitted, 0 if planner.plain_pass_due else 6)
        size = next(size for size in ladder if size > len(found))
        planner.decoded(15_000_000 if size > 1 and found else 1_000_000, 1 + len(found))
        looked_up += bool(found)
        emitted = [(position + i) % period for i in range(len(found) + 1)]
        position += len(emitted)
    assert 0 < looked_up < 50
