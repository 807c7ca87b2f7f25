"""uvicorn, with what it lacks: a time limit for requests that are sent slowly, and an end without tracebacks."""

import asyncio
import logging
import socket
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_log = logging.getLogger("gumiho.serve")
_AFTER_GRACE = 5  # seconds for aborted requests to send their last message


class ImpatientProtocol(H11Protocol):
    """HTTP/1.1 whose request lines and headers must be complete within PATIENCE seconds. uvicorn closes only
    connections that are idle between requests."""

    PATIENCE: ClassVar[float] = 30.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = self.loop.call_later(self.PATIENCE, self._expired)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._forget()
        elif self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._deadline = self.loop.call_later(self.PATIENCE, self._expired)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP, unless a response has already begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expired(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves an ASGI application on the listening sockets of ``run`` until SIGTERM or SIGINT, under a name for the
    log.

    patience: seconds within which a request's headers must come. grace: seconds that requests have to end once a signal
    has come.
    """

    def __init__(self, app: Any, name: str, patience: float, grace: int) -> None:
        self._name, self._grace = name, grace
        super().__init__(
            uvicorn.Config(
                app,
                http=type("Protocol", (ImpatientProtocol,), {"PATIENCE": patience}),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=max(1, int(patience)),
                timeout_graceful_shutdown=grace + _AFTER_GRACE,
            )
        )

    def handle_exit(self, sig: int, frame: Any) -> None:
        super().handle_exit(sig, frame)
        # Otherwise uvicorn would raise the signals again, and the process would end with their status.
        self._captured_signals.clear()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            host, port = listening.getsockname()[:2]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            _log.info("%s on %s, OpenAI's API on %s/v1", self._name, address, address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.get_running_loop().call_later(self._grace, self._break_off)
        await super().shutdown(sockets)
        ending.cancel()

    def _break_off(self) -> None:
        """Ends each request with a message. uvicorn would log a traceback for each."""
        _log.warning("--grace %d is over: %d requests are broken off", self._grace, len(self.server_state.tasks))
        for task in self.server_state.tasks:
            task.cancel()
