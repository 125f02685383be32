"""gRPC servicer of SMG's SglangScheduler: a node as a worker of an SMG gateway.

A prefill and a decode node get each request at once, under one room, and transfer the KV as they
do for Baton's router.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from google.protobuf.struct_pb2 import Struct
from grpc import aio
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2, sglang_scheduler_pb2_grpc

from baton.core.legs import LegKind, role_of
from baton.core.output import FinishReason
from baton.core.request import EngineRequest
from baton.engine.events import SchedulerStats
from baton.node.cache_resets import CacheResets
from baton.node.call_server import CallServer, ReportedOutput
from baton.node.call_streams import CallContext
from baton.node.smg.request import SEED_BITS, requests_from
from baton.node.state import NodeState
from baton.rpc.call_outcome import HasDeadline
from baton.rpc.errors import GenerationFailed
from baton.rpc.security.token_gate import sent_token
from baton.rpc.smg.answers import AnswerEnd, AnswerFormat, AnswerMessages
from baton.rpc.smg.call_streams import CallStreams
from baton.rpc.smg.model_facts import ModelFacts, sampling_defaults_json
from baton.rpc.smg.tokenizer_bundle import TokenizerBundle
from baton.rpc.smg.unserved import UnservedMethods
from baton.rpc.status import named_errors

SERVICE = "sglang.grpc.scheduler.SglangScheduler"
Context = aio.ServicerContext[Any, Any]


class SmgNodeServicer(UnservedMethods, sglang_scheduler_pb2_grpc.SglangSchedulerServicer):  # type: ignore[misc]
    def __init__(
        self,
        calls: CallServer,
        state: NodeState,
        find_trouble: Callable[[], str],
        read_stats: Callable[[], Awaitable[SchedulerStats]],
        resets: CacheResets,
        facts: ModelFacts,
    ) -> None:
        """`find_trouble` returns why the node does not serve now; empty: it does."""
        self._calls = calls
        self._state = state
        self._find_trouble = find_trouble
        self._read_stats = read_stats
        self._resets = resets
        self._facts = facts
        self._tokenizer = TokenizerBundle(facts.path)
        self._started_s = time.monotonic()
        self._streams: CallStreams[ReportedOutput] = CallStreams(_is_last)

    async def Generate(
        self, request: sglang_scheduler_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[sglang_scheduler_pb2.GenerateResponse, None]:
        async with named_errors(context, node_id=self._state.card.node_id):
            requests = requests_from(
                request, self._state.card, time.monotonic(), secrets.randbits(SEED_BITS)
            )
            # The gateway waits for the headers of both nodes before it reads from either: without
            # them, it would learn that one of them refuses only after the other one's answer.
            await context.send_initial_metadata(())
            answer_format = AnswerFormat(
                sglang_scheduler_pb2,
                counts_deltas=False,
                envelope={"request_id": request.request_id},
            )
            answers = [
                AnswerMessages(
                    answer_format, index, each.prompt_token_ids, is_streamed=request.stream
                )
                for index, each in enumerate(requests)
            ]
            call = _call_context(context)
            streams = [self._serve(each, call) for each in requests]
            async with aclosing(self._streams.merge(request.request_id, streams)) as merged:
                async for index, (output, report) in merged:
                    answer = answers[index]
                    response = await answer.add(
                        output.token_ids, output.logprobs, output.prompt_logprobs
                    )
                    if response is not None:
                        yield response
                    if output.finish_reason is not None:
                        yield answer.finish(_end_of(output.finish_reason, (output, report)))
            for answer in answers:
                if not answer.is_finished:
                    yield answer.finish(AnswerEnd(FinishReason.ABORT))

    async def _serve(
        self, request: EngineRequest, call: CallContext
    ) -> AsyncGenerator[ReportedOutput, None]:
        """Yield the outputs of a request. Ends after the last write of its KV."""
        kind = LegKind.DECODE if request.send_to is None else LegKind.PREFILL
        with self._state.serving_leg(kind):
            async with aclosing(self._calls.serve_request(kind, request, call)) as outputs:
                async for reported in outputs:
                    if reported[0].finish_reason is FinishReason.ERROR:
                        failure = reported[0].failure
                        raise GenerationFailed("" if failure is None else failure.reason)
                    yield reported

    async def Abort(
        self, request: sglang_scheduler_pb2.AbortRequest, context: Context
    ) -> sglang_scheduler_pb2.AbortResponse:
        is_known = self._streams.abort(request.request_id)
        message = "aborted" if is_known else "no such request is in progress"
        return sglang_scheduler_pb2.AbortResponse(success=is_known, message=message)

    async def HealthCheck(
        self, request: sglang_scheduler_pb2.HealthCheckRequest, context: Context
    ) -> sglang_scheduler_pb2.HealthCheckResponse:
        trouble = self._find_trouble()
        return sglang_scheduler_pb2.HealthCheckResponse(
            healthy=not trouble, message=trouble or "ready"
        )

    async def GetModelInfo(
        self, request: sglang_scheduler_pb2.GetModelInfoRequest, context: Context
    ) -> sglang_scheduler_pb2.GetModelInfoResponse:
        card, facts = self._state.card, self._facts
        return sglang_scheduler_pb2.GetModelInfoResponse(
            model_path=facts.path,
            tokenizer_path=facts.path,
            is_generation=card.generates,
            weight_version=card.fingerprint.model,
            served_model_name=card.model,
            max_context_length=card.max_sequence_length,
            vocab_size=card.vocab_size,
            model_type=facts.model_type,
            eos_token_ids=facts.eos_token_ids,
            pad_token_id=facts.pad_token_id,
            bos_token_id=facts.bos_token_id,
            max_req_input_len=card.max_sequence_length - 1,
            architectures=facts.architectures,
            default_sampling_params_json=sampling_defaults_json(card.sampling_defaults),
        )

    async def GetServerInfo(
        self, request: sglang_scheduler_pb2.GetServerInfoRequest, context: Context
    ) -> sglang_scheduler_pb2.GetServerInfoResponse:
        card = self._state.card
        arguments = Struct()
        arguments.update(
            {
                "model_path": self._facts.path,
                "served_model_name": card.model,
                "tokenizer_path": self._facts.path,
                "dp_size": 1,
                "max_total_tokens": self._num_tokens,
                "max_running_requests": card.max_num_seqs,
                "disaggregation_mode": role_of(card.legs),
                "page_size": card.fingerprint.layout.block_size,
                "kv_cache_dtype": card.fingerprint.layout.cache_dtype,
                "dtype": card.fingerprint.layout.cache_dtype,
                "weight_version": card.fingerprint.model,
            }
        )
        return sglang_scheduler_pb2.GetServerInfoResponse(
            server_args=arguments,
            active_requests=self._state.num_calls,
            uptime_seconds=time.monotonic() - self._started_s,
            sglang_version=f"baton-{card.version}",
            server_type="grpc",
            max_total_num_tokens=self._num_tokens,
        )

    async def GetLoads(
        self, request: sglang_scheduler_pb2.GetLoadsRequest, context: Context
    ) -> sglang_scheduler_pb2.GetLoadsResponse:
        """Report the load. Requests that wait for their KV are not waiting for this node."""
        card = self._state.card
        async with named_errors(context, node_id=card.node_id):
            stats = await self._read_stats()
        num_used = (card.num_blocks - stats.num_free_blocks) * card.fingerprint.layout.block_size
        usage = num_used / max(1, self._num_tokens)
        num_running = stats.num_running + stats.num_ready
        num_waiting = stats.num_waiting + stats.num_waiting_for_fsm
        scheduler_load = sglang_scheduler_pb2.SchedulerLoad(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            num_total_reqs=num_running + num_waiting + stats.num_waiting_for_remote_kvs,
            num_used_tokens=num_used,
            max_total_num_tokens=self._num_tokens,
            token_usage=usage,
            cache_hit_rate=stats.total_prefix_hit_tokens / max(1, stats.total_prefix_query_tokens),
            max_running_requests=card.max_num_seqs,
        )
        scheduler_load.disaggregation.mode = role_of(card.legs)
        scheduler_load.disaggregation.decode_transfer_queue_reqs = stats.num_waiting_for_remote_kvs
        aggregate = sglang_scheduler_pb2.AggregateMetrics(
            total_running_reqs=num_running,
            total_waiting_reqs=num_waiting,
            total_reqs=scheduler_load.num_total_reqs,
            avg_token_usage=usage,
        )
        return sglang_scheduler_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=card.version,
            dp_rank_count=1,
            loads=[scheduler_load],
            aggregate=aggregate,
        )

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Clear the cache and its tiers at once. Requests in progress are not affected."""
        async with named_errors(context, node_id=self._state.card.node_id):
            shown = sent_token(context.invocation_metadata())
            num_blocks = sum((await self._resets.reset((), shown)).values())
        return common_pb2.FlushCacheResponse(success=True, message=f"{num_blocks} blocks removed")

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncGenerator[common_pb2.GetTokenizerChunk, None]:
        async with named_errors(context), aclosing(self._tokenizer.chunks()) as chunks:
            async for chunk in chunks:
                yield chunk

    @property
    def _num_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self._state.card.num_blocks * self._state.card.fingerprint.layout.block_size


def _is_last(reported: ReportedOutput) -> bool:
    return reported[0].finish_reason is not None


def _end_of(reason: FinishReason, reported: ReportedOutput) -> AnswerEnd:
    output, report = reported
    served = output.served
    return AnswerEnd(
        reason,
        output.stop_token_id,
        num_cached_tokens=0 if report is None else report.prompt_tokens_cached,
        num_accepted_tokens=0 if served is None else served.num_accepted_tokens,
        num_proposed_tokens=0 if served is None else served.num_proposed_tokens,
    )


def _call_context(context: Context) -> CallContext:
    """Return the trace context and the deadline of a call."""
    received: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    metadata = tuple((key, value) for key, value in received if isinstance(value, str))
    call: HasDeadline = context  # gRPC's type says that there always is a deadline
    remaining_s = call.time_remaining()
    deadline_s = None if remaining_s is None else time.monotonic() + remaining_s
    return CallContext(metadata, deadline_s)
