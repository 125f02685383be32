"""Events of clients, and errors as events. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.core.errors import InvalidRequest
from baton.router.doors.openai.errors import RefusedByCode, error_body
from baton.router.http.errors import HttpFailure
from baton.router.http.json_encoding import Json

CREATE = "response.create"
STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}", re.ASCII)


@dataclass(frozen=True, slots=True)
class CreateEvent:
    fields: Mapping[str, Any]  # of the request, as over HTTP
    is_warmup: bool = False


def take_stream_id(event: dict[str, Any]) -> str:
    """Remove the stream's id from an event; empty: there is none. Raises InvalidRequest."""
    stream_id = event.pop("stream_id", None)
    if stream_id is None:
        return ""
    if not isinstance(stream_id, str) or not STREAM_ID.fullmatch(stream_id):
        raise RefusedByCode(
            "stream_id must have 1 to 256 letters, digits, underscores, hyphens and periods",
            "stream_id",
            "invalid_stream_id",
        )
    return stream_id


def create_event_from(event: Mapping[str, Any]) -> CreateEvent:
    """Raises InvalidRequest."""
    fields = dict(event)
    kind, generate = fields.pop("type", None), fields.pop("generate", True)
    if kind != CREATE:
        shown = f"is {kind[:64]!r}" if isinstance(kind, str) else "is missing"
        raise InvalidRequest(f"type {shown}: events of clients here are {CREATE}", "type")
    if not isinstance(generate, bool):
        raise InvalidRequest("generate must be true or false", "generate")
    if fields.pop("stream", True) is not True:
        raise InvalidRequest("stream: responses over WebSocket are streams; leave it out", "stream")
    return CreateEvent({**fields, "stream": True}, is_warmup=not generate)


def error_event(failure: HttpFailure, headers: Mapping[str, str], stream_id: str = "") -> Json:
    """Return an error, with the headers that a response over HTTP would have."""
    error = {**error_body(failure)["error"], "headers": {**headers, **failure.headers}}
    event: Json = {"type": "error", "status": failure.status, "error": error}
    return in_stream(event, stream_id)


def in_stream(event: Json, stream_id: str) -> Json:
    return {**event, "stream_id": stream_id} if stream_id else event
