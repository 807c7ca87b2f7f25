"""Of a long text the drafter reads the first tokens and the last part: the output stays plain decoding's, and nothing
else is read again for it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from runtime import GumihoError, Model, load
from runtime.decoding.draft_history import DraftHistory
from tests.conftest import DEMO, EVERY_BACKEND, MakeBundle
from tests.end_to_end.test_forms import opened
from tests.test_session import finished, forget

FIRST, LAST = 3, 16


@pytest.fixture(scope="module")
def opened_once(demo_bundle: Path) -> Iterator[Model]:
    with load(demo_bundle, threads=1) as model:
        model.decoder.history.FIRST, model.decoder.history.LAST = FIRST, LAST  # type: ignore[misc]
        yield model


@pytest.fixture
def model(opened_once: Model) -> Model:
    """It knows no text."""
    opened_once.decoder.clear()
    return opened_once


@pytest.fixture(scope="module")
def other(demo_bundle: Path) -> Iterator[Model]:
    """Reads everything."""
    with load(demo_bundle, threads=1) as model:
        model.decoder.history.LAST = 1 << 20  # type: ignore[misc]
        yield model


def values(model: Model) -> np.ndarray:
    """The values of the drafter's first layer, [kv heads, rows, d]. They depend on the token and the target's hidden
    row alone, wherever they lie and whatever was read before: so they show what has been read."""
    decoder = model.decoder
    decoder.catch_up()
    cache, kv_heads = decoder.draft.cache, int(decoder.draft.graphs["draft"].caches[0].shape[1])
    return cache.rows(int(cache.length[0]))[kv_heads : 2 * kv_heads]


def read(model: Model) -> list[int]:
    """The positions of the tokens that the drafter has read."""
    model.decoder.catch_up()
    return model.decoder.history.positions.tolist()


def same_tokens_read(model: Model, other: Model, text: list[int]) -> None:
    """Whether what the drafter holds is what it says it has read of the text."""
    found, positions = values(model), read(model)
    assert positions == sorted(set(positions))
    finished(other.generate(text, 2))
    np.testing.assert_allclose(found, values(other)[:, positions], rtol=1e-4, atol=1e-5)


def expected(length: int) -> list[int]:
    """What it reads of a prompt of so many tokens."""
    return [at for at in range(length - 1) if at < FIRST or at >= length - 1 - LAST]


@pytest.mark.parametrize(
    "length",
    [1, 3, 4, 19, 20, 21, 129, 300, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 16, 40, 128, 145))],
)
def test_of_a_prompt_it_reads_the_first_tokens_and_the_last(model: Model, other: Model, length: int) -> None:
    prompt = np.random.default_rng(length).integers(2, 2000, length).tolist()
    turn = finished(model.generate(prompt, 20))
    assert turn.ids == finished(other.generate(prompt, 20, speculate=False)).ids
    held = read(model)
    assert [at for at in held if at < length - 1] == expected(length)
    assert held[len(expected(length)) :] == list(range(length - 1, length - 1 + len(held) - len(expected(length))))
    same_tokens_read(model, other, prompt + turn.ids)


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(5, 12))]
)
def test_turns(model: Model, other: Model, tmp_path: Path, seed: int) -> None:
    """Longer and shorter than what the drafter reads, with and without it, taken back, saved, and after another
    text."""
    draw = np.random.default_rng(seed)
    session = model.session()
    for _ in range(8):
        if draw.random() < 0.2:
            session.rewind(int(draw.integers(0, len(session.ids) + 1)))
        if draw.random() < 0.3:
            session.save(tmp_path / "saved")
            forget(model)
            session = model.session(tmp_path / "saved")
        held = len(model.decoder.cached)
        new = draw.integers(2, 2000, int(draw.choice([1, 3, 15, 17, 40, 130]))).tolist()
        prompt, speculate = [*session.ids, *new], draw.random() < 0.7
        turn = finished(session.generate(prompt, int(draw.integers(1, 24)), speculate))
        assert turn.ids == finished(other.generate(prompt, len(turn.ids), speculate=False)).ids
        fewest = min(held, len(prompt) - len(new), len(prompt) - 1)
        assert turn.stats.cached_tokens >= (min(fewest, len(prompt) - 1 - LAST) if speculate else fewest - 1)
        if speculate:
            same_tokens_read(model, other, prompt + turn.ids)


def test_a_turn_that_only_read_its_prompt(model: Model, other: Model) -> None:
    """What the drafter was to read of it, it reads in the next turn, and the target nothing again."""
    prompt = np.random.default_rng(0).integers(2, 2000, 100).tolist()
    session = model.session()
    finished(session.generate(prompt, 1))
    assert not len(model.decoder.history.positions)
    turn = finished(session.generate([*session.ids, 9], 10))
    assert turn.stats.cached_tokens == len(prompt) - 1
    assert [at for at in read(model) if at < len(turn.prompt) - 1] == expected(len(turn.prompt))
    same_tokens_read(model, other, session.ids)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("length", [2, 200])
def test_after_plain_turns_little_is_read_again(
    model: Model, other: Model, tmp_path: Path, saved: bool, length: int
) -> None:
    """The target reads what the drafter does, and of the first tokens nothing, whether the session was saved or not."""
    prompt = np.random.default_rng(0).integers(2, 2000, length).tolist()
    session = model.session()
    finished(session.generate(prompt, 30, speculate=False))
    assert not len(model.decoder.history.positions)
    if saved:
        session.save(tmp_path / "saved")
        forget(model)
        session = model.session(tmp_path / "saved")
    turn = finished(session.generate([*session.ids, 9], 10))
    length = len(turn.prompt)
    assert turn.stats.cached_tokens == length - 1 - LAST
    assert [at for at in read(model) if at < length - 1] == [
        *range(min(FIRST, len(prompt) - 1)),
        *range(length - 1 - LAST, length - 1),
    ]
    same_tokens_read(model, other, session.ids)


def test_saved_rows_are_of_the_tokens_they_were(model: Model, other: Model, tmp_path: Path) -> None:
    prompt = np.random.default_rng(0).integers(2, 2000, 100).tolist()
    session, file = model.session(), tmp_path / "saved"
    finished(session.generate(prompt, 10))
    held = read(model)
    session.save(file)
    forget(model)
    again = model.session(file)
    assert read(model) == held == [*expected(len(prompt)), *range(len(prompt) - 1, len(session.ids) - 2)]
    turn = finished(again.generate([*again.ids, 9], 10))
    # the last token was not read, and the drafter's row needs one more
    assert turn.stats.cached_tokens == len(prompt) + 10 - 2
    same_tokens_read(model, other, again.ids)


def shifted(positions: np.ndarray, by: int) -> np.ndarray:
    return positions + by


def swapped(positions: np.ndarray) -> np.ndarray:
    return positions[[1, 0, *range(2, len(positions))]]


def wrapped(positions: np.ndarray) -> np.ndarray:
    """Their differences are positive in 64 bits."""
    return np.array([0, 2**63 - 1, -(2**63), -1, *positions[4:]])


HOSTILE = {
    "negative": lambda positions: shifted(positions, -1),
    "beyond the text": lambda positions: shifted(positions, 90),
    "overflow": wrapped,
    "not ascending": swapped,
    "too few": lambda positions: positions[1:],
    "one number": lambda positions: np.array(3),
    "floats": lambda positions: positions.astype(float),
    "text": lambda positions: positions.astype(str),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_positions_that_cannot_be(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    session, file = model.session(), tmp_path / "saved"
    finished(session.generate(list(range(2, 60)), 10))
    savez = np.savez
    with monkeypatch.context() as patch:
        patch.setattr(
            "numpy.savez", lambda file, positions, **content: savez(file, **content, positions=change(positions))
        )
        session.save(file)
    with pytest.raises(GumihoError, match="cannot be read as a saved session"):
        session.restore(file)


def test_files_of_older_versions_begin_at_the_first_token(
    other: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, file = other.session(), tmp_path / "saved"
    finished(session.generate(list(range(2, 60)), 10))
    savez = np.savez
    with monkeypatch.context() as patch:
        patch.setattr("numpy.savez", lambda file, positions, **content: savez(file, **content))
        session.save(file)
    forget(other)
    session = other.session(file)
    assert finished(session.generate([*session.ids, 9], 5)).stats.cached_tokens > 60


@pytest.mark.parametrize("form", ["migraphx", "tensorrt"])
def test_on_an_accelerator(make_bundle: MakeBundle, other: Model, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftHistory, "FIRST", FIRST)
    with opened(make_bundle(DEMO, *EVERY_BACKEND), form, lazy=True) as model:
        monkeypatch.setattr(model.decoder.history, "LAST", LAST, raising=False)
        prompt = np.random.default_rng(0).integers(2, 2000, 150).tolist()
        turn = finished(model.generate(prompt, 20))
        assert turn.ids == finished(other.generate(prompt, 20)).ids
        assert [at for at in read(model) if at < len(prompt) - 1] == expected(len(prompt))
        same_tokens_read(model, other, prompt + turn.ids)
