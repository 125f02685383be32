"""Client of Open Responses, which validates responses and events, over HTTP and WebSocket."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jsonschema import Draft202012Validator
from websockets.sync.client import connect

from tests.support.open_responses import EVENTS, RESPONSE, SOCKET_ERROR
from tests.support.response_sockets import LAST_EVENTS

MAX_S = 60
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string"}},
        "required": ["location"],
    },
}
USER = {"type": "message", "role": "user", "content": "Say hello in three words."}


def said(role: str, content: str, **more: str) -> dict[str, str]:
    return {"type": "message", "role": role, "content": content, **more}


def post(url: str, items: Any, **fields: Any) -> bytes:
    body = json.dumps({"model": "agent", "input": items, **fields}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=MAX_S) as answer:
        received: bytes = answer.read()
    return received


def create(url: str, items: Any, **fields: Any) -> Any:
    """Return a whole response that matches the schema."""
    response = json.loads(post(url, items, **fields))
    Draft202012Validator(RESPONSE).validate(response)
    return response


def stream(url: str, items: Any, **fields: Any) -> list[Any]:
    """Return the events of a stream, each of which matches its schema."""
    events = []
    for block in post(url, items, stream=True, **fields).decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if lines.get("data", "[DONE]") == "[DONE]":
            continue
        event = json.loads(lines["data"])
        assert event["type"] == lines["event"]
        Draft202012Validator(EVENTS[event["type"]]).validate(event)
        events.append(event)
    return events


def texts_of(response: Any) -> list[str]:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return [part["text"] for item in messages for part in item["content"]]


@contextmanager
def asking_over_websocket(url: str) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Yield a function that sends fields of a request, and returns the events of its response.

    Each event matches its schema.
    """
    with connect(url.replace("http", "ws", 1), proxy=None) as connection:

        def ask(**fields: Any) -> list[dict[str, Any]]:
            connection.send(json.dumps({"type": "response.create", **fields}))
            events: list[dict[str, Any]] = []
            while not events or events[-1]["type"] not in LAST_EVENTS:
                event = json.loads(connection.recv())
                schema = SOCKET_ERROR if event["type"] == "error" else EVENTS[event["type"]]
                Draft202012Validator(schema).validate(event)
                events.append(event)
            return events

        yield ask
