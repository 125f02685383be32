"""Conversion of OpenAI prompts, messages and tools to the router's prompts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from baton.core.errors import InvalidRequest
from baton.router.doors.openai.request.bodies import MAX_INT32, TemplateFields
from baton.router.doors.openai.request.files import document_of_part, image_of_part
from baton.router.input_processing.limits import (
    MAX_ANSWERS,
    MAX_CHAT_MESSAGES,
    check_count,
    check_prompt_length,
)
from baton.router.parts import Content, Part, content_of
from baton.router.values import (
    ChatMessage,
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from baton.rpc.errors import EmptyPrompt, UnsupportedInput

EXPECTED = "a text, a list of texts, a list of token ids, or a list of such lists"
# Template variables that are set by other fields of the request.
RESERVED = ("messages", "tools", "add_generation_prompt")


def parse_prompts(
    value: object,
    *,
    add_special_tokens: bool = True,
    max_model_len: int | None = None,
    field: str = "prompt",
    max_prompts: int = MAX_ANSWERS,
) -> list[Prompt]:
    """Return one or several prompts. Raises InvalidRequest and EmptyPrompt."""
    if isinstance(value, str):
        return [TextPrompt(value, add_special_tokens)]
    if isinstance(value, list):
        if not value:
            raise EmptyPrompt(f"{field} is an empty list; send at least one text")
        if type(value[0]) is int:
            return [_token_prompt(value, max_model_len, field)]
        check_count(field, len(value), max_prompts)
        if all(isinstance(prompt, str) for prompt in value):
            return [TextPrompt(text, add_special_tokens) for text in value]
        if all(isinstance(prompt, list) for prompt in value):
            return [_token_prompt(ids, max_model_len, field) for ids in value]
    raise InvalidRequest(f"{field} must be {EXPECTED}", field)


def _token_prompt(token_ids: list[Any], max_model_len: int | None, field: str) -> TokenPrompt:
    check_prompt_length(len(token_ids), max_model_len)
    if not _are_token_ids(token_ids):
        raise InvalidRequest(f"{field} must be {EXPECTED}", field)
    return TokenPrompt(tuple(token_ids))


def _are_token_ids(values: Sequence[Any]) -> bool:
    if set(map(type, values)) - {int}:
        return False
    return not values or (min(values) >= 0 and max(values) <= MAX_INT32)


def chat_from(
    messages: Sequence[ChatMessage], body: TemplateFields, tools: Sequence[Mapping[str, Any]]
) -> ChatPrompt:
    """Raises InvalidRequest."""
    check_count("messages", len(messages), MAX_CHAT_MESSAGES)
    if not messages:
        raise InvalidRequest("messages is empty: send at least one", "messages")
    for name in RESERVED:
        if name in body.chat_template_kwargs:
            field = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"{field}: send {name} as a field of its own", field)
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    variables = {**effort, **body.chat_template_kwargs}
    if tools:
        variables["tools"] = list(tools)
    return ChatPrompt(tuple(messages), body.add_generation_prompt, variables)


def messages_from(values: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Raises InvalidRequest and UnsupportedInput."""
    return [_message(value, f"messages.{index}") for index, value in enumerate(values)]


def _message(message: Mapping[str, Any], where: str) -> ChatMessage:
    others = {key: value for key, value in message.items() if key not in ("role", "content")}
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"{where}.role must be a text", f"{where}.role")
    if others.get("tool_calls") is not None:
        others["tool_calls"] = _tool_calls(others["tool_calls"], f"{where}.tool_calls")
    return ChatMessage(role, _content(message.get("content"), f"{where}.content"), others)


def _content(value: object, where: str) -> Content:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a text or a list of text parts", where)
    return content_of(_part(part, f"{where}.{index}") for index, part in enumerate(value))


def _part(part: object, where: str) -> Part:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where} must be an object with type and text", where)
    if part.get("type") == "file":
        return document_of_part(part, where)
    if part.get("type") == "image_url":
        return image_of_part(part, where)
    if part.get("type") != "text":
        raise UnsupportedInput(
            f"{where} is no text, file or image_url: other parts are not supported", where
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a text", f"{where}.text")
    return str(part["text"])


def _tool_calls(value: object, where: str) -> list[dict[str, Any]]:
    """Parse each call's arguments, a JSON string, since templates expect the object."""
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a list", where)
    return [_tool_call(call, f"{where}.{index}") for index, call in enumerate(value)]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidRequest(f"{where}.function must be an object", f"{where}.function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    parsed = parse_arguments(arguments, f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": parsed}}


def parse_arguments(arguments: str, where: str) -> object:
    """Raises InvalidRequest."""
    try:
        return from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"{where} is not JSON: {error}", where) from error
