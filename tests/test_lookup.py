"""Lookups against a search through the whole text, and texts that they do not change."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import load
from runtime.decoding.planner import Planner
from runtime.decoding.prices import Costs
from runtime.decoding.prompt_lookup import LONGEST_MATCH, Lookup
from tests.conftest import DEMO, EVERY_BACKEND, MakeBundle
from tests.end_to_end.test_forms import BACKENDS, opened

PROMPT = "def first(self):\n    return self._first\n\ndef second(self):\n    return self._second\n\ndef third("
TEXT = st.lists(st.integers(0, 3), max_size=60)


class Clocked(Planner):
    """Told that every pass takes 1 ms and every draft 3 ms, whatever the machine does."""

    def decoded(self, target: int, rows: int = 1) -> None:
        super().decoded(10**6, rows)

    def drafted(
        self,
        scores: Sequence[float],
        depths: Sequence[int],
        accepted: int,
        times: tuple[int, int, int],
        catch_up_ns: int = 0,
    ) -> None:
        super().drafted(scores, depths, accepted, (3 * 10**6, 10**6, 0))


def naive(text: list[int], most: int) -> tuple[int, list[int]]:
    """The last place where the text's last four tokens were before, or else its last two."""
    for run in (4, 2):
        for end in range(len(text) - 1, run - 1, -1):
            if text[end - run : end] == text[-run:]:
                length = run
                while length < min(LONGEST_MATCH, end) and text[end - length - 1] == text[-length - 1]:
                    length += 1
                copied = list(text)
                for i in range(most):
                    copied.append(copied[end + i])
                return length, copied[len(text) :]
    return 0, []


@given(st.lists(TEXT, max_size=4), st.integers(0, 12))
def test_the_last_place_alike_is_found(pieces: list[list[int]], most: int) -> None:
    """However the text came, in whichever pieces."""
    lookup, text = Lookup(), list[int]()
    for piece in pieces:
        lookup.extend(piece)
        text += piece
        length, found = lookup.find(most)
        assert (length, list(found)) == naive(text, most)


def test_a_repetition_goes_on() -> None:
    lookup = Lookup()
    lookup.extend([7, 5, 6, 5, 6, 5, 6])
    assert lookup.find(5) == (4, [5, 6, 5, 6, 5])


COUNT = 60  # tokens
DRAWN = {"temperature": 0.8, "seed": 3}


@pytest.mark.parametrize(
    ("form", "asked"),
    [
        pytest.param(
            form,
            asked,
            marks=() if form == "cpu" or (form == "migraphx" and asked is DRAWN) else pytest.mark.exhaustive,
        )
        for form in BACKENDS
        for asked in ({}, DRAWN, {"repetition_penalty": 1.1})
    ],
    ids=str,
)
def test_texts_stay_what_they_are(make_bundle: MakeBundle, form: str, asked: dict[str, float]) -> None:
    """Where drafting costs more than it can bring, and rows nothing: all that is found is verified."""
    bundle = make_bundle(DEMO, *EVERY_BACKEND)
    with load(bundle, "cpu", threads=1) if form == "cpu" else opened(bundle, form, lazy=True) as model:
        decoder = model.decoder
        wanted = model.generate(PROMPT, COUNT, speculate=False, **asked)  # type: ignore[arg-type]
        list(wanted.cycles())
        for _ in range(2):
            prices = Costs(dict.fromkeys(range(1, 9), 1e6), 3e6, 0.0)
            decoder.planners = [Clocked(prices, 7, decoder.form.chunk if decoder.form.static else 0)] * 2
            found = model.generate(PROMPT, COUNT, trace=True, **asked)  # type: ignore[arg-type]
            cycles = list(found.cycles())
            assert found.ids == wanted.ids
            stats = found.stats.summary()
            assert stats["lookups"] == sum(cycle.lookup for cycle in cycles) > 0
            assert stats["looked_up"] == sum(len(cycle.path) - 1 for cycle in cycles if cycle.lookup) > 0
            for before, cycle in pairwise(cycles):
                if cycle.lookup:
                    assert cycle.tree
                    assert cycle.tree.tokens[0] == before.tokens[-1]
                    assert len(cycle.tree.tokens) == cycle.rows > 1
                    assert cycle.tree.tokens[1 : len(cycle.path)] == cycle.tokens[: len(cycle.path) - 1]
        for without in ({"lookup": False}, {"rows": 8}, {"accept": "typical"}):
            if "accept" not in without or asked.keys() <= {"temperature", "seed"}:
                generation = model.generate(PROMPT, COUNT, **asked, **without)  # type: ignore[arg-type]
                list(generation.cycles())
                assert generation.stats.lookups == 0
