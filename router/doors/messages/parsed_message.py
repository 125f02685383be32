"""Conversion of Anthropic's requests to chats, and so to calls of the pipeline. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.errors import InvalidRequest
from baton.router.doors.chats import with_retain_s, with_thinking
from baton.router.doors.field_names import Renames, renaming_fields
from baton.router.doors.messages.bodies import (
    CHAT_FIELDS,
    MessagesBody,
    TokenCountBody,
    Tool,
    ToolChoiceBody,
    own_fields,
    read_tools,
)
from baton.router.doors.messages.conversation import Conversation
from baton.router.doors.openai.request.bodies import ChatOptions, openai_body, validate_body
from baton.router.doors.openai.request.parsed_request import (
    ModelContext,
    ParsedRequest,
    chat_request_from,
)
from baton.router.values import Prompt

# Names of a chat's fields, and what they are here. The message of an error begins with the name.
FIELD_NAMES: Renames = (
    (re.compile(r"^(tools\.\d+)\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"^(tools\.\d+)\.function\b"), r"\1"),
    (re.compile(r"^stop\b(?!_)"), "stop_sequences"),
    (re.compile(r"^response_format(\.json_schema)?\b"), "output_config.format"),
    (re.compile(r"^prompt$"), "messages"),
)
NO_FIELDS: Mapping[str, Any] = {}
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    request: ParsedRequest
    max_tokens: int  # as the client sent it
    hides_thinking: bool = False
    warnings: Sequence[str] = ()


def message_from(
    fields: Mapping[str, Any], request_id: str, context: ModelContext
) -> ParsedMessage:
    """Parse a request for a message. Raises InvalidRequest and UnsupportedInput."""
    effective, warnings = own_fields(fields)
    body = validate_body(_own(effective), MessagesBody)
    more = {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    thinking = body.thinking
    if thinking is not None and thinking.budget_tokens is not None:
        warnings.append(
            "thinking.budget_tokens: there is no limit for thinking alone; max_tokens limits "
            "thinking and answer together"
        )
    return ParsedMessage(
        _chat(effective, body, request_id, context, more),
        body.max_tokens,
        hides_thinking=thinking is not None and thinking.display == "omitted",
        warnings=warnings,
    )


def prompt_to_count(fields: Mapping[str, Any], context: ModelContext) -> Prompt:
    """Return the prompt whose tokens are to be counted. Raises as `message_from` does."""
    effective, _ = own_fields(fields)
    body = validate_body(_own(effective), TokenCountBody)
    return _chat(effective, body, "", context).calls[0].prompt


def _own(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in CHAT_FIELDS}


def _chat(
    fields: Mapping[str, Any],
    body: TokenCountBody,
    request_id: str,
    context: ModelContext,
    more: Mapping[str, Any] = NO_FIELDS,
) -> ParsedRequest:
    """Return the request of a chat with the same prompt and the same form."""
    conversation, tools = Conversation(), read_tools(body.tools)
    conversation.note_cache(body.cache_control)
    for tool in tools:
        conversation.note_cache(tool.cache_control)
    if body.system is not None:
        conversation.add_system(body.system)
    for index, message in enumerate(body.messages):
        conversation.add(message, f"messages.{index}")
    if not body.messages:
        raise InvalidRequest("messages is empty: send at least one", "messages")
    conversation.check_end()
    variables = fields.get("chat_template_kwargs", {})
    if body.thinking is not None:
        variables = with_thinking(variables, is_on=body.thinking.type != "disabled")
    chat = {
        **{name: fields[name] for name in CHAT_FIELDS if name in fields},
        "tools": [_function(tool) for tool in _shown(tools, conversation.tool_references)],
        **_tool_choice(body.tool_choice),
        **_output(body),
        "kv_hints": with_retain_s(fields.get("kv_hints", {}), conversation.retain_s),
        "chat_template_kwargs": variables,
        **more,
    }
    with renaming_fields(FIELD_NAMES):
        options = openai_body(chat, ChatOptions)
        return chat_request_from(conversation.messages, options, request_id, context)


def _shown(tools: Sequence[Tool], references: Mapping[str, str]) -> list[Tool]:
    """Return the tools without those that are deferred and not referred to."""
    names = {tool.name for tool in tools}
    for name, field in references.items():
        if name not in names:
            raise InvalidRequest(f"{field} is {name[:64]!r}, which is not in tools", field)
    return [tool for tool in tools if not tool.defer_loading or tool.name in references]


def _function(tool: Tool) -> dict[str, Any]:
    description = {} if tool.description is None else {"description": tool.description}
    strict = {} if tool.strict is None else {"strict": tool.strict}
    function = {"name": tool.name, **description, "parameters": tool.input_schema, **strict}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoiceBody | None) -> dict[str, Any]:
    if choice is None:
        return {}
    chosen: str | dict[str, Any]
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice.name is missing", "tool_choice.name")
        chosen = {"type": "function", "function": {"name": choice.name}}
    else:
        chosen = TOOL_CHOICES[choice.type]
    return {
        "tool_choice": chosen,
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _output(body: TokenCountBody) -> dict[str, Any]:
    effort, output = body.output_config.effort, body.output_config.format
    fields: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if output is not None:
        named = {"name": "output", "schema": output.output_schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    return fields
