"""Formats of errors, by the path of a request."""

from __future__ import annotations

from baton.router.doors.messages.errors import MESSAGES_ERRORS
from baton.router.doors.openai.errors import OPENAI_ERRORS
from baton.router.http.errors import ErrorFormat

DEFAULT_ERRORS = OPENAI_ERRORS  # outside of the paths of another API
FORMATS: dict[str, ErrorFormat] = {"/v1/messages": MESSAGES_ERRORS}


def errors_of(path: str) -> ErrorFormat:
    formats = (FORMATS[prefix] for prefix in FORMATS if is_under(path, prefix))
    return next(formats, DEFAULT_ERRORS)


def is_under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")
