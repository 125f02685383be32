"""gRPC servicer of SMG's VllmEngine: the router as one worker of an SMG gateway.

The gateway tokenises and detokenises, so prompts and answers are token ids.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, TypeVar

from grpc import StatusCode, aio
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from baton.core.errors import InvalidRequest
from baton.core.ids import ModelVariant
from baton.core.legs import LegKind
from baton.router.answers import generate_answers
from baton.router.doors.smg.answers import AnswerMessages
from baton.router.doors.smg.model_facts import ModelFacts, sampling_defaults_json
from baton.router.doors.smg.request import calls_from
from baton.router.doors.smg.tokenizer_bundle import TokenizerBundle
from baton.router.orders.node_orders import NodeOrders
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScopes
from baton.router.routing.served_models import Node
from baton.router.values import TokenChunk, TokenPrompt
from baton.rpc.errors import Draining, NoNodes, RequestIdInUse, UnsupportedInput
from baton.rpc.security.token_gate import sent_token
from baton.rpc.status import named_errors

SERVICE = "vllm.grpc.engine.VllmEngine"
Context = aio.ServicerContext[Any, Any]
Method = Callable[[Any, object, Context], Awaitable[None]]
Item = TypeVar("Item")


def _unserved(name: str, advice: str) -> Method:
    async def refuse(_self: Any, _request: object, context: Context) -> None:
        await context.abort(StatusCode.UNIMPLEMENTED, f"Baton does not serve {name}: {advice}")

    return refuse


class UnservedMethods:
    """Base class of the servicer. Its generated base would log each call as a failure."""

    Embed = _unserved("Embed", "use /v1/embeddings or Embed of Baton's router")
    StartProfile = _unserved("StartProfile", "use Baton's traces (docs/observability.md)")
    StopProfile = _unserved("StopProfile", "use Baton's traces (docs/observability.md)")
    SubscribeKvEvents = _unserved(
        "SubscribeKvEvents", "nodes publish events by --kv-events-endpoint"
    )


class SmgServicer(UnservedMethods, vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    def __init__(
        self, pipeline: Pipeline, scopes: RequestScopes, orders: NodeOrders, facts: ModelFacts
    ) -> None:
        self._pipeline = pipeline
        self._table = pipeline.table
        self._scopes = scopes
        self._orders = orders
        self._facts = facts
        self._tokenizer = TokenizerBundle(facts.path)
        self._started_s = time.monotonic()
        self._running = RunningCalls()

    async def Generate(
        self, request: vllm_engine_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[vllm_engine_pb2.GenerateResponse, None]:
        request_id, scope = self._scopes.begin_call(request.request_id, context)
        async with named_errors(context, request_id=request_id, trace_id=scope.trace_id):
            with scope.ending_on_error():
                model = self._model()
                calls = calls_from(request, request_id, self._table.served_model(model), model)
                token_ids = await self._pipeline.inputs.token_ids(
                    calls[0].prompt, model, scope.client
                )
            calls = [replace(call, prompt=TokenPrompt(token_ids)) for call in calls]
            answers = [
                AnswerMessages(index, token_ids, is_streamed=request.stream)
                for index in range(len(calls))
            ]
            generated = generate_answers(self._pipeline, scope, calls, len(calls))
            running = self._running.until_aborted(request_id, scope.owner, generated)
            with scope.within_limits():
                async with aclosing(running) as parts:
                    async for index, part in parts:
                        if not isinstance(part, TokenChunk):
                            yield answers[index].finish(part)
                        elif (chunk := await answers[index].add(part)) is not None:
                            yield chunk
            for answer in answers:
                if not answer.is_finished:
                    yield answer.finish(None)

    async def Abort(
        self, request: vllm_engine_pb2.AbortRequest, context: Context
    ) -> vllm_engine_pb2.AbortResponse:
        """End requests of this client. Ids of others are ignored, as those that have ended."""
        owner = self._scopes.owner_of(context.invocation_metadata() or ())
        for request_id in request.request_ids:
            self._running.abort(request_id, owner)
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Fail without nodes, so that a gateway that starts first waits for them."""
        async with named_errors(context):
            self._decode_nodes()
            if self._pipeline.is_draining:
                raise Draining("this router is shutting down; use another one")
        return vllm_engine_pb2.HealthCheckResponse(healthy=True, message="ready")

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        async with named_errors(context):
            model = self._model()
            card = self._decode_nodes()[0].card
            longest = self._table.served_model(model).max_sequence_len or card.max_model_len
        facts = self._facts
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=facts.path or card.model,
            is_generation=True,
            max_context_length=longest,
            vocab_size=card.vocab_size,
            served_model_name=card.model,
            tokenizer_path=facts.path,
            model_type=facts.model_type,
            architectures=facts.architectures,
            eos_token_ids=facts.eos_token_ids,
            pad_token_id=facts.pad_token_id,
            bos_token_id=facts.bos_token_id,
            max_req_input_len=longest - 1,
            default_sampling_params_json=sampling_defaults_json(card.sampling_defaults),
        )

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        async with named_errors(context):
            nodes = self._decode_nodes()
        fingerprint = nodes[0].card.fingerprint
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=self._pipeline.traffic.num_in_flight,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type=f"baton-{version('baton')}",
            data_parallel_size=1,
            kv_cache_dtype=fingerprint.layout.cache_dtype,
            block_size=fingerprint.layout.block_size,
            model_dtype=fingerprint.layout.dtype,
            max_num_seqs=sum(node.card.max_num_seqs for node in nodes),
            constrained_decoding_start="first_token",
        )

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: Context
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """Report the router's requests, and the KV of all decode nodes as one.

        Only what the router queues is waiting, and not what nodes queue: a gateway sends no more to
        a worker with a few requests that wait.
        """
        async with named_errors(context):
            nodes = self._decode_nodes()
        load = vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=self._pipeline.traffic.num_in_flight,
            num_waiting_reqs=self._pipeline.traffic.num_waiting,
            max_running_requests=sum(node.card.max_num_seqs for node in nodes),
        )
        for node in nodes:
            card, reported = node.card, self._table.node_load(node).reported
            block_size = card.fingerprint.layout.block_size
            load.max_total_num_tokens += card.num_blocks * block_size
            load.num_used_tokens += (card.num_blocks - reported.num_free_blocks) * block_size
        load.num_total_reqs = load.num_running_reqs + load.num_waiting_reqs
        load.token_usage = load.num_used_tokens / max(1, load.max_total_num_tokens)
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=version("baton"),
            dp_rank_count=1,
            loads=[load],
        )

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Clear the caches of all nodes at once. Requests in progress are not affected."""
        async with named_errors(context):
            resets = await self._orders.reset_prefix_caches(
                (), sent_token(context.invocation_metadata() or ())
            )
        num_blocks = sum(reset.num_blocks for reset in resets)
        message = f"{num_blocks} blocks removed from {len(resets)} nodes"
        return common_pb2.FlushCacheResponse(success=True, message=message)

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncGenerator[common_pb2.GetTokenizerChunk, None]:
        async with named_errors(context), aclosing(self._tokenizer.chunks()) as chunks:
            async for chunk in chunks:
                yield chunk

    def _model(self) -> ModelVariant:
        """Return the only model. Raises UnsupportedInput: these requests do not name one."""
        try:
            model = self._table.find_model("")
            self._pipeline.inputs.check_model(model)
        except InvalidRequest as several:
            raise UnsupportedInput(
                "SMG's requests name no model, and this router serves several: start a router for "
                "each model"
            ) from several
        return model

    def _decode_nodes(self) -> list[Node]:
        nodes = self._table.open_nodes(LegKind.DECODE)
        if not nodes:
            raise NoNodes("no decode node is reachable; try again when one is")
        return nodes


class _Call:
    def __init__(self) -> None:
        self.is_aborted = False
        self._wait: asyncio.Timeout | None = None  # for an item

    def abort(self) -> None:
        if self._wait is not None and not self.is_aborted:
            self._wait.reschedule(0)
        self.is_aborted = True

    async def next_of(self, items: AsyncGenerator[Item, None]) -> Item | None:
        """Return the next item; None at the end. Raises TimeoutError when aborted."""
        async with asyncio.timeout(None) as wait:
            self._wait = wait
            try:
                return await anext(items, None)
            finally:
                self._wait = None


class RunningCalls:
    """Generate calls in progress, which their clients abort by id."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], _Call] = {}  # by owner and id

    def abort(self, request_id: str, owner: str) -> None:
        """End a request of this owner in any state, if there is one."""
        call = self._calls.get((owner, request_id))
        if call is not None:
            call.abort()

    async def until_aborted(
        self, request_id: str, owner: str, items: AsyncGenerator[Item, None]
    ) -> AsyncGenerator[Item, None]:
        """Yield the items until they end or the request is aborted. Raises RequestIdInUse."""
        key = owner, request_id
        if key in self._calls:
            raise RequestIdInUse(f"request {request_id!r} is under way; choose another id")
        call = self._calls[key] = _Call()
        try:
            async with aclosing(items):
                while not call.is_aborted and (item := await call.next_of(items)) is not None:
                    yield item
        except TimeoutError:
            if not call.is_aborted:
                raise
        finally:
            del self._calls[key]
