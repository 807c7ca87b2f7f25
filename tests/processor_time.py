"""Counts the processor time of the suite and of its tests, those of its processes and theirs included, and holds it to
a budget."""

import json
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_SHOWN = 10  # of the tests that take longest


def _spent() -> float:
    """Seconds of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class ProcessorTime:
    """Of one process of the suite. The one that the user started adds those of the others."""

    def __init__(self, budget: float, record: Path | None) -> None:
        """budget: minutes. record: a file that gets the seconds of every test."""
        self._budget, self._record = budget, record
        self._of_tests = Counter[str]()
        self._of_workers = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fixtures count for the test that needed them first."""
        before = _spent()
        try:
            return (yield)
        finally:
            self._of_tests[item.nodeid] += _spent() - before

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["processor_time"] = _spent(), dict(self._of_tests)
        elif self.minutes > self._budget:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist
    def pytest_testnodedown(self, node: Any) -> None:
        seconds, tests = getattr(node, "workeroutput", {}).get("processor_time", (0.0, {}))
        self._of_workers += seconds
        self._of_tests.update(tests)

    @property
    def minutes(self) -> float:
        return (self._of_workers or _spent()) / 60

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._of_tests:
            return
        terminalreporter.section("processor time")
        for name, seconds in self._of_tests.most_common(_SHOWN):
            terminalreporter.write_line(f"{seconds:6.1f} s {name}")
        terminalreporter.write_line(f"{self.minutes:6.1f} minutes in all, of at most {self._budget:g}")
        if self.minutes > self._budget:
            terminalreporter.write_line(
                "the suite takes more processor time than it may: see CONTRIBUTING.md", red=True
            )
        if self._record is not None:
            self._record.write_text(json.dumps(dict(self._of_tests.most_common()), indent=1), "utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processor-minutes", type=float, default=float("inf"), help="fail if the suite takes more processor time"
    )
    parser.addoption(
        "--processor-record", type=Path, help="write the processor seconds of every test to this file, as JSON"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorTime(config.option.processor_minutes, config.option.processor_record))
