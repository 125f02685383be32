"""Conversion of named errors to HTTP statuses and to bodies in OpenAI's format."""

from __future__ import annotations

import math

from grpc import StatusCode
from starlette.requests import Request
from starlette.responses import JSONResponse

from errors import InvalidRequest
from router.openai.response.choices import Json
from rpc.errors import (
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
from rpc.status import MAX_ERROR_FIELD_CHARACTERS, code_and_reason, message_of

# HTTP statuses of the gRPC codes in `rpc/status.py`.
HTTP_STATUS = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.UNAUTHENTICATED: 401,
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


def status_of(error: Exception) -> int:
    if isinstance(error, MessageTooLarge):
        return TOO_LARGE
    if isinstance(error, BodyTimeout):
        return TIMED_OUT
    return HTTP_STATUS[code_and_reason(error)[0]]


def body_of(error: Exception) -> Json:
    _, reason = code_and_reason(error)
    return error_body(
        message_of(error),
        status_of(error),
        reason,
        (_field(error) or "")[:MAX_ERROR_FIELD_CHARACTERS] or None,
    )


def error_body(message: str, status: int, code: str, param: str | None = None) -> Json:
    kind = "rate_limit_error" if status == HTTP_STATUS[StatusCode.RESOURCE_EXHAUSTED] else None
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(body_of(error), status_of(error), {**(headers or {}), **_headers(error)})


async def tell_named(_request: Request, error: Exception) -> JSONResponse:
    return error_response(error)


async def handle_bug(_request: Request, _error: Exception) -> JSONResponse:
    """Report an internal error. The log has its traceback."""
    return JSONResponse(error_body("internal error; see the server's log", 500, "INTERNAL"), 500)


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
