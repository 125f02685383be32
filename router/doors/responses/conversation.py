"""Items of a Responses input as messages of a chat. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.core.errors import InvalidRequest
from baton.router.doors.chats import ChatTurns
from baton.router.doors.openai.request.bodies import validate_body
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
from baton.router.doors.responses.files import document_of_part
from baton.router.doors.responses.summaries import read_summary
from baton.router.doors.responses.tools import joined_name
from baton.router.parts import Part
from baton.rpc.errors import UnsupportedInput

ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    "compaction": CompactionItem,
}
TEXTS = ("input_text", "output_text", "text")
# Few chat templates know OpenAI's name.
ROLES = {"developer": "system"}


def add_items(turns: ChatTurns, items: Sequence[Any], where: str = "input") -> None:
    """Raises InvalidRequest and UnsupportedInput, which name the field."""
    for index, value in enumerate(items):
        _add_item(turns, _item(value, f"{where}.{index}"), f"{where}.{index}")


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
            kind, parts = "reasoning_text", item.content
            if not parts:
                kind, parts = "summary_text", item.summary
            for index, part in enumerate(parts):
                turns.add_reasoning(_text(part, f"{where}.content.{index}", (kind,)))


def _item(value: object, where: str) -> Item:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"{where} must be an object with a type", where)
    if kind not in ITEMS:
        raise UnsupportedInput(
            f"{where}.type is {kind[:64]!r}: supported here are {', '.join(ITEMS)}", f"{where}.type"
        )
    return validate_body(value, ITEMS[kind], where)


def _parts(content: str | list[Any], where: str) -> list[Part]:
    if isinstance(content, str):
        return [content]
    return [_part(part, f"{where}.{index}") for index, part in enumerate(content)]


def _part(part: object, where: str) -> Part:
    if isinstance(part, dict) and part.get("type") == "input_file":
        return document_of_part(part, where)
    return _text(part, where, TEXTS)


def _text(part: object, where: str, kinds: Sequence[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in kinds:
        raise UnsupportedInput(
            f"{where}.type is {kind[:64]!r}: supported here are texts and files",
            f"{where}.type",
        )
    return validate_body(part, TextPart, where).text
