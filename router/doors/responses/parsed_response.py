"""Conversion of Responses requests to chats, and so to calls of the pipeline. Pure."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from baton.core.errors import InvalidRequest
from baton.router.doors.chats import ChatTurns, with_thinking
from baton.router.doors.field_names import Renames, renaming_fields
from baton.router.doors.openai.request.bodies import (
    ChatOptions,
    effective_fields,
    openai_body,
    validate_body,
    validate_by_type,
)
from baton.router.doors.openai.request.parsed_request import (
    ModelContext,
    ParsedRequest,
    chat_request_from,
)
from baton.router.doors.openai.request.prompts import parse_arguments
from baton.router.doors.responses.bodies import (
    ACCEPTED_VALUES,
    CHAT_FIELDS,
    IGNORED_FIELDS,
    CallItem,
    CallOutputItem,
    CompactionItem,
    Format,
    Item,
    MessageItem,
    NamedFunction,
    ReasoningItem,
    ResponsesBody,
    TextPart,
)
from baton.router.doors.responses.files import (
    InputFile,
    InputImage,
    document_of_part,
    image_of_part,
)
from baton.router.doors.responses.tools import joined_name, read_tools
from baton.router.http.json_encoding import Json, as_json
from baton.router.parts import Part
from baton.rpc.errors import UnsupportedInput

# Names of a chat's fields, and what they are here. The message of an error begins with the name.
FIELD_NAMES: Renames = (
    (re.compile(r"^max_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"^(tools\.\d+)\.function\b"), r"\1"),
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
    (re.compile(r"^response_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"^messages(\.\d+)?(?=$|[ .])(\.[\w.]+)?"), "input"),
    (re.compile(r"^prompt$"), "input"),
)
NO_HISTORY = b"[]"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
PLAIN_REASONING = f"include: {ENCRYPTED_REASONING} is not needed: reasoning is returned as text"
ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    "compaction": CompactionItem,
}
PARTS: Mapping[str, type[TextPart | InputFile | InputImage]] = {
    **dict.fromkeys(("input_text", "output_text", "text"), TextPart),
    "input_file": InputFile,
    "input_image": InputImage,
}
# Few chat templates know OpenAI's name.
ROLES = {"developer": "system"}
PREFIX = "baton:"  # of the content of items that are made here
SUMMARY = "Summary of the conversation before this message:\n{}"


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    request: ParsedRequest
    echo: Json  # fields of the request that the response repeats
    history: bytes  # JSON of the items before the request
    items: Sequence[Any]  # of the request, without instructions
    is_stored: bool
    warnings: Sequence[str] = ()
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # of functions

    def conversation(self, answer: Sequence[Any]) -> bytes:
        """Return the JSON of all items: those before the request, its own, and the answer's."""
        items = [*self.items, *answer]
        if self.history == NO_HISTORY or not items:
            return as_json(items) if items else self.history
        return self.history[:-1] + b"," + as_json(items)[1:]


def response_from(
    fields: Mapping[str, Any],
    history: bytes,
    request_id: str,
    context: ModelContext,
    *,
    is_warmup: bool = False,
) -> ParsedResponse:
    """Parse a request. `history` are the items before it, as JSON.

    A warm-up may have no input, and no message of the user, which many chat templates need.
    Raises InvalidRequest and UnsupportedInput.
    """
    effective = effective_fields(fields, IGNORED_FIELDS, ACCEPTED_VALUES)
    own = {name: value for name, value in effective.items() if name not in CHAT_FIELDS}
    body = validate_body(own, ResponsesBody)
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    turns = ChatTurns()
    if body.instructions is not None:
        turns.add("system", body.instructions)
    add_items(turns, from_json(history))
    add_items(turns, given)
    if is_warmup and {*turns.roles} <= {"system"}:
        turns.add("user", "")
    elif not given and not is_warmup:
        raise InvalidRequest("input is empty: send a text, or at least one item", "input")
    tools = read_tools(body.tools)
    chat = {
        **{name: effective[name] for name in CHAT_FIELDS if name in effective},
        "tools": tools.functions,
        "tool_choice": _tool_choice(body.tool_choice),
        **_options(body, effective),
    }
    with renaming_fields(FIELD_NAMES):
        options = openai_body(chat, ChatOptions)
        parsed = chat_request_from(turns.messages, options, request_id, context)
    echo = _echo(body, effective, fields, parsed)
    return ParsedResponse(
        parsed,
        echo,
        history,
        given,
        body.store,
        [*_warnings(body), *tools.warnings],
        tools.namespaces,
    )


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise UnsupportedInput(
            'tool_choice must be none, auto, required or {"type": "function", "name": …}',
            "tool_choice",
        )
    named = validate_body(choice, NamedFunction, "tool_choice")
    return {"type": "function", "function": {"name": named.name}}


def _options(body: ResponsesBody, fields: Mapping[str, Any]) -> dict[str, Any]:
    variables, effort = fields.get("chat_template_kwargs", {}), body.reasoning.effort
    if effort == "none":
        variables = with_thinking(variables, is_on=False)
    options: dict[str, Any] = {"chat_template_kwargs": variables}
    if effort is not None:
        options["reasoning_effort"] = effort
    if body.max_output_tokens is not None:
        options["max_completion_tokens"] = body.max_output_tokens
    if body.text.format is not None:
        options["response_format"] = _response_format(body.text.format)
    return options


def _response_format(form: Format) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    if form.output_schema is None:
        raise InvalidRequest("text.format.schema is missing", "text.format.schema")
    return {
        "type": "json_schema",
        "json_schema": {"name": form.name or "output", "schema": form.output_schema},
    }


def _warnings(body: ResponsesBody) -> list[str]:
    for name in body.include:
        if name != ENCRYPTED_REASONING:
            raise UnsupportedInput(f"include: {name[:64]!r} is not supported here", "include")
    return [PLAIN_REASONING] if body.include else []


def _echo(
    body: ResponsesBody,
    effective: Mapping[str, Any],
    fields: Mapping[str, Any],
    parsed: ParsedRequest,
) -> Json:
    """Return the fields of the request, in the shape that Open Responses has for a response."""
    sampling = parsed.calls[0].sampling
    return {
        "background": False,
        "frequency_penalty": sampling.frequency_penalty,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": fields.get("max_tool_calls"),
        "metadata": body.metadata,
        "parallel_tool_calls": effective.get("parallel_tool_calls", True),
        "presence_penalty": sampling.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": fields.get("prompt_cache_key"),
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "safety_identifier": fields.get("safety_identifier"),
        "service_tier": "default",
        "store": body.store,
        "temperature": sampling.temperature,
        "text": {"format": _echoed_format(body.text.format)},
        "tool_choice": body.tool_choice,
        "tools": [_echoed_tool(tool) for tool in body.tools],
        "top_logprobs": 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }


def _echoed_format(form: Format | None) -> Json:
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None else form.type}
    return {
        "type": form.type,
        "name": form.name or "output",
        "description": form.description,
        "schema": form.output_schema,
        "strict": bool(form.strict),
    }


def _echoed_tool(tool: Mapping[str, Any]) -> Json:
    if tool.get("type") != "function":
        return dict(tool)
    return {**dict.fromkeys(("description", "parameters", "strict")), **tool}


def add_items(turns: ChatTurns, items: Sequence[Any]) -> None:
    """Raises InvalidRequest and UnsupportedInput, which name the field."""
    for index, value in enumerate(items):
        typed = {"type": "message", **value} if isinstance(value, dict) else value
        _add_item(turns, validate_by_type(typed, ITEMS, f"input.{index}"), f"input.{index}")


def _add_item(turns: ChatTurns, item: Item, where: str) -> None:
    match item:
        case MessageItem():
            for part in _parts(item.content, f"{where}.content"):
                turns.add(ROLES.get(item.role, item.role), part)
        case CallItem():
            name = joined_name(item.namespace, item.name)
            arguments = parse_arguments(item.arguments, f"{where}.arguments")
            turns.add_call(item.call_id, name, arguments)
        case CallOutputItem():
            if not turns.has_call(item.call_id):
                raise InvalidRequest(
                    f"{where}.call_id: no function_call before it has the id "
                    f"{item.call_id[:64]!r}; send the call, too",
                    f"{where}.call_id",
                )
            turns.add_result(item.call_id, _parts(item.output, f"{where}.output"))
        case CompactionItem():
            summary = read_summary(item.encrypted_content, f"{where}.encrypted_content")
            turns.add("user", summary)
        case ReasoningItem():
            kind = "reasoning_text" if item.content else "summary_text"
            for index, value in enumerate(item.content or item.summary):
                read = validate_by_type(value, {kind: TextPart}, f"{where}.content.{index}")
                turns.add_reasoning(read.text)


def _parts(content: str | list[Any], where: str) -> list[Part]:
    if isinstance(content, str):
        return [content]
    return [_part(part, f"{where}.{index}") for index, part in enumerate(content)]


def _part(value: object, where: str) -> Part:
    part = validate_by_type(value, PARTS, where)
    match part:
        case TextPart():
            return part.text
        case InputFile():
            return document_of_part(part, where)
        case InputImage():
            return image_of_part(part, where)


def content_of(summary: str) -> str:
    """Return a summary as the content of an item. It is not encrypted."""
    return PREFIX + base64.b64encode(summary.encode()).decode()


def read_summary(content: str, where: str) -> str:
    """Return the summary as a message's text. Raises InvalidRequest."""
    try:
        if not content.startswith(PREFIX):
            raise ValueError
        text = base64.b64decode(content.removeprefix(PREFIX), validate=True).decode()
    except (ValueError, binascii.Error):
        raise InvalidRequest(
            f"{where} was not made by this service, so it cannot be read: send the conversation "
            "itself",
            where,
        ) from None
    return SUMMARY.format(text)
