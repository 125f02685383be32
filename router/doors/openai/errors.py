"""Errors in OpenAI's format, with Baton's own `reason`."""

from __future__ import annotations

from baton.core.errors import ContextLengthExceeded, InvalidRequest
from baton.router.http.errors import ErrorFormat, HttpFailure
from baton.router.http.json_encoding import Json, server_sent_event
from baton.rpc.errors import QueueFull, Unauthenticated, UnknownModel
from baton.rpc.status import CONTEXT_LENGTH_EXCEEDED

# Codes that clients test for. Other errors have Baton's reason as their code.
CODES: dict[type[Exception], str] = {
    ContextLengthExceeded: CONTEXT_LENGTH_EXCEEDED,
    UnknownModel: "model_not_found",
    Unauthenticated: "invalid_api_key",
    QueueFull: "rate_limit_exceeded",
}


class RefusedByCode(InvalidRequest):
    """Invalid request for which OpenAI has a code."""

    def __init__(self, message: str, field: str | None, code: str) -> None:
        super().__init__(message, field)
        self.code = code


def error_body(failure: HttpFailure) -> Json:
    error = {
        "message": failure.message,
        "type": _type(failure.status),
        "param": failure.field,
        "code": _code(failure),
        "reason": failure.reason,
    }
    return {"error": error}


def _code(failure: HttpFailure) -> str:
    if isinstance(failure.cause, RefusedByCode):
        return failure.cause.code
    codes = (code for kind, code in CODES.items() if isinstance(failure.cause, kind))
    return next(codes, failure.reason)


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


OPENAI_ERRORS = ErrorFormat(error_body, lambda failure: server_sent_event(error_body(failure)))
