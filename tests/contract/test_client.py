"""Python clients: retries, cancellation, timeouts and bearer tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.client import Access, Answer, AsyncClient, BatonError, Client, Generation, Retries
from baton.core.errors import InvalidConfig
from baton.core.legs import LegKind
from baton.core.sampling import SamplingDefaults, SamplingParams
from baton.router.admission.rate_limits import RateLimitConfig
from baton.rpc.channel import open_channel
from baton.rpc.errors import NoNodes, QueueFull, RequestIdInUse, UnknownModel
from baton.rpc.messages.interceptor import MAX_FIELDS
from baton.rpc.messages.limits import MAX_REQUEST_BYTES
from baton.rpc.security.tls import PLAIN
from baton.rpc.security.token import AcceptedTokens
from baton.rpc.security.token_gate import TokenInterceptor
from tests.support.node_calls import FakeNodeCalls, a_node, a_table
from tests.support.routers import a_router

PATIENCE_S = 30
PROMPT = (1, 2, 3)
SIX = Generation(SamplingParams(max_tokens=6))
SOON = Retries(max_attempts=3, first_pause_s=0.0)
GONE = NoNodes("no node yet")

Generate = Callable[[str, Retries], Awaitable[Answer]]


async def by_async_client(address: str, retries: Retries) -> Answer:
    async with AsyncClient(address, retries=retries, timeout_s=PATIENCE_S) as client:
        return await client.generate(PROMPT, SIX)


async def by_blocking_client(address: str, retries: Retries) -> Answer:
    def generate() -> Answer:
        with Client(address, retries=retries, timeout_s=PATIENCE_S) as client:
            return client.generate(PROMPT, SIX)

    return await asyncio.to_thread(generate)


both_clients = pytest.mark.parametrize("generate", [by_async_client, by_blocking_client])


def run(scenario: Awaitable[None]) -> None:
    async def play() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scenario

    asyncio.run(play())


@both_clients
def test_an_initially_unavailable_router_is_retried(generate: Generate) -> None:
    async def scenario() -> None:
        async with a_router(GONE, GONE) as (router, address):
            answer = await generate(address, SOON)

            assert len(answer.token_ids) == 6
            assert router.num_asked == 3

    run(scenario())


@both_clients
def test_the_last_error_is_raised_after_the_last_attempt(generate: Generate) -> None:
    async def scenario() -> None:
        async with a_router(GONE, GONE, GONE) as (router, address):
            with pytest.raises(BatonError, match="no node yet") as refusal:
                await generate(address, SOON)

            assert (refusal.value.reason, router.num_asked) == ("NO_NODES", 3)

    run(scenario())


@both_clients
@pytest.mark.parametrize("fault", [UnknownModel("no"), QueueFull("full", 0.0), RequestIdInUse("x")])
def test_other_errors_are_raised_at_once(generate: Generate, fault: Exception) -> None:
    async def scenario() -> None:
        async with a_router(fault) as (router, address):
            with pytest.raises(BatonError):
                await generate(address, SOON)

            assert router.num_asked == 1

    run(scenario())


@both_clients
def test_a_full_queue_is_retried_after_its_delay_if_enabled(generate: Generate) -> None:
    patient = Retries(max_attempts=3, waits_when_full=True)

    async def scenario() -> None:
        async with a_router(QueueFull("full", 0.01), GONE) as (router, address):
            answer = await generate(address, patient)

            assert len(answer.token_ids) == 6
            assert router.num_asked == 3

    run(scenario())


@both_clients
def test_a_retry_waits_until_the_failed_attempt_releases_the_request_id(generate: Generate) -> None:
    async def scenario() -> None:
        async with a_router(GONE, RequestIdInUse("in use")) as (router, address):
            answer = await generate(address, SOON)

            assert len(answer.token_ids) == 6
            assert router.num_asked == 3

    run(scenario())


@both_clients
def test_a_request_with_a_started_answer_is_never_retried(generate: Generate) -> None:
    async def scenario() -> None:
        breaks = FakeNodeCalls(decode_breaks_after=[2, 0, 0])
        async with a_router(node_calls=breaks) as (router, address):
            with pytest.raises(BatonError) as failure:
                await generate(address, SOON)

            assert (failure.value.reason, router.num_asked) == ("NODE_FAILED", 1)

    run(scenario())


@both_clients
def test_a_call_that_a_closing_router_leaves_without_an_answer_is_retried(
    generate: Generate,
) -> None:
    """Such a call ends without the reason DRAINING, which only answers have."""
    until_it_returns = Retries(max_attempts=1000, first_pause_s=0.02, max_pause_s=0.02)
    silent = FakeNodeCalls(is_prefill_late=True, may_prefill_report=asyncio.Event())

    async def scenario() -> None:
        async with a_router(node_calls=silent) as (closing, address):
            answer = asyncio.ensure_future(generate(address, until_it_returns))
            await closing.text.read.get()
        async with a_router(port=int(address.rpartition(":")[2])) as (_, _):
            assert len((await answer).token_ids) == 6

    run(scenario())


@both_clients
def test_a_backoff_beyond_the_timeout_is_not_started(generate: Generate) -> None:
    slow = Retries(first_pause_s=10 * PATIENCE_S, max_pause_s=10 * PATIENCE_S)

    async def scenario() -> None:
        async with a_router(GONE) as (router, address):
            with pytest.raises(BatonError) as refusal:
                await generate(address, slow)

            assert (refusal.value.reason, router.num_asked) == ("NO_NODES", 1)

    run(scenario())


async def leave_async(client: AsyncClient) -> None:
    async for _ in client.stream(PROMPT, SIX):
        break


async def close_async(client: AsyncClient) -> None:
    async with aclosing(client.stream(PROMPT, SIX)) as stream:
        await anext(stream)


@pytest.mark.parametrize("leave", [leave_async, close_async])
def test_leaving_the_loop_over_a_stream_cancels_its_request(
    leave: Callable[[AsyncClient], Awaitable[None]],
) -> None:
    async def scenario() -> None:
        calls = FakeNodeCalls(is_endless=True)
        async with a_router(node_calls=calls) as (router, address):
            async with AsyncClient(address) as client:
                await leave(client)
                await router.pipeline.drain()  # returns when no request is under way

            assert calls.left == [LegKind.DECODE]

    run(scenario())


def test_no_call_of_a_closed_client_is_still_ending() -> None:
    """Its end would arrive in the next event loop, which then reports an exception."""

    async def scenario() -> None:
        async with a_router(node_calls=FakeNodeCalls(is_endless=True)) as (_, address):
            async with AsyncClient(address) as client:
                await close_async(client)

            assert not [task for task in asyncio.all_tasks() if "_AioCall" in repr(task)]

    run(scenario())


def test_omitted_sampling_parameters_take_the_model_defaults() -> None:
    advised = SamplingDefaults(temperature=0.3, top_k=7)
    node = a_node(LegKind.DECODE)
    table = a_table(replace(node, card=replace(node.card, sampling_defaults=advised)))

    async def scenario() -> None:
        calls = FakeNodeCalls()
        async with (
            a_router(node_calls=calls, table=table) as (_, address),
            AsyncClient(address) as client,
        ):
            assert (await client.model()).sampling_defaults == advised
            await client.generate(PROMPT, Generation({"max_tokens": 2, "top_k": 1}))
            await client.generate(PROMPT, SIX)

        left, whole = (requested.request.sampling for requested in calls.received)
        assert left == SamplingParams(2, temperature=0.3, top_k=1)
        assert whole == SIX.sampling

    run(scenario())


def test_leaving_the_loop_over_a_blocking_stream_cancels_its_request() -> None:
    def leave(client: Client) -> None:
        for _ in client.stream(PROMPT, SIX):
            break

    async def scenario() -> None:
        calls = FakeNodeCalls(is_endless=True)
        async with a_router(node_calls=calls) as (router, address):
            with Client(address) as client:
                await asyncio.to_thread(leave, client)
                await router.pipeline.drain()

            assert calls.left == [LegKind.DECODE]

    run(scenario())


def test_a_timeout_is_reported_and_cancels_the_request() -> None:
    async def scenario() -> None:
        calls = FakeNodeCalls(is_endless=True)
        async with (
            a_router(node_calls=calls) as (router, address),
            AsyncClient(address, timeout_s=PATIENCE_S) as client,
        ):
            with pytest.raises(BatonError, match=r"within 0\.1 s") as failure:
                await client.generate(PROMPT, SIX, timeout_s=0.1)
            await router.pipeline.drain()

        assert failure.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert failure.value.reason == "DEADLINE_EXCEEDED"

    run(scenario())


@both_clients
def test_a_prompt_beyond_the_message_size_is_refused_by_name(generate: Generate) -> None:
    async def scenario() -> None:
        async with a_router() as (router, address), AsyncClient(address) as client:
            with pytest.raises(BatonError, match="ask for less") as refusal:
                await client.generate("x" * (MAX_REQUEST_BYTES + 1), SIX)

            assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (refusal.value.reason, router.num_asked) == ("MESSAGE_TOO_LARGE", 0)
            assert len((await generate(address, SOON)).token_ids) == 6

    run(scenario())


def test_a_message_with_too_many_entries_is_refused_before_parsing() -> None:
    async def scenario() -> None:
        async with a_router() as (router, address), AsyncClient(address) as client:
            with pytest.raises(BatonError, match="more than 65536 fields") as refusal:
                await client.generate([{"role": "", "content": ""}] * (MAX_FIELDS + 1), SIX)

            assert (refusal.value.reason, router.num_asked) == ("MESSAGE_TOO_LARGE", 0)
            assert len((await client.generate(PROMPT, SIX)).token_ids) == 6

    run(scenario())


@pytest.mark.parametrize("request_id", ["x" * 257, "a\nb", "\u2028", "\x1b[2J"])
def test_an_overlong_or_unprintable_request_id_is_refused(request_id: str) -> None:
    async def scenario() -> None:
        async with a_router() as (_, address), AsyncClient(address) as client:
            with pytest.raises(BatonError, match="request_id has") as refusal:
                await client.generate(PROMPT, replace(SIX, request_id=request_id))

            assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
            await client.generate(PROMPT, replace(SIX, request_id="é" * 256))

    run(scenario())


GATE = TokenInterceptor(AcceptedTokens(("right", "also-right")))


@pytest.mark.parametrize("token", ["right", "also-right"])
def test_a_valid_token_is_accepted_by_every_call(token: str) -> None:
    async def scenario() -> None:
        async with (
            a_router(interceptors=[GATE]) as (_, address),
            AsyncClient(address, token=token) as client,
        ):
            assert (await client.model()).name == "tiny"
            assert len((await client.generate(PROMPT, SIX)).token_ids) == 6

    run(scenario())


@pytest.mark.parametrize("token", [None, "wrong"])
def test_without_a_valid_token_every_call_is_refused(token: str | None) -> None:
    async def scenario() -> None:
        async with a_router(interceptors=[GATE]) as (router, address):
            async with AsyncClient(address, token=token) as client:
                for call in (client.generate(PROMPT), client.model(), client.detokenize([1])):
                    with pytest.raises(BatonError) as refusal:
                        await call
                    assert refusal.value.code is grpc.StatusCode.UNAUTHENTICATED
                    assert refusal.value.reason == "UNAUTHENTICATED"
                    assert "wrong" not in str(refusal.value)
            assert router.num_asked == 0

    run(scenario())


def test_health_requires_no_token_and_reflection_does() -> None:
    listing = reflection_pb2.ServerReflectionRequest(list_services="")

    async def scenario() -> None:
        async with (
            a_router(interceptors=[GATE]) as (_, address),
            open_channel(address) as channel,
        ):
            health = health_pb2_grpc.HealthStub(channel)
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)

            answer = await health.Check(health_pb2.HealthCheckRequest())
            with pytest.raises(grpc.RpcError) as refusal:
                [_ async for _ in reflection.ServerReflectionInfo(iter([listing]))]
            shown = (("authorization", "Bearer right"),)
            listed = [
                one
                async for one in reflection.ServerReflectionInfo(iter([listing]), metadata=shown)
            ]

            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert listed

    run(scenario())


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_describes_every_service_itself_and_error_details(version: str) -> None:
    own = f"grpc.reflection.{version}.ServerReflection"
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    details = reflection_pb2.ServerReflectionRequest(
        file_by_filename="google/rpc/error_details.proto"
    )

    async def scenario() -> None:
        async with a_router() as (_, address), open_channel(address) as channel:
            call = channel.stream_stream(
                f"/{own}/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            [listed] = [one async for one in call(iter([listing]))]
            services = [one.name for one in listed.list_services_response.service]
            symbols = [
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
                for name in services
            ]
            answers = [one async for one in call(iter([details, *symbols]))]

        assert own in services
        described = descriptor_pool.DescriptorPool()
        for answer in answers:
            assert not answer.HasField("error_response"), answer.error_response
            for file in reversed(answer.file_descriptor_response.file_descriptor_proto):
                described.AddSerializedFile(file)
        for name in services:
            assert described.FindServiceByName(name).methods
        assert described.FindMessageTypeByName("google.rpc.ErrorInfo").name == "ErrorInfo"

    run(scenario())


def test_sending_tokens_in_plain_text_logs_one_warning_without_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        access = Access("plain-text.example:1", None, PLAIN, "hush-hush", SOON)
        replace(access, token="hush-operator")  # as for each call with an operator's token

    assert caplog.text.count("in plain text") == 1
    assert "hush" not in caplog.text + repr(access)


def test_a_token_that_cannot_be_sent_is_refused_and_not_quoted() -> None:
    with pytest.raises(InvalidConfig) as refusal:
        Client("127.0.0.1:1", token="two words")

    assert "words" not in str(refusal.value)


def test_calls_that_generate_nothing_count_in_the_limits() -> None:
    async def scenario() -> None:
        never, limits = Retries(max_attempts=1), RateLimitConfig(client_requests_per_minute=1)
        calls: list[Callable[[AsyncClient], Awaitable[object]]] = [
            lambda client: client.tokenize("a"),
            lambda client: client.detokenize([1]),
        ]
        for call in calls:
            async with (
                a_router(rate_limits=limits) as (_router, address),
                AsyncClient(address, retries=never) as client,
            ):
                for reason in ("UNSUPPORTED_INPUT", "RATE_LIMITED"):  # it has no tokenizer
                    with pytest.raises(BatonError) as refusal:
                        await call(client)
                    assert refusal.value.reason == reason

    run(scenario())


def test_a_client_over_its_rate_limit_learns_when_to_try_again() -> None:
    async def scenario() -> None:
        limits = RateLimitConfig(client_tokens_per_minute=5)
        never = Retries(max_attempts=1)
        async with a_router(rate_limits=limits) as (_router, address):
            assert len((await by_async_client(address, never)).token_ids) == 6
            with pytest.raises(BatonError, match="5 tokens per minute") as refusal:
                await by_async_client(address, never)

        assert refusal.value.reason == "RATE_LIMITED"
        # 3 tokens of the prompt and 6 more are 4 too many, and one must be there.
        assert refusal.value.retry_after_s == pytest.approx(60, abs=2)

    run(scenario())
