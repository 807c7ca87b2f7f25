"""When the user wants training to stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Interruption:
    """Whether SIGINT or SIGTERM has come, to this process or to one it trains with: a collective. The second one ends
    the process."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self) -> bool:
        from .parallel import total  # torch, which takes seconds to load

        agreed = total(self.came)[0] > 0
        if agreed:
            self.came = True
        return agreed

    @contextmanager
    def heeded(self) -> Iterator[None]:
        def note(number: int, _: object) -> None:
            self.came = True
            signal.signal(number, signal.SIG_DFL)

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
