"""Compiles the grammars of requests, apart from everything that other requests need: few at once, and no longer than the client stays."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from ..backends.processor import physical_cores
from ..decoding.grammar import Grammar, GrammarMatchers, PreparedGrammar
from .problems import Problem


class Grammars:
    """waiting: requests that wait until their grammar can be compiled."""

    def __init__(self, matchers: GrammarMatchers, most: int, longest_queue: int) -> None:
        """most: grammars at once, whether they are compiled or followed: each may take memory. longest_queue: of requests that wait."""
        self._matchers, self._room, self._longest_queue = matchers, asyncio.Semaphore(most), longest_queue
        # Texts are decoded meanwhile, and need cores too.
        self._threads = ThreadPoolExecutor(max(1, physical_cores() // 2), "gumiho-grammar")
        self.waiting = 0

    async def prepare(self, grammar: Grammar, held: ExitStack) -> PreparedGrammar:
        """Compiles a grammar. held: when it is closed, all that is done for the grammar ends. Raises Problem if too many wait, and what
        ``GrammarMatchers.start`` does."""
        prepared = self._matchers.prepared(grammar)
        held.callback(prepared.close)
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
        await asyncio.get_running_loop().run_in_executor(self._threads, prepared.prepare)
        return prepared

    def close(self) -> None:
        self._threads.shutdown(wait=False)
