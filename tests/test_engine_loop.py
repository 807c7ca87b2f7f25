"""The loop that owns the engines: what streams want is done in order, passes are shared, and nothing runs beside
whoever wants the engines for itself."""

import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from runtime import Model, load
from runtime.backends.onnxruntime_lanes import Lanes, Pass
from runtime.bundle.reader import Bundle
from runtime.engines.devices import Host
from runtime.engines.loaded import LoadedBundle
from runtime.engines.loop import EngineLoop, Work
from runtime.engines.queued import QueuedEngine, QueuedTarget
from tests.conftest import DEMO, MakeBundle
from tests.test_streams import finished, run


class Recorded:
    """Stands for ``Lanes``: notes what is run together. interrupted: how many runs break off."""

    count = 3

    def __init__(self, interrupted: int = 0, at_once: int = 1) -> None:
        self.runs, self.interrupted, self.at_once = list[list[str]](), interrupted, at_once

    def bind(self, buffers: Any) -> Any:
        made = Pass.__new__(Pass)
        made.buffers, made.failure, made.ns, made.done, made.rows = buffers, None, 1.0, False, buffers.get("rows", 1)
        return made

    def run(self, passes: Any, beside: bool = False) -> None:
        self.runs.append([one.buffers["name"] for one in passes])
        if self.interrupted:
            self.interrupted -= 1
            raise KeyboardInterrupt
        for one in passes:
            one.done = True


@contextmanager
def started(lanes: Recorded | None) -> Iterator[EngineLoop]:
    """A loop with threads. Everything has been done at the end."""
    loop = EngineLoop(lanes)  # type: ignore[arg-type]
    loop.start()
    yield loop
    assert not loop._queue
    assert not loop._running
    assert loop._holder is None
    loop.stop()


def queued(loop: EngineLoop, streams: Sequence[Callable[[], object]]) -> list[threading.Thread]:
    """Threads that want the engines, in this order."""
    threads = [threading.Thread(target=work, daemon=True) for work in streams]
    for number, thread in enumerate(threads):
        thread.start()
        while len(loop._queue) <= number:
            pass
    return threads


def verify(loop: EngineLoop, lanes: Recorded, stream: int, rows: int = 1) -> float | None:
    """A pass of a stream."""
    return QueuedTarget(lanes, loop, stream).bind({"name": f"{stream}", "rows": rows})()  # type: ignore[arg-type,dict-item]


def shared(loop: EngineLoop, streams: Sequence[Callable[[], object]]) -> None:
    """All of them wait for the engines before any has them."""
    with loop.exclusive():
        threads = queued(loop, streams)
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("interrupted", [0, 1])
def test_whoever_waits_is_served_in_the_next_passes(interrupted: int) -> None:
    """In the order in which they came; and again by themselves, if a pass with others was broken off."""
    lanes, done = Recorded(interrupted), list[str]()
    with started(lanes) as loop:

        def stream(number: int) -> None:
            try:
                assert verify(loop, lanes, number) == 1.0
                done.append(f"{number}")
            except KeyboardInterrupt:
                done.append("interrupted")

        shared(loop, [partial(stream, number) for number in range(5)])
    assert lanes.runs[0] == ["0", "1", "2"]
    assert sorted(done) == (["0", "1", "2", "3", "4"] if not interrupted else ["1", "2", "3", "4", "interrupted"])
    assert sorted(name for names in lanes.runs[interrupted:] for name in names) == [
        str(n) for n in range(interrupted, 5)
    ]


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_stream_that_is_about_to_come_again_is_waited_for(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """But no other one. Of two passes at once each has half of the streams."""
    monkeypatch.setattr("runtime.engines.loop._SHARE", math.inf)  # however fast passes are
    monkeypatch.setattr("runtime.engines.loop._PATIENCE", 60.0)
    lanes = Recorded(at_once=at_once)
    with started(lanes) as loop:
        shared(loop, [partial(verify, loop, lanes, number) for number in range(2)])
        first = threading.Thread(target=verify, args=(loop, lanes, 0))
        first.start()
        if at_once == 1:
            while not loop._queue:
                pass
            verify(loop, lanes, 1)
        first.join()
        assert sorted(sorted(names) for names in lanes.runs) == (
            [["0", "1"]] * 2 if at_once == 1 else [["0"], ["0"], ["1"]]
        )
        loop.forget(1)
        started_at = perf_counter()
        verify(loop, lanes, 0)
        assert perf_counter() - started_at < 30


def test_drafts_come_before_passes_which_their_streams_then_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever came first: its pass waits for the drafts of the others, and for their passes after these."""
    monkeypatch.setattr("runtime.engines.loop._SHARE", math.inf)  # however slow this machine is
    monkeypatch.setattr("runtime.engines.loop._PATIENCE", 60.0)
    lanes, drafts = Recorded(), list[int]()

    class Draft:
        def bind(self, stream: int) -> Callable[[], None]:
            return lambda: drafts.append(stream)

    with started(lanes) as loop:
        loop._pass_seconds = 1.0

        def draft(stream: int) -> None:
            QueuedEngine(Draft(), loop, stream).bind(stream)()  # type: ignore[arg-type]
            verify(loop, lanes, stream)

        shared(loop, [partial(verify, loop, lanes, 0), partial(draft, 1), partial(draft, 2)])
    assert drafts == [1, 2]
    assert [sorted(names) for names in lanes.runs] == [["0", "1", "2"]]


def test_prompts_are_read_one_after_the_other_with_the_rows_of_others() -> None:
    """Chunks of several prompts in one pass would delay the others for as long as all of them take."""
    lanes = Recorded()
    with started(lanes) as loop:
        shared(loop, [partial(verify, loop, lanes, number, rows) for number, rows in enumerate((128, 1, 128, 5))])
    assert lanes.runs == [["0", "1", "3"], ["2"]]


@pytest.mark.parametrize("threads", [False, True])
def test_those_who_wait_longest_come_first(threads: bool) -> None:
    """With threads of the loop and without."""
    loop, order = EngineLoop(), list[int]()
    if threads:
        loop.start()
    owners = set[int]()

    def want(number: int) -> None:
        def work(_: bool) -> None:
            order.append(number)
            owners.add(threading.get_ident())
            assert loop.mine

        loop.run(number, work)

    shared(loop, [partial(want, number) for number in range(5)])
    assert order == [0, 1, 2, 3, 4]
    assert len(owners) == (1 if threads else 5)
    assert not loop.mine
    assert loop.contended(0)
    for number in range(5):
        loop.forget(number)
    assert not loop.contended(0)
    loop.stop()


class Interrupted:
    """A lock of which the first ``acquire`` is interrupted, as soon as there is reason to."""

    def __init__(self, lock: Any, reason: Callable[[], bool]) -> None:
        self._lock, self._reason, self._acquired = lock, reason, 0
        self.release = lock.release
        self.waits_again = threading.Event()

    def acquire(self) -> None:
        self._acquired += 1
        if self._acquired == 1:
            while not self._reason():
                pass
            raise KeyboardInterrupt
        self.waits_again.set()
        self._lock.acquire()


@contextmanager
def interrupted(reason: Callable[[], bool] = lambda: True) -> Iterator[list[Interrupted]]:
    """Whoever waits for the engines is interrupted. Gives the locks that they wait for."""
    locks, real = list[Interrupted](), Work.__init__

    def prepare(work: Work, *given: Any) -> None:
        real(work, *given)
        locks.append(Interrupted(work.ready, reason))
        work.ready = locks[-1]  # type: ignore[assignment]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "__init__", prepare)
        yield locks


def test_an_interruption_while_waiting_changes_nothing() -> None:
    """For the engines, and for what has not begun."""
    inside, leave = threading.Event(), threading.Event()
    with started(None) as loop:
        thread = threading.Thread(target=loop.run, args=(1, lambda _: (inside.set(), leave.wait())), daemon=True)
        thread.start()
        inside.wait()
        with interrupted():
            with pytest.raises(KeyboardInterrupt), loop.exclusive():
                pytest.fail("they are not free")
            with pytest.raises(KeyboardInterrupt):
                loop.run(2, lambda _: pytest.fail("it was given up"))
        assert not loop._queue
        leave.set()
        thread.join()
        with loop.exclusive():
            assert loop.mine


def test_an_interruption_waits_for_the_end_of_what_has_begun() -> None:
    """It uses the stream's buffers."""
    events, begun = list[str](), threading.Event()
    with started(None) as loop, interrupted(begun.is_set) as locks:

        def work(_: bool) -> None:
            begun.set()
            locks[0].waits_again.wait()
            events.append("done")

        with pytest.raises(KeyboardInterrupt):
            loop.run(1, work)
        assert events == ["done"]


def test_errors_reach_whoever_wanted_the_work() -> None:
    with started(None) as loop:
        with pytest.raises(ZeroDivisionError):
            loop.run(1, lambda _: 1 / 0)
        assert loop.run(1, lambda _: 7) == 7


@pytest.mark.parametrize("at_once", [1, 2])
def test_whoever_takes_the_engines_has_them_for_itself(at_once: int) -> None:
    events, inside, leave = list[str](), threading.Event(), threading.Event()
    with started(Recorded(at_once=at_once)) as loop, ExitStack() as stack:

        def decode(_: bool) -> None:
            inside.set()
            leave.wait()
            events.append("decoded")

        def alone() -> None:
            with loop.exclusive():
                events.append("alone")
                assert loop.run(0, lambda _: 7) == 7
                assert loop.mine

        threads = [threading.Thread(target=loop.run, args=(1, decode)), threading.Thread(target=alone)]
        threads += [threading.Thread(target=loop.run, args=(2, lambda _: events.append("later")))]
        for number, thread in enumerate(threads):
            stack.callback(thread.join)
            thread.start()
            inside.wait()
            while len(loop._queue) < number:
                pass
        assert not events
        leave.set()
    assert events == ["decoded", "alone", "later"]


def test_a_loop_that_nobody_holds_ends() -> None:
    """Though its threads wait for work."""
    loop = EngineLoop()
    loaded = LoadedBundle(Bundle.__new__(Bundle), None, {}, Host(), loop=loop)  # type: ignore[arg-type]
    loop.start()
    (thread,) = [thread for thread in threading.enumerate() if thread.ident in loop._threads]
    gone = weakref.ref(loaded)
    del loaded
    gc.collect()
    assert gone() is None
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def bundle(make_bundle: MakeBundle) -> Path:
    return make_bundle(DEMO, "--weights", "int8", "--rows", "8", "--capacity", "200")


@pytest.mark.parametrize("threads", [1, 2])
def test_passes_of_a_small_target_run_at_once(bundle: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Where there are threads for it; and a text is that of a stream alone."""
    counts, lock, running, most = list[int](), threading.Lock(), 0, 0
    real = Lanes._run

    def counted(lanes: Lanes, session: Any, passes: Any) -> None:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
            counts.append(len(passes))
        real(lanes, session, passes)
        with lock:
            running -= 1

    monkeypatch.setattr(Lanes, "_run", counted)
    prompts = [list(range(3 * stream, 3 * stream + 9)) for stream in range(4)]
    with load(bundle, "cpu", threads=1) as alone:
        expected = [finished(alone, prompt, 80, {}) for prompt in prompts]
    found: dict[int, list[int]] = {}
    with load(bundle, "cpu", threads=threads, streams=4) as model:

        def work(number: int) -> None:
            found[number] = finished(model.streams[number], prompts[number], 80, {})

        run(*(lambda number=number: work(number) for number in range(4)))
    assert [found[number] for number in range(4)] == expected
    assert most == threads
    assert max(counts) >= 4 // threads  # more if a thread did not run for a second


def test_the_users_code_keeps_nobody_waiting(bundle: Path) -> None:
    """Where passes are shared: another text is finished while a callback runs."""
    answered = threading.Event()
    with load(bundle, "cpu", threads=1, streams=2) as model:
        slow, quick = model.streams

        def text() -> list[int]:
            return finished(slow, [1, 2, 3], 4, {"callback": lambda *_: not answered.wait(60)})

        found = list[list[int]]()
        thread = threading.Thread(target=lambda: found.append(text()))
        thread.start()
        assert len(finished(quick, [4, 5, 6], 20, {"min_new_tokens": 20})) == 20
        answered.set()
        thread.join()
        assert found == [finished(quick, [1, 2, 3], 4, {})]


def test_the_caller_of_a_single_stream_has_the_engines(bundle: Path) -> None:
    with load(bundle, "cpu", threads=1) as model:
        callers = set[int]()
        list(model.generate([1, 2, 3], 4, callback=lambda *_: callers.add(threading.get_ident()) or False))
        assert callers == {threading.get_ident()}
        assert isinstance(model, Model)
        assert not model._loaded.loop._threads
