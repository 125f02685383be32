"""Open Responses' compliance templates over HTTP, but those of images and files; and clients that
read reasoning and calls that the model decides about.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic import Anthropic
from jsonschema import Draft202012Validator
from openai import OpenAI

from baton.cluster import LocalCluster
from tests.support.open_responses import COMPACTED, EVENTS, RESPONSE
from tests.support.scripted_agent import CALLS, SECRET, SEEN, TEXT, THOUGHT

MAX_S = 60
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string"}},
        "required": ["location"],
    },
}
USER = {"type": "message", "role": "user", "content": "Say hello in three words."}


def said(role: str, content: str, **more: str) -> dict[str, str]:
    return {"type": "message", "role": role, "content": content, **more}


@pytest.fixture
def url(scripted: LocalCluster) -> str:
    return f"http://{scripted.router.http_address}/v1/responses"


def post(url: str, items: Any, **fields: Any) -> bytes:
    body = json.dumps({"model": "agent", "input": items, **fields}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=MAX_S) as answer:
        received: bytes = answer.read()
    return received


def create(url: str, items: Any, **fields: Any) -> Any:
    """Return a whole response that matches the schema."""
    response = json.loads(post(url, items, **fields))
    Draft202012Validator(RESPONSE).validate(response)
    return response


def stream(url: str, items: Any, **fields: Any) -> list[Any]:
    """Return the events of a stream, each of which matches its schema."""
    events = []
    for block in post(url, items, stream=True, **fields).decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if lines.get("data", "[DONE]") == "[DONE]":
            continue
        event = json.loads(lines["data"])
        assert event["type"] == lines["event"]
        Draft202012Validator(EVENTS[event["type"]]).validate(event)
        events.append(event)
    return events


def texts_of(response: Any) -> list[str]:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return [part["text"] for item in messages for part in item["content"]]


@pytest.mark.parametrize(
    "items",
    [
        pytest.param([USER], id="basic-response"),
        pytest.param([said("system", "You are a pirate."), USER], id="system-prompt"),
        pytest.param(
            [said("user", "I am Alice."), said("assistant", "Hello Alice!"), USER], id="multi-turn"
        ),
        pytest.param(
            [
                said("assistant", "I answer with the number.", phase="commentary"),
                said("assistant", "Four.", phase="final_answer"),
                USER,
            ],
            id="assistant-phase",
        ),
    ],
)
def test_a_conversation_is_answered(items: Sequence[Any], url: str) -> None:
    response = create(url, items)

    assert response["status"] == "completed"
    assert texts_of(response) == [TEXT]


def test_a_stream_has_the_events_of_its_response(url: str) -> None:
    events = stream(url, [USER])

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert len(deltas) > 1
    last = events[-1]
    assert last["type"] == "response.completed"
    assert texts_of(last["response"]) == ["".join(deltas)] == [TEXT]


def test_a_function_is_called_and_its_output_answered(url: str) -> None:
    whole = create(url, [USER], tools=[WEATHER])
    events = stream(url, [USER], tools=[WEATHER])

    [call], [again] = whole["output"], events[-1]["response"]["output"]
    assert call["type"] == again["type"] == "function_call"
    assert json.loads(call["arguments"]) == {"location": "San Francisco, CA"}
    by_kind: dict[str, list[Any]] = {}
    for event in events:
        by_kind.setdefault(event["type"], []).append(event)
    for kind in ("response.output_item.added", "response.output_item.done"):
        assert [event["item"]["type"] for event in by_kind[kind]] == ["function_call"]
    deltas = by_kind["response.function_call_arguments.delta"]
    [done] = by_kind["response.function_call_arguments.done"]
    assert "".join(event["delta"] for event in deltas) == done["arguments"] == call["arguments"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": SECRET}
    answered = create(url, [output], tools=[WEATHER], previous_response_id=whole["id"])
    assert answered["status"] == "completed"
    assert answered["previous_response_id"] == whole["id"]
    assert texts_of(answered) == [SEEN]


def test_a_forced_function_is_called(url: str) -> None:
    choice = {"type": "function", "name": "get_weather"}

    response = create(
        url, "the weather", tools=[WEATHER], tool_choice=choice, temperature=1, seed=3
    )

    [call] = response["output"]
    assert (call["type"], call["name"]) == ("function_call", "get_weather")
    assert isinstance(json.loads(call["arguments"])["location"], str)


def test_a_conversation_is_compacted_and_continued(url: str) -> None:
    compact = f"{url}/compact"
    turns = [said("user", "We launch on Tuesday."), said("assistant", "Understood.")]

    compacted = json.loads(post(compact, turns, prompt_cache_key="a"))

    Draft202012Validator(COMPACTED).validate(compacted)
    [item] = compacted["output"]
    continued = create(url, [item, USER])
    assert texts_of(continued) == [TEXT]
    without = create(url, [USER])
    assert continued["usage"]["input_tokens"] > without["usage"]["input_tokens"] + len(TEXT) // 4
    stored = create(url, "We launch on Tuesday.")
    again = json.loads(post(compact, None, previous_response_id=stored["id"]))
    assert again["output"][0]["type"] == "compaction"
    foreign = {"type": "compaction", "encrypted_content": "gAAAA"}
    wrong: list[tuple[str, Any, dict[str, Any], str]] = [
        (compact, turns, {"model": None}, "model is missing"),
        (compact, [], {}, "input is empty"),
        (url, [foreign, USER], {}, "input.0.encrypted_content was not made by this service"),
    ]
    for path, items, fields, reason in wrong:
        with pytest.raises(urllib.error.HTTPError) as refusal:
            post(path, items, **fields)
        with refusal.value:
            assert refusal.value.code == 400
            assert reason in json.load(refusal.value)["error"]["message"]


def test_a_response_repeats_the_fields_of_its_request(url: str) -> None:
    form = {"type": "json_schema", "name": "fox", "schema": {"enum": ["red"]}}
    given = {"safety_identifier": "a", "prompt_cache_key": "b", "max_tool_calls": 3}

    response = create(
        url, "?", text={"format": form}, presence_penalty=0.5, instructions=None, **given
    )

    assert texts_of(response) == ['"red"']
    assert response["text"]["format"] == {**form, "description": None, "strict": False}
    assert response["presence_penalty"] == 0.5
    assert {name: response[name] for name in given} == given
    assert response["completed_at"] >= response["created_at"]


def test_openai_reads_reasoning_and_calls(scripted: LocalCluster) -> None:
    base = f"http://{scripted.router.http_address}/v1"
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    tools: Any = [{"type": "function", "function": {**function, "strict": True}}]
    thinking: Any = [{"role": "user", "content": "think"}]
    asked: Any = [{"role": "user", "content": "the weather"}]
    with OpenAI(base_url=base, api_key="none", max_retries=0, timeout=MAX_S) as client:
        thought = client.chat.completions.create(model="", messages=thinking).choices[0].message
        item, message = client.responses.create(model="", input="think").output
        called = client.chat.completions.create(model="", messages=asked, tools=tools).choices[0]
        with client.chat.completions.stream(model="", messages=asked, tools=tools) as events:
            streamed = events.get_final_completion().choices[0]
        [call] = called.message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": SECRET}
        turns = [*asked, called.message.model_dump(exclude_none=True), result]
        answered = client.chat.completions.create(model="", messages=turns, tools=tools)

    assert thought.content is not None
    assert thought.content.strip() == TEXT
    assert thought.reasoning_content.strip() == THOUGHT
    assert (item.type, message.type) == ("reasoning", "message")
    assert item.content[0].text.strip() == THOUGHT
    assert called.finish_reason == streamed.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == CALLS["get_weather"]
    [again] = streamed.message.tool_calls
    assert again.function.arguments == call.function.arguments
    assert answered.choices[0].message.content == SEEN


def test_anthropic_reads_thinking_and_calls(scripted: LocalCluster) -> None:
    base = f"http://{scripted.router.http_address}"
    tools: Any = [{"name": WEATHER["name"], "input_schema": WEATHER["parameters"], "strict": True}]
    asked: Any = [{"role": "user", "content": "the weather"}]
    thinking: Any = [{"role": "user", "content": "think"}]
    common: Any = {"model": "agent", "max_tokens": 64}
    with Anthropic(base_url=base, api_key="none", max_retries=0, timeout=MAX_S) as client:
        messages: Any = client.messages
        with messages.stream(**common, messages=thinking, thinking={"type": "adaptive"}) as events:
            thought = events.get_final_message()
        called = messages.create(**common, messages=asked, tools=tools)
        [call] = called.content
        result = {"type": "tool_result", "tool_use_id": call.id, "content": SECRET}
        turns = [
            *asked,
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result]},
        ]
        answered = messages.create(**common, messages=turns, tools=tools)

    assert [block.type for block in thought.content] == ["thinking", "text"]
    assert thought.content[0].thinking.strip() == THOUGHT
    assert thought.content[1].text.strip() == TEXT
    assert called.stop_reason == "tool_use"
    assert (call.type, call.input) == ("tool_use", CALLS["get_weather"])
    assert answered.content[0].text == SEEN
