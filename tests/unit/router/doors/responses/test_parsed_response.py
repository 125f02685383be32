"""Translation of Responses requests to chats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.kv_hints import KvHints
from baton.core.sampling import NO_SAMPLING_DEFAULTS
from baton.core.structured_outputs import StructuredOutputs
from baton.router.doors.openai.request.parsed_request import ModelContext
from baton.router.doors.responses.parsed_response import (
    ParsedResponse,
    response_from,
)
from baton.router.pictures.plan import ImageFile
from baton.router.text_events.parsing import ToolCallMode
from baton.router.values import ChatMessage, ChatPrompt, GenerateCall
from baton.rpc.errors import UnsupportedInput

CONTEXT = ModelContext(NO_SAMPLING_DEFAULTS, 512)
SEE = {"type": "function", "name": "see", "parameters": {"type": "object", "properties": {}}}
IMAGE = {"type": "input_image", "image_url": "file:///fox.png"}
LARGE = {"type": "string", "description": "x" * (1 << 19)}


def parse(history: list[Any] | None = None, **fields: Any) -> ParsedResponse:
    before = json.dumps(history or []).encode()
    return response_from({"input": "hi", **fields}, before, "id", CONTEXT)


def call_of(history: list[Any] | None = None, **fields: Any) -> GenerateCall:
    [call] = parse(history, **fields).request.calls
    return call


def prompt_of(history: list[Any] | None = None, **fields: Any) -> ChatPrompt:
    prompt = call_of(history, **fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_items_become_messages_of_a_chat_behind_the_history() -> None:
    history = [{"role": "user", "content": "before"}]
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "function_call", "call_id": "c1", "name": "see", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "a fox"},
    ]

    prompt = prompt_of(history, input=items, instructions="S", tools=[SEE])

    use = {
        "id": "c1",
        "type": "function",
        "function": {"name": "see", "arguments": {"x": 1}},
    }
    assert prompt.messages == (
        ChatMessage("system", "S"),
        ChatMessage("user", "before"),
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "hi"),
        ChatMessage("assistant", "", {"reasoning_content": "hm", "tool_calls": [use]}),
        ChatMessage("tool", "a fox", {"tool_call_id": "c1", "name": "see"}),
    )
    parsed = parse(history, input=items, instructions="S")
    assert json.loads(parsed.conversation(["answer"])) == [*history, *items, "answer"]


def test_options_are_those_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    call = call_of(
        max_output_tokens=9,
        temperature=0.5,
        seed=7,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema}},
        reasoning={"effort": "low", "summary": "auto"},
        prompt_cache_retention="24h",
    )

    assert (call.sampling.max_tokens, call.sampling.temperature, call.sampling.seed) == (9, 0.5, 7)
    assert isinstance(call.sampling.structured_outputs, StructuredOutputs)
    assert call.kv_hints == KvHints(retain_s=86_400)
    assert isinstance(call.prompt, ChatPrompt)
    assert call.prompt.variables == {"reasoning_effort": "low"}
    assert not call.fills_context
    assert call_of().fills_context


def test_the_lifetime_of_a_prompt_cache_is_how_long_kv_is_retained() -> None:
    options = {"mode": "explicit", "ttl": "12h", "prewarm": False, "comparison_response_id": "r"}
    part = {"type": "input_text", "text": "hi", "prompt_cache_breakpoint": {"mode": "explicit"}}

    call = call_of(prompt_cache_options=options, input=[{"role": "user", "content": [part]}])

    assert call.kv_hints == KvHints(retain_s=43_200)


def test_functions_of_a_namespace_have_one_name_for_the_model() -> None:
    space = {"type": "namespace", "name": "zoo", "description": "Animals.", "tools": [SEE]}
    custom = {"type": "custom", "name": "free"}
    call = {"type": "function_call", "call_id": "c", "namespace": "zoo", "name": "see"}
    items = [{**call, "arguments": "{}"}, {"role": "user", "content": "and?"}]
    mixed = {**space, "name": "mcp__", "tools": [custom, SEE]}

    parsed = parse(input=items, tools=[SEE, space, mixed])

    prompt: Any = parsed.request.calls[0].prompt
    names = [tool["function"]["name"] for tool in prompt.variables["tools"]]
    assert names == ["see", "zoo__see", "mcp__see"]
    assert parsed.namespaces == {"zoo__see": ("zoo", "see"), "mcp__see": ("mcp__", "see")}
    [use] = prompt.messages[0].others["tool_calls"]
    assert use["function"]["name"] == "zoo__see"
    assert parsed.warnings == ["tools: only functions are shown to the model, not custom"]
    with pytest.raises(InvalidRequest, match="two functions named 'zoo__see'"):
        parse(tools=[space, space])


def test_no_effort_turns_thinking_off() -> None:
    variables = prompt_of(reasoning={"effort": "none"}).variables

    assert variables == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}


def test_a_named_function_is_forced() -> None:
    text_format = parse(
        tools=[SEE], tool_choice={"type": "function", "name": "see"}
    ).request.options.text_format

    assert (text_format.tool_calls, text_format.function) == (ToolCallMode.NAMED, "see")


def test_tools_that_are_no_functions_are_left_out_with_a_warning() -> None:
    tools = [{"type": "web_search"}, SEE, {"type": "custom", "name": "n"}]

    parsed = parse(tools=tools)

    assert parsed.warnings == [
        "tools: only functions are shown to the model, not web_search, custom"
    ]
    [call] = parsed.request.calls
    assert isinstance(call.prompt, ChatPrompt)
    shown: Any = call.prompt.variables["tools"]
    assert [tool["function"]["name"] for tool in shown] == ["see"]


def test_the_response_repeats_the_request() -> None:
    parsed = parse(metadata={"k": "v"}, tools=[SEE], store=False, max_output_tokens=3)

    assert not parsed.is_stored
    assert parsed.echo["metadata"] == {"k": "v"}
    assert parsed.echo["tools"] == [{**SEE, "description": None, "strict": None}]
    assert (parsed.echo["max_output_tokens"], parsed.echo["text"]) == (
        3,
        {"format": {"type": "text"}},
    )


@pytest.mark.parametrize("detail", ["low", "high", "original"])
def test_an_image_has_the_detail_that_its_part_asks_for(detail: str) -> None:
    image = {**IMAGE, "image_url": "data:image/png;base64,AAAA", "detail": detail}

    prompt = call_of(input=[{"role": "user", "content": [image]}]).prompt

    assert isinstance(prompt, ChatPrompt)
    [file] = prompt.parts(ImageFile)
    assert file.detail.value == detail


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [
        ({"background": True}, UnsupportedInput, "background"),
        ({"conversation": "c"}, UnsupportedInput, "conversation"),
        ({"truncation": "auto"}, UnsupportedInput, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, UnsupportedInput, "include"),
        ({"input": []}, InvalidRequest, "input"),
        ({"input": [7]}, InvalidRequest, "input.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, UnsupportedInput, "input.0.type"),
        (
            {"input": [{"role": "user", "content": [IMAGE]}]},
            UnsupportedInput,
            "input.0.content.0.image_url",
        ),
        ({"input": [{"role": "robot", "content": "hi"}]}, InvalidRequest, "input.0.role"),
        (
            {
                "input": [
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "no JSON"}
                ]
            },
            InvalidRequest,
            "input.0.arguments",
        ),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            InvalidRequest,
            "tool_choice",
        ),
        ({"tools": [{"type": "function"}]}, InvalidRequest, "tools.0.name"),
        ({"tool_choice": "maybe"}, InvalidRequest, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, UnsupportedInput, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, InvalidRequest, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema"}}}, InvalidRequest, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "schema": LARGE}}},
            InvalidRequest,
            "text.format",
        ),
        ({"max_output_tokens": 0}, InvalidRequest, "max_output_tokens"),
        (
            {"prompt_cache_options": {"prewarm": True}},
            InvalidRequest,
            "prompt_cache_options.prewarm",
        ),
        ({"prompt_cache_retention": "1h"}, InvalidRequest, "prompt_cache_retention"),
        ({"temperature": -1}, InvalidRequest, "temperature"),
        ({"metadata": {"k": "v" * 513}}, InvalidRequest, "metadata.k"),
        ({"n": 2}, InvalidRequest, "n"),
        ({"messages": []}, InvalidRequest, "messages"),
    ],
)
def test_a_refusal_names_the_field_of_the_client(
    fields: dict[str, Any], kind: type[Exception], field: str
) -> None:
    with pytest.raises(kind) as refusal:
        parse(**fields)

    assert getattr(refusal.value, "field", None) == field
    assert str(refusal.value).startswith(field)
