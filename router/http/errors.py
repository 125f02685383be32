"""Failed HTTP requests: statuses and headers of named errors. Their bodies are up to each API."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpc import StatusCode
from starlette.responses import JSONResponse

from baton.core.errors import InvalidRequest
from baton.rpc.errors import (
    BodyTimeout,
    Draining,
    EmptyPrompt,
    MessageTooLarge,
    PoisonedRequest,
    QueueFull,
    Unauthenticated,
    UnknownModel,
    UnsupportedInput,
)
from baton.rpc.status import MAX_ERROR_FIELD_CHARACTERS, code_and_reason, message_of

# HTTP statuses of the gRPC codes in `rpc/status.py`.
HTTP_STATUS = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.ALREADY_EXISTS: 409,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.CANCELLED: 499,
    StatusCode.INTERNAL: 500,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.FAILED_PRECONDITION: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}
TOO_LARGE = 413
TIMED_OUT = 408
# A draining process is replaced by another one soon.
DRAINING_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class HttpFailure:
    """A failed request, before it is put in the format of an API."""

    status: int
    message: str
    reason: str  # for programs; the same over gRPC
    headers: Mapping[str, str] = field(default_factory=dict)
    field: str | None = None  # of the request, if one is at fault
    cause: Exception | None = None  # for APIs whose codes are narrower than a reason


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """Format of an API's errors: as the body of a response, or as the last event of a stream."""

    body: Callable[[HttpFailure], dict[str, Any]]
    event: Callable[[HttpFailure], bytes]

    def response(
        self, failure: HttpFailure, headers: Mapping[str, str] | None = None
    ) -> JSONResponse:
        both = {**(headers or {}), **failure.headers}
        return JSONResponse(self.body(failure), failure.status, both)


ErrorFormats = Callable[[str], ErrorFormat]  # by the path of a request

# The log has the traceback.
INTERNAL = HttpFailure(500, "internal error; see the server's log", "INTERNAL")


def failure_of(error: Exception) -> HttpFailure:
    return HttpFailure(
        status_of(error),
        message_of(error),
        code_and_reason(error)[1],
        _headers(error),
        (_field(error) or "")[:MAX_ERROR_FIELD_CHARACTERS] or None,
        error,
    )


def status_of(error: Exception) -> int:
    if isinstance(error, MessageTooLarge):
        return TOO_LARGE
    if isinstance(error, BodyTimeout):
        return TIMED_OUT
    return HTTP_STATUS[code_and_reason(error)[0]]


def _field(error: Exception) -> str | None:
    match error:
        case InvalidRequest() | UnsupportedInput():
            return error.field
        case UnknownModel():
            return "model"
        case EmptyPrompt():
            return "prompt"
    return None


def _headers(error: Exception) -> dict[str, str]:
    match error:
        case QueueFull():
            return {"retry-after": _seconds(error.retry_after_s)}
        case Draining():
            return {"retry-after": _seconds(DRAINING_RETRY_AFTER_S), "connection": "close"}
        case PoisonedRequest():
            return {"x-should-retry": "false"}  # to OpenAI's clients, which try 500 again
        case Unauthenticated():
            return {"www-authenticate": "Bearer"}
    return {}


def _seconds(wait_s: float) -> str:
    """Round up, since Retry-After has whole seconds."""
    return str(max(1, math.ceil(wait_s)))
