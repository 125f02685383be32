"""Translation of Anthropic's requests to chats."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.kv_hints import KvHints
from baton.core.sampling import NO_SAMPLING_DEFAULTS
from baton.core.structured_outputs import StructuredOutputs
from baton.router.doors.messages.parsed_message import ParsedMessage, message_from
from baton.router.doors.openai.request.parsed_request import ModelContext
from baton.router.text_events.parsing import ToolCallMode
from baton.router.values import ChatMessage, ChatPrompt, GenerateCall
from baton.rpc.errors import UnsupportedInput

CONTEXT = ModelContext(NO_SAMPLING_DEFAULTS, 512)
USER = {"role": "user", "content": "hi"}
SEE = {"name": "see", "input_schema": {"type": "object", "properties": {}}}
IMAGE = {"type": "image", "source": {"type": "file", "file_id": "file-1"}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.197"
EPHEMERAL = {"type": "ephemeral"}
LARGE = {"type": "string", "description": "x" * (1 << 19)}


def parse(**fields: Any) -> ParsedMessage:
    return message_from({"messages": [USER], "max_tokens": 9, **fields}, "id", CONTEXT)


def call_of(**fields: Any) -> GenerateCall:
    [call] = parse(**fields).request.calls
    return call


def prompt_of(**fields: Any) -> ChatPrompt:
    prompt = call_of(**fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_sampling_and_stop_sequences_are_those_of_a_chat() -> None:
    call = call_of(
        stop_sequences=["end", "fin"], temperature=0.5, top_k=3, seed=7, cache_salt="salt"
    )

    assert call.stop.strings == ("end", "fin")
    assert (call.sampling.max_tokens, call.sampling.temperature) == (9, 0.5)
    assert (call.sampling.top_k, call.sampling.seed, call.cache_salt) == (3, 7, "salt")
    assert not call.fills_context


def test_a_conversation_with_tools_becomes_messages_of_a_chat() -> None:
    prompt = prompt_of(
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        tools=[{**SEE, "description": "looks", "cache_control": EPHEMERAL}],
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "of another service"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "see", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "a fox"},
                    {"type": "text", "text": "and?"},
                ],
            },
            {"role": "user", "content": "well?"},
            {"role": "system", "content": "now"},
        ],
    )

    use = {
        "id": "t1",
        "type": "function",
        "function": {"name": "see", "arguments": {"x": 1}},
    }
    assert prompt.messages == (
        ChatMessage("system", "Be\nbrief."),
        ChatMessage("user", "hi"),
        ChatMessage("assistant", "I look.", {"reasoning_content": "hm", "tool_calls": [use]}),
        ChatMessage("tool", "a fox", {"tool_call_id": "t1", "name": "see"}),
        ChatMessage("user", "and?\nwell?"),
        ChatMessage("system", "now"),
    )
    function = {"name": "see", "description": "looks", "parameters": SEE["input_schema"]}
    assert prompt.variables == {"tools": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    "system",
    [
        [{"type": "text", "text": BILLING + digest}, {"type": "text", "text": "Be brief."}]
        for digest in (".8a5; cch=1;", ".cb6; cch=2;")
    ]
    + [f"{BILLING}.8a5;\nBe brief."],
)
def test_the_header_for_billing_does_not_change_the_prompt(system: object) -> None:
    assert prompt_of(system=system).messages[0] == ChatMessage("system", "Be brief.")


def test_deferred_tools_are_shown_from_a_reference_on() -> None:
    result = [{"type": "tool_reference", "tool_name": "see"}]
    found = {"type": "tool_result", "tool_use_id": "t1", "content": result}
    tools = [{**SEE, "defer_loading": True}, {**SEE, "name": "feed", "defer_loading": False}]

    before: Any = prompt_of(tools=tools).variables["tools"]
    after: Any = prompt_of(tools=tools, messages=[{"role": "user", "content": [found]}]).variables[
        "tools"
    ]

    assert [tool["function"]["name"] for tool in before] == ["feed"]
    assert [tool["function"]["name"] for tool in after] == ["see", "feed"]
    with pytest.raises(InvalidRequest, match="is 'see', which is not in tools") as refusal:
        prompt_of(messages=[{"role": "user", "content": [found]}])
    assert refusal.value.field == "messages.0.content.0.content.0.tool_name"


@pytest.mark.parametrize(
    ("choice", "mode"),
    [
        ({"type": "auto"}, ToolCallMode.BY_MODEL),
        ({"type": "any"}, ToolCallMode.REQUIRED),
        ({"type": "tool", "name": "see"}, ToolCallMode.NAMED),
        ({"type": "none"}, ToolCallMode.NONE),
    ],
)
def test_each_tool_choice_has_its_mode(choice: dict[str, Any], mode: ToolCallMode) -> None:
    one = {**choice, "disable_parallel_tool_use": True}

    text_format = parse(tools=[SEE], tool_choice=one).request.options.text_format

    assert (text_format.tool_calls, text_format.has_one_call) == (mode, True)


@pytest.mark.parametrize(
    ("fields", "retain_s"),
    [
        ({}, 0),
        ({"cache_control": EPHEMERAL}, 300),
        ({"tools": [{**SEE, "cache_control": {**EPHEMERAL, "ttl": "1h"}}]}, 3600),
        ({"system": [{"type": "text", "text": "S", "cache_control": EPHEMERAL}]}, 300),
        (
            {
                "cache_control": {**EPHEMERAL, "ttl": "1h"},
                "system": [{"type": "text", "text": "S", "cache_control": EPHEMERAL}],
            },
            3600,
        ),
        ({"cache_control": {**EPHEMERAL, "ttl": "1h"}, "kv_hints": {"retain_s": 7}}, 7),
    ],
)
def test_cache_control_retains_the_kv(fields: dict[str, Any], retain_s: int) -> None:
    assert call_of(**fields).kv_hints == KvHints(retain_s=retain_s)


def test_a_release_is_stronger_than_cache_control() -> None:
    hints = call_of(cache_control=EPHEMERAL, kv_hints={"release": True}).kv_hints

    assert hints == KvHints(release=True)


def test_thinking_is_a_variable_of_the_chat_template() -> None:
    on = parse(thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})
    off = prompt_of(thinking={"type": "disabled"})

    assert on.hides_thinking
    assert [warning.partition(":")[0] for warning in on.warnings] == ["thinking.budget_tokens"]
    assert off.variables == {"enable_thinking": False, "thinking": False}
    assert prompt_of().variables == {}


def test_an_output_format_is_a_structured_output() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}

    call = call_of(output_config=config)

    assert isinstance(call.sampling.structured_outputs, StructuredOutputs)
    assert call.sampling.structured_outputs.json is not None
    assert isinstance(call.prompt, ChatPrompt)
    assert call.prompt.variables == {"reasoning_effort": "low"}


def test_context_management_is_left_out_with_a_warning() -> None:
    warnings = parse(context_management={"edits": []}).warnings

    assert [warning.partition(":")[0] for warning in warnings] == ["context_management"]


def assistant(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": [block]}, USER]}


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            UnsupportedInput,
            "0.content.0.source.type",
        ),
        (assistant({"type": "redacted_thinking"}), UnsupportedInput, "0.content.0.type"),
        (assistant({"type": "tool_use", "id": "1"}), InvalidRequest, "0.content.0.name"),
        ({"messages": [{"role": "robot", "content": "x"}]}, InvalidRequest, "messages.0.role"),
        ({"messages": [USER, {"role": "assistant", "content": "{"}]}, UnsupportedInput, "messages"),
        ({"messages": []}, InvalidRequest, "messages"),
        ({"messages": [7]}, InvalidRequest, "messages.0"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"temperature": -1}, InvalidRequest, "temperature"),
        ({"stop_sequences": ["x" * 2000]}, InvalidRequest, "stop_sequences"),
        ({"tools": [{"type": "bash_20250124", "name": "b"}]}, UnsupportedInput, "tools.0.type"),
        ({"tools": [{"name": "see"}]}, InvalidRequest, "tools.0.input_schema"),
        ({"tool_choice": {"type": "tool"}}, InvalidRequest, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, InvalidRequest, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema"}}}, InvalidRequest, "format.schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": LARGE}}},
            InvalidRequest,
            "output_config.format",
        ),
        ({"mcp_servers": [{"url": "x"}]}, UnsupportedInput, "mcp_servers"),
        ({"cache_control": {"type": "forever"}}, InvalidRequest, "cache_control.type"),
        ({"n": 2}, InvalidRequest, "n"),
        ({"stop": "x"}, InvalidRequest, "stop"),
        ({"container": "c"}, InvalidRequest, "container"),
    ],
)
def test_a_refusal_names_the_field_of_the_client(
    fields: dict[str, Any], kind: type[Exception], field: str
) -> None:
    with pytest.raises(kind) as refusal:
        parse(**fields)

    named = getattr(refusal.value, "field", None) or ""
    assert named.endswith(field)
    assert str(refusal.value).startswith(named)
