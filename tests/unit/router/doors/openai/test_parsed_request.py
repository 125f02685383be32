"""Parsing of OpenAI requests into calls of the pipeline."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.ids import ModelVariant
from baton.core.kv_hints import KvHints
from baton.core.sampling import NO_SAMPLING_DEFAULTS, SamplingDefaults, SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.router.doors.openai.request.parsed_request import (
    ModelContext,
    ParsedRequest,
    chat_completion_from,
    completion_from,
)
from baton.router.doors.openai.request.prompts import parse_prompts
from baton.router.http.bodies import json_object
from baton.router.input_processing.limits import MAX_ANSWERS, MAX_LOGPROBS_PER_REQUEST
from baton.router.pictures.plan import ImageFile
from baton.router.values import ChatPrompt, Parsing, TextPrompt, TokenPrompt
from baton.rpc.errors import EmptyPrompt, Unreadable, UnsupportedInput

CONTEXT = ModelContext(
    SamplingDefaults(temperature=0.6, top_k=20), 512, variant=ModelVariant("tiny")
)
USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> ParsedRequest:
    return completion_from({"prompt": "hi", **fields}, "id", CONTEXT)


def chat(*messages: dict[str, Any], **fields: Any) -> ParsedRequest:
    return chat_completion_from({"messages": list(messages) or [USER], **fields}, "id", CONTEXT)


def chat_prompt(*messages: dict[str, Any], **fields: Any) -> ChatPrompt:
    [call] = chat(*messages, **fields).calls
    assert isinstance(call.prompt, ChatPrompt)
    return call.prompt


def test_null_leaves_a_field_out() -> None:
    names = ("stop", "tools", "temperature", "n", "stream_options", "response_format", "suffix")

    assert chat(**dict.fromkeys(names)) == chat()


def test_every_sampling_field_is_parsed() -> None:
    [call] = completion(
        max_tokens=9,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=1.5,
        logit_bias={"7": -100, "0": 1.5},
        seed=-1,
        stop="end",
        include_stop_str_in_output=True,
        stop_token_ids=[5],
        allowed_token_ids=[5, 6],
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=0,
        priority=-2,
        cache_salt="salt",
        kv_hints={"session_id": "s", "retain_s": 30, "priority": 80},
        model="tiny",
    ).calls

    assert call.sampling == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=0,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=1.5,
        logit_bias={7: -100, 0: 1.5},
        seed=2**64 - 1,
        stop_token_ids=(5,),
        allowed_token_ids=(5, 6),
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=0,
    )
    assert (call.stop.strings, call.stop.is_included, call.stop.min_tokens) == (("end",), True, 2)
    assert (call.model.name, call.priority, call.cache_salt) == ("tiny", -2, "salt")
    assert call.kv_hints == KvHints("s", 30.0, 80)


def test_omitted_and_null_fields_take_the_model_defaults() -> None:
    fields = json_object(b'{"prompt": "hi", "temperature": null, "top_p": null, "stop": null}')

    [call] = completion_from(fields, "id", CONTEXT).calls

    assert call.sampling == SamplingParams(temperature=0.6, top_k=20)


def test_answers_are_grouped_by_prompt_and_have_unique_ids_and_seeds() -> None:
    requested = completion(prompt=["a", "b"], n=2, seed=2**64 - 1)

    prompts = [call.prompt for call in requested.calls]
    assert prompts == [TextPrompt("a"), TextPrompt("a"), TextPrompt("b"), TextPrompt("b")]
    assert [call.request_id for call in requested.calls] == ["id-0", "id-1", "id-2", "id-3"]
    assert [call.sampling.seed for call in requested.calls] == [2**64 - 1, 0, 2**64 - 1, 0]
    assert requested.num_each == 2


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("text", [TextPrompt("text")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([3, 4], [TokenPrompt((3, 4))]),
        ([[3], [4, 5]], [TokenPrompt((3,)), TokenPrompt((4, 5))]),
    ],
)
def test_a_prompt_has_four_forms(given: object, prompts: list[object]) -> None:
    assert parse_prompts(given) == prompts


@pytest.mark.parametrize(
    "given", [5, {"a": 1}, ["a", 1], [1, "a"], [True], [-1], [1.0], [2**31], [[1], "a"], [[[1]]]]
)
def test_other_prompt_forms_are_refused(given: object) -> None:
    with pytest.raises(InvalidRequest, match="prompt must be"):
        parse_prompts(given)


def test_an_empty_prompt_list_is_refused() -> None:
    with pytest.raises(EmptyPrompt):
        parse_prompts([])


def test_the_default_max_tokens_of_a_chat_is_the_remaining_context() -> None:
    assert chat().calls[0].sampling.max_tokens == 512
    assert chat(max_tokens=7).calls[0].sampling.max_tokens == 7
    assert chat(max_tokens=7, max_completion_tokens=8).calls[0].sampling.max_tokens == 8


def test_messages_reach_the_template_with_all_their_fields() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    tools = [{"type": "function", "function": {"name": "f"}}]

    prompt = chat_prompt(
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        tools=tools,
        chat_template_kwargs={"enable_thinking": False},
        add_generation_prompt=False,
    )

    requested, called, answered = prompt.messages
    assert (requested.content, requested.others) == ("a\nb", {"name": "Ann"})
    read = {**call, "function": {"name": "f", "arguments": {"x": 1}}}
    assert (called.content, called.others) == ("", {"tool_calls": [read]})
    assert answered.others == {"tool_call_id": "1"}
    assert prompt.variables == {"tools": tools, "enable_thinking": False}
    assert not prompt.add_generation_prompt


@pytest.mark.parametrize(
    ("more", "detail"), [({}, "auto"), ({"detail": None}, "auto"), ({"detail": "low"}, "low")]
)
def test_an_image_has_the_detail_that_its_part_asks_for(more: dict[str, Any], detail: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", **more}}

    [file] = chat_prompt({"role": "user", "content": [image]}).parts(ImageFile)

    assert (file.data, file.detail.value) == (bytes(3), detail)


def test_an_image_without_content_needs_a_uuid() -> None:
    part: dict[str, Any] = {"type": "image_url", "image_url": None}

    [file] = chat_prompt({"role": "user", "content": [{**part, "uuid": "mine"}]}).parts(ImageFile)

    assert (file.uuid, file.has_content) == ("mine", False)
    for wrong, field in (({}, "image_url.url"), ({"uuid": "x" * 1025}, "uuid")):
        with pytest.raises(InvalidRequest) as refusal:
            chat({"role": "user", "content": [{**part, **wrong}]})
        assert refusal.value.field == f"messages.0.content.0.{field}"


def test_tools_are_hidden_with_tool_choice_none() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert "tools" not in chat_prompt(tools=tools, tool_choice="none").variables


def test_reasoning_effort_reaches_the_template() -> None:
    kwargs = {"reasoning_effort": "high"}

    assert chat_prompt(reasoning_effort="low").variables == {"reasoning_effort": "low"}
    assert chat_prompt(reasoning_effort="low", chat_template_kwargs=kwargs).variables == kwargs


def test_tags_of_tool_calls_and_reasoning_are_decoded_if_they_are_parsed() -> None:
    context = replace(CONTEXT, parsing=Parsing("llama3_json", "qwen3"))

    def shown(**fields: Any) -> tuple[str, ...]:
        requested = chat_completion_from({"messages": [USER], **fields}, "id", context)
        return requested.calls[0].shown_tokens

    tools = [{"type": "function", "function": {"name": "f"}}]
    assert shown(tools=tools) == ("<|python_tag|>", "<think>", "</think>")
    assert shown() == shown(tools=tools, tool_choice="none") == ("<think>", "</think>")
    assert shown(tools=tools, tool_choice="required") == ()


def test_chat_top_logprobs_exclude_the_chosen_token() -> None:
    assert chat().calls[0].sampling.logprobs is None
    assert chat(logprobs=True).calls[0].sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).calls[0].sampling.logprobs == 4


def test_echo_requires_prompt_logprobs_and_can_be_the_whole_answer() -> None:
    requested = completion(echo=True, logprobs=2, max_tokens=0)

    assert requested.calls[0].sampling.prompt_logprobs == 2
    assert requested.calls[0].sampling.max_tokens == 1
    assert not requested.options.with_answer


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 10**12}, "n"),
        ({"prompt": ["a"] * (MAX_ANSWERS + 1)}, "prompt"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": {"a": 1}}, "stop.str"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"prompt": 5}, "prompt"),
        ({"guided_decoding_backend": "auto"}, "guided_decoding_backend"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_an_invalid_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        completion(**fields)

    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [{"content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
        ),
        ({"messages": [{**USER, "tool_calls": 5}]}, "messages.0.tool_calls"),
        ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
        (
            {"messages": [{**USER, "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
        (
            {"messages": [{**USER, "tool_calls": [{"function": {"arguments": '"\\ud800"'}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "text", "content": "a"}}, "prediction.type"),
    ],
)
def test_an_invalid_chat_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        chat(**fields)

    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"tools": [{"type": "custom"}], "tool_choice": "required"}, "tools.0"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, None),
    ],
)
def test_unsupported_features_are_refused_and_never_ignored(
    fields: dict[str, Any], field: str | None
) -> None:
    with pytest.raises(UnsupportedInput) as refusal:
        chat(**fields)

    assert refusal.value.field == (field or "messages.0.content.0")


SCHEMA = {"type": "object", "title": "é"}
WRITTEN = json.dumps(SCHEMA, ensure_ascii=False)


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            StructuredOutputs(json=WRITTEN),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=WRITTEN)),
        ({"structured_outputs": {"json": WRITTEN}}, StructuredOutputs(json=WRITTEN)),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            StructuredOutputs(json_object=True, disable_any_whitespace=True),
        ),
        (
            {"structured_outputs": {"regex": "a+", "json": None, "json_object": False}},
            StructuredOutputs(regex="a+"),
        ),
        ({"guided_json": SCHEMA}, StructuredOutputs(json=WRITTEN)),
        ({"guided_regex": "a"}, StructuredOutputs(regex="a")),
        ({"guided_choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
        ({"guided_grammar": "start: A"}, StructuredOutputs(grammar="start: A")),
    ],
)
def test_a_constraint_is_parsed_under_each_of_its_field_names(
    fields: dict[str, Any], form: StructuredOutputs | None
) -> None:
    for requested in (chat(**fields), completion(**fields)):
        assert requested.calls[0].sampling.structured_outputs == form
        assert bool(requested.options.form_field) == (form is not None)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_a_malformed_constraint_is_refused_with_the_field_name_used(
    fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        completion(**fields)

    assert refusal.value.field == field


def test_fields_without_effect_on_the_answer_are_accepted() -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "response_format": {"type": "text"},
        "verbosity": "low",
        "tool_choice": "auto",
        "prompt_cache_options": {"mode": "explicit"},
        "prompt_cache_retention": "in_memory",
    }

    assert chat(**harmless) == chat()


@pytest.mark.parametrize(
    "content", ["def f():", [{"type": "text", "text": "def "}, {"type": "text", "text": "f():"}]]
)
def test_a_prediction_is_text_or_parts_of_it(content: Any) -> None:
    [call] = chat(prediction={"type": "content", "content": content}).calls

    assert call.prediction == "def f():"


def test_a_prediction_of_an_image_is_refused() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}]

    with pytest.raises(UnsupportedInput, match="parts of type text"):
        chat(prediction={"type": "content", "content": parts})


@pytest.mark.parametrize(
    ("fields", "retain_s"),
    [
        ({"prompt_cache_retention": "24h"}, 86_400),
        ({"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, 1_800),
        ({"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}, 86_400),
        ({"prompt_cache_options": {"ttl": "30m"}, "kv_hints": {"retain_s": 5.0}}, 5),
        ({"prompt_cache_options": {"ttl": "30m"}, "kv_hints": {"release": True}}, 0),
    ],
)
def test_the_lifetime_of_a_prompt_cache_is_how_long_kv_is_retained(
    fields: dict[str, Any], retain_s: float
) -> None:
    assert chat(**fields).calls[0].kv_hints.retain_s == retain_s


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"a"',
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b"\xff",
        b'{"a": ' + b"[" * 5000,
        b"{} {}",
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(Unreadable):
        json_object(body)


def test_a_body_is_parsed_as_written() -> None:
    fields = {"prompt": "grün 🙂\u0000", "n": 2}
    assert json_object(json.dumps(fields).encode()) == fields


def test_best_of_generates_as_many_candidates_with_unique_seeds() -> None:
    requested = completion(prompt=["one", "two"], n=2, best_of=3, seed=4)

    assert (requested.num_each, requested.num_returned) == (3, 2)
    assert [call.sampling.seed for call in requested.calls] == [4, 5, 6] * 2
    assert {call.sampling.logprobs for call in requested.calls} == {0}
    assert requested.options.num_logprobs is None


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"n": 2, "best_of": 1}, InvalidRequest),
        ({"best_of": 0}, InvalidRequest),
        ({"best_of": MAX_ANSWERS + 1}, InvalidRequest),
        ({"best_of": 2, "stream": True}, UnsupportedInput),
    ],
)
def test_an_invalid_best_of_is_refused(fields: dict[str, Any], error: type[InvalidRequest]) -> None:
    with pytest.raises(error) as refused:
        completion(**fields)

    assert refused.value.field == "best_of"


def test_best_of_equal_to_n_can_be_streamed() -> None:
    requested = completion(n=2, best_of=2, stream=True)

    assert (requested.num_each, requested.num_returned) == (2, 2)
    assert requested.calls[0].sampling.logprobs is None


def test_logprobs_of_a_whole_answer_are_bounded_over_all_choices() -> None:
    most = MAX_LOGPROBS_PER_REQUEST // (6 * 128)
    fields = {"prompt": [1], "n": 128, "logprobs": 5}
    context = ModelContext(NO_SAMPLING_DEFAULTS, 100_000)

    requested = completion_from({**fields, "max_tokens": most}, "id", context)
    assert len(requested.calls) == 128
    with pytest.raises(InvalidRequest, match=f"can have {most} tokens") as refused:
        completion_from({**fields, "max_tokens": most + 1}, "id", context)
    assert refused.value.field == "max_tokens"
    completion_from({**fields, "max_tokens": most + 1, "stream": True}, "id", context)


def test_the_default_max_tokens_of_a_chat_leaves_room_for_its_logprobs() -> None:
    fields = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
    context = ModelContext(NO_SAMPLING_DEFAULTS, 100_000)

    [call] = chat_completion_from(fields, "id", context).calls
    [streamed] = chat_completion_from({**fields, "stream": True}, "id", context).calls

    assert call.sampling.max_tokens == MAX_LOGPROBS_PER_REQUEST // 21
    assert streamed.sampling.max_tokens == 100_000
