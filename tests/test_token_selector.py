"""Where a text ends, and who ends it: with and without speculation at the same token, and the model can be used behind
it."""

import threading
from collections.abc import Iterator
from itertools import accumulate, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime import GumihoError, Model, load
from runtime.api.generation import Generation
from runtime.decoding.settings import Settings
from runtime.decoding.token_selector import TokenSelector
from tests.conftest import MakeBundle
from tests.pairs import SMALL
from tests.test_text import BYTE_LEVEL as TOKENIZER
from tests.test_text import text_and_length

PROMPT = TOKENIZER.encode("def main(argv=None):\n    parser = argparse.ArgumentParser(").ids
MOST = 40  # tokens of a text that nothing else ends
BEGIN, END = 0, 1  # special tokens of the demo pair; the second ends a text
LONG = (PROMPT * 40)[:600]  # several chunks of 128
BOTH = pytest.mark.parametrize("speculate", [True, False], ids=["speculative", "plain"])


@pytest.fixture(scope="module")
def model(demo_bundle: Path) -> Iterator[Model]:
    with load(demo_bundle, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def tiny(make_bundle: MakeBundle) -> Iterator[Model]:
    """Without a tokenizer."""
    with load(make_bundle(SMALL, "--capacity", "100"), threads=1) as model:
        yield model


def made(
    model: Model, max_new_tokens: int = MOST, prompt: list[int] = PROMPT, **settings: Any
) -> tuple[Generation, str]:
    generation = model.generate(prompt, max_new_tokens, **settings)
    text = "".join(generation)
    assert generation.stats.tokens == len(generation.ids)
    return generation, text


@pytest.fixture(scope="module")
def free(model: Model) -> list[int]:
    """The greedy continuation, which everything below cuts short."""
    ids = made(model)[0].ids
    assert END not in ids
    assert len(ids) == MOST
    return ids


def ended(model: Model, free: list[int], at: int, reason: str, **settings: Any) -> str:
    """The text comes to an end behind its first ``at`` tokens. Returns it."""
    generation, text = made(model, **settings)
    assert generation.ids == free[:at]
    assert generation.finish_reason == reason
    assert model.decoder.cached == [*PROMPT, *free[: at - 1]]
    return text


@BOTH
def test_stop_token_ids(model: Model, free: list[int], speculate: bool) -> None:
    """The first of any of them ends the text and is its last token, wherever in a block it falls."""
    for token in sorted(set(free)):
        at = free.index(token) + 1
        text = ended(model, free, at, "stop", stop_token_ids=[2000, token], speculate=speculate)
        assert text == TOKENIZER.decode(PROMPT + free[:at])[len(TOKENIZER.decode(PROMPT)) :]


@BOTH
@pytest.mark.parametrize(
    ("settings", "end"), [({}, END), ({"stop": ["<|begin_of_text|>"]}, BEGIN), ({"stop_token_ids": [7]}, 7)]
)
def test_ends_of_every_kind(model: Model, settings: dict[str, Any], end: int, speculate: bool) -> None:
    """The model's own end, a special token as a stop string, an id. Each is emitted, and a special one is no text.
    ``min_new_tokens`` holds it off though it is the likeliest token by far, and not a token longer."""
    for least in (0, 1, 2, 9, 30):
        biased = {"logit_bias": {end: 1000.0}, "min_new_tokens": least, "speculate": speculate}
        generation, text = made(model, **biased, **settings)
        assert generation.ids.index(end) == least == len(generation.ids) - 1
        assert generation.finish_reason == "stop"
        assert text == TOKENIZER.decode(PROMPT + generation.ids)[len(TOKENIZER.decode(PROMPT)) :]
        other, _ = made(model, least + 3, **biased)
        assert other.finish_reason == ("stop" if end == END else "length"), "it ends the text without being asked to"


@BOTH
def test_min_new_tokens_holds_off_all_at_once(model: Model, speculate: bool) -> None:
    """An end that is forced all the same is one: who names the token wants it."""
    ends = {"stop_token_ids": [7], "stop": ["<|begin_of_text|>"], "min_new_tokens": 20, "speculate": speculate}
    generation, _ = made(model, **ends, logit_bias={END: 1000.0, BEGIN: 1000.0, 7: 1000.0}, temperature=1.0, seed=0)
    assert len(generation.ids) == 21
    assert not {END, BEGIN, 7} & set(generation.ids[:20])
    forced, _ = made(model, **ends, forced={3: 7})
    assert (len(forced.ids), forced.finish_reason) == (4, "stop")


@BOTH
def test_stop_strings(model: Model, free: list[int], speculate: bool) -> None:
    """Text and ids end as the whole text says, for strings in and over tokens, held off or not; no special token, no
    end."""
    draw = np.random.default_rng(0)
    text = TOKENIZER.decode(PROMPT + free)[len(TOKENIZER.decode(PROMPT)) :]
    for _ in range(25):
        starts = draw.integers(0, len(text) - 8, 3)
        stop = [text[at : at + draw.integers(1, 8)] for at in starts]
        least = int(draw.choice([0, 0, 10, 25]))
        wanted, at = text_and_length(TOKENIZER, PROMPT, free, stop, least)
        reason = "length" if wanted == text else "stop"
        assert ended(model, free, at, reason, stop=stop, min_new_tokens=least, speculate=speculate) == wanted
    assert ended(model, free, MOST, "length", stop=["<|no_such_token|>"], speculate=speculate) == text


@BOTH
def test_a_stop_string_is_cut_off_whatever_else_ends_the_text(model: Model, free: list[int], speculate: bool) -> None:
    """Its last token is also a stop token, the last one there is room for, or one that the callback stops at."""
    text = TOKENIZER.decode(PROMPT + free[:9])[len(TOKENIZER.decode(PROMPT)) :]
    at = text_and_length(TOKENIZER, PROMPT, free, [text[-3:]])[1]
    for also in (
        {"stop_token_ids": [free[at - 1]]},
        {"callback": lambda token, _: token == free[at - 1]},
        {"max_new_tokens": at},
    ):
        found = ended(model, free, at, "stop", stop=[text[-3:]], speculate=speculate, **also)
        assert text.startswith(found)
        assert not found.endswith(text[-3:])


@BOTH
def test_limits(model: Model, tiny: Model, free: list[int], speculate: bool) -> None:
    """``length`` where it was asked for, ``context`` where the cache is full, and the end of the text where it falls on
    either."""
    for most in (0, 1, 2, 3, 10, MOST):
        generation, _ = made(model, most, speculate=speculate)
        assert (generation.ids, generation.finish_reason) == (free[:most], "length")

    def filled(most: int, **settings: Any) -> Generation:
        """Behind a prompt that leaves room for 5 tokens."""
        prompt = [2 + i * i % 37 for i in range(tiny.bundle.manifest.capacity - 4)]
        generation = tiny.generate(prompt, most, speculate, logit_bias={END: -1000.0}, **settings)
        list(generation.cycles())
        return generation

    whole = filled(MOST)
    assert (len(whole.ids), whole.finish_reason) == (5, "context")
    for most, reason in ((4, "length"), (5, "length"), (6, "context")):
        generation = filled(most)
        assert (generation.ids, generation.finish_reason) == (whole.ids[:most], reason)
        for at in (4, 5):
            if at <= most:
                stopped = filled(most, forced={at - 1: END})
                assert (len(stopped.ids), stopped.finish_reason) == (at, "stop")


def cycles_of(model: Model, **settings: Any) -> list[int]:
    """Where the steps of the greedy continuation end."""
    return list(accumulate(len(cycle.tokens) for cycle in model.generate(PROMPT, MOST, **settings).cycles()))


@BOTH
def test_callback(model: Model, free: list[int], speculate: bool) -> None:
    """It is told every token in turn with the text that comes with it, and stops the text wherever it likes, also
    within a block."""
    seen: list[tuple[int, str]] = []
    generation, text = made(model, callback=lambda *told: seen.append(told), speculate=speculate)
    assert generation.ids == free == [token for token, _ in seen]
    assert "".join(piece for _, piece in seen) == text
    borders, within = cycles_of(model), 0
    for at in range(1, 20):
        asked = count(1)
        ended(model, free, at, "stop", callback=lambda *_, asked=asked, at=at: next(asked) == at, speculate=speculate)
        assert next(asked) == at + 1, "it was asked about tokens behind the end"
        within += at not in borders
    assert within > 5


@BOTH
def test_a_callback_that_fails(model: Model, free: list[int], speculate: bool) -> None:
    """Its error reaches the caller as it is, at the first token, within a block and at its end; then model and session
    go on as though the step had not been made."""
    for at in (1, 2, 3, 4, 5, 11):
        asked, session = count(1), model.session()

        def fail(*_: object, asked: Iterator[int] = asked, at: int = at) -> None:
            if next(asked) == at:
                raise KeyError("mine")

        generation = session.generate(PROMPT, MOST, speculate, callback=fail)
        with pytest.raises(KeyError, match="mine"):
            list(generation)
        assert generation.ids == free[: len(generation.ids)]
        assert len(generation.ids) < at
        with pytest.raises(GumihoError, match="broken off by an error"):
            list(generation.cycles())
        for way in (True, False):
            again = session.generate(session.ids, 10, way)
            list(again.cycles())
            assert again.ids == free[len(generation.ids) :][:10]
            session.rewind(len(PROMPT) + len(generation.ids))
        assert made(model, 10, speculate=speculate)[0].ids == free[:10]


class Clock:
    """Goes on by a second whenever it is looked at: when a text begins, and between its passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        monkeypatch.setattr("runtime.decoding.token_selector.monotonic", self)

    def __call__(self) -> int:
        self.now += 1
        return self.now


@BOTH
def test_max_seconds(model: Model, free: list[int], speculate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind every step there may be, from none at all."""
    steps = [0, *cycles_of(model, speculate=speculate)]
    for seconds in range(12):
        Clock(monkeypatch)
        generation, text = made(model, max_seconds=seconds, speculate=speculate)
        # One look is before the prompt's only chunk.
        at = steps[max(0, seconds - 1)]
        assert (generation.ids, generation.finish_reason) == (free[:at], "time")
        assert text == TOKENIZER.decode(PROMPT + free[:at])[len(TOKENIZER.decode(PROMPT)) :]


@BOTH
def test_time_ends_a_long_prompt(model: Model, speculate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two chunks: no token comes, what was read is not read again, and the rest gives what it would have
    given."""
    whole, _ = made(model, 8, LONG, speculate=speculate)
    for seconds, chunks in ((1, 0), (2, 1), (4, 3)):
        made(model, 1, [5])  # the caches hold another text
        session = model.session()
        Clock(monkeypatch)
        generation = session.generate(LONG, 8, speculate, max_seconds=seconds)
        (cycle,) = generation.cycles()
        assert (cycle.tokens, cycle.path, cycle.finish_reason) == ((), (), "time")
        assert (generation.ids, generation.finish_reason, generation.stats.tokens) == ([], "time", 0)
        assert model.decoder.cached == LONG[: 128 * chunks]
        again = session.generate(LONG, 8, speculate)
        list(again.cycles())
        assert again.ids == whole.ids
        assert again.stats.cached_tokens >= 128 * chunks - 1


def test_real_time(model: Model) -> None:
    generation, _ = made(model, 1000, max_seconds=0.1, speculate=False, logit_bias={END: -1000.0})
    assert generation.finish_reason == "time"
    assert len(generation.ids) < 900


@BOTH
def test_cancel_from_another_thread(model: Model, free: list[int], speculate: bool) -> None:
    """The text ends behind the step that runs: what came is the text's beginning, and the model goes on with other
    texts."""
    at = threading.Event()
    generation = model.generate(PROMPT, MOST, speculate, callback=lambda *_: at.wait(10) and None)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.extend(generation))
    reader.start()
    generation.cancel()  # while the first step waits for the callback, if it has come so far
    at.set()
    reader.join()
    assert generation.finish_reason == "cancelled"
    assert generation.ids == free[: len(generation.ids)]
    assert len(generation.ids) <= 1
    generation = model.generate(PROMPT, MOST, speculate)
    steps = generation.cycles()
    tokens = [*next(steps).tokens, *next(steps).tokens]
    canceller = threading.Thread(target=generation.cancel)
    canceller.start()
    canceller.join()
    assert list(steps) == []
    assert (generation.ids, generation.finish_reason) == (tokens, "cancelled")
    assert tokens == free[: len(tokens)]
    generation.cancel()
    done, _ = made(model, speculate=speculate)
    done.cancel()
    assert (done.ids, done.finish_reason) == (free, "length")


@BOTH
def test_cancel_during_a_long_prompt(model: Model, speculate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No further chunk is read."""
    generation, read = model.generate(LONG, 8, speculate), list[int]()
    feed = model.decoder.feed

    def cancelled_in_the_second(tokens: list[int], last: bool = False) -> int:
        first = feed(tokens, last)
        read.append(len(tokens))
        if len(read) == 2:
            canceller = threading.Thread(target=generation.cancel)
            canceller.start()
            canceller.join()
        return first

    monkeypatch.setattr(model.decoder, "feed", cancelled_in_the_second)
    assert "".join(generation) == ""
    assert (generation.ids, generation.finish_reason, read) == ([], "cancelled", [128, 128])


@BOTH
def test_seed(model: Model, speculate: bool) -> None:
    """Drawn where none is given and told, so that it gives the same text again; None where nothing is drawn."""
    asked = {"temperature": 1.0, "speculate": speculate}
    first, second = made(model, 30, **asked)[0], made(model, 30, **asked)[0]
    assert first.stats.seed is not None
    assert first.stats.seed != second.stats.seed
    assert first.ids != second.ids
    again, _ = made(model, 30, seed=first.stats.seed, **asked)
    assert (again.ids, again.stats.seed) == (first.ids, first.stats.seed)
    for greedy in ({}, {"seed": 5}, {"top_k": 5, "logit_bias": {3: 1.0}}):
        assert made(model, 5, speculate=speculate, **greedy)[0].stats.seed is None
    assert made(model, 0, temperature=1.0, seed=5, speculate=speculate)[0].stats.seed == 5


def test_ids_that_are_none(model: Model) -> None:
    """Ids that were asked for are refused; a special token that the tokenizer knows and the model does not can never
    come."""
    for token in (2048, -1):
        with pytest.raises(GumihoError, match=f"stop_token_ids names token id {token}, outside the vocabulary of 2048"):
            model.generate(PROMPT, stop_token_ids=[token])
    small: Any = SimpleNamespace(eos_token_ids=(5, 3000), vocabulary=10, capacity=8)
    selector = TokenSelector(Settings(min_new_tokens=2, stop=["<|end_of_text|>"]), [3], small, TOKENIZER)
    row = np.arange(10, dtype=np.float32)
    row[[1, 5]] = 50, 60

    def choose() -> int:
        return selector.choose(int(row.argmax()), lambda: row)

    assert [choose(), selector.add(9), selector.add(9), choose(), selector.add(5)] == [9, 9, 9, 5, None]
    assert (selector.ids, selector.finish_reason) == ([9, 9, 5], "stop")


@BOTH
def test_without_a_tokenizer(tiny: Model, speculate: bool) -> None:
    """A callback is told ids alone, and stop strings are refused."""
    seen: list[tuple[int, str]] = []
    generation = tiny.generate([3, 4, 5], 9, speculate, callback=lambda *told: seen.append(told))
    list(generation.cycles())
    assert seen == [(token, "") for token in generation.ids]
    with pytest.raises(GumihoError, match="has no tokenizer"):
        tiny.generate([3, 4, 5], 9, speculate, stop=["a"])
