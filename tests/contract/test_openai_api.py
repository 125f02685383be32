"""OpenAI-compatible HTTP API, tested with the `openai` client and fake nodes."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.cli.health_check import ask
from baton.client import AsyncClient, BatonError
from baton.core.errors import ContextLengthExceeded
from baton.core.kv_hints import KvHints
from baton.core.legs import LegKind
from baton.core.output import FinishReason
from baton.core.sampling import ReasoningSection, SamplingParams
from baton.router.admission.admission_queue import AdmissionQueueConfig
from baton.router.answer import IncrementalDetokenizer
from baton.router.http.bodies import MAX_BODY_BYTES, max_values
from baton.router.input_processing.tokenization import ModelText, TextBoundary
from baton.router.request_scope import RequestContext
from baton.router.routing.node_table import NodeTable
from baton.router.tracing import Tracing
from baton.router.values import (
    GenerateCall,
    Parsing,
    Prompt,
    ReasoningMarks,
    ReasoningTokens,
    TextPrompt,
    TokenPrompt,
)
from baton.rpc.errors import FailureKind, NodeFailed
from baton.rpc.messages.calls import CallReport
from baton.rpc.security.tls import PLAIN, TlsConfig
from baton.rpc.security.token import AcceptedTokens
from baton.telemetry import names
from tests.support.certificates import Authority, make_authority
from tests.support.http_routers import HttpRouter, an_http_router
from tests.support.models import EOS_TOKEN_ID, save_tokenizer
from tests.support.node_calls import FakeNodeCalls, a_node, a_table
from tests.support.tracers import TakingTracer

PROMPT = [3, 4, 5]
ANSWER = [12, 19, 26, 33]  # of healthy fake nodes
LONGEST_S = 120
CHAT: list[Any] = [{"role": "user", "content": "the quick"}]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBoundary:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    return ModelText(load_tokenizer(folder))


@asynccontextmanager
async def a_client(router: HttpRouter, api_key: str = "any") -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{router.url}/v1", api_key=api_key, max_retries=0) as client:
        yield client


def through_the_door(
    scenario: Callable[[HttpRouter, AsyncOpenAI], Awaitable[None]],
    nodes: FakeNodeCalls | None = None,
    **around: Any,
) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(LONGEST_S),  # rather than for ever
            an_http_router(nodes, **around) as router,
            a_client(router) as client,
        ):
            await scenario(router, client)

    asyncio.run(run())


def test_a_completion_has_tokens_finish_reason_and_usage(text: TextBoundary) -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        ids = {"return_token_ids": True}
        answer = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=4, extra_body=ids
        )

        [choice] = answer.choices
        reported: Any = choice
        assert (reported.token_ids, reported.prompt_token_ids) == (ANSWER, PROMPT)
        assert choice.text == text.text(tuple(ANSWER))
        assert (choice.finish_reason, reported.stop_reason) == ("length", None)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
        assert (answer.model, answer.object) == ("tiny", "text_completion")

    through_the_door(scenario, text=text)


def test_max_tokens_is_lowered_to_the_remaining_kv_cache(
    text: TextBoundary,
) -> None:
    nodes = FakeNodeCalls()
    small, large = a_node(LegKind.DECODE, "small"), a_node(LegKind.DECODE, "large")
    small = replace(small, card=replace(small.card, max_sequence_len=160))
    table = a_table(small, large, a_node(LegKind.PREFILL))

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        [model] = (await client.models.list()).data
        answer = await client.chat.completions.create(model="tiny", messages=CHAT)
        capped: Any = await client.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=400
        )

        assert answer.usage is not None
        rest = 160 - answer.usage.prompt_tokens
        by_default, explicit = {
            each.handoff_id.request_id: each.request.sampling.max_tokens for each in nodes.received
        }.values()
        assert (by_default, explicit) == (rest, rest)
        assert "warnings" not in (answer.model_extra or {})
        [warning] = capped.warnings
        assert warning.startswith(f"max_tokens 400 was lowered to {rest}: prompt and answer")
        assert getattr(model, "max_sequence_len", None) == 160
        with pytest.raises(openai.BadRequestError, match="lower it to at most") as refusal:
            await client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=400, extra_body={"min_tokens": 300}
            )
        assert refusal.value.param == "min_tokens"

    through_the_door(scenario, nodes, text=text, table=table)


def test_the_joined_chunks_of_a_stream_equal_the_whole_answer(text: TextBoundary) -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        whole = await client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=9)
        stream = await client.chat.completions.create(
            model="tiny",
            messages=CHAT,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]

        *reported, last = chunks
        deltas = [chunk.choices[0].delta for chunk in reported]
        assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
        assert [delta.role for delta in deltas if delta.role] == ["assistant"]
        assert reported[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
        assert (last.choices, last.usage) == ([], whole.usage)
        assert all(chunk.usage is None for chunk in reported)
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}

    through_the_door(scenario, text=text)


def test_several_choices_have_indices_and_their_prompt_counts_once(text: TextBoundary) -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        ids = {"return_token_ids": True}
        several: dict[str, Any] = {"model": "tiny", "prompt": [PROMPT, [7]], "n": 2}
        answer = await client.completions.create(**several, max_tokens=4, extra_body=ids)
        stream = await client.completions.create(
            **several, max_tokens=4, extra_body=ids, stream=True
        )
        streamed: dict[int, list[int]] = {}
        async for chunk in stream:
            for part in chunk.choices:
                streamed.setdefault(part.index, []).extend(getattr(part, "token_ids", ()))

        whole: list[Any] = list(answer.choices)
        assert [choice.index for choice in whole] == [0, 1, 2, 3]
        assert {choice.index: choice.token_ids for choice in whole} == streamed
        assert whole[0].token_ids == whole[1].token_ids == ANSWER != whole[2].token_ids
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 16)

    through_the_door(scenario, text=text)


def test_each_choice_has_its_own_seed() -> None:
    nodes = FakeNodeCalls()

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2, n=3, seed=7)

        decoded = [requested for requested in nodes.received if requested.leg is LegKind.DECODE]
        assert sorted(requested.request.seed for requested in decoded) == [7, 8, 9]

    through_the_door(scenario, nodes)


def test_an_echo_repeats_the_prompt_as_it_was_given(text: TextBoundary) -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        parameters: dict[str, Any] = {"model": "tiny", "echo": True}
        of_text = await client.completions.create(**parameters, prompt="the quick", max_tokens=0)
        of_ids = await client.completions.create(**parameters, prompt=PROMPT, max_tokens=4)
        stream = await client.completions.create(
            **parameters, prompt=PROMPT, max_tokens=4, stream=True
        )
        streamed = "".join([chunk.choices[0].text async for chunk in stream])

        assert of_text.choices[0].text == "the quick"
        assert of_text.usage is not None
        assert of_text.usage.completion_tokens == 0
        whole = text.text(tuple(PROMPT)) + text.text(tuple(ANSWER))
        assert of_ids.choices[0].text == streamed == whole

    through_the_door(scenario, text=text)


def test_each_chunk_has_the_usage_so_far_if_requested() -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        stream = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=4, stream=True, stream_options=options
        )
        reported = [chunk.usage async for chunk in stream]

        counts = [usage.completion_tokens for usage in reported if usage is not None]
        assert len(counts) == len(reported)
        assert counts == sorted(counts)
        assert counts[-1] == 4
        assert {usage.prompt_tokens for usage in reported if usage is not None} == {3}

    through_the_door(scenario)


def test_the_usage_has_the_prompt_tokens_that_came_from_a_cache() -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        parameters: dict[str, Any] = {
            "model": "tiny",
            "prompt": [PROMPT, [7]],
            "n": 2,
            "max_tokens": 4,
        }
        whole = await client.completions.create(**parameters)
        stream = await client.completions.create(
            **parameters, stream=True, stream_options={"include_usage": True}
        )
        last = [chunk async for chunk in stream][-1]

        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        # Once for each prompt: its answers share what was found.
        assert whole.usage.prompt_tokens_details.cached_tokens == 4
        assert last.usage == whole.usage

    # The second answer finds on decode what the first one had computed.
    report = CallReport(kv_blocks=2, prompt_tokens_cached=3)
    through_the_door(scenario, FakeNodeCalls(num_cached_on_prefill=2, report=report))


def test_the_usage_counts_loaded_tokens_by_their_source() -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        parameters: dict[str, Any] = {
            "model": "tiny",
            "prompt": [PROMPT, [7]],
            "n": 2,
            "max_tokens": 4,
        }
        whole = await client.completions.create(**parameters)
        stream = await client.completions.create(
            **parameters, stream=True, stream_options={"include_usage": True}
        )
        last = [chunk async for chunk in stream][-1]

        assert whole.usage is not None
        details: Any = whole.usage.prompt_tokens_details
        # Once for each prompt, and not for answers that find the loaded tokens in the KV cache.
        assert (details.cached_tokens, details.loaded_tokens) == (4, {"host": 2, "peer": 2})
        assert last.usage == whole.usage

    loaded = {"host": 1, "peer": 1}
    nodes = FakeNodeCalls(
        num_cached_on_prefill=2,
        loaded_on_prefill=loaded,
        report=CallReport(kv_blocks=2, prompt_tokens_cached=3),
    )
    through_the_door(scenario, nodes)


@pytest.mark.parametrize(
    ("stop_token_ids", "stop_reason"), [([], None), ([EOS_TOKEN_ID], EOS_TOKEN_ID), ([9], None)]
)
def test_the_stop_reason_is_a_token_only_if_the_request_asked_for_it(
    stop_token_ids: list[int], stop_reason: int | None, text: TextBoundary
) -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        extra = {"stop_token_ids": stop_token_ids}
        chat: Any = await client.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=4, extra_body=extra
        )
        completion: Any = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=4, extra_body=extra
        )
        for answer in (chat, completion):
            assert answer.choices[0].finish_reason == "stop"
            assert answer.choices[0].stop_reason == stop_reason

    nodes = FakeNodeCalls(ends_by=FinishReason.STOP, stop_token_id=EOS_TOKEN_ID)
    through_the_door(scenario, nodes, text=text)


def test_an_unknown_role_is_refused_by_name(text: TextBoundary) -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        messages: Any = [*CHAT, {"role": "robot", "content": "hi"}]
        with pytest.raises(openai.BadRequestError, match="'robot': choose one of") as refusal:
            await client.chat.completions.create(model="tiny", messages=messages)
        assert refusal.value.param == f"messages.{len(CHAT)}.role"

    through_the_door(scenario, text=text)


def test_a_prediction_goes_to_nodes_that_follow_it_and_is_counted(text: TextBoundary) -> None:
    following = a_node(LegKind.DECODE)
    card = replace(following.card, follows_predictions=True, max_model_len=64)
    table = a_table(a_node(LegKind.PREFILL), replace(following, card=card))
    nodes = FakeNodeCalls(report=CallReport(tokens_proposed=5, tokens_accepted=3))
    words = "the quick fox " * 99
    prediction: Any = {"type": "content", "content": words}

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        parameters: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 4, "n": 2}
        parameters["prediction"] = prediction
        whole = await client.chat.completions.create(**parameters)
        stream = await client.chat.completions.create(
            **parameters, stream=True, stream_options={"include_usage": True}
        )
        last = [chunk async for chunk in stream][-1]
        plain = await client.chat.completions.create(
            model="tiny", messages=CHAT, prediction=None, max_tokens=4
        )

        assert whole.usage is not None
        assert whole.usage.completion_tokens_details is not None
        details = whole.usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (6, 4)
        assert last.usage == whole.usage
        assert "warnings" not in (whole.model_extra or {})
        assert plain.usage is not None
        assert plain.usage.completion_tokens_details is None
        predicted = [
            each.request.predicted_token_ids
            for each in nodes.received
            if each.leg is LegKind.DECODE
        ]
        assert predicted == [text.token_ids(TextPrompt(words, False))[:64]] * 4 + [()]

    through_the_door(scenario, nodes, text=text, table=table)


def test_a_prediction_that_no_node_follows_is_ignored_with_a_warning(text: TextBoundary) -> None:
    nodes = FakeNodeCalls()

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        answer: Any = await client.chat.completions.create(
            model="tiny",
            messages=CHAT,
            max_tokens=4,
            prediction={"type": "content", "content": "the quick"},
        )

        [warning] = answer.warnings
        assert warning.startswith("prediction is ignored")
        assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0
        assert not any(each.request.predicted_token_ids for each in nodes.received)

    through_the_door(scenario, nodes, text=text)


def test_an_unknown_count_of_cached_tokens_is_left_out() -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        answer = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4)

        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is None

    through_the_door(scenario, FakeNodeCalls(num_cached_on_prefill=None))


def test_a_session_comes_from_the_header_unless_the_body_names_one() -> None:
    nodes = FakeNodeCalls()

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        parameters: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
        header = {"x-session-id": "of the header"}
        for hints in ({"retain_s": 9}, {"session_id": "of the body"}):
            await client.completions.create(
                **parameters, extra_headers=header, extra_body={"kv_hints": hints}
            )
        with pytest.raises(openai.BadRequestError, match="x-session-id"):
            await client.completions.create(**parameters, extra_headers={"x-session-id": "s" * 257})

    through_the_door(scenario, nodes)
    hints = [each.request.kv_hints for each in nodes.received if each.leg is LegKind.PREFILL]
    assert hints == [KvHints("of the header", 9.0), KvHints("of the body")]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_prefetch_is_an_answer_without_tokens(is_streamed: bool) -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        parameters: dict[str, Any] = {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": 4,
            "logprobs": 1,
        }
        answer = await client.completions.create(
            **parameters, stream=is_streamed, extra_body={"kv_hints": {"prefetch": True}}
        )
        last = [chunk async for chunk in answer][-1] if is_streamed else answer

        assert (last.choices[0].text, last.choices[0].finish_reason) == ("", "length")
        if not is_streamed:
            assert last.usage.completion_tokens == 0
            assert last.usage.prompt_tokens_details.cached_tokens == 2

    through_the_door(scenario, FakeNodeCalls(num_cached_on_prefill=2))


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"max_tokens": "many"}}, openai.BadRequestError, "max_tokens"),
        ({"n": 10**6}, openai.BadRequestError, "n"),
        ({"prompt": []}, openai.BadRequestError, "prompt"),
        ({"prompt": "text"}, openai.BadRequestError, None),
        ({"extra_body": {"no_such": {}}}, openai.BadRequestError, "no_such"),
        ({"extra_body": {"guided_json": 5}}, openai.BadRequestError, "guided_json"),
        (
            {"prompt": [5] * 500, "n": 128, "extra_body": {"prompt_logprobs": 64}},
            openai.BadRequestError,
            "prompt_logprobs",
        ),
    ],
)
def test_a_refusal_is_a_typed_error_that_names_the_field(
    fields: dict[str, Any], kind: type[openai.APIStatusError], param: str | None
) -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        for is_streamed in (False, True):
            parameters: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, **fields}
            with pytest.raises(kind) as refusal:
                await client.completions.create(**parameters, stream=is_streamed)
            assert refusal.value.param == param
            assert refusal.value.type == "invalid_request_error"

    through_the_door(scenario)


LITELLM_RECOGNISES = "this model's maximum context length is 512 tokens"


@pytest.mark.parametrize(
    "prompt", [[5] * 512, [5] * 513, [[5], [5] * 512], "the " * 600, "x" * 100_000]
)
def test_a_prompt_beyond_the_context_has_the_code_context_length_exceeded(
    prompt: Any, text: TextBoundary
) -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        for is_streamed in (False, True):
            with pytest.raises(openai.BadRequestError) as refusal:
                await client.completions.create(model="tiny", prompt=prompt, stream=is_streamed)
            assert (refusal.value.code, refusal.value.param) == (
                "context_length_exceeded",
                "prompt",
            )
            assert refusal.value.type == "invalid_request_error"
            assert LITELLM_RECOGNISES in refusal.value.message
        if isinstance(prompt, str):
            long: Any = [{"role": "user", "content": prompt}]
            with pytest.raises(openai.BadRequestError) as refusal:
                await client.chat.completions.create(model="tiny", messages=long)
            assert refusal.value.code == "context_length_exceeded"
            assert refusal.value.param == "messages"

    through_the_door(scenario, text=text)


def test_a_prompt_beyond_the_kv_cache_has_the_code_context_length_exceeded() -> None:
    too_long = ContextLengthExceeded("with this cache, this model's maximum context length is 9")
    nodes = FakeNodeCalls(prefill_faults=[too_long])

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.completions.create(model="tiny", prompt=PROMPT)
        assert refusal.value.code == "context_length_exceeded"

    through_the_door(scenario, nodes)


def test_an_unknown_model_has_the_code_model_not_found() -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as refusal:
            await client.completions.create(model="other", prompt=PROMPT)
        assert (refusal.value.code, refusal.value.param) == ("model_not_found", "model")
        assert refusal.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError) as refusal:
            await client.models.retrieve("other")
        assert refusal.value.code == "model_not_found"

    through_the_door(scenario)


def test_a_full_queue_returns_a_retry_delay() -> None:
    nodes = FakeNodeCalls(is_endless=True)

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        parameters: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "stream": True}
        async with await client.completions.create(**parameters):
            with pytest.raises(openai.RateLimitError) as refusal:
                await client.completions.create(**parameters)
        assert refusal.value.code == "rate_limit_exceeded"
        assert refusal.value.type == "rate_limit_error"
        assert refusal.value.body["reason"] == "QUEUE_FULL"
        assert int(refusal.value.response.headers["retry-after"]) >= 1

    through_the_door(
        scenario, nodes, admission_queue=AdmissionQueueConfig(max_in_flight=1, max_queue=0)
    )


def test_a_poisonous_request_fails_with_a_named_error_that_is_not_retried() -> None:
    faults: list[Exception] = [NodeFailed("it broke", FailureKind.PASS_FAILED) for _ in range(9)]
    nodes = FakeNodeCalls(prefill_faults=faults)
    table = a_table(*(a_node(LegKind.PREFILL, f"p{n}") for n in range(3)), a_node(LegKind.DECODE))

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.InternalServerError) as refusal:
            await client.with_options(max_retries=2).completions.create(model="tiny", prompt=PROMPT)
        assert refusal.value.code == "POISONED_REQUEST"
        assert refusal.value.status_code == 500

    through_the_door(scenario, nodes, table=table)

    assert len(faults) == 9 - 2


def test_without_nodes_the_status_is_503() -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.InternalServerError) as refusal:
            await client.completions.create(model="tiny", prompt=PROMPT)
        assert refusal.value.status_code == 503
        assert refusal.value.code == "NO_NODES"

    through_the_door(scenario, table=NodeTable())


def test_an_interrupted_answer_ends_its_stream_with_an_error() -> None:
    nodes = FakeNodeCalls(decode_breaks_after=[2, 0, 0, 0, 0])

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        ids = {"return_token_ids": True}
        stream = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=50, stream=True, extra_body=ids
        )
        first: Any = await anext(stream)
        with pytest.raises(openai.APIError) as failure:
            [_ async for _ in stream]

        assert first.choices[0].token_ids[:1] == ANSWER[:1]
        assert failure.value.code == "NODE_FAILED"

    through_the_door(scenario, nodes)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_disconnected_client_frees_the_nodes(is_streamed: bool) -> None:
    nodes = FakeNodeCalls(is_endless=True)

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        asking = asyncio.ensure_future(
            client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=4, n=2, stream=is_streamed
            )
        )
        if is_streamed:
            stream: Any = await asking
            await stream.close()
        else:
            await nodes.decode_told_all.wait()
            asking.cancel()
        await router.pipeline.drain()

        assert nodes.left == [LegKind.DECODE, LegKind.DECODE]

    through_the_door(scenario, nodes)


def test_a_draining_router_finishes_its_streams_and_refuses_new_requests() -> None:
    nodes = FakeNodeCalls(is_endless=True)

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        parameters: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
        stream = await client.completions.create(**parameters, stream=True)
        draining = asyncio.ensure_future(router.pipeline.drain())
        await asyncio.sleep(0)  # lets it begin

        with pytest.raises(openai.InternalServerError) as refusal:
            await client.completions.create(**parameters)
        ready, health, alive = [
            (await client._client.get(router.url + path)).status_code
            for path in ("/ready", "/health", "/live")
        ]
        assert refusal.value.code == "DRAINING"
        assert (ready, health, alive) == (503, 503, 200)
        assert not draining.done()
        await stream.close()
        await draining

    through_the_door(scenario, nodes)


def test_requests_without_a_valid_token_are_refused() -> None:
    async def scenario(router: HttpRouter, stranger: AsyncOpenAI) -> None:
        with pytest.raises(openai.AuthenticationError) as refusal:
            await stranger.models.list()
        assert refusal.value.code == "invalid_api_key"
        assert refusal.value.type == "invalid_request_error"
        async with a_client(router, "sesame") as friend:
            assert [model.id async for model in friend.models.list()] == ["tiny"]
        statuses = {
            path: (await stranger._client.get(router.url + path)).status_code
            for path in ("/health", "/live", "/ready", "/metrics", "/nowhere")
        }
        open_paths = dict.fromkeys(("/health", "/live", "/ready"), 200)
        assert statuses == {**open_paths, "/metrics": 401, "/nowhere": 401}

    through_the_door(scenario, tokens=AcceptedTokens(("sesame",)))


def test_a_trace_continues_through_the_http_api_and_its_id_is_returned() -> None:
    tracer = TakingTracer()
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    header = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "x-request-id": "mine"}

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        raw = await client.completions.with_raw_response.create(
            model="tiny", prompt=PROMPT, max_tokens=2, n=2, extra_headers=header
        )
        roots = [(await tracer.next_spans())[0] for _ in range(2)]

        assert (raw.headers["x-trace-id"], raw.headers["x-request-id"]) == (trace_id, "mine")
        assert raw.parse().id == "cmpl-mine"
        assert {f"{root.trace_id:032x}" for root in roots} == {trace_id}

    through_the_door(scenario, tracing=Tracing(tracer))


def test_a_body_beyond_the_limit_is_refused_as_too_large() -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        too_much = b" " * (MAX_BODY_BYTES + 1)
        refusal = await client._client.post(f"{router.url}/v1/completions", content=too_much)

        assert refusal.status_code == 413
        assert refusal.json()["error"]["code"] == "MESSAGE_TOO_LARGE"

    through_the_door(scenario)


def test_a_list_longer_than_any_prompt_is_refused_before_its_end() -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        too_many = b'{"prompt":[' + b"5," * (max_values(512) + 1)  # and no end
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            refusal = await client._client.post(router.url + path, content=too_many)

            assert refusal.status_code == 413
            assert "JSON values" in refusal.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "word"),
    [
        ("POST", "/v1/conversations", 404, "conversations are not stored here"),
        ("POST", "/v1/images/edits", 404, "images are not implemented"),
        ("GET", "/redoc", 404, "is /docs"),
        ("POST", "/v1/messages/batches", 404, "batches are not stored here"),
        ("POST", "/chat/completions", 404, "its path here is /v1/chat/completions"),
        ("GET", "/v1/health", 404, "its path here is /health"),
        ("GET", "/", 404, "POST /v1/completions, POST /v1/chat/completions, POST /v1/embeddings"),
        ("GET", "/v1/completions", 405, "/v1/completions takes POST, not GET"),
        ("OPTIONS", "/v1/completions", 200, "CORS"),
    ],
)
def test_unknown_paths_and_methods_are_refused_with_an_explanation(
    method: str, path: str, status: int, word: str
) -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        answer = await client._client.request(method, router.url + path)

        reported = answer.json()
        assert answer.status_code == status
        assert word in (reported.get("error") or reported)["message"]
        assert ("POST" in answer.headers.get("allow", "")) == (status != 404)

    through_the_door(scenario)


def test_an_overlong_request_id_is_refused() -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        parameters: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
        with pytest.raises(openai.BadRequestError, match="257 characters") as refusal:
            await client.completions.create(**parameters, extra_headers={"x-request-id": "x" * 257})

        assert refusal.value.param == "x-request-id"
        assert 0 < len(refusal.value.response.headers["x-request-id"]) <= 256


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_client_that_disconnects_within_its_body_is_not_logged_as_a_bug(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = TakingTracer()

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        host, _, port = router.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        traced = f"traceparent: 00-{'a' * 32}-{'b' * 16}-01\r\n"
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\n{traced}content-length: 999\r\n\r\n"
        writer.write(f'{head}{{"prompt": '.encode())
        await writer.drain()
        writer.close()
        if path == "/v1/completions":
            root, *_ = await tracer.next_spans()
            assert root.attributes[names.OUTCOME] == "cancelled"

    through_the_door(scenario, tracing=Tracing(tracer))

    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_grpc_clients_of_the_http_port_get_an_explanation() -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        async with AsyncClient(router.address) as lost:
            with pytest.raises(BatonError, match="speaks HTTP and not gRPC"):
                await lost.model()
        verdict = await asyncio.to_thread(ask, router.address, LONGEST_S, PLAIN)
        assert "speaks HTTP and not gRPC" in verdict.words

    through_the_door(scenario)


def test_models_tokenize_and_detokenize_endpoints_respond(text: TextBoundary) -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        async def post(path: str, **fields: Any) -> Any:
            return (await client._client.post(router.url + path, json=fields)).json()

        model = await client.models.retrieve("tiny")
        assert (model.id, getattr(model, "max_model_len", None)) == ("tiny", 512)
        assert (model.model_extra or {})["root"] == "tiny"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("some/other")
        tokens = await post("/tokenize", prompt="the quick", return_token_strs=True)
        assert "".join(tokens["token_strs"]) == "the quick"
        assert tokens["count"] == len(tokens["tokens"])
        assert await post("/detokenize", tokens=tokens["tokens"]) == {"prompt": "the quick"}
        chat = await post("/tokenize", messages=CHAT)
        rendered = (await post("/detokenize", tokens=chat["tokens"]))["prompt"]
        assert "the quick" in rendered
        special = {"tokens": [1, *tokens["tokens"], EOS_TOKEN_ID]}
        assert await post("/detokenize", **special) == {"prompt": "<s>the quick</s>"}
        assert (await post("/tokenize", prompt="a", model="b"))["error"]["param"] == "model"
        missing = await client._client.get(f"{router.url}/nowhere")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "NOT_FOUND")

    through_the_door(scenario, text=text)


def test_a_request_id_in_use_is_a_conflict() -> None:
    nodes = FakeNodeCalls(is_endless=True)

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        parameters: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "stream": True}
        named = {"x-request-id": "mine"}
        async with await client.completions.create(**parameters, extra_headers=named):
            with pytest.raises(openai.ConflictError):
                await client.completions.create(**parameters, extra_headers=named)

    through_the_door(scenario, nodes)


def test_over_tls_a_renewed_certificate_is_used_for_new_connections(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    old, new = (authority.issue(name, f"{name}.example") for name in ("old", "new"))
    shown = tmp_path / "shown.pem", tmp_path / "shown.key"

    def put(cert: Path, key: Path) -> None:
        for source, place in zip((cert, key), shown, strict=True):
            place.write_bytes(source.read_bytes())

    async def run() -> None:
        put(*old)
        async with an_http_router(tls=TlsConfig(*shown)) as router:
            assert await status_at(router, authority, "old.example") == 200
            put(new[0], old[1])  # half of the change
            assert await status_at(router, authority, "old.example") == 200
            put(*new)
            assert await status_at(router, authority, "new.example") == 200
            with pytest.raises(ssl.SSLCertVerificationError):
                await status_at(router, authority, "old.example")

    asyncio.run(run())


def test_over_mutual_tls_clients_without_a_certificate_are_refused(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    mine = authority.issue("client", "client.example")

    async def run() -> None:
        async with an_http_router(tls=authority.mutual("server", "a.example")) as router:
            assert await status_at(router, authority, "a.example", mine) == 200
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await status_at(router, authority, "a.example")

    asyncio.run(run())


async def status_at(
    router: HttpRouter, authority: Authority, name: str, own: tuple[Path, Path] | None = None
) -> int:
    host, _, port = router.address.rpartition(":")
    context = ssl.create_default_context(cafile=str(authority.ca))
    if own is not None:
        context.load_cert_chain(*own)
    reading, writing = await asyncio.open_connection(
        host, int(port), ssl=context, server_hostname=name
    )
    try:
        writing.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        line = await reading.readline()
        if not line:
            raise ConnectionResetError("sent away")
        return int(line.split()[1])
    finally:
        writing.close()


class Scripted(TextBoundary):
    """Tokenizer with a fixed prompt and a fixed answer of three characters per token."""

    def __init__(self, script: str, prompt_end: str = "") -> None:
        super().__init__()
        self._script = script
        self._prompt_end = prompt_end

    def token_ids(self, prompt: Prompt, max_tokens: int | None = None) -> tuple[int, ...]:
        return tuple(PROMPT)

    def end_of(self, token_ids: tuple[int, ...]) -> str:
        return self._prompt_end

    def create_detokenizer(self, shown: Collection[str] = ()) -> IncrementalDetokenizer:
        return ScriptedSpeller(self._script)


class ScriptedSpeller:
    def __init__(self, script: str) -> None:
        self._rest = script

    def push(self, *token_ids: int) -> str:
        size = 3 * len(token_ids)
        reported, self._rest = self._rest[:size], self._rest[size:]
        return reported

    def finish(self) -> str:
        return ""


def test_reasoning_and_tool_calls_are_separated_with_and_without_streaming() -> None:
    call = '<tool_call>{"name": "look", "arguments": {"for": "a fox"}}</tool_call>'
    script = f"<think>why not</think>I look.{call}{call}<end>"
    tools: Any = [{"type": "function", "function": {"name": "look"}}]
    parameters: dict[str, Any] = {
        "model": "tiny",
        "messages": CHAT,
        "tools": tools,
        "max_tokens": 100,
        "stop": "<end>",
    }

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        whole: Any = (await client.chat.completions.create(**parameters)).choices[0]
        message = whole.message
        assert (message.reasoning_content, message.content) == ("why not", "I look.")
        assert [one.function.name for one in message.tool_calls] == ["look", "look"]
        assert json.loads(message.tool_calls[0].function.arguments) == {"for": "a fox"}
        assert len({one.id for one in message.tool_calls}) == 2
        assert whole.finish_reason == "tool_calls"

        async with client.chat.completions.stream(**parameters) as stream:
            reported: Any = (await stream.get_final_completion()).choices[0]
        assert reported.message.content == "I look."
        assert [
            (one.function.name, one.function.arguments) for one in reported.message.tool_calls
        ] == [(one.function.name, one.function.arguments) for one in message.tool_calls]
        assert reported.finish_reason == "tool_calls"

        without: Any = await client.chat.completions.create(**{**parameters, "tool_choice": "none"})
        assert without.choices[0].message.content == f"I look.{call}{call}"

    parsing = Parsing(tools="hermes", reasoning="qwen3")
    through_the_door(scenario, text=Scripted(script), parsing=parsing)


def test_openais_client_reads_streams_whose_call_is_cut() -> None:
    script = '<tool_call>{"name": "look", "arguments": {"for": "a fox"<end>'
    tools: Any = [{"type": "function", "name": "look", "parameters": {}}]

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        async with client.responses.stream(
            model="tiny", input="hi", tools=tools, max_output_tokens=len(script) // 3
        ) as stream:
            events: list[Any] = [event async for event in stream]
        last = events[-1]
        assert last.type == "response.incomplete"
        assert last.response.incomplete_details.reason == "unended_tool_call"
        assert [item.type for item in last.response.output] == ["message"]
        previous = last.response.id
        parameters: Any = {"model": "tiny", "input": "and?", "previous_response_id": previous}
        assert (await client.responses.create(**parameters)).status == "completed"

    nodes = FakeNodeCalls(ends_by=FinishReason.STOP)
    through_the_door(scenario, nodes, text=Scripted(script), parsing=Parsing("hermes"))


@pytest.mark.parametrize("script", ["", " \n", "<think>how?</think>\n", "<think>how"])
def test_a_compaction_without_a_summary_fails(script: str) -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.InternalServerError, match="wrote no summary") as failure:
            await client.responses.compact(model="tiny", input="hi")
        body: Any = failure.value.body
        assert body["reason"] == "GENERATION_FAILED"

    nodes = FakeNodeCalls(ends_by=FinishReason.STOP)
    through_the_door(scenario, nodes, text=Scripted(script), parsing=Parsing(reasoning="qwen3"))


def test_an_error_of_a_compaction_names_its_input(text: TextBoundary) -> None:
    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="maximum context length") as refusal:
            await client.responses.compact(model="tiny", input="the " * 600)
        assert refusal.value.param == "input"

    through_the_door(scenario, text=text)


LOOK: Any = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
OBJECT: Any = {"type": "json_object"}
NAMED: Any = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("script", "choice", "arguments", "finish_reason"),
    [
        (
            '[{"name": "look", "arguments": {"for": "a }]"}}, {"name": "look", "arguments": {}}]',
            "required",
            ['{"for": "a }]"}', "{}"],
            "tool_calls",
        ),
        ('{"for": "a fox"}', NAMED, ['{"for": "a fox"}'], "stop"),
    ],
)
def test_forced_calls_are_returned_with_and_without_streaming(
    script: str, choice: Any, arguments: list[str], finish_reason: str
) -> None:
    parameters: dict[str, Any] = {
        "model": "tiny",
        "messages": CHAT,
        "tools": LOOK,
        "tool_choice": choice,
    }
    parameters["max_tokens"] = -(-len(script) // 3)

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        whole: Any = (await client.chat.completions.create(**parameters)).choices[0]
        assert [one.function.name for one in whole.message.tool_calls] == ["look"] * len(arguments)
        assert [one.function.arguments for one in whole.message.tool_calls] == arguments
        assert (whole.message.content, whole.finish_reason) == (None, finish_reason)

        async with client.chat.completions.stream(**parameters) as stream:
            reported: Any = (await stream.get_final_completion()).choices[0]
        assert [one.function.arguments for one in reported.message.tool_calls] == arguments
        assert len({one.id for one in reported.message.tool_calls}) == len(arguments)
        assert (reported.message.content or "", reported.finish_reason) == ("", finish_reason)

    nodes = FakeNodeCalls(ends_by=FinishReason.STOP)
    through_the_door(scenario, nodes, text=Scripted(script), parsing=Parsing("hermes", "qwen3"))


THINK = ReasoningMarks("<think>", "</think>")
HARMONY_START = "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final"


@pytest.mark.parametrize(
    ("prompt_end", "script", "begin", "reasoning"),
    [
        ("<think>\n", 'why</think>{"a": 1}', None, "why"),
        ("assistant\n", '<think>why</think>{"a": 1}', 8, "why"),
        ("assistant\n", '{"a": 1}', 8, None),
        ("<think>\n\n</think>\n\n", '{"a": 1}', "no section", None),
    ],
)
@pytest.mark.parametrize("is_call", [False, True], ids=["format", "call"])
def test_structured_output_and_forced_calls_begin_after_the_reasoning(
    prompt_end: str, script: str, begin: object, reasoning: str | None, is_call: bool
) -> None:
    parameters: dict[str, Any] = {"model": "tiny", "messages": CHAT, "response_format": OBJECT}
    if is_call:
        parameters = {"model": "tiny", "messages": CHAT, "tools": LOOK, "tool_choice": NAMED}
    parameters["max_tokens"] = -(-len(script) // 3)
    nodes = FakeNodeCalls(ends_by=FinishReason.STOP)

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        whole: Any = (await client.chat.completions.create(**parameters)).choices[0].message
        stream: Any = await client.chat.completions.create(**parameters, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]

        text = whole.tool_calls[0].function.arguments if is_call else whole.content
        assert (text, getattr(whole, "reasoning_content", None)) == ('{"a": 1}', reasoning)
        told = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
        assert "".join(told) == (reasoning or "")

    parsing = Parsing("hermes", "qwen3", ReasoningTokens(THINK, 8, (9,)))
    through_the_door(scenario, nodes, text=Scripted(script, prompt_end), parsing=parsing)
    expected = None
    if begin != "no section":
        expected = ReasoningSection((9,), 8 if begin == 8 else None)
    assert {one.request.sampling.reasoning for one in nodes.received} == {expected}


def test_structured_output_of_harmony_is_on_its_final_channel() -> None:
    script = f'{HARMONY_START}<|message|>{{"a": 1}}'
    parameters: dict[str, Any] = {"model": "tiny", "messages": CHAT, "response_format": OBJECT}
    parameters["max_tokens"] = -(-len(script) // 3)

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        whole: Any = (await client.chat.completions.create(**parameters)).choices[0].message
        assert (whole.content, whole.reasoning_content) == ('{"a": 1}', "why")

    marks = ReasoningMarks("<|channel|>", "<|channel|>final<|message|>")
    parsing = Parsing("openai", "openai_gptoss", ReasoningTokens(marks, 8, (8, 7, 9)))
    nodes = FakeNodeCalls(ends_by=FinishReason.STOP)
    text = Scripted(script, "<|start|>assistant")
    through_the_door(scenario, nodes, text=text, parsing=parsing)
    [sections] = {one.request.sampling.reasoning for one in nodes.received}
    assert sections == ReasoningSection((8, 7, 9), 8)


def test_unfulfilled_options_are_reported_as_warnings() -> None:
    parameters: dict[str, Any] = {
        "model": "tiny",
        "messages": CHAT,
        "tools": LOOK,
        "max_tokens": 600,
    }

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        whole: Any = await client.chat.completions.create(**parameters, stop="e")
        [unseen, unread, capped] = whole.warnings
        assert "template does not show them" in unseen
        assert "set --tool-parser" in unread
        assert capped.startswith("max_tokens 600 was lowered to ")

        stream: Any = await client.chat.completions.create(**parameters, stop="e", stream=True)
        warnings = [chunk.model_extra.get("warnings") async for chunk in stream]
        assert [reported for reported in warnings if reported] == [whole.warnings]
        assert warnings[-1] == whole.warnings

        plain: Any = await client.chat.completions.create(model="tiny", messages=CHAT, stop="e")
        assert "warnings" not in plain.model_extra

    through_the_door(scenario, text=Scripted("some"))


def test_grpc_and_http_share_one_admission_queue() -> None:
    """Requests over one protocol count against the limit for the other."""
    nodes = FakeNodeCalls(is_endless=True)

    async def scenario(router: HttpRouter, client: AsyncOpenAI) -> None:
        by_grpc = GenerateCall("other", TokenPrompt((3,)), SamplingParams(max_tokens=2))
        parts = router.pipeline.generate(by_grpc, RequestContext(time.monotonic()))
        await anext(parts)
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="tiny", prompt=PROMPT)
        await parts.aclose()

    through_the_door(
        scenario, nodes, admission_queue=AdmissionQueueConfig(max_in_flight=1, max_queue=0)
    )
