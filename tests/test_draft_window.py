"""Of a long text the drafter reads the last part: the output stays plain decoding's, and nothing else is read again for it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from runtime import GumihoError, Model, load
from tests.conftest import DEMO, EVERY_BACKEND, MakeBundle
from tests.end_to_end.test_forms import opened
from tests.test_session import finished, forget

WINDOW = 16


@pytest.fixture
def model(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    with load(demo_bundle, threads=1) as model:
        monkeypatch.setattr(model.decoder.history, "WINDOW", WINDOW, raising=False)
        yield model


@pytest.fixture(scope="module")
def other(demo_bundle: Path) -> Iterator[Model]:
    """Reads everything."""
    with load(demo_bundle, threads=1) as model:
        yield model


def values(model: Model) -> tuple[int, np.ndarray]:
    """The position of the drafter's first row, and the values of its first layer, [kv heads, rows, d]. They depend on the token and the
    target's hidden row alone, wherever they lie and whatever was read before: so they show what has been read."""
    decoder = model.decoder
    decoder.catch_up()
    cache, kv_heads = decoder.passes.draft_cache, int(decoder.passes.graphs["draft"].caches[0].shape[1])
    return decoder.history.begin, cache.rows(int(cache.length[0]))[kv_heads : 2 * kv_heads]


def same_tokens_read(model: Model, other: Model, text: list[int]) -> None:
    """Whether what the drafter holds is a part of the text without a gap."""
    begin, found = values(model)
    finished(other.generate(text, 2))
    _, whole = values(other)
    np.testing.assert_allclose(found, whole[:, begin : begin + found.shape[1]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 40, 128, 129, 145, 300])
def test_of_a_prompt_it_reads_the_last_part(model: Model, other: Model, length: int) -> None:
    prompt = np.random.default_rng(length).integers(2, 2000, length).tolist()
    turn = finished(model.generate(prompt, 20))
    assert turn.ids == finished(other.generate(prompt, 20, speculate=False)).ids
    begin, found = values(model)
    assert begin == max(0, length - 1 - WINDOW)
    assert begin + found.shape[1] >= length - 1
    same_tokens_read(model, other, prompt + turn.ids)


@pytest.mark.parametrize("seed", range(12))
def test_turns(model: Model, other: Model, tmp_path: Path, seed: int) -> None:
    """Longer and shorter than what the drafter reads, with and without it, taken back, saved, and after another text."""
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
        assert turn.stats.cached_tokens >= (min(fewest, len(prompt) - 1 - WINDOW) if speculate else fewest - 1)
        if speculate:
            same_tokens_read(model, other, prompt + turn.ids)


def test_a_turn_that_only_read_its_prompt(model: Model, other: Model) -> None:
    """What the drafter was to read of it, it reads in the next turn, and the target nothing again."""
    prompt = np.random.default_rng(0).integers(2, 2000, 100).tolist()
    session = model.session()
    finished(session.generate(prompt, 1))
    assert int(model.decoder.passes.draft_cache.length[0]) == 0
    turn = finished(session.generate([*session.ids, 9], 10))
    assert turn.stats.cached_tokens == len(prompt) - 1
    assert values(model)[0] == len(prompt) - 1 - WINDOW
    same_tokens_read(model, other, session.ids)


def test_after_plain_turns_little_is_read_again(model: Model) -> None:
    prompt = np.random.default_rng(0).integers(2, 2000, 200).tolist()
    session = model.session()
    finished(session.generate(prompt, 30, speculate=False))
    turn = finished(session.generate([*session.ids, 9], 10))
    assert turn.stats.cached_tokens == len(turn.prompt) - 1 - WINDOW


def test_saved_rows_begin_where_they_did(model: Model, other: Model, tmp_path: Path) -> None:
    prompt = np.random.default_rng(0).integers(2, 2000, 100).tolist()
    session, file = model.session(), tmp_path / "saved"
    finished(session.generate(prompt, 10))
    session.save(file)
    held = int(model.decoder.passes.draft_cache.length[0])
    forget(model)
    again = model.session(file)
    assert (model.decoder.history.begin, int(model.decoder.passes.draft_cache.length[0])) == (len(prompt) - 1 - WINDOW, held)
    turn = finished(again.generate([*again.ids, 9], 10))
    assert turn.stats.cached_tokens == len(prompt) + 10 - 2  # the last token was not read, and the drafter's row needs one more
    same_tokens_read(model, other, again.ids)


@pytest.mark.parametrize("begin", [np.array(-1), np.array(1 << 40), np.array(90), np.array(1.0), np.array([3]), np.array("3")])
def test_where_saved_rows_cannot_begin(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: np.ndarray
) -> None:
    session, file = model.session(), tmp_path / "saved"
    finished(session.generate(list(range(2, 60)), 10))
    savez = np.savez
    with monkeypatch.context() as patch:
        patch.setattr("numpy.savez", lambda file, **content: savez(file, **content | {"begin": begin}))
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
        patch.setattr("numpy.savez", lambda file, begin, **content: savez(file, **content))
        session.save(file)
    forget(other)
    session = other.session(file)
    assert finished(session.generate([*session.ids, 9], 5)).stats.cached_tokens > 60


@pytest.mark.parametrize("form", ["migraphx", "tensorrt"])
def test_on_an_accelerator(make_bundle: MakeBundle, other: Model, form: str) -> None:
    with opened(make_bundle(DEMO, *EVERY_BACKEND), form, lazy=True) as model:
        model.decoder.history.WINDOW = WINDOW  # type: ignore[misc]
        prompt = np.random.default_rng(0).integers(2, 2000, 150).tolist()
        turn = finished(model.generate(prompt, 20))
        assert turn.ids == finished(other.generate(prompt, 20)).ids
        assert model.decoder.history.begin == len(prompt) - 1 - WINDOW
        same_tokens_read(model, other, prompt + turn.ids)
