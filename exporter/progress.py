"""The one progress display of an export, on standard error: a live line on a terminal, else one line for each finished
phase, and one whenever nothing else was said for some seconds."""

import sys
from contextlib import suppress
from threading import Event, Lock, Thread
from time import monotonic
from types import TracebackType

from tqdm import tqdm

_MEASURED = "{desc}: {percentage:3.0f}% of {total_fmt}{unit}{postfix}, {remaining} left"
_UNMEASURED = "{desc}{postfix}, {elapsed}"
_SILENCE = 4.5  # seconds without a line, at most: a log then shows something every 5 seconds
_REFRESH = 1.0  # seconds between two states of the live line, if no work is counted


class Progress:
    """What an export is doing. The phases follow one another: ``start`` ends the phase before it.

    The time left is that of the phase, from the work done so far; a phase whose work cannot be counted shows the time
    since it began.
    """

    def __init__(self) -> None:
        self._live = bool(sys.stderr and sys.stderr.isatty())
        self._bar: tqdm | None = None
        self._phase = ""
        self._step = ""
        self._unit = ""
        self._began = 0.0
        self._said = 0.0
        self._total = 0
        self._done = 0
        self._lock = Lock()  # workers of the golden run count their work too
        self._over, self._beats = Event(), Thread(target=self._keep_talking, name="progress", daemon=True)

    def __enter__(self) -> "Progress":
        self._beats.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._beats.join()
        self._end(finished=kind is None)

    def _keep_talking(self) -> None:
        """Runs in a thread of its own, because much of the work is single calls that take long."""
        pause = _REFRESH if self._live else _SILENCE
        while not self._over.wait(pause):
            with self._lock, suppress(OSError, ValueError):  # a closed stream is reported by the export itself
                if self._bar is not None:
                    self._bar.refresh()
                elif not self._live:
                    pause = self._said + _SILENCE - monotonic()
                    if pause <= 0 or not self._phase:
                        self._say()
                        pause = _SILENCE

    def _say(self) -> None:
        """A line about the phase that has not ended."""
        if not self._phase or not sys.stderr:
            return
        self._said = monotonic()
        total = f"{self._total / 1e6:.0f} MB" if self._unit == "B" else f"{self._total} {self._unit}"
        shares = [f"{100 * self._done // self._total}% of {total}"] if self._total else []
        parts = [*shares, *filter(None, [self._step]), f"{self._said - self._began:.0f} s so far"]
        print(f"{self._phase}: {', '.join(parts)}", file=sys.stderr, flush=True)

    def start(self, phase: str, total: int = 0, unit: str = "B") -> None:
        """total: work of the phase in units, 0 if it cannot be counted."""
        self._end(finished=True)
        with self._lock:
            self._phase, self._step, self._unit, self._total, self._done = phase, "", unit, total, 0
            self._began = self._said = monotonic()
            if not self._live:
                return
            layout = _MEASURED if total else _UNMEASURED
            own = "B" if unit == "B" else f" {unit}"
            self._bar = tqdm(
                total=total or None, unit=own, unit_scale=unit == "B", desc=phase, bar_format=layout, leave=False
            )

    def advance(self, work: int) -> None:
        """Counts finished work. What exceeds the phase's total, which may be an estimate, does not count."""
        with self._lock:
            step = min(work, self._total - self._done)
            self._done += step
            if self._bar is not None and step > 0:
                self._bar.update(step)

    def tell(self, step: str) -> None:
        """Shows a step of the phase: on a terminal at once, else in the next line."""
        with self._lock:
            self._step = step
            if self._bar is not None:
                self._bar.set_postfix_str(step)

    def _end(self, finished: bool) -> None:
        """An unfinished phase gets no line: the error that ended it follows."""
        with self._lock:
            if self._bar is not None:
                self._bar.close()
                self._bar = None
            elif self._phase and finished and sys.stderr and not self._live:
                print(f"{self._phase}: {monotonic() - self._began:.1f} s", file=sys.stderr)
            self._phase = ""
