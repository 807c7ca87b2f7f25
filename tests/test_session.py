"""Turns over one cache: they read what is new to them and nothing else, and give what a fresh generation gives."""

import errno
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import Generation, GumihoError, Model, load
from runtime.api.session import Session
from runtime.decoding.draft_history import DraftHistory
from tests.conftest import DEMO, EVERY_BACKEND, MakeBundle
from tests.end_to_end.test_forms import opened
from tests.pairs import SMALL

TEXT = '''def main(argv=None):
    """Reads the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*")
'''


@pytest.fixture(scope="module")
def bundle(make_bundle: MakeBundle) -> Path:
    return make_bundle(DEMO, *EVERY_BACKEND)


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with load(bundle, "cpu", threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def other(bundle: Path) -> Iterator[Model]:
    """The same bundle once more, which shows what a fresh generation gives."""
    with load(bundle, "cpu", threads=1) as model:
        yield model


def finished(generation: Generation) -> Generation:
    list(generation.cycles())
    return generation


def steps(generation: Generation) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Tokens and accepted rows, which show what the drafter knows as the tokens show what the target does."""
    return [(cycle.tokens, cycle.path) for cycle in generation.cycles()]


def forget(model: Model) -> None:
    finished(model.generate([1000, 1001, 1002], 3))


@contextmanager
def counted(model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Rows that target and drafter read before the first token."""
    rows, decoder = {"target": 0, "drafter": 0}, model.decoder
    feed, keep, extend = decoder.feed, decoder.draft.cache.commit, decoder.draft.graphs["extend"]

    def fed(tokens: Any, last: bool = False) -> int:
        rows["target"] += len(tokens)
        return feed(tokens, last)

    def kept(graph: Any, path: Any) -> None:
        rows["drafter"] += len(path) if graph is extend else 0
        keep(graph, path)

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "feed", fed)
        patch.setattr(decoder.draft.cache, "commit", kept)
        yield rows


def test_a_turn_reads_what_is_new(model: Model, other: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of both ways in any order, greedy and sampled, some stopped within a block. A plain turn reads the tokens
    behind the last one that was passed through the target. One that drafts goes back to where the drafter is: the last
    accepted block, and whatever plain turns left, but for the hidden rows of the first tokens, which they keep."""
    draw, session = np.random.default_rng(0), model.session()
    forget(model)
    # positions in the caches; known: those the drafter has read or can read
    target = drafter = known = stopped = blocks = 0
    prompt = model.encode(TEXT)[:20]
    for turn in range(40):
        speculate = bool(draw.random() < 0.6)
        asked: dict[str, Any] = {"temperature": float(draw.choice([0, 0.7])), "seed": turn}
        if draw.random() < 0.5:  # stops at a token that comes in the middle
            ids = finished(other.generate(prompt, 8, **asked)).ids
            asked["stop_token_ids"] = [ids[len(ids) // 2]]
        with counted(model, monkeypatch) as rows:
            generation = session.generate(prompt, 8, speculate, **asked)
            found = steps(generation)
        assert found == steps(other.generate(prompt, 8, speculate, **asked))
        assert session.ids == prompt + generation.ids

        start = known if speculate else target
        assert generation.stats.cached_tokens == start
        assert rows == {"target": len(prompt) - start, "drafter": len(prompt) - 1 - drafter if speculate else 0}
        target = len(session.ids) - 1
        assert model.decoder.cached == session.ids[:-1]
        if speculate:
            # The last block is accepted, and not yet read by the drafter.
            drafter = target - len(found[-1][1] or [0])
            known = drafter
            stopped, blocks = stopped + (generation.finish_reason == "stop"), blocks + (len(found[-1][1]) > 1)
        elif start < DraftHistory.FIRST:
            known = max(known, min(DraftHistory.FIRST, len(prompt) - 1))
        assert model.decoder.draft.length == drafter
        if rewound := len(session.ids) > 90:
            session.rewind(40)
            target, drafter, known = 40, min(drafter, 39), min(known, 39)
        # The last token of a turn is new to the caches, as is what the user says then.
        said = model.encode(TEXT)[5 * turn % 40 :][: int(draw.integers(rewound, 6))]
        prompt = session.ids + said
    assert stopped > 2
    assert blocks > 2, "no turn ended within a block: the test proves too little"


def test_a_prompt_that_is_all_there(model: Model, other: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last token is read all the same, since only a pass says what follows."""
    prompt = model.encode(TEXT)
    session = model.session()
    wanted = finished(other.generate(prompt, 10)).ids
    for speculate in (True, False):
        finished(session.generate([*prompt, 7], 5, speculate))
        for _ in range(2):
            with counted(model, monkeypatch) as rows:
                again = finished(session.generate(prompt, 10, speculate))
            assert (again.ids, again.stats.cached_tokens) == (wanted, len(prompt) - 1)
            assert rows == {"target": 1, "drafter": 0}


def test_another_prompt(model: Model, other: Model) -> None:
    """Whatever it shares with the text in the caches, from nothing to all of it, longer or shorter; also one longer
    than a chunk."""
    text = model.encode(TEXT * 3)[:150]
    session, draw = model.session(), np.random.default_rng(1)
    for turn in range(24):
        shared = int(draw.integers(0, len(text)))
        prompt = text[:shared] + draw.integers(2, 2048, int(draw.integers(shared == 0, 12))).tolist()
        speculate = bool(turn % 3)
        asked = {"temperature": 0.8 * (turn % 2), "seed": turn}
        before = model.decoder.cached
        generation = session.generate(prompt, 12, speculate, **asked)
        assert steps(generation) == steps(other.generate(prompt, 12, speculate, **asked))
        assert generation.stats.cached_tokens <= len(before)


@pytest.mark.parametrize(
    "speculate", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["speculative", "plain"]
)
def test_rewind_anywhere(model: Model, other: Model, speculate: bool) -> None:
    """Behind any token of prompt or text the session goes on as a fresh generation does, in either way."""
    prompt = model.encode(TEXT)[:6]
    for length in [*range(1, 26), 10, 25, 1]:
        session = model.session()
        finished(session.generate(prompt, 20, speculate, temperature=0.9, seed=3))
        whole = session.ids
        assert len(whole) == 26
        session.rewind(length)
        assert session.ids == whole[:length]
        for way in (True, False):
            assert steps(session.generate(session.ids, 6, way)) == steps(other.generate(whole[:length], 6, way))
            session.rewind(length)
    for length in (-1, 2):
        with pytest.raises(GumihoError, match=rf"has 1 tokens and cannot go back to {length}"):
            session.rewind(length)
    session.rewind(0)
    assert session.ids == []


def test_something_else_in_between(model: Model, other: Model) -> None:
    """Another generation, a second session and a turn that was left in its middle cost reading again, and change
    nothing."""
    prompt = model.encode(TEXT)[:16]
    wanted = finished(other.generate(prompt, 40)).ids
    first, second = model.session(), model.session()
    for cut in (5, 10, 15, 20):
        text = prompt + wanted[:cut]
        assert finished(first.generate(text, 5)).ids == wanted[cut : cut + 5]
        forget(model)
        assert finished(first.generate(text, 5)).ids == wanted[cut : cut + 5]
        assert first.ids == prompt + wanted[: cut + 5]
        assert finished(second.generate(text[3:], 5)).ids == finished(other.generate(text[3:], 5)).ids
        left = first.generate(text, 20)
        next(left.cycles())
        begun = left.ids
        assert first.ids == text + begun
        assert finished(first.generate(first.ids, 5)).ids == wanted[cut + len(begun) :][:5]
        with pytest.raises(GumihoError, match="another generation"):
            next(left.cycles())
    assert first.ids == prompt + wanted[: 20 + len(begun) + 5]


@pytest.mark.parametrize("form", ["migraphx", "tensorrt", "cuda"])
def test_accelerators_to_the_last_position(bundle: Path, other: Model, form: str) -> None:
    """Their passes have one size, so what a turn reads is padded, wherever it begins: also past the end of the text's
    room. Callbacks that fail leave their memory as good as it was."""
    text = (other.encode(TEXT) * 5)[:200]
    with opened(bundle, form, lazy=True) as model:
        session, asked = model.session(), {"temperature": 0.8, "seed": 2, "logit_bias": {1: -1000.0}}
        prompt, turn = text[:160], 0
        while len(prompt) <= 200:
            if turn % 4 == 3:
                with pytest.raises(ZeroDivisionError):
                    finished(session.generate(prompt, 5, callback=lambda *_: 1 / 0, **asked))
            generation = session.generate(prompt, 5, turn % 3 < 2, **asked)
            assert steps(generation) == steps(other.generate(prompt, 5, turn % 3 < 2, **asked))
            assert turn == 0 or generation.stats.cached_tokens > len(prompt) - 24
            prompt, turn = session.ids + text[:1] * (turn % 2), turn + 1
        assert len(session.ids) == 201
        assert turn > 6


def test_a_refused_turn_changes_nothing(model: Model) -> None:
    session = model.session()
    finished(session.generate(TEXT, 5))
    before = session.ids
    for prompt, asked in (([], {}), ([1] * 999, {}), (TEXT, {"top_p": 7.0}), (TEXT, {"banned": [2048]})):
        with pytest.raises(GumihoError):
            session.generate(prompt, **asked)
        assert session.ids == before


@pytest.mark.parametrize("form", ["cpu", "migraphx", pytest.param("tensorrt", marks=pytest.mark.exhaustive)])
def test_saved_and_restored(bundle: Path, model: Model, other: Model, form: str, tmp_path: Path) -> None:
    """Into the same model, a freshly loaded one and another backend's, and back from there: the caches are what they
    were, so that only what is new is read, and the text goes on as it would have."""
    prompt = model.encode(TEXT)
    session = model.session()
    finished(session.generate(prompt, 20, stop_token_ids=[finished(other.generate(prompt, 20)).ids[10]]))
    file = tmp_path / "session.npz"
    session.save(file)
    said = [*session.ids, *model.encode(TEXT)[1:9]]
    drafted = model.decoder.draft.length
    asking = [(speculate, asked) for speculate in (True, False) for asked in ({}, {"temperature": 0.9, "seed": 8})]
    with load(bundle, "cpu", threads=1) if form == "cpu" else opened(bundle, form, lazy=True) as fresh:
        for speculate, asked in asking:
            cached = drafted if speculate else len(session.ids) - 1
            expected = other.generate(said, 20, speculate, **asked)
            wanted = steps(expected)
            restored = fresh.session(file)
            assert restored.ids == session.ids
            again = restored.generate(said, 20, speculate, **asked)
            assert steps(again) == wanted
            assert again.stats.cached_tokens == cached
            back = tmp_path / "back.npz"
            restored.save(back)
            behind = fresh.decoder.draft.length
            fresh.decoder.clear()
            forget(model)
            here = model.session(back)
            assert here.ids == said + expected.ids
            more = here.generate([*here.ids, 9], 10, **asked)
            assert steps(more) == steps(other.generate([*said, *expected.ids, 9], 10, **asked))
            assert more.stats.cached_tokens == behind


def test_saved_at_odd_moments(model: Model, other: Model, tmp_path: Path) -> None:
    """Before the first turn, between two cycles, after a rewind, after something else was read, after a prompt that was
    broken off."""
    file, prompt = tmp_path / "session.npz", model.encode(TEXT)

    def goes_on(ids: list[int], cached: int) -> None:
        forget(model)
        restored = model.session(file)
        assert restored.ids == ids
        again = restored.generate([*ids, 9], 10)
        assert steps(again) == steps(other.generate([*ids, 9], 10))
        assert again.stats.cached_tokens == cached

    session = model.session()
    session.save(file)
    goes_on([], 0)

    turn = session.generate(prompt, 60)
    cycles = turn.cycles()
    begun = [t for _ in range(4) for t in next(cycles).tokens]
    drafted = model.decoder.draft.length
    session.save(file)
    # Saving is no interruption.
    assert begun + [t for cycle in cycles for t in cycle.tokens] == finished(other.generate(prompt, 60)).ids
    goes_on(prompt + begun, drafted)

    finished(session.generate(prompt, 20, speculate=False))
    session.rewind(30)
    session.save(file)
    goes_on(session.ids, 29)

    finished(session.generate(prompt, 20))
    forget(model)
    session.save(file)
    goes_on(session.ids, 0)

    forget(model)
    long = (prompt * 5)[:190]
    finished(session.generate(long, 20, max_seconds=0))
    session.save(file)
    goes_on(long, 0)


@pytest.mark.parametrize("saved", [False, True])
def test_what_the_drafter_was_to_read_it_reads_later(model: Model, other: Model, tmp_path: Path, saved: bool) -> None:
    """A turn that ends with its first token leaves the prompt to it; the next one need not have the target read it
    again."""
    prompt = (model.encode(TEXT) * 5)[:180]
    forget(model)
    session = model.session()
    finished(session.generate(prompt, 1))
    assert model.decoder.draft.length == 0
    if saved:
        session.save(tmp_path / "session.npz")
        forget(model)
        session = model.session(tmp_path / "session.npz")
    again = session.generate([*session.ids, 9], 15)
    assert steps(again) == steps(other.generate([*prompt, *session.ids[180:181], 9], 15))
    assert again.stats.cached_tokens == 179


def test_restoring_ends_what_runs(model: Model, tmp_path: Path) -> None:
    """Its caches are gone: it must not go on over those of another text."""
    session, prompt = model.session(), model.encode(TEXT)
    finished(session.generate(prompt[:15], 5))
    session.save(tmp_path / "session.npz")
    running = model.generate(prompt, 40)
    cycles = running.cycles()
    next(cycles)
    session.restore(tmp_path / "session.npz")
    with pytest.raises(GumihoError, match="start it again"):
        next(cycles)
    assert finished(session.generate(session.ids, 3)).stats.cached_tokens > 10


def saved(model: Model, folder: Path) -> tuple[Session, Path]:
    session = model.session()
    finished(session.generate(TEXT, 10))
    session.save(folder / "session.npz")
    return session, folder / "session.npz"


def test_files_that_are_no_session(model: Model, make_bundle: MakeBundle, tmp_path: Path) -> None:
    """Missing, of another bundle, cut off anywhere, of another kind. The session in hand stays as it is."""
    session, file = saved(model, tmp_path)
    before, content = session.ids, file.read_bytes()
    array, pickled = io.BytesIO(), io.BytesIO()
    np.save(array, np.arange(4))
    np.savez(pickled, bundle=np.array({}, object), ids=0, target=0, drafter=0)
    other = io.BytesIO()
    np.savez(other, x=np.arange(3))
    bad = [b"", b"PK", b"text", array.getvalue(), pickled.getvalue(), other.getvalue()]
    bad += [content[:n] for n in (1, 100, len(content) // 2, len(content) - 30, len(content) - 1)]
    for broken in bad:
        file.write_bytes(broken)
        with pytest.raises(GumihoError, match=r"session.npz' cannot be read as a saved session \(.*\): save it again"):
            session.restore(file)
    with pytest.raises(GumihoError, match=r"nowhere.npz' cannot be read as a saved session \(.*No such file"):
        session.restore(tmp_path / "nowhere.npz")
    with pytest.raises(GumihoError, match="cannot be read"):
        session.restore(tmp_path)
    file.write_bytes(content)
    foreign = make_bundle(SMALL, "--capacity", "100")
    with (
        load(foreign, threads=1) as stranger,
        pytest.raises(GumihoError, match=r"saved with another bundle than .*: load that one"),
    ):
        stranger.session(file)
    assert session.ids == before
    assert finished(session.generate(before, 5)).stats.cached_tokens > len(before) - 9


def test_any_flipped_bit_is_found(model: Model, tmp_path: Path) -> None:
    """A cache that is not what it was would change the text in silence."""
    session, file = saved(model, tmp_path)
    content, draw = file.read_bytes(), np.random.default_rng(0)
    for place in [
        *draw.integers(0, len(content), 100),
        *draw.integers(len(content) - 400, len(content), 50),
        *range(0, 240, 7),
    ]:
        broken = bytearray(content)
        broken[place] ^= 1 << int(draw.integers(8))
        file.write_bytes(broken)
        with pytest.raises(GumihoError, match="does not match its checksum"):
            session.restore(file)


@pytest.mark.parametrize("failing", ["numpy.savez", "os.replace", "os.fsync"])
@pytest.mark.parametrize("there", [True, False], ids=["over another", "new"])
def test_a_full_disk(model: Model, tmp_path: Path, failing: str, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was saved before stays whole, and nothing is left beside it."""
    session, file = saved(model, tmp_path)
    content = file.read_bytes()
    if not there:
        file.unlink()

    def full(*args: Any, **_: Any) -> None:
        if hasattr(args[0] if args else None, "write"):
            args[0].write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(failing, full)
        with pytest.raises(
            GumihoError, match=r"session.npz' cannot be written \(No space left on device\): free some space"
        ):
            session.save(file)
    assert [path.name for path in tmp_path.iterdir()] == ["session.npz"] * there
    assert not there or file.read_bytes() == content
    session.save(file)
    assert file.read_bytes() == content


def test_saving_where_nothing_can_be(model: Model, tmp_path: Path) -> None:
    session, file = saved(model, tmp_path)
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "nowhere/session.npz", tmp_path / "folder"):
        with pytest.raises(GumihoError, match="cannot be written"):
            session.save(place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", file.name]
    assert not list((tmp_path / "folder").iterdir())


def test_an_interrupted_save(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, file = saved(model, tmp_path)
    content = file.read_bytes()

    def interrupted(*_: Any, **__: Any) -> None:
        assert len(list(tmp_path.iterdir())) == 2, "only from beside it can a file be put in its place in one step"
        raise KeyboardInterrupt

    monkeypatch.setattr("numpy.savez", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.save(file)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(file.name, content)]


@pytest.mark.exhaustive
def test_what_was_accepted_on_trust_is_read_again(demo_bundle: Path, tmp_path: Path) -> None:
    """Full Tree Attention keeps rows that were read under other ancestors: a turn behind it equals a fresh generation
    all the same, and so does one that is restored."""
    with load(demo_bundle, threads=1) as model:
        borrowed = 0
        for seed in range(24):
            prompt = np.random.default_rng(seed).integers(2, 2000, 6).tolist()
            session = model.session()
            list(session.generate(prompt, 40, tree="fta", temperature=1.0, seed=seed).cycles())
            borrowed += len(model.decoder.cached) < len(session.ids) - 1
            session.save(tmp_path / "saved")
            text, asked = session.ids, {"temperature": 1.0, "seed": seed}
            for next_session in (lambda: session, lambda: model.session(tmp_path / "saved")):  # noqa: B023
                turn = next_session().generate(text, 12, **asked)
                list(turn.cycles())
                fresh = model.generate(text, 12, speculate=False, **asked)
                list(fresh.cycles())
                assert turn.ids == fresh.ids
        assert borrowed, "nothing was borrowed: the test proves too little"
