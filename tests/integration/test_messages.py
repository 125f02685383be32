"""`anthropic` client against a real cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from baton.client import Client, Generation
from baton.cluster import LocalCluster
from baton.core.sampling import SamplingParams
from tests.support.schemas import is_valid

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
AS_BATON: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
FOX: Any = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "grey"]}, "age": {"type": "integer", "maximum": 20}},
    "required": ["colour", "age"],
}
TOOLS: Any = [{"name": name, "input_schema": FOX} for name in ("see", "feed")]


def asked(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "max_tokens": 12, "messages": messages, **fields}


@pytest.fixture
def door(cluster: LocalCluster) -> Iterator[Any]:
    url = f"http://{cluster.router.http_address}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as connected:
        yield connected


def test_a_message_is_the_same_whole_streamed_and_over_grpc(door: Any, client: Client) -> None:
    native = client.generate([{"role": "user", "content": "the quick brown"}], Generation(GREEDY))
    body = asked("the quick brown", extra_body=AS_BATON)

    whole = door.messages.create(**body)
    with door.messages.stream(**body) as stream:
        deltas = list(stream.text_stream)
        streamed = stream.get_final_message()

    assert whole.content[0].text == streamed.content[0].text == "".join(deltas) == native.text
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 12
    counted = door.messages.count_tokens(model="tiny", messages=body["messages"]).input_tokens
    for message in (whole, streamed):
        used = message.usage
        assert used.input_tokens + used.cache_read_input_tokens == counted


def test_a_repeated_prompt_is_read_from_the_cache(door: Any) -> None:
    system = [{"type": "text", "text": "fox " * 60, "cache_control": {"type": "ephemeral"}}]
    body = asked("hi", system=system, extra_body={**AS_BATON, "cache_salt": "of this test"})

    first, second = (door.messages.create(**body).usage for _ in range(2))

    assert first.cache_read_input_tokens == 0
    assert second.cache_read_input_tokens > 16
    assert first.input_tokens == second.input_tokens + second.cache_read_input_tokens


def test_a_stop_sequence_ends_the_message_and_is_named(door: Any) -> None:
    body = asked("the quick brown", extra_body=AS_BATON)
    whole = door.messages.create(**body).content[0].text
    stop = whole[3:5]

    ended = door.messages.create(**body, stop_sequences=[stop])

    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in ended.content) == whole[: whole.index(stop)]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "feed"}])
def test_a_forced_tool_is_called_and_its_result_can_be_sent(choice: Any, door: Any) -> None:
    once = {**choice, "disable_parallel_tool_use": True}
    sampled = {"extra_body": {"temperature": 1, "seed": 3}}
    body = {**asked("fox", tools=TOOLS, tool_choice=once, **sampled), "max_tokens": 400}

    whole = door.messages.create(**body)
    with door.messages.stream(**body) as stream:
        streamed = stream.get_final_message()

    [call], [again] = whole.content, streamed.content
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert call.type == "tool_use"
    assert (call.name, call.input) == (again.name, again.input)
    assert call.name == choice.get("name", call.name)
    assert is_valid(json.dumps(call.input), FOX)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "a red one"}
    turns = [
        *body["messages"],
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    answered = door.messages.create(model="tiny", max_tokens=4, messages=turns, tools=TOOLS)
    assert answered.usage.output_tokens > 0


def test_an_output_format_is_enforced(door: Any) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": FOX}}

    answer = door.messages.create(
        **{**asked("fox", output_config=config, extra_body={"seed": 3}), "max_tokens": 400}
    )

    assert answer.stop_reason == "end_turn"
    assert is_valid(answer.content[0].text, FOX)


def test_errors_are_those_of_the_client(door: Any) -> None:
    image: Any = [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}]
    with pytest.raises(
        anthropic.BadRequestError,
        match=r"messages\.0\.content\.0\.source\.url: model 'tiny' takes no images",
    ):
        door.messages.create(**{**asked(""), "messages": [{"role": "user", "content": image}]})
    with pytest.raises(anthropic.NotFoundError, match="not served here") as refusal:
        door.messages.create(**{**asked("hi"), "model": "claude"})
    assert refusal.value.body["error"]["type"] == "not_found_error"
    assert refusal.value.request_id
