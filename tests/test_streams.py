"""Several streams over one set of engines: each gives what it gives by itself, they share passes or take turns, and
none waits long for another."""

import asyncio
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime import InputError, MisuseError, Model, UnavailableError, load
from runtime.backends import memory
from runtime.backends.memory import buffers
from runtime.bundle.reader import Bundle
from tests.conftest import DEMO, EVERY_BACKEND, MakeBundle, examples
from tests.end_to_end.test_forms import opened

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"speculate": False},
    {"temperature": 1.2, "top_p": 0.9, "seed": 4, "repetition_penalty": 1.1},
    {"rows": 4},
)

PROMPTS = [5, 6, 7], list(range(3, 90)), [800] * 12


@pytest.fixture(scope="module")
def bundle(make_bundle: MakeBundle) -> Path:
    """Of a target whose rows are the same in every pass: what runs beside a text cannot change it by a bit."""
    return make_bundle(DEMO, "--weights", "int8", "--rows", "8", "--capacity", "200")


@pytest.fixture(scope="module")
def by_turns(bundle: Path) -> Iterator[Model]:
    """The target's own engine, which takes the rows of one stream."""
    with load(bundle, "cpu", threads=1) as model:
        kept = [model.stream(), model.stream()]
        yield model
        assert len(model.streams) == 1 + len(kept)


@pytest.fixture(scope="module")
def together(bundle: Path) -> Iterator[Model]:
    """Passes that take the rows of several streams."""
    with load(bundle, "cpu", threads=1, streams=3) as model:
        yield model


@pytest.fixture(scope="module")
def at_once(bundle: Path) -> Iterator[Model]:
    """Two such passes at once."""
    with load(bundle, "cpu", threads=2, streams=3) as model:
        assert len(model._loaded.loop._threads) == 2
        yield model


@pytest.fixture(params=["by turns", "together", "at once"])
def model(request: pytest.FixtureRequest, by_turns: Model, together: Model, at_once: Model) -> Model:
    return {"by turns": by_turns, "together": together, "at once": at_once}[request.param]


def test_texts_do_not_depend_on_what_runs_beside_them(model: Model) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 900, size).tolist() for size in (1, 17, 150, 40)]
    jobs = [(prompt, 24, settings) for prompt in prompts for settings in SETTINGS]
    alone = [list(finished(model, *job)) for job in jobs]
    found: dict[int, list[int]] = {}
    left, lock = list(enumerate(jobs)), threading.Lock()

    def work(stream: Model) -> None:
        while True:
            with lock:
                if not left:
                    return
                number, job = left.pop()
            found[number] = finished(stream, *job)

    run(*(lambda stream=stream: work(stream) for stream in model.streams))
    assert len(found) == len(jobs)
    assert [found[number] for number in range(len(jobs))] == alone


def finished(model: Model, prompt: list[int], count: int, settings: dict[str, Any]) -> list[int]:
    generation = model.generate(prompt, count, **settings)
    for _ in generation.cycles():
        pass
    return generation.ids


@pytest.mark.parametrize(
    "settings", [*SETTINGS, {"speculate": False, "logprobs": 2, "presence_penalty": 0.7, "temperature": 1.0, "seed": 5}]
)
def test_a_text_that_moves_between_streams_stays_the_same(together: Model, settings: dict[str, Any]) -> None:
    prompt = PROMPTS[1]
    alone = together.generate(prompt, 40, **settings)
    cycles = [cycle.tokens for cycle in alone.cycles()]
    moving = together.generate(prompt, 40, **settings)
    pieces, emitted = list[str](), list[int]()
    streams = [*together.streams[1:], *together.streams]
    for number, piece in enumerate(moving.pieces(lambda cycle: emitted.extend(cycle.tokens))):
        pieces.append(piece)
        if number % 2 and moving.finish_reason is None and streams:
            finished(stream := streams.pop(0), PROMPTS[0], 3, {})  # what its caches hold is another text's
            moving.move(stream)
    assert len(streams) <= len(together.streams)  # it did move
    assert (moving.ids, moving.logprobs, moving.finish_reason) == (alone.ids, alone.logprobs, alone.finish_reason)
    assert emitted == moving.ids == [token for tokens in cycles for token in tokens]
    assert "".join(pieces) == alone.text
    assert moving.stats.tokens == len(moving.ids)
    assert moving.stats.prompt_tokens == len(prompt)


def run(*work: Any) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def assert_as_plain(model: Model, prompts: list[list[int]], rows: int) -> None:
    """Drafts of so many rows, greedy and sampled, by itself and beside another stream, change nothing. model: with two
    streams."""
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        plain = [finished(model, prompt, 40, options | {"speculate": False}) for prompt in prompts]
        assert [finished(model, prompt, 40, options | {"rows": rows, "lookup": False}) for prompt in prompts] == plain
        found: dict[int, list[int]] = {}

        def work(number: int, options: dict[str, Any] = options, found: dict[int, list[int]] = found) -> None:
            found[number] = finished(model.streams[number], prompts[number], 40, options)

        run(*(partial(work, number) for number in range(2)))
        assert [found[0], found[1]] == plain[:2]


@settings(examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=40))
def test_cycles_of_streams_in_any_order(model: Model, order: list[tuple[int, int]]) -> None:
    """One thread drives them, so that every order of cycles can come up."""
    running = [stream.generate(prompt, 16) for stream, prompt in zip(model.streams, PROMPTS, strict=True)]
    cycles = [generation.cycles() for generation in running]
    for at, count in order:
        for _ in range(count):
            next(cycles[at], None)
    for rest in cycles:
        list(rest)
    assert [generation.ids for generation in running] == [alone(model, number) for number in range(3)]


@cache
def alone(model: Model, number: int) -> list[int]:
    """What a prompt gives with nothing beside it."""
    return finished(model, PROMPTS[number], 16, {})


def test_sessions_of_streams_keep_their_caches(model: Model) -> None:
    first, second = (stream.session() for stream in model.streams[:2])
    one, other = list(range(10, 80)), list(range(300, 340))
    list(first.generate(one, 8).cycles())
    list(second.generate(other, 8).cycles())
    turn = first.generate([*first.ids, 4, 5], 8)
    list(turn.cycles())
    assert turn.stats.cached_tokens >= len(one)
    assert turn.ids == finished(model.streams[2], turn.prompt, 8, {})


def test_a_long_prompt_lets_other_streams_decode(by_turns: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a prompt is read, another stream's tokens come between its passes."""
    long, other = by_turns.streams[1:3]
    events, sizes = list[str](), list[int]()
    feed = long.decoder.feed

    def fed(tokens: Any, last: bool = False) -> int:
        events.append("chunk")
        sizes.append(len(tokens))
        first = feed(tokens, last)
        if len(sizes) == 1:
            started.set()
            while not long._loaded.loop._queue:  # the other stream waits for the engines
                pass
        return first

    started = threading.Event()
    monkeypatch.setattr(long.decoder, "feed", fed)
    monkeypatch.setattr(long.decoder, "form", SimpleNamespace(chunk=16))
    beside = other.generate([1, 2, 3], 30, speculate=False)
    cycles = beside.cycles()
    next(cycles)

    def decode() -> None:
        started.wait()
        for _ in cycles:
            events.append("token")

    run(decode, lambda: finished(long, list(range(3, 180)), 2, {}))
    between = "".join(event[0] for event in events).strip("t").split("c")
    assert sum("t" in part for part in between) > 3, events
    assert max(sizes) == 16
    assert sum(sizes) == 177


def test_passes_over_a_prompt_shrink_while_others_wait(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = model.decoder
    for contended, speed, expected in ((False, 0, 128), (True, 0, 8), (True, 3, 8), (True, 50, 50), (True, 10**6, 128)):
        monkeypatch.setattr(decoder, "contended", contended)
        monkeypatch.setattr(decoder, "_rows_in_time", speed)
        assert decoder._chunk() == expected == min(expected, decoder.form.chunk)


def test_memory_is_that_of_the_caches(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Bundle(bundle)
    one, weights = buffers(read, "cpu"), read.weights() + read.caches("cpu")
    monkeypatch.setattr(memory, "host_free", lambda: weights + 3 * one)
    with load(bundle, streams=4) as model:
        monkeypatch.setattr(memory, "host_free", lambda: one - 1)
        with pytest.raises(UnavailableError, match="another stream needs about"):
            model.stream()
    monkeypatch.setattr(memory, "host_free", lambda: weights + 3 * one - 1)
    with pytest.raises(UnavailableError, match="load fewer streams"):
        load(bundle, streams=4)
    for count in (0, -1, "two", 4000):
        with pytest.raises(InputError, match="streams is"):
            load(bundle, streams=count)  # type: ignore[arg-type]


def test_bindings_are_freed_at_once(model: Model) -> None:
    """Caches that grow and shrink are bound anew. What was bound before must not wait for the garbage collector, which
    does not see what a binding holds outside of Python: a server grew by 70 MB so."""
    prompts = [[(7 * i * i + length) % 1000 + 2 for i in range(length)] for length in (1, 140, 20, 150, 3)]

    def work() -> None:
        for prompt in prompts:
            for options in ({}, {"speculate": False}):
                for stream in model.streams[:2]:
                    finished(stream, prompt, 8, options)

    work()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        work()
        gc.collect()
        kept = Counter(type(one).__name__ for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not kept.keys() & {"Call", "Pass", "IOBinding", "OrtValue"}


def test_closing(bundle: Path) -> None:
    model = load(bundle, streams=2)
    second, third = model.streams[1], model.stream()
    generation = third.generate([1, 2, 3], 50)
    next(iter(generation.cycles()))
    second.close()
    second.close()
    assert model.streams == (model, third)
    with pytest.raises(MisuseError, match="closed"):
        second.generate([1], 1)
    assert finished(third, [1, 2, 3], 5, {}) == finished(model, [1, 2, 3], 5, {})
    model.close()
    for stream in (model, third):
        with pytest.raises(MisuseError, match="closed"):
            stream.generate([1], 1)
        with pytest.raises(MisuseError, match="closed"):
            stream.stream()
    assert model.streams == ()


def test_a_stream_that_nobody_holds_is_freed(bundle: Path) -> None:
    with load(bundle) as model:
        stream = model.stream()
        finished(stream, [1, 2], 4, {})
        gone = weakref.ref(stream.decoder.target.cache)
        del stream
        gc.collect()
        assert gone() is None
        assert model.streams == (model,)


def test_a_cycle_that_has_the_engines_cannot_start_another_streams(by_turns: Model) -> None:
    first, second = by_turns.streams[:2]
    other = second.generate([1, 2], 4)

    def callback(token: int, piece: str) -> None:
        next(iter(other.cycles()))

    with pytest.raises(MisuseError, match="in the middle of a cycle"):
        list(first.generate([1, 2], 4, callback=callback).cycles())
    assert finished(second, [1, 2], 4, {}) == finished(first, [1, 2], 4, {})


def test_asyncio(model: Model) -> None:
    prompts = ["def main():\n", "import os\n", "class A:\n"]
    expected = ["".join(model.generate(prompt, 30)) for prompt in prompts]

    async def text(stream: Model, prompt: str) -> str:
        return "".join([piece async for piece in stream.agenerate(prompt, 30)])

    async def together() -> list[str]:
        return list(await asyncio.gather(*(text(*pair) for pair in zip(model.streams, prompts, strict=True))))

    assert asyncio.run(together()) == expected


def test_asyncio_cancels_what_nobody_reads(model: Model) -> None:
    generation = model.generate("def main():\n", 180)

    async def first_piece() -> None:
        async with aclosing(aiter(generation)) as pieces:
            async for _ in pieces:
                break

    asyncio.run(first_piece())
    list(generation.cycles())
    assert generation.finish_reason == "cancelled"

    async def cancelled() -> None:
        task = asyncio.ensure_future(anext(aiter(model.agenerate("def main():\n", 180))))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())

    async def wrong() -> None:
        async for _ in model.agenerate([], 1):
            pass

    with pytest.raises(InputError, match="no tokens"):
        asyncio.run(wrong())


@pytest.mark.parametrize(
    "form", [*(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("tensorrt", "cuda")), "migraphx"]
)
def test_streams_of_other_backends(make_bundle: MakeBundle, form: str) -> None:
    """On one accelerator and one stream of work, with every call bound anew for every stream."""
    bundle = make_bundle(DEMO, *EVERY_BACKEND)
    with load(bundle, "cpu", threads=1) as cpu, opened(bundle, form, lazy=True) as model:
        streams = [model, model.stream(), model.stream()]
        prompts = [[5, 6, 7], list(range(3, 150)), [800] * 12]
        running = [stream.generate(prompt, 16) for stream, prompt in zip(streams, prompts, strict=True)]
        cycles = [generation.cycles() for generation in running]
        while left := [cycle for one in cycles if (cycle := next(one, None))]:
            assert len(left) <= 3
        assert [generation.ids for generation in running] == [finished(cpu, prompt, 16, {}) for prompt in prompts]
        streams[1].close()
        assert finished(streams[2], prompts[1], 8, {}) == running[1].ids[:8]
