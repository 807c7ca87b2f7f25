"""Teams of streams: of equal size whoever comes and goes, their passes at once, and nothing beside whoever wants the engines for itself."""

import threading
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import load
from runtime.backends.onnxruntime_lanes import Lanes
from runtime.engines.teams import Teams
from tests.conftest import DEMO, MakeBundle
from tests.test_streams import finished, run

# What happens one after the other: a stream comes, or comes to the end of its text.
EVENTS = st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30)


@given(EVENTS, st.integers(1, 3))
def test_streams_that_decode_are_spread_evenly(events: list[tuple[bool, int]], count: int) -> None:
    teams, active = Teams(count), set[int]()
    for comes, stream in events:
        (active.add if comes else active.discard)(stream)
        if not comes:
            teams.forget(stream)
        for one in active:  # each takes its next turn
            with teams.turns(one).of(one):
                pass
        sizes = [sum(teams.turns(one) is turns for one in active) for turns in teams._turns]
        assert sum(sizes) == len(active)
        assert max(sizes) - min(sizes) <= 1
        assert all(teams.shared(one) == (len(active) > 1) for one in active)


def test_a_stream_stays_in_its_team_while_it_can() -> None:
    """Those that share passes have to find each other again in every cycle."""
    teams = Teams(2)
    before = [teams.turns(stream) for stream in range(5)]
    for _ in range(3):
        assert [teams.turns(stream) for stream in range(5)] == before
    teams.forget(0)
    teams.forget(2)
    assert [teams.turns(stream) for stream in (1, 3, 4)] == [before[stream] for stream in (1, 3, 4)]


def test_a_team_does_not_wait_for_a_stream_that_left_it() -> None:
    teams = Teams(2)
    left, joined, _ = (teams.turns(stream) for stream in range(3))
    left.expect(2)
    teams.forget(1)
    assert teams.turns(2) is joined
    left.take(0)
    started = perf_counter()
    assert left.claim(1, 20.0) == []
    assert perf_counter() - started < 10


def test_whoever_takes_the_engines_has_them_for_itself() -> None:
    teams = Teams(2)
    other, events = teams.turns(1), list[str]()
    assert teams.turns(0) is not other
    inside, leave = threading.Event(), threading.Event()

    def decode() -> None:
        with other.of(1):
            inside.set()
            leave.wait()
            events.append("decoded")

    def alone() -> None:
        with teams.of(0):
            events.append("alone")
            assert teams.turns(0).mine

    threads = [threading.Thread(target=decode), threading.Thread(target=alone)]
    threads[0].start()
    inside.wait()
    threads[1].start()
    while not other.wanted:
        pass
    assert not events
    leave.set()
    for thread in threads:
        thread.join()
    assert events == ["decoded", "alone"]
    assert all(turns.holder is None for turns in teams._turns)


@pytest.mark.parametrize("threads", [1, 2])
def test_passes_of_a_small_target_run_at_once(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Where there are threads for it; and a text is that of a stream alone."""
    bundle: Path = make_bundle(DEMO, "--weights", "int8", "--rows", "8", "--capacity", "200")
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
