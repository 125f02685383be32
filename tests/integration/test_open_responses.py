"""Open Responses' compliance templates; and clients that send documents, and read reasoning and
calls that the model decides about.
"""

from __future__ import annotations

import base64
import json
import urllib.error
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
from anthropic import Anthropic
from jsonschema import Draft202012Validator
from openai import OpenAI

from baton.cluster import LocalCluster
from tests.support.open_responses import COMPACTED
from tests.support.open_responses_client import (
    USER,
    WEATHER,
    asking_over_websocket,
    create,
    post,
    said,
    stream,
    texts_of,
)
from tests.support.pdf_files import data_url, pdf_of, show
from tests.support.response_sockets import LAST_EVENTS
from tests.support.scripted_agent import CALLS, FOX, SECRET, SEEN, TEXT, THOUGHT

MAX_S = 60
NOT_FOUND = "previous_response_not_found"
needs_pdfium = pytest.mark.skipif(
    find_spec("pypdfium2") is None, reason="baton[documents] is not installed"
)
# As the template's, without a cross-reference table.
FILE = pdf_of(show("Title: OpenResponses File Input Fixture"))
FILE_INPUT = {
    "type": "message",
    "role": "user",
    "content": [
        {"type": "input_text", "text": "Read the attached file and answer with its title only."},
        {
            "type": "input_file",
            "filename": "openresponses-fixture.pdf",
            "file_data": data_url(
                FILE[: FILE.index(b"xref")] + b"trailer\n<< /Root 1 0 R >>\n%%EOF"
            ),
        },
    ],
}
RED_SQUARE = (  # a PNG of 8x8 pixels
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAFUlE"
    "QVR42mO8I2fDgA0wMeAAg1MCAPdsAUakOMBDAAAAAElFTkSuQmCC"
)
IMAGE_INPUT = {
    "type": "message",
    "role": "user",
    "content": [
        {"type": "input_text", "text": "What do you see in this image? Answer in one sentence."},
        {"type": "input_image", "image_url": f"data:image/png;base64,{RED_SQUARE}"},
    ],
}
needs_pillow = pytest.mark.skipif(find_spec("PIL") is None, reason="baton[images] is not installed")


@pytest.fixture
def url(scripted: LocalCluster) -> str:
    return f"http://{scripted.router.http_address}/v1/responses"


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
        pytest.param([FILE_INPUT], id="file-input", marks=needs_pdfium),
        pytest.param([IMAGE_INPUT], id="image-input", marks=needs_pillow),
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


def test_responses_over_websocket_follow_each_other_and_continue(url: str) -> None:
    """Templates websocket-response, -sequential-responses and -continuation."""
    with asking_over_websocket(url) as ask:
        for store in (True, False):
            events = ask(model="agent", input=[USER], store=store)
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            deltas = [
                event["delta"] for event in events if event["type"] == "response.output_text.delta"
            ]
            assert events[-1]["type"] == "response.completed"
            assert texts_of(events[-1]["response"]) == ["".join(deltas)] == [TEXT]
        called = ask(model="agent", input=[USER], tools=[WEATHER], store=False)[-1]["response"]
        [call] = called["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": SECRET}
        more = {"previous_response_id": called["id"], "tools": [WEATHER], "store": False}
        answered = ask(model="agent", input=[output], **more)[-1]["response"]
        assert texts_of(answered) == [SEEN]
        long = {"model": "agent", "input": "Be patient. " * 9}
        warm = ask(**long, generate=False, store=False)[-1]["response"]
        assert (warm["status"], warm["output"]) == ("completed", [])
        following = {**long, "input": "?", "previous_response_id": warm["id"]}
        usage = ask(**following)[-1]["response"]["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] > usage["input_tokens"] // 2


def test_only_its_connection_continues_what_is_not_stored(url: str) -> None:
    """Templates -reconnect-store-false-recovery, -previous-response-not-found,
    -failed-continuation-evicts-cache and -compact-new-chain.
    """
    common: dict[str, Any] = {"model": "agent", "store": False}
    output = {"type": "function_call_output", "call_id": "call_missing", "output": "?"}
    with asking_over_websocket(url) as ask:
        first = ask(**common, input="Remember: copper.")[-1]["response"]["id"]
        with asking_over_websocket(url) as reconnected:
            for previous in (first, "resp_missing"):
                [lost] = reconnected(**common, input="?", previous_response_id=previous)
                assert (lost["status"], lost["error"]["code"]) == (400, NOT_FOUND)
            assert texts_of(reconnected(**common, input=[USER])[-1]["response"]) == [TEXT]
        [failed] = ask(**common, input=[output], previous_response_id=first)
        assert failed["error"]["param"] == "input.0.call_id"
        [evicted] = ask(**common, input="?", previous_response_id=first)
        assert evicted["error"]["code"] == NOT_FOUND
        turns = [said("user", "Remember: slate."), said("assistant", "OK.")]
        compacted = json.loads(post(f"{url}/compact", turns))["output"]
        assert texts_of(ask(**common, input=[*compacted, USER])[-1]["response"]) == [TEXT]


def test_openai_converses_over_websocket(scripted: LocalCluster) -> None:
    base = f"http://{scripted.router.http_address}/v1"
    asked: Any = {"model": "agent", "input": "the weather", "tools": [WEATHER], "store": False}
    with (
        OpenAI(base_url=base, api_key="none", timeout=MAX_S) as client,
        client.responses.connect() as connection,
    ):

        def last_event(**fields: Any) -> Any:
            connection.response.create(**fields)
            return next(event for event in connection if event.type in LAST_EVENTS)

        called = last_event(**asked, stream_id="main")
        [call] = called.response.output
        result: Any = {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": SECRET,
        }
        more = {**asked, "input": [result], "previous_response_id": called.response.id}
        answered = last_event(**more, stream_id="main")
        lost = last_event(**more, stream_id="main")

    assert called.stream_id == answered.stream_id == lost.stream_id == "main"
    assert json.loads(call.arguments) == CALLS["get_weather"]
    assert answered.response.output_text == SEEN
    assert (lost.type, lost.status, lost.error.code) == ("error", 400, NOT_FOUND)


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


@needs_pdfium
def test_documents_of_both_clients_are_read(scripted: LocalCluster) -> None:
    base = f"http://{scripted.router.http_address}"
    asking = pdf_of(show("Answer as json_schema says."))  # where the model answers with a fox
    inline: Any = {"filename": "ask.pdf", "file_data": data_url(asking)}
    chat: Any = [{"type": "file", "file": inline}]
    item: Any = {"role": "user", "content": [{"type": "input_file", **inline}]}
    data = base64.b64encode(asking).decode()
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    block: Any = [{"type": "document", "source": source, "title": "ask.pdf"}]
    with OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=MAX_S) as client:
        chats: Any = client.chat.completions
        whole = chats.create(model="", messages=[{"role": "user", "content": chat}])
        answers = [
            whole.choices[0].message.content,
            client.responses.create(model="", input=[item]).output_text,
        ]
    with Anthropic(base_url=base, api_key="none", max_retries=0, timeout=MAX_S) as client:
        turns: Any = [{"role": "user", "content": block}]
        said_to = {"model": "agent", "messages": turns}
        answers.append(client.messages.create(**said_to, max_tokens=64).content[0].text)
        counted = client.messages.count_tokens(**said_to).input_tokens

    assert [json.loads(answer or "") for answer in answers] == [FOX] * 3
    assert whole.usage is not None
    assert counted == whole.usage.prompt_tokens
