"""Items of a Responses input as messages of a chat. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.core.errors import InvalidRequest
from baton.router.doors.chats import ChatTurns
from baton.router.doors.openai.request.bodies import validate_by_type
from baton.router.doors.openai.request.prompts import parse_arguments
from baton.router.doors.responses.bodies import (
    CallItem,
    CallOutputItem,
    CompactionItem,
    Item,
    MessageItem,
    ReasoningItem,
    TextPart,
)
from baton.router.doors.responses.files import (
    InputFile,
    InputImage,
    document_of_part,
    image_of_part,
)
from baton.router.doors.responses.summaries import read_summary
from baton.router.doors.responses.tools import joined_name
from baton.router.parts import Part

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
