"""Conversion of named errors to HTTP statuses and to bodies in OpenAI's format."""

from __future__ import annotations

import math

from grpc import StatusCode
from starlette.requests import Request
from starlette.responses import JSONResponse

from baton.core.errors import ContextLengthExceeded, InvalidRequest
from baton.router.doors.openai.response.choices import Json
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
from baton.rpc.status import (
    CONTEXT_LENGTH_EXCEEDED,
    MAX_ERROR_FIELD_CHARACTERS,
    code_and_reason,
    message_of,
)

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
# OpenAI's codes that clients test for. Other errors have Baton's reason as their code.
OPENAI_CODES: dict[type[Exception], str] = {
    ContextLengthExceeded: CONTEXT_LENGTH_EXCEEDED,
    UnknownModel: "model_not_found",
    Unauthenticated: "invalid_api_key",
    QueueFull: "rate_limit_exceeded",
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
    """Return an error in OpenAI's format, and with Baton's own `reason`, which gRPC has, too."""
    _, reason = code_and_reason(error)
    codes = (code for kind, code in OPENAI_CODES.items() if isinstance(error, kind))
    return error_body(
        message_of(error),
        status_of(error),
        next(codes, reason),
        (_field(error) or "")[:MAX_ERROR_FIELD_CHARACTERS] or None,
        reason,
    )


def error_body(
    message: str, status: int, code: str, param: str | None = None, reason: str | None = None
) -> Json:
    kind = "rate_limit_error" if status == HTTP_STATUS[StatusCode.RESOURCE_EXHAUSTED] else None
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": {**error, "reason": reason or code}}


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
