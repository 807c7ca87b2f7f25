"""Compiles the grammars of requests, apart from everything that other requests need, and no longer than the client stays.

Each is tried first with little time and memory, which is enough for nearly all. What takes more is given up, and begins again among the few
that are compiled and followed at once. So no request waits longer than that little time for another's grammar that takes long.
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
        """most: grammars at once that take long, whether they are compiled or followed: each may take memory. longest_queue: of requests
        that wait for their turn among them."""
        threads = max(1, physical_cores() // 2)  # texts are decoded meanwhile, and need cores too
        self._matchers = matchers
        self._trials, self._long = _Lane(threads, most + longest_queue), _Lane(most, longest_queue)
        self._trying, self._compiling = (ThreadPoolExecutor(threads, "gumiho-grammar") for _ in range(2))

    @property
    def waiting(self) -> int:
        """Requests that wait until their grammar can be compiled."""
        return self._trials.waiting + self._long.waiting

    async def prepare(self, grammar: Grammar, held: ExitStack) -> PreparedGrammar:
        """Compiles a grammar. held: when it is closed, all that is done for the grammar ends. Raises Problem if too many wait, and what
        ``GrammarMatchers.start`` does."""
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


class _Lane:
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
