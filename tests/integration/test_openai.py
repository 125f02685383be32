"""`openai` client against a real cluster: the HTTP API gives the same answers as gRPC."""

from __future__ import annotations

import json
import statistics
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.client import Client, Generation
from baton.cluster import LocalCluster
from baton.core.sampling import SamplingParams
from tests.support.models import prompt_of
from tests.support.schemas import is_valid

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ASK: dict[str, Any] = {"model": "", "max_tokens": 12, "temperature": 0}
AS_BATON: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture
def door(cluster: LocalCluster) -> Iterator[OpenAI]:
    url = f"http://{cluster.router.http_address}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as connected:
        yield connected


def test_a_greedy_completion_is_the_same_over_http_and_grpc(door: OpenAI, client: Client) -> None:
    prompt = prompt_of(40, seed=80)
    generation = Generation(
        SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
    )
    native = client.generate(prompt, generation)
    # By id: the older API can only return one of two tokens with the same text.
    extra = {**AS_BATON, "return_tokens_as_token_ids": True}
    parameters = {**ASK, "prompt": list(prompt), "logprobs": 2, "extra_body": extra}

    whole: Any = door.completions.create(**parameters)
    stream = door.completions.create(**parameters, stream=True)
    streamed: list[Any] = [chunk.choices[0] for chunk in stream]

    [choice] = whole.choices
    assert choice.token_ids == native.token_ids
    assert choice.text == native.text == "".join(one.text for one in streamed)
    assert [token for one in streamed for token in getattr(one, "token_ids", [])] == (
        native.token_ids
    )
    reported = choice.logprobs
    assert reported.token_logprobs == [one.logprob for one in native.logprobs]
    assert [len(top) for top in reported.top_logprobs] == [2] * 12
    assert reported.tokens == [f"token_id:{token_id}" for token_id in native.token_ids]
    assert reported.text_offset[:2] == [0, len(reported.tokens[0])]
    in_pieces = [each.logprobs for each in streamed if each.logprobs]
    assert [one for each in in_pieces for one in each.token_logprobs] == reported.token_logprobs
    assert [one for each in in_pieces for one in each.text_offset] == reported.text_offset


def test_the_models_endpoint_names_the_folder(door: OpenAI, model_folder: Path) -> None:
    [model] = door.models.list().data

    assert model.id == model_folder.name
    assert (model.model_extra or {})["root"] == str(model_folder)


def test_a_chat_is_the_same_over_http_and_grpc(door: OpenAI, client: Client) -> None:
    native = client.generate([{"role": "user", "content": "the quick brown"}], Generation(GREEDY))

    answer = door.chat.completions.create(
        **ASK,
        messages=[{"role": "user", "content": "the quick brown"}],
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True},
    )

    [choice] = answer.choices
    assert choice.message.content == native.text
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    spelled = b"".join(bytes(one.bytes or ()) for one in choice.logprobs.content)
    assert spelled.decode(errors="replace").startswith(native.text.rstrip("\ufffd"))
    assert all(one.top_logprobs[0].token == one.token for one in choice.logprobs.content)


FOX: Any = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "grey"]}, "age": {"$ref": "#/$defs/age"}},
    "required": ["colour", "age"],
    "$defs": {"age": {"type": "integer", "minimum": 0, "maximum": 20}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": FOX}} for name in ("see", "feed")
]


@pytest.mark.parametrize(
    ("choice", "finish_reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "feed"}}, "stop")],
)
def test_a_model_without_tool_training_makes_forced_calls(
    choice: Any, finish_reason: str, door: OpenAI
) -> None:
    parameters: dict[str, Any] = {
        "model": "",
        "messages": [{"role": "user", "content": "fox"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 1,
        "seed": 3,
        "max_tokens": 400,
    }

    whole = door.chat.completions.create(**parameters).choices[0]
    with door.chat.completions.stream(**parameters) as stream:
        streamed = stream.get_final_completion().choices[0]

    [call] = whole.message.tool_calls or []
    [again] = streamed.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in ("see", "feed")
    assert is_valid(call.function.arguments, FOX)
    reported = (again.function.name, again.function.arguments)
    assert reported == (call.function.name, call.function.arguments)
    assert whole.finish_reason == streamed.finish_reason == finish_reason


def test_a_chat_ends_at_the_context_length_of_the_model(door: OpenAI) -> None:
    answer = door.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": "fox " * 100}],
        temperature=0,
        extra_body={"ignore_eos": True},
    )

    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512


def test_each_choice_has_the_tokens_of_its_seed(door: OpenAI) -> None:
    parameters: dict[str, Any] = {
        "model": "",
        "prompt": "the quick",
        "max_tokens": 8,
        "temperature": 1,
    }

    several = door.completions.create(**parameters, n=2, seed=11)
    alone = [door.completions.create(**parameters, seed=seed).choices[0].text for seed in (11, 12)]

    assert [choice.text for choice in several.choices] == alone
    assert alone[0] != alone[1]


def test_an_echo_starts_with_the_prompt_logprobs(door: OpenAI, client: Client) -> None:
    prompt = prompt_of(10, seed=81)
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    native = client.generate(prompt, Generation(sampling))

    answer: Any = door.completions.create(
        model="",
        prompt=list(prompt),
        max_tokens=2,
        temperature=0,
        echo=True,
        logprobs=1,
        extra_body={"ignore_eos": True, "prompt_logprobs": 1},
    )

    [choice] = answer.choices
    assert choice.text == client.detokenize(prompt) + native.text
    reported = choice.logprobs.token_logprobs
    assert reported[0] is None
    expected = [one.logprob for one in native.prompt_logprobs if one is not None]
    assert reported[1:10] == expected
    assert len(reported) == 12
    by_id = choice.prompt_logprobs
    assert by_id[0] is None
    assert [by_id[place][str(prompt[place])]["logprob"] for place in range(1, 10)] == expected


def test_a_stop_string_ends_the_answer_and_is_reported(door: OpenAI) -> None:
    parameters = {**ASK, "prompt": "the quick brown", "extra_body": {"ignore_eos": True}}
    whole = door.completions.create(**parameters).choices[0].text
    stop = whole[3:5]

    answer: Any = door.completions.create(**parameters, stop=[stop])

    [choice] = answer.choices
    assert choice.text == whole[: whole.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_errors_of_nodes_are_client_errors_over_http(door: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary"):
        door.completions.create(model="", prompt=[100_000])
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        door.completions.create(model="", prompt=[5] * 600)
    nothing = {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}
    with pytest.raises(openai.BadRequestError, match="no token may be chosen"):
        door.completions.create(model="", prompt=[7], extra_body=nothing, max_tokens=2)


def test_the_routers_metrics_are_on_the_http_port(cluster: LocalCluster, door: OpenAI) -> None:
    door.completions.create(**ASK, prompt=list(prompt_of(5)))

    with urllib.request.urlopen(f"http://{cluster.router.http_address}/metrics") as answer:
        reported = answer.read().decode()

    assert 'baton_nodes_open{role="decode"} 1.0' in reported
    assert 'outcome="ok"' in reported


def test_joined_token_bytes_equal_the_text(model_folder: Path) -> None:
    tokenizer = load_tokenizer(model_folder)
    text = "naïve 東京 🙂 fox\n"

    spelled = [tokenizer.token(token_id) for token_id in tokenizer.encode(text)]

    assert b"".join(one.raw for one in spelled) == text.encode()
    assert any("\ufffd" in one.text for one in spelled)


def test_an_http_error_is_json(cluster: LocalCluster) -> None:
    request = urllib.request.Request(
        f"http://{cluster.router.http_address}/v1/chat/completions", data=b"{", method="POST"
    )

    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request)

    error = json.loads(refusal.value.read())["error"]
    assert (refusal.value.code, error["code"]) == (400, "UNREADABLE")


def test_best_of_returns_the_most_likely_candidates(door: OpenAI) -> None:
    parameters = {**ASK, "prompt": list(prompt_of(30, seed=83)), "temperature": 1.2, "seed": 5}
    every: Any = door.completions.create(**parameters, n=5, logprobs=0, extra_body=AS_BATON)
    means = [statistics.fmean(one.logprobs.token_logprobs) for one in every.choices]
    likeliest = sorted(range(5), key=means.__getitem__, reverse=True)

    best: Any = door.completions.create(**parameters, n=2, best_of=5, extra_body=AS_BATON)

    assert [one.index for one in best.choices] == [0, 1]
    assert [one.token_ids for one in best.choices] == [
        every.choices[index].token_ids for index in likeliest[:2]
    ]
    assert best.choices[0].logprobs is None
    assert best.usage.completion_tokens == every.usage.completion_tokens
