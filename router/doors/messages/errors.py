"""Errors in Anthropic's format, with Baton's own `reason` and `param`."""

from __future__ import annotations

from baton.router.http.errors import ErrorFormat, HttpFailure
from baton.router.http.json_encoding import Json, named_event

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(failure: HttpFailure) -> Json:
    error = {
        "type": TYPES.get(failure.status, _type(failure.status)),
        "message": failure.message,
        "param": failure.field,
        "reason": failure.reason,
    }
    return {"type": "error", "error": error}


def _type(status: int) -> str:
    return "invalid_request_error" if status < 500 else "api_error"


MESSAGES_ERRORS = ErrorFormat(error_body, lambda failure: named_event(error_body(failure)))
