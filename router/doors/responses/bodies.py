"""Pydantic models of the bodies of OpenAI's Responses. Pure.

Unknown fields, wrong types and kinds of items without support are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.router.doors.chats import BATON_FIELDS
from baton.router.doors.openai.request.bodies import (
    MAX_INT32,
    Body,
    Texts,
    Tools,
)
from baton.router.input_processing.limits import MAX_CHAT_MESSAGES

# Accepted and ignored: these fields do not affect the answer.
IGNORED_FIELDS = frozenset(
    {
        *("user", "safety_identifier", "service_tier", "prompt_cache_key", "max_tool_calls"),
        "client_metadata",  # of Codex
    }
)
# Fields without support, and the values that are accepted because they match the behaviour.
ACCEPTED_VALUES: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "conversation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "context_management": ([],),
    "moderation": (),
}
CHAT_FIELDS = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls"),
    *("presence_penalty", "frequency_penalty", *BATON_FIELDS),
    *("prompt_cache_options", "prompt_cache_retention"),
)
MAX_METADATA = 16
MAX_METADATA_CHARACTERS = 512
Positive = Annotated[int, Field(ge=1, le=MAX_INT32)]
ShortText = Annotated[str, Field(max_length=MAX_METADATA_CHARACTERS)]
Items = Annotated[list[Any], Field(max_length=MAX_CHAT_MESSAGES, fail_fast=True)]
Roles = Literal["user", "assistant", "system", "developer"]


class Item(Body):
    """Item of an input. What services add to their outputs is ignored."""

    type: str
    id: Any = None
    status: Any = None


class MessageItem(Item):
    type: str = "message"
    role: Roles
    content: str | list[Any]
    phase: Any = None


class CallItem(Item):
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    caller: Any = None


class CallOutputItem(Item):
    call_id: str
    output: str | list[Any]
    name: Any = None
    namespace: Any = None
    caller: Any = None


class ReasoningItem(Item):
    summary: list[Any] = Field(default_factory=list)
    content: list[Any] | None = None
    encrypted_content: Any = None


class CompactionItem(Item):
    encrypted_content: str
    created_by: Any = None


class TextPart(Body):
    type: str
    text: str
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class ReasoningOptions(Body):
    effort: str | None = None
    summary: str | None = None  # ignored: reasoning is returned as a whole
    generate_summary: str | None = None


class Format(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    output_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    format: Format | None = None
    verbosity: str | None = None  # ignored, as in chats


class ResponsesStreamOptions(Body):
    include_obfuscation: bool | None = None  # ignored: no padding is added


class ResponsesBody(Body):
    input: str | Items = Field(default_factory=list)
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    metadata: Annotated[dict[str, ShortText], Field(max_length=MAX_METADATA)] = Field(
        default_factory=dict
    )
    previous_response_id: str | None = None
    store: bool = True
    tools: Tools = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    reasoning: ReasoningOptions = ReasoningOptions()
    text: TextOptions = TextOptions()
    include: Texts = Field(default_factory=list)
    stream_options: ResponsesStreamOptions | None = None
