"""Processes that follow grammars, one for each, so that no grammar can crash this one, fill its memory or keep its
threads."""

import marshal
import os
import socket
import struct
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..errors import UnavailableError
from . import grammar_child as child

_PROGRAM = Path(child.__file__)
_FAILED = (
    "the process that follows grammars does not start: run 'python -c \"import llguidance, os; os.fork()\"' to see why"
)


class EndedError(Exception):
    """The process has ended: by a limit, a crash of the library, or ``close``."""


class GrammarProcess:
    """One process. may_end: whether the text may end here. ``close`` may be called in any thread, all else in one at a
    time.

    Each call raises EndedError; ``problem`` is the library's error, "" if it has none.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.may_end, self.problem = False, ""
        weakref.finalize(self, connection.close)

    def compile(self, kind: str, text: str, trial: bool = False) -> None:
        """trial: within the limits of ``TRY_SECONDS`` and ``TRY_MEMORY``."""
        content = f"{kind} {text}".encode()
        self._ask(child.TRY if trial else child.COMPILE, len(content), content)

    def mask(self, bits: np.ndarray) -> None:
        """bits: int32 [vocabulary // 32 + 1], set to a bit for each id of the library that may follow."""
        self._ask(child.MASK, 0, into=bits)

    def consume(self, token: int) -> bool:
        """Whether a token of the library's may follow and has been appended."""
        return self._ask(child.CONSUME, token)

    def rollback(self, count: int) -> None:
        self._ask(child.ROLLBACK, count)

    def copy(self) -> "GrammarProcess":
        """A process with the same grammar and text."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._ask(child.COPY, 0, handle=theirs)
        copied = GrammarProcess(ours)
        copied.may_end = self.may_end
        return copied

    def close(self) -> None:
        """Ends it. A call that waits for it in another thread raises EndedError."""
        with suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)

    def _ask(
        self,
        command: bytes,
        number: int,
        content: bytes = b"",
        into: np.ndarray | None = None,
        handle: socket.socket | None = None,
    ) -> bool:
        try:
            message = child.COMMAND.pack(command, number) + content
            if handle:
                socket.send_fds(self._connection, [message], [handle.fileno()])
            else:
                self._connection.sendall(message)
            outcome, may_end, length = child.REPLY.unpack(child.received(self._connection, child.REPLY.size))
            reply = child.received(self._connection, length)
        except (OSError, EOFError):
            raise EndedError from None
        self.may_end = bool(may_end)
        self.problem = reply.decode("utf-8", "replace") if outcome == child.FAILED else ""
        if into is not None and not self.problem:
            into[:] = np.frombuffer(reply, np.int32)[: len(into)]  # the library's may be longer
        return outcome == child.TRUE


class GrammarProcesses:
    """Starts processes for one vocabulary, by forks of a process that has read it."""

    def __init__(self, tokens: list[bytes], end: int) -> None:
        """tokens: their spellings by id, b"" for none. end: the id that ends a text."""
        self._vocabulary = marshal.dumps((tokens, end))
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    def start(self) -> GrammarProcess:
        """A process without a grammar. Raises UnavailableError if processes cannot be started."""
        if not hasattr(os, "fork"):
            raise UnavailableError("guided decoding needs a system that can fork processes: Linux or macOS")
        with self._lock:
            for _ in range(2):  # once more if it has been ended from outside
                try:
                    self._control = self._control or self._open()
                    ours, theirs = socket.socketpair()
                    with theirs:
                        socket.send_fds(self._control, [b"!"], [theirs.fileno()])
                    return GrammarProcess(ours)
                except (OSError, EOFError):
                    self._control = None
        raise UnavailableError(_FAILED)

    def _open(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            # Isolated from the terminal, whose Ctrl-C is for this process. -W: it forks while a thread waits, and means
            # to.
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(_PROGRAM), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path[1:])), "PYTHONSAFEPATH": "1"},
            )
        weakref.finalize(self, _end, ours, process)
        ours.sendall(struct.pack("=Q", len(self._vocabulary)) + self._vocabulary)
        child.received(ours, 1)
        return ours


def _end(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    control.close()
    process.kill()
    process.wait()
