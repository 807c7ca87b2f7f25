"""Follows grammars with the library llguidance: the program of the processes that ``grammar_process`` starts.

It gets a vocabulary, and forks a process for every grammar: the library's parser recurses as deeply as a grammar is
chained, its automata can double with every byte of a text, and neither can be broken off. A process can. It imports the
library and nothing of ours, so that it is small. A forked process ends itself when the other end of its connection is
closed, whatever it is doing.

Messages are a header, ``COMMAND`` or ``REPLY``, and ``length`` bytes.
"""

import gc
import marshal
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

COMMAND = struct.Struct("=cI")  # one of the letters below; a length, token or count
REPLY = struct.Struct("=BBI")  # FALSE, TRUE or FAILED; whether the text may end here; length
COMPILE, TRY, COPY, MASK, CONSUME, ROLLBACK = b"c", b"q", b"f", b"m", b"t", b"r"
FALSE, TRUE, FAILED = 0, 1, 2
STEP_SECONDS, COMPILE_SECONDS, TEXT_SECONDS = 1.0, 10.0, 60  # of processor time
TRY_SECONDS = 0.25  # the schemas of twenty tools compile in a tenth of it
MEMORY, TRY_MEMORY = 256 << 20, 32 << 20  # bytes that a grammar may take
_STACK = 64 << 20
_NICENESS = 10  # on a busy core, a ninth of the processor time that decoding gets
# By default the library forces its own tokenization if only one text can follow. Here the grammar decides the text, and
# the model how it is split into tokens. The options come last, so that the line numbers in messages stay those of the
# grammar.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'


def received(connection: socket.socket, length: int) -> bytes:
    """Raises EOFError if the other end is closed."""
    content = bytearray(length)
    view = memoryview(content)
    while view:
        if not (count := connection.recv_into(view)):
            raise EOFError
        view = view[count:]
    return bytes(content)


def lark(library: Any, kind: str, text: str) -> str:
    """The grammar in the library's dialect of Lark."""
    if kind == "json":
        return f"start: %json {text}{_OPTIONS}"
    return (f"start: /{library.regex_to_lark(text, '')}/" if kind == "regex" else text) + _OPTIONS


class Follower:
    """The state of one grammar in one text."""

    def __init__(self, library: Any, tokenizer: Any) -> None:
        self._library, self._tokenizer = library, tokenizer
        self._text = ""
        self._matcher: Any = None
        self._consumed: list[int] = []

    def serve(self, connection: socket.socket) -> None:
        """Obeys commands until the connection is closed."""
        _end_with(connection)
        while True:
            header, handles, _, _ = socket.recv_fds(connection, COMMAND.size, 1)
            if len(header) < COMMAND.size:
                header += received(connection, COMMAND.size - len(header))
            name, number = COMMAND.unpack(header)
            if name == COPY:
                copied = socket.socket(fileno=handles[0])
                if os.fork() == 0:
                    connection.close()
                    return self.serve(copied)
                copied.close()
            content = received(connection, number) if name in (COMPILE, TRY) else b""
            with _limited(name):
                outcome, reply = self._do(name, number, content)
                may_end = outcome != FAILED and self._matcher.is_accepting()
            connection.sendall(REPLY.pack(outcome, may_end, len(reply)) + reply)

    def _do(self, name: bytes, number: int, content: bytes) -> tuple[int, bytes]:
        """Whether it could be done, and the mask if that is wanted, or an error."""
        done, reply = True, b""
        if name in (COMPILE, TRY):
            kind, _, text = content.decode().partition(" ")
            self._text = lark(self._library, kind, text)
            self._matcher = self._start()
        elif name == MASK:
            reply = self._matcher.compute_bitmask()
        elif name == CONSUME:
            done = bool(self._matcher.try_consume_tokens([number]))
            self._consumed += [number] * done
        elif name == ROLLBACK:
            del self._consumed[len(self._consumed) - number :]
            # grammars that limit the number of tokens cannot: read all of them again
            if not self._matcher.rollback(number):
                self._matcher = self._start()
                self._matcher.consume_tokens(self._consumed)
        if self._matcher.is_error():
            return FAILED, self._matcher.get_error().encode()
        return done, reply

    def _start(self) -> Any:
        limits = self._library.LLParserLimits(verbose_errors=False)
        return self._library.LLMatcher(self._tokenizer, self._text, log_level=0, limits=limits)


@contextmanager
def _limited(name: bytes) -> Iterator[None]:
    """Ends the process if a command takes too much."""
    signal.setitimer(signal.ITIMER_PROF, {COMPILE: COMPILE_SECONDS, TRY: TRY_SECONDS}.get(name, STEP_SECONDS))
    less = MEMORY - TRY_MEMORY if name == TRY else 0
    _change_memory(-less)
    yield
    _change_memory(less)
    signal.setitimer(signal.ITIMER_PROF, 0)


def _end_with(connection: socket.socket) -> None:
    """Ends the process when the other end is closed."""
    poll = select.poll()
    poll.register(connection, 0)  # nothing but that is reported

    def watch() -> None:
        poll.poll()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _change_memory(by: int) -> None:
    """by: bytes added to what this process may take."""
    import resource

    most, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if by and most != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_DATA, (most + by, hard))


def _limit() -> None:
    import resource

    def lower(kind: int, limit: int) -> None:
        most = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))

    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_STACK, _STACK)
    lower(resource.RLIMIT_CPU, TEXT_SECONDS)  # of each copy too
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            lower(resource.RLIMIT_DATA, int(file.read().split()[5]) * resource.getpagesize() + MEMORY)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if the machine runs out of memory, the kernel ends this process and not its parent


def _yield_to_decoding() -> None:
    """Lowers this process's priority. An engine's pass takes as long as its slowest thread, so a grammar that takes
    half of one core would double it."""
    if not hasattr(os, "nice"):
        return
    niceness = os.nice(_NICENESS)
    # A session of its own makes the process a scheduling group of its own (sched(7), "autogroup"), in which niceness
    # compares it with nobody: the group needs one too.
    with suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write(str(niceness))


def main() -> None:
    import llguidance

    _yield_to_decoding()

    control = socket.socket(fileno=int(sys.argv[1]))
    # Signals to the parent's group must not end this process in the middle of a text: it ends when the parent closes
    # the connection.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forked processes
    tokens, end = marshal.loads(received(control, *struct.unpack("=Q", received(control, 8))))
    vocabulary = SimpleNamespace(tokens=tokens, eos_token_id=end, bos_token_id=None, special_token_ids=())
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary))
    tokens.clear()  # the library has copied the tokens, but keeps a reference to the list
    threading.stack_size(256 << 10)
    gc.freeze()
    control.sendall(b"!")
    while True:
        _, handles, _, _ = socket.recv_fds(control, 1, 1)
        if not handles:
            return
        connection = socket.socket(fileno=handles[0])
        if os.fork() == 0:
            control.close()
            _limit()
            Follower(llguidance, tokenizer).serve(connection)
        connection.close()


if __name__ == "__main__":
    try:
        main()
    except (EOFError, OSError):
        os._exit(0)
