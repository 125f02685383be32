"""Messages of Anthropic's API as messages of a chat. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.router.doors.chats import ChatTurns
from baton.router.doors.messages.bodies import (
    Block,
    CacheControl,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from baton.router.doors.messages.files import (
    DocumentBlock,
    ImageBlock,
    document_of_block,
    image_of_block,
)
from baton.router.doors.openai.request.bodies import validate_body, validate_by_type
from baton.router.parts import Part
from baton.router.values import ChatMessage
from baton.rpc.errors import UnsupportedInput

TEXT: dict[str, type[Block]] = {"text": TextBlock}
GIVEN: dict[str, type[Block]] = {**TEXT, "document": DocumentBlock, "image": ImageBlock}
IN_RESULTS: dict[str, type[Block]] = {**GIVEN, "tool_reference": ToolReferenceBlock}
OF_USERS: dict[str, type[Block]] = {**GIVEN, "tool_result": ToolResultBlock}
OF_ASSISTANTS: dict[str, type[Block]] = {
    **TEXT,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
}
BLOCKS_BY_ROLE = {"user": OF_USERS, "assistant": OF_ASSISTANTS, "system": TEXT}
# Claude Code begins its system prompt with this line for Anthropic's servers. It has a hash of the
# conversation: with it, no two conversations would have a prefix in common.
BILLING_HEADER = "x-anthropic-billing-header:"


class Conversation:
    """Builds the messages of a chat from Anthropic's."""

    def __init__(self) -> None:
        self.retain_s = 0  # the longest that a `cache_control` asks for
        self.tool_references: dict[str, str] = {}  # field of the first one by the tool's name
        self._turns = ChatTurns()

    @property
    def messages(self) -> list[ChatMessage]:
        return self._turns.messages

    def add_system(self, content: str | list[Any]) -> None:
        for block in self._blocks(content, TEXT, "system"):
            if isinstance(block, TextBlock):
                for text in _without_header(block.text):
                    self._turns.add("system", text)

    def add(self, message: Mapping[str, Any], where: str) -> None:
        """Raises InvalidRequest and UnsupportedInput, which name the field."""
        read = validate_body(message, Message, where)
        kinds, inside = BLOCKS_BY_ROLE[read.role], f"{where}.content"
        for index, block in enumerate(self._blocks(read.content, kinds, inside)):
            match block:
                case ThinkingBlock():
                    self._turns.add_reasoning(block.thinking)
                case ToolUseBlock():
                    self._turns.add_call(block.id, block.name, block.input)
                case ToolResultBlock():
                    self._add_result(block, f"{inside}.{index}.content")
                case DocumentBlock():
                    self._turns.add(read.role, document_of_block(block, f"{inside}.{index}"))
                case ImageBlock():
                    self._turns.add(read.role, image_of_block(block, f"{inside}.{index}"))
                case TextBlock():
                    self._turns.add(read.role, block.text)

    def check_end(self) -> None:
        """Raises UnsupportedInput if the answer would have to continue an assistant's message."""
        if self._turns.roles[-1:] == ["assistant"]:
            raise UnsupportedInput(
                "messages: the last message is the assistant's; the beginning of an answer cannot "
                "be given here: end with a message of the user",
                "messages",
            )

    def note_cache(self, control: CacheControl | None) -> None:
        if control is not None:
            self.retain_s = max(self.retain_s, control.retain_s)

    def _blocks(
        self, content: str | list[Any], kinds: Mapping[str, type[Block]], where: str
    ) -> list[Block]:
        if isinstance(content, str):
            return [TextBlock(type="text", text=content)]
        blocks = [
            validate_by_type(each, kinds, f"{where}.{index}") for index, each in enumerate(content)
        ]
        for block in blocks:
            self.note_cache(block.cache_control)
        return blocks

    def _add_result(self, block: ToolResultBlock, where: str) -> None:
        parts: list[Part] = []
        for index, each in enumerate(self._blocks(block.content or "", IN_RESULTS, where)):
            match each:
                case ToolReferenceBlock():
                    field = f"{where}.{index}.tool_name"
                    self.tool_references.setdefault(each.tool_name, field)
                    parts.append(f"The tool {each.tool_name} can be called now.")
                case DocumentBlock():
                    parts.append(document_of_block(each, f"{where}.{index}"))
                case ImageBlock():
                    parts.append(image_of_block(each, f"{where}.{index}"))
                case TextBlock():
                    parts.append(each.text)
        self._turns.add_result(block.tool_use_id, parts, is_error=bool(block.is_error))


def _without_header(text: str) -> list[str]:
    return text.split("\n", 1)[1:] if text.startswith(BILLING_HEADER) else [text]
