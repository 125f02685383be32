"""Pydantic models of Anthropic's request bodies. Pure.

Unknown fields, wrong types and kinds of content without support are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.router.doors.chats import BATON_FIELDS
from baton.router.doors.openai.request.bodies import (
    MAX_INT32,
    Body,
    Messages,
    Texts,
    Tools,
    effective_fields,
    validate_body,
)
from baton.rpc.errors import UnsupportedInput

# Accepted and ignored: these fields do not affect the answer.
IGNORED_FIELDS = frozenset({"metadata", "service_tier", "inference_geo", "diagnostics"})
# Fields without support, and the values that are accepted because they match the behaviour.
ACCEPTED_VALUES: Mapping[str, tuple[object, ...]] = {"speed": ("standard",), "mcp_servers": ([],)}
# Fields whose effect is left out with a warning: the answer is right without it.
UNFULFILLED_FIELDS = {
    "context_management": "context_management: no messages were removed from the prompt"
}
# Fields of chats with the same meaning: Anthropic's, and after them Baton's own.
CHAT_FIELDS = ("model", "stream", "temperature", "top_p", *BATON_FIELDS)
RETAIN_S = {"5m": 300, "1h": 3600}
Positive = Annotated[int, Field(ge=1, le=MAX_INT32)]
Display = Literal["summarized", "omitted"] | None


class CacheControl(Body):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def retain_s(self) -> int:
        return RETAIN_S[self.ttl]


class Block(Body):
    """Content block. None: not given."""

    type: str
    cache_control: CacheControl | None = None


class TextBlock(Block):
    text: str
    citations: None = None


class ThinkingBlock(Block):
    thinking: str
    signature: str = ""  # of the service that made the block; not checked


class ToolUseBlock(Block):
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None


class ToolResultBlock(Block):
    tool_use_id: str
    content: str | list[Any] | None = None
    is_error: bool | None = None


class ToolReferenceBlock(Block):
    """Result of a client's search for tools: a deferred tool that the model sees from now on."""

    tool_name: str


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class Tool(Body):
    """Tool of the client."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    defer_loading: bool | None = None  # not shown to the model before a `tool_reference` to it
    # Accepted where they match the behaviour, or do not affect it.
    eager_input_streaming: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: list[Any] | None = None


class ToolChoiceBody(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Positive | None = None
    display: Display = None


class JsonOutput(Body):
    type: Literal["json_schema"]
    output_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: str | None = None
    format: JsonOutput | None = None


class TokenCountBody(Body):
    """Fields that make the prompt, which `count_tokens` has."""

    messages: Messages
    system: str | list[Any] | None = None
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoiceBody | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: CacheControl | None = None


class MessagesBody(TokenCountBody):
    max_tokens: Positive
    stop_sequences: Texts = Field(default_factory=list)


def own_fields(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that have an effect, and warnings about some others.

    Raises UnsupportedInput and InvalidRequest.
    """
    effective = effective_fields(fields, IGNORED_FIELDS, ACCEPTED_VALUES)
    unfulfilled = [name for name in UNFULFILLED_FIELDS if effective.pop(name, None)]
    return effective, [UNFULFILLED_FIELDS[name] for name in unfulfilled]


def read_tools(tools: list[dict[str, Any]]) -> list[Tool]:
    return [_tool(tool, f"tools.{index}") for index, tool in enumerate(tools)]


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    kind = tool.get("type")
    if isinstance(kind, str) and kind != "custom":
        raise UnsupportedInput(
            f"{where}.type is {kind[:64]!r}: tools of Anthropic's own are not supported; give the "
            "tool an input_schema, and run it in your program",
            f"{where}.type",
        )
    return validate_body(tool, Tool, where)
