"""A client's connection: reads the body, notices when the client leaves, and limits how slowly it may read."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import GumihoError
from .problems import ENDING, FAILED, Problem

_log = logging.getLogger("gumiho.serve")
_LAST_SECONDS = 1.0  # for a client to read the message that the server ends
_T = TypeVar("_T")


class GoneError(Exception):
    """The client has closed the connection, or has stopped reading."""


async def read(request: Request, most: int, seconds: float) -> bytes:
    """The body. Raises Problem if it is larger than ``most`` bytes or takes longer, GoneError if the client leaves."""
    declared = request.headers.get("content-length", "0")
    too_large = Problem(
        413, f"the body is larger than {most} bytes: send less, or start the server with a larger --max-body"
    )
    if declared.isdigit() and int(declared) > most:
        raise too_large
    content = bytearray()

    async def receive() -> None:
        async for piece in request.stream():
            content.extend(piece)
            if len(content) > most:
                raise too_large

    try:
        await asyncio.wait_for(receive(), seconds)
    except asyncio.TimeoutError:
        raise Problem(408, f"the body did not arrive within {seconds:g} seconds: send it faster") from None
    except ClientDisconnect:
        raise GoneError from None
    return bytes(content)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Awaits ``work``; if the client leaves, cancels it and raises GoneError. The body must have been read."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise GoneError
    finally:
        for task in (working, leaving):
            task.cancel()
        for task in (working, leaving):
            with suppress(BaseException):
                await task


class EventStream(Response):
    """Server-sent events in the API's format: a JSON object per chunk, then ``[DONE]``."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], patience: float) -> None:
        """patience: seconds that the client may take to read sent data before it counts as gone."""
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._patience = chunks, patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._write(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await unless_gone(receive, self._send_all(send))
        except asyncio.CancelledError:  # only the end of the server cancels a request
            self._patience = min(self._patience, _LAST_SECONDS)
            await self._last(send, _event(ENDING.body))

    async def _send_all(self, send: Send) -> None:
        last = b"data: [DONE]\n\n"
        try:
            async for chunk in self._chunks:
                await self._body(send, _event(chunk))
        except Problem as problem:  # the status has been sent already
            last = _event(problem.body)
        except GumihoError as error:
            last = _event(Problem.of(error).body)
        except GoneError:
            raise
        except Exception:
            _log.exception("a request failed")
            last = _event(Problem(500, FAILED).body)
        await self._last(send, last)

    async def _last(self, send: Send, content: bytes) -> None:
        await self._body(send, content)
        await self._body(send, b"", more=False)

    async def _body(self, send: Send, content: bytes, more: bool = True) -> None:
        await self._write(send, {"type": "http.response.body", "body": content, "more_body": more})

    async def _write(self, send: Send, message: dict[str, Any]) -> None:
        """Sends a message. Raises GoneError if the client reads too slowly. ``wait_for`` would make a task for every
        chunk."""
        task, late = asyncio.current_task(), False
        assert task

        def expire() -> None:
            nonlocal late
            late = True
            task.cancel()

        timer = asyncio.get_running_loop().call_later(self._patience, expire)
        try:
            await send(message)
        except OSError:
            raise GoneError from None
        except asyncio.CancelledError:
            if late:
                raise GoneError from None
            raise
        finally:
            timer.cancel()


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode("utf-8", "replace")
