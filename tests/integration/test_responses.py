"""`openai` client's Responses against a real cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from baton.client import Client, Generation
from baton.cluster import LocalCluster
from baton.core.sampling import SamplingParams
from tests.support.schemas import is_valid

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ASK: dict[str, Any] = {"model": "", "max_output_tokens": 12, "temperature": 0}
AS_BATON: dict[str, Any] = {"ignore_eos": True}
FOX: Any = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "grey"]}, "age": {"type": "integer", "maximum": 20}},
    "required": ["colour", "age"],
}
TOOLS: Any = [{"type": "function", "name": name, "parameters": FOX} for name in ("see", "feed")]


@pytest.fixture
def door(cluster: LocalCluster) -> Iterator[OpenAI]:
    url = f"http://{cluster.router.http_address}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as connected:
        yield connected


def test_a_response_is_the_same_whole_streamed_and_over_grpc(door: OpenAI, client: Client) -> None:
    native = client.generate([{"role": "user", "content": "the quick brown"}], Generation(GREEDY))
    parameters = {**ASK, "input": "the quick brown", "extra_body": AS_BATON}

    whole = door.responses.create(**parameters)
    events = list(door.responses.create(**parameters, stream=True))

    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert whole.output_text == native.text == "".join(deltas)
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == native.text
    assert whole.status == last.response.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert whole.usage is not None
    assert whole.usage.output_tokens == 12
    assert last.response.usage.input_tokens == whole.usage.input_tokens


def test_a_stored_response_is_continued_retrieved_and_deleted(door: OpenAI) -> None:
    first = door.responses.create(**ASK, input="the quick", extra_body=AS_BATON)
    second = door.responses.create(
        **ASK, input="and?", previous_response_id=first.id, extra_body=AS_BATON
    )
    at_once = door.responses.create(
        **ASK,
        input=[
            {"role": "user", "content": "the quick"},
            *[item.model_dump() for item in first.output],
            {"role": "user", "content": "and?"},
        ],
        store=False,
        extra_body=AS_BATON,
    )

    assert second.output_text == at_once.output_text
    assert second.usage is not None
    assert at_once.usage is not None
    assert second.usage.input_tokens == at_once.usage.input_tokens
    assert second.previous_response_id == first.id
    assert door.responses.retrieve(first.id) == first
    door.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        door.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        door.responses.retrieve(at_once.id)
    with pytest.raises(openai.BadRequestError, match="not found") as refusal:
        door.responses.create(**ASK, input="and?", previous_response_id=first.id)
    assert refusal.value.param == "previous_response_id"
    again = door.responses.create(**ASK, input="so?", previous_response_id=second.id)
    assert again.usage is not None
    assert again.usage.input_tokens > second.usage.input_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "feed"}])
def test_a_forced_function_is_called_and_its_output_can_be_sent(choice: Any, door: OpenAI) -> None:
    parameters: dict[str, Any] = {
        "model": "",
        "input": "fox",
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_output_tokens": 400,
        "temperature": 1,
        "extra_body": {"seed": 3},
    }

    whole = door.responses.create(**parameters)
    with door.responses.stream(**parameters) as stream:
        streamed = stream.get_final_response()

    [call], [again] = whole.output, streamed.output
    assert call.type == again.type == "function_call"
    assert (call.name, call.arguments) == (again.name, again.arguments)
    assert call.name in ("see", "feed") if choice == "required" else call.name == "feed"
    assert is_valid(call.arguments, FOX)
    assert whole.status == "completed"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "a red one"}
    answered = door.responses.create(
        **ASK, input=[result], tools=TOOLS, previous_response_id=whole.id
    )
    assert answered.usage is not None
    assert answered.usage.output_tokens > 0


def test_a_text_format_is_enforced(door: OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "fox", "schema": FOX, "strict": True}

    answer = door.responses.create(
        model="", input="fox", text={"format": form}, extra_body={"seed": 3}, max_output_tokens=400
    )

    assert answer.status == "completed"
    assert is_valid(answer.output_text, FOX)
    assert json.loads(answer.model_dump_json())["text"]["format"]["name"] == "fox"


def test_errors_name_the_field(door: OpenAI) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"background": True}, "background"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "fox " * 900}, "input"),
    ]
    for fields, param in refused:
        with pytest.raises(openai.BadRequestError) as refusal:
            door.responses.create(**{"model": "", "input": "hi", **fields})
        assert refusal.value.param == param
