"""A real chat model in a cluster: chats, streams, stops, schemas, prefixes, tiers and faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from baton.client import Answer, Client, Finish, Generation
from baton.client.generation import Chunk
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from baton.llm import LLM
from tests.real.conftest import NODE_ARGUMENTS
from tests.support.nodes import kill_the_writer
from tests.support.real_prompts import long_text
from tests.support.scrapes import Scrape
from tests.support.suspended_processes import suspended

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "is_large": {"type": "boolean"},
    },
    "required": ["city", "is_large"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def greedy(max_tokens: int) -> Generation:
    return Generation(SamplingParams(max_tokens=max_tokens, temperature=0.0))


def finish_of(answer: Answer | Chunk) -> Finish:
    assert answer.finish is not None
    return answer.finish


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.address, timeout_s=120) as connected:
        yield connected


@pytest.fixture
def door(cluster: LocalCluster) -> Iterator[OpenAI]:
    url = f"http://{cluster.router.http_address}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as connected:
        yield connected


def test_a_chat_knows_the_capital_of_france_over_both_apis(client: Client, door: OpenAI) -> None:
    native = client.generate(QUESTION, greedy(40))

    pieces = list(
        door.chat.completions.create(
            model="", messages=QUESTION, max_tokens=40, temperature=0, stream=True
        )
    )

    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert "Paris" in native.text
    assert text == native.text
    assert finish_of(native).served.kv_bytes > 0
    assert finish_of(native).reason.name == "STOP"  # the model ends its turn


def test_an_answer_ends_before_a_stop_string(door: OpenAI) -> None:
    answer = door.completions.create(
        model="", prompt="1, 2, 3, 4, 5, 6,", max_tokens=40, temperature=0, stop=[" 9"]
    )

    assert answer.choices[0].text == " 7, 8,"
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_follows_a_schema(door: OpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}

    answer = door.chat.completions.create(
        model="", messages=QUESTION, max_tokens=80, temperature=0, response_format=schema
    )

    found = json.loads(answer.choices[0].message.content or "")
    assert found.keys() == {"city", "is_large"}


def test_a_forced_tool_is_called_with_its_arguments(door: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "How is the weather in Rome?"}]
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}

    answer = door.chat.completions.create(
        model="", messages=messages, tools=[TOOL], tool_choice=choice, max_tokens=60, temperature=0
    )

    [call] = answer.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments).keys() == {"city"}


def test_a_second_turn_takes_the_first_from_the_cache(client: Client) -> None:
    messages = [*QUESTION]
    first = client.generate(messages, greedy(30))
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And of Italy?"},
    ]

    second = client.generate(messages, greedy(30))

    assert (finish_of(second).num_cached_prompt_tokens or 0) >= 32
    assert "Rome" in second.text


def test_the_death_of_a_decode_node_changes_no_token(model_file: Path) -> None:
    options = ClusterOptions(str(model_file), 1, 2, False, node_arguments=NODE_ARGUMENTS)
    generation = Generation(SamplingParams(max_tokens=32, temperature=0.8, seed=3, ignore_eos=True))
    with LocalCluster(options) as running, Client(running.address, timeout_s=120) as connected:
        expected = connected.generate(QUESTION, generation)
        with suspended(*running.decodes):  # or the answer may be whole before that
            stream = connected.stream(QUESTION, generation)
            token_ids = [*next(stream).token_ids]  # sampled on prefill
            kill_the_writer(running)
        last = None
        for last in stream:
            token_ids += last.token_ids

    assert token_ids == list(expected.token_ids)
    assert last is not None
    assert finish_of(last).served.attempts == 2


def test_a_prompt_is_loaded_from_files_after_a_restart(model_file: Path, tmp_path: Path) -> None:
    tiers = ("--kv-host-memory", "64MiB", "--kv-folder", str(tmp_path))
    arguments = (*NODE_ARGUMENTS, *tiers)
    options = ClusterOptions(str(model_file), 1, 1, False, node_arguments=arguments)
    answers = []
    for _ in range(2):
        with LocalCluster(options) as running, Client(running.address, timeout_s=120) as connected:
            answers.append(connected.generate(long_text(), greedy(16)))

    first, second = answers
    assert second.token_ids == first.token_ids
    finish = finish_of(second)
    assert finish.num_prompt_tokens > 512
    assert sum(finish.served.prompt_tokens_loaded.values()) >= 0.9 * finish.num_prompt_tokens


def test_int8_kv_and_activations_speculation_and_pulls_give_the_tokens_of_one_engine(
    model_file: Path,
) -> None:
    prompt = long_text()
    sampling = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    int8 = ("--kv-cache-dtype", "int8", "--activation-dtype", "int8")
    options = ClusterOptions(
        str(model_file),
        node_arguments=(*NODE_ARGUMENTS, *int8, "--kv-host-memory", "64MiB"),
        decode_arguments=("--speculative", "ngram:4:fixed", "--metrics-port", "0"),
        router_arguments=("--local-prefill-below", "0"),
    )
    with LLM(
        str(model_file),
        kv_cache_dtype="int8",
        activation_dtype="int8",
        kv_cache_memory="128MiB",
        num_threads=1,
    ) as llm:
        [alone] = llm.generate([prompt], sampling)
        turn = [*alone.prompt_token_ids, *alone.token_ids, *alone.prompt_token_ids[:40]]
        [alone_again] = llm.generate([turn], sampling)

    with LocalCluster(options) as running, Client(running.address, timeout_s=120) as connected:
        first = connected.generate(prompt, Generation(sampling))
        second = connected.generate(turn, Generation(sampling))
        [decode] = [child for child in running.children if "decode" in child.name]
        metrics = Scrape(decode)

    assert first.token_ids == alone.token_ids
    assert second.token_ids == alone_again.token_ids
    assert finish_of(second).served.prompt_tokens_loaded.get("peer", 0) > 0
    assert metrics.total("baton_tokens_speculated_total", kind="accepted") > 0
