"""Schemas of Open Responses (openresponses.org, version of 2026-04) for responses and events.

Written from the specification: all fields that it requires, with their types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete"]}


def _object(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


PART = {
    "anyOf": [
        _object(
            type={"const": "output_text"}, text=TEXT, annotations=_list({}), logprobs=_list({})
        ),
        _object(type={"enum": ["reasoning_text", "summary_text", "input_text"]}, text=TEXT),
    ]
}
MESSAGE = _object(
    type={"const": "message"},
    id=TEXT,
    status=STATUS,
    role={"enum": ["user", "assistant", "system", "developer"]},
    content=_list(PART),
)
CALL = _object(
    type={"const": "function_call"},
    id=TEXT,
    call_id=TEXT,
    name=TEXT,
    arguments=TEXT,
    status=STATUS,
)
REASONING = _object(type={"const": "reasoning"}, id=TEXT, content=_list(PART), summary=_list(PART))
ITEM = {"anyOf": [MESSAGE, CALL, REASONING]}
TOOL = _object(
    type={"const": "function"},
    name=TEXT,
    description=_or_null(TEXT),
    parameters=_or_null({"type": "object"}),
    strict=_or_null(FLAG),
)
FORMAT = {
    "anyOf": [
        _object(type={"enum": ["text", "json_object"]}),
        _object(
            type={"const": "json_schema"},
            name=TEXT,
            description=_or_null(TEXT),
            schema={"type": ["object", "null"]},
            strict=FLAG,
        ),
    ]
}
USAGE = _object(
    input_tokens=COUNT,
    output_tokens=COUNT,
    total_tokens=COUNT,
    input_tokens_details=_object(cached_tokens=COUNT),
    output_tokens_details=_object(reasoning_tokens=COUNT),
)
RESPONSE = _object(
    id=TEXT,
    object={"const": "response"},
    created_at=COUNT,
    completed_at=_or_null(COUNT),
    status={"enum": ["in_progress", "completed", "incomplete", "failed"]},
    incomplete_details=_or_null(_object(reason=TEXT)),
    model=TEXT,
    previous_response_id=_or_null(TEXT),
    instructions=_or_null(TEXT),
    output=_list(ITEM),
    error=_or_null(_object(code=TEXT, message=TEXT)),
    tools=_list(TOOL),
    tool_choice={
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            _object(type={"const": "function"}, name=TEXT),
        ]
    },
    truncation={"enum": ["auto", "disabled"]},
    parallel_tool_calls=FLAG,
    text=_object(format=FORMAT),
    top_p=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    top_logprobs=COUNT,
    temperature=NUMBER,
    reasoning=_or_null(_object(effort=_or_null(TEXT), summary=_or_null(TEXT))),
    usage=_or_null(USAGE),
    max_output_tokens=_or_null(COUNT),
    max_tool_calls=_or_null(COUNT),
    store=FLAG,
    background=FLAG,
    service_tier=TEXT,
    metadata={},
    safety_identifier=_or_null(TEXT),
    prompt_cache_key=_or_null(TEXT),
)
COMPACTED = _object(
    id=TEXT,
    object={"const": "response.compaction"},
    created_at=COUNT,
    output=_list(_object(type={"const": "compaction"}, id=TEXT, encrypted_content=TEXT)),
    usage=USAGE,
)
# Error over WebSocket.
SOCKET_ERROR = _object(
    type={"const": "error"},
    status=COUNT,
    error=_object(type=TEXT, code=TEXT, message=TEXT, param=_or_null(TEXT)),
)

_PLACE: Mapping[str, Schema] = {"item_id": TEXT, "output_index": COUNT}
_PART_PLACE = {**_PLACE, "content_index": COUNT}
_OF_RESPONSE = {"response": RESPONSE}
_OF_ITEM = {"output_index": COUNT, "item": ITEM}
_EVENTS: Mapping[str, Mapping[str, Schema]] = {
    "response.created": _OF_RESPONSE,
    "response.in_progress": _OF_RESPONSE,
    "response.completed": _OF_RESPONSE,
    "response.incomplete": _OF_RESPONSE,
    "response.failed": _OF_RESPONSE,
    "response.output_item.added": _OF_ITEM,
    "response.output_item.done": _OF_ITEM,
    "response.content_part.added": {**_PART_PLACE, "part": PART},
    "response.content_part.done": {**_PART_PLACE, "part": PART},
    "response.output_text.delta": {**_PART_PLACE, "delta": TEXT, "logprobs": _list({})},
    "response.output_text.done": {**_PART_PLACE, "text": TEXT, "logprobs": _list({})},
    "response.function_call_arguments.delta": {**_PLACE, "delta": TEXT},
    "response.function_call_arguments.done": {**_PLACE, "arguments": TEXT},
}
EVENTS: Mapping[str, Schema] = {
    kind: _object(type={"const": kind}, sequence_number=COUNT, **fields)
    for kind, fields in _EVENTS.items()
}
