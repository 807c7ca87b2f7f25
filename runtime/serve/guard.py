"""Wraps every request: checks access, turns errors into the API's format, and logs a line."""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from urllib.parse import quote

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import GumihoError
from .completions import Request
from .connection import GoneError
from .metrics import Metrics
from .problems import ENDING, FAILED, Problem

_log = logging.getLogger("gumiho.serve")
_MOST_OF_PATH = 200  # characters in the log
_GONE = 499  # nginx's status for a client that has closed the connection, in logs and metrics


@dataclass(frozen=True)
class Access:
    """Who may use the server. keys: if there are any, requests must have one of them. origins: web pages of other
    origins that may send requests (CORS), ``*`` for all. hosts: allowed names in the Host header, None for any. They
    protect from web pages whose name is made to resolve to this machine (DNS rebinding).
    """

    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    hosts: Sequence[str] | None = None


class Line:
    """The log line of a request. asked: the texts that it requests, if any. body: logged too. held: closed when the
    line is written."""

    def __init__(self) -> None:
        self.begun, self.body, self.streams = perf_counter(), b"", False
        self.asked: Request | None = None
        self.held = ExitStack()

    def __str__(self) -> str:
        said = ""
        if self.asked:
            usage, stats = self.asked.usage, self.asked.stats
            said = f", {usage.prompt} + {usage.completion} tokens, {usage.cached} cached, {stats.tau:.2f} a pass"
            said += ", streamed" if self.streams else ""
        return said + (f", body {self.body!r}" if self.body else "")


class Guard:
    """Makes ASGI applications from request handlers."""

    def __init__(self, access: Access, metrics: Metrics) -> None:
        self._access, self._metrics = access, metrics

    def __call__(self, work: Callable[[HttpRequest, Line], Awaitable[Response]], keyed: bool = True) -> "_Guarded":
        """keyed: whether requests need a key, if the server has any."""
        return _Guarded(self, work, keyed)

    def admit(self, request: HttpRequest, keyed: bool) -> None:
        """Raises Problem if the request is not allowed."""
        host = request.headers.get("host", "")
        name = host[: host.rindex("]") + 1] if "]" in host else host.partition(":")[0]
        if self._access.hosts is not None and name.lower() not in self._access.hosts:
            raise Problem(
                403, f"{name!r} is not this server's name: start it with --allow-host {name}", code="unknown_host"
            )
        if keyed and self._access.keys:
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            # All keys are compared, so that the time does not depend on which one matches.
            same = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in self._access.keys]
            if kind.lower() != "bearer" or not any(same):
                raise Problem(
                    401,
                    "the API key is missing or wrong: send Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )

    def ended(self, request: HttpRequest, line: Line, status: int) -> None:
        """Logs and counts a request that has ended. status: of HTTP."""
        line.held.close()
        path = getattr(request.scope.get("route"), "path", "other")
        self._metrics.requests.labels(path, str(status)).inc()
        said = quote(request.scope["path"], errors="replace")[:_MOST_OF_PATH]
        _log.info("%s %s %d %.3f s%s", request.method, said, status, perf_counter() - line.begun, line)


class _Guarded:
    def __init__(self, guard: Guard, work: Callable[[HttpRequest, Line], Awaitable[Response]], keyed: bool) -> None:
        self._guard, self._work, self._keyed = guard, work, keyed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, line, status = HttpRequest(scope, receive), Line(), _GONE

        async def watched(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            response = await self._respond(request, line)
            await response(scope, receive, watched)
        except GoneError:
            status = _GONE
        finally:
            self._guard.ended(request, line, status)

    async def _respond(self, request: HttpRequest, line: Line) -> Response:
        try:
            self._guard.admit(request, self._keyed)
            return await self._work(request, line)
        except Problem as problem:
            return problem.response()
        except GumihoError as error:
            return Problem.of(error).response()
        except GoneError:
            raise
        except asyncio.CancelledError:  # only the end of the server cancels a request
            return ENDING.response()
        except Exception:
            _log.exception("a request failed")
            return Problem(500, FAILED).response()
