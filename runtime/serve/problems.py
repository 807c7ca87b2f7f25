"""Errors of requests, in the API's format (https://platform.openai.com/docs/guides/error-codes)."""

import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from ..errors import GumihoError, InputError, UnavailableError

_log = logging.getLogger("gumiho.serve")
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class Problem(Exception):
    """A request that is refused. status: of HTTP. param: the parameter at fault, if any. code: the API's error code, if
    it has one."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = {},
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, str(GumihoError(message)), code, headers
        self.param = None if param is None else str(GumihoError(param))

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=dict(self.headers))

    @staticmethod
    def of(error: GumihoError) -> "Problem":
        """The problem for an error of the runtime. Only errors about the caller's input are shown; others concern this
        machine and are logged, since they may name its paths and libraries."""
        if isinstance(error, InputError):
            return Problem(400, str(error))
        _log.error("a request failed: %s", error)
        return Problem(503 if isinstance(error, UnavailableError) else 500, FAILED)


FAILED = "the server failed, and its log says why: report it"
ENDING = Problem(503, "the server is ending: try again later", code="server_ending")
