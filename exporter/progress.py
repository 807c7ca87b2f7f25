"""The one progress display of an export, on standard error: a live line on a terminal, else one line for each finished phase."""

import sys
from threading import Lock
from time import monotonic
from types import TracebackType

from tqdm import tqdm

_MEASURED = "{desc}: {percentage:3.0f}% of {total_fmt}{unit}{postfix}, {remaining} left"
_UNMEASURED = "{desc}{postfix}, {elapsed}"


class Progress:
    """What an export is doing. The phases follow one another: ``start`` ends the phase before it.

    The time left is that of the phase, from the work done so far; a phase whose work cannot be counted shows the time since it began.
    """

    def __init__(self) -> None:
        self._live = bool(sys.stderr and sys.stderr.isatty())
        self._bar: tqdm | None = None
        self._phase, self._began, self._total, self._done = "", 0.0, 0, 0
        self._lock = Lock()  # workers of the golden run count their work too

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(finished=kind is None)

    def start(self, phase: str, total: int = 0, unit: str = "B") -> None:
        """total: work of the phase in units, 0 if it cannot be counted."""
        self._end(finished=True)
        self._phase, self._began, self._total, self._done = phase, monotonic(), total, 0
        if self._live:
            layout = _MEASURED if total else _UNMEASURED
            own = "B" if unit == "B" else f" {unit}"
            self._bar = tqdm(total=total or None, unit=own, unit_scale=unit == "B", desc=phase, bar_format=layout, leave=False)

    def advance(self, work: int) -> None:
        """Counts finished work. What exceeds the phase's total, which may be an estimate, does not count."""
        with self._lock:
            step = min(work, self._total - self._done)
            self._done += step
            if self._bar is not None and step > 0:
                self._bar.update(step)

    def tell(self, step: str) -> None:
        """Shows a step of the phase, on a terminal only."""
        if self._bar is not None:
            self._bar.set_postfix_str(step)

    def _end(self, finished: bool) -> None:
        """An unfinished phase gets no line: the error that ended it follows."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif self._phase and finished and sys.stderr and not self._live:
            print(f"{self._phase}: {monotonic() - self._began:.1f} s", file=sys.stderr)
        self._phase = ""
