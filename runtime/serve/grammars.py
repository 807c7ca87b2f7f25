"""Compiles the grammars of requests, in threads that nothing else uses, and only while the client stays.

Each grammar is first tried with little time and memory, which is enough for nearly all. A trial that exceeds its limits
is given up, and compiling starts again with full limits, for a few grammars at a time. So no request waits for
another's slow grammar longer than a trial takes.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from ..backends.processor import physical_cores
from ..decoding.grammar import Grammar, GrammarMatchers, PreparedGrammar
from .problems import Problem


class Grammars:
    """Compiles a server's grammars."""

    def __init__(self, matchers: GrammarMatchers, most: int, longest_queue: int) -> None:
        """most: slow grammars that may be compiled or in use at once, since each may take much memory. longest_queue:
        requests that may wait to be among them."""
        threads = max(1, physical_cores() // 2)  # decoding needs cores meanwhile
        self._matchers = matchers
        self._trials, self._long = _Gate(threads, most + longest_queue), _Gate(most, longest_queue)
        self._trying, self._compiling = (ThreadPoolExecutor(threads, "gumiho-grammar") for _ in range(2))

    @property
    def waiting(self) -> int:
        """The number of requests whose grammar waits to be compiled."""
        return self._trials.waiting + self._long.waiting

    async def prepare(self, grammar: Grammar, held: ExitStack) -> PreparedGrammar:
        """Compiles a grammar. held: closing it ends all work for the grammar and frees its place. Raises Problem if too
        many wait, and the errors of ``GrammarMatchers.start``."""
        prepared, run = self._matchers.prepared(grammar), asyncio.get_running_loop().run_in_executor
        held.callback(prepared.close)
        with ExitStack() as trial:
            await self._trials.enter(trial)
            if await run(self._trying, prepared.try_to_prepare):
                return prepared
        await self._long.enter(held)
        await run(self._compiling, prepared.prepare)
        return prepared

    def close(self) -> None:
        self._trying.shutdown(wait=False)
        self._compiling.shutdown(wait=False)


class _Gate:
    def __init__(self, room: int, longest_queue: int) -> None:
        self._room, self._longest_queue = asyncio.Semaphore(room), longest_queue
        self.waiting = 0

    async def enter(self, held: ExitStack) -> None:
        if self._room.locked() and self.waiting >= self._longest_queue:
            raise Problem(
                429,
                f"{self.waiting} texts with grammars wait: try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.waiting += 1
        try:
            await self._room.acquire()
        finally:
            self.waiting -= 1
        held.callback(self._room.release)
