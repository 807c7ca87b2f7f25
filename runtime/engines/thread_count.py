"""How many CPU threads run engines fastest on this machine, found when they are compiled."""

from collections.abc import Callable

from ..decoding.decoder import Decoder
from .pass_times import fastest

_CHUNKS, _TOKENS = 2, 128  # of the text whose time counts: read in chunks, then decoded plainly
_FASTER = 0.85  # of the time with twice as many threads: less may be due to what else the machine does


def text_time(decoder: Decoder) -> float:
    """Nanoseconds of a short text: of reading its prompt and of decoding one token at a time."""
    decoder.clear()
    passes = decoder.passes
    return _CHUNKS * fastest(passes.causal(decoder.form.chunk)) + _TOKENS * fastest(passes.causal(1))


def fewer_threads(most: float, time: Callable[[int], float], cores: int) -> int:
    """Half of the cores, a quarter and so on, for as long as that is clearly faster; 0 if already half of them is not.

    most: nanoseconds with a thread for every core; time: measures them with so many threads.
    """
    best, shortest, threads = 0, most, cores // 2
    while threads and (taken := time(threads)) < _FASTER * shortest:
        best, shortest, threads = threads, taken, threads // 2
    return best
