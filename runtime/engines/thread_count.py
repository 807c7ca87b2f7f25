"""How many CPU threads run engines fastest on this machine, found when they are compiled."""

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns, process_time_ns

from ..backends.control_groups import text
from ..decoding.decoder import Decoder

_CHUNKS, _TOKENS = 2, 128  # the text whose time counts: a prompt of so many chunks, then so many tokens
_FASTER = 0.85  # fewer threads must take less than this share of the time: a smaller gain may be other load
_STRETCH, _FEWEST = 300_000_000, 3  # a pass is repeated for so many nanoseconds, and at least so many times
_OTHERS, _WAITED = 0.1, 0.02  # limits: cores that other programs use, and the share of time that a thread waits for one
_STAT, _TASKS = Path("/proc/stat"), Path("/proc/self/task")


def text_time(decoder: Decoder) -> float:
    """Nanoseconds of a short text: of reading its prompt and of decoding one token at a time."""
    decoder.clear()
    target = decoder.target
    return _CHUNKS * _mean(target.causal(decoder.form.chunk)) + _TOKENS * _mean(target.causal(1))


def _mean(call: Callable[[], object]) -> float:
    """Nanoseconds of a call, on average: threads that lack a core hold up some passes for long, and most not at all."""
    call()
    started, count = perf_counter_ns(), 0
    while count < _FEWEST or perf_counter_ns() - started < _STRETCH:
        call()
        count += 1
    return (perf_counter_ns() - started) / count


def fewer_threads(most: float, time: Callable[[int], float], cores: int) -> int:
    """Half of the cores, a quarter and so on, for as long as that is clearly faster; 0 if already half of them is not.

    most: nanoseconds with a thread for every core; time: measures them with so many threads.
    """
    best, shortest, threads = 0, most, cores // 2
    while threads and (taken := time(threads)) < _FASTER * shortest:
        best, shortest, threads = threads, taken, threads // 2
    return best


class OtherPrograms:
    """Whether other programs have held up this process since the object was made (Linux; elsewhere never)."""

    def __init__(self) -> None:
        self._began = _clocks()

    @property
    def in_the_way(self) -> bool:
        """Both that threads have waited for a core and that other programs have used one: threads also wait for each
        other."""
        wall, busy, own, waited = (now - began for now, began in zip(_clocks(), self._began, strict=True))
        return busy - own > _OTHERS * wall and waited > _WAITED * wall


def _clocks() -> tuple[int, int, int, int]:
    """Nanoseconds: now, that all programs and this one have used the cores, and that threads of this one have waited
    for a core."""
    user, nice, system, *_ = [int(ticks) for ticks in text(_STAT).partition("\n")[0].split()[1:]] or [0, 0, 0]
    waits = [text(task / "schedstat").split()[1:2] for task in _TASKS.iterdir()] if _TASKS.is_dir() else []
    tick = 10**9 // (os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100)
    return (
        perf_counter_ns(),
        (user + nice + system) * tick,
        process_time_ns(),
        sum(int(wait[0]) for wait in waits if wait),
    )
