"""One attempt to serve a request: its legs, called at once with one hand-off id."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from baton.core.foreign_kv import ForeignKv
from baton.core.ids import HandoffId, Peer
from baton.core.legs import LegKind, role_of
from baton.core.media import Picture
from baton.core.output import Finish, Served
from baton.core.request import EngineRequest, PrefixSource, ReceiveKv
from baton.router.answer import AnswerAssembler, FinishStatus
from baton.router.dispatch.foreign_prefills import ComputedKv
from baton.router.dispatch.node_rpcs import (
    Deliver,
    Events,
    LegCall,
    LegEnded,
    LegEvent,
    LegOutput,
    NodeCalls,
    under_way,
)
from baton.router.dispatch.quarantine import Suspicion
from baton.router.dispatch.retries import AttemptFailures
from baton.router.request_scope import RequestContext
from baton.router.routing.policy import Leg, Route
from baton.router.routing.served_models import Revision
from baton.router.values import AnswerPart, GenerateCall, TokenChunk
from baton.rpc.errors import FailureKind, NodeFailed
from baton.rpc.messages.calls import CallReport, node_request_id

# Maximum delay of an answer's statistics after its last token. Prefill sent its own long before,
# unless its process is frozen.
PREFILL_REPORT_WAIT_S = 0.1
NODE_ENDED = {FailureKind.VANISHED, FailureKind.ENGINE_FAILED}
SEED_BITS = 63
# Before the salt of KV that a vLLM server has computed, which differs a little from that of nodes.
# The salt of a client begins with its owner, or with a colon.
VLLM_SALT = "vllm!"
NONCE_BYTES = 8


class Attempt:
    def __init__(
        self,
        *,
        route: Route,
        handoff_id: HandoffId,
        request: EngineRequest,
        answer: AnswerAssembler,
        context: RequestContext,
        clock: Callable[[], float],
        on_prefilled: Callable[[], None],
        on_decoded: Callable[[], None],
    ) -> None:
        self._route = route
        self._handoff_id = handoff_id
        self._request = request
        self._answer = answer
        self._context = context
        self._clock = clock
        self._on_prefilled = on_prefilled
        self._on_decoded = on_decoded  # first token of the decode leg: it has all KV
        self._under_way: set[LegKind] = set()
        self._has_prefill_output = False
        self._reports: dict[LegKind, CallReport] = {}
        self._dispatched_s = 0.0
        self._first_token_s: float | None = None
        self._first_decoded_token_s: float | None = None
        self.failure_by_address: dict[str, NodeFailed] = {}

    @property
    def number(self) -> int:
        return self._handoff_id.attempt

    def lacked_pictures(self, failure: NodeFailed) -> bool:
        """Return whether the node of the prompt had less KV of pictures than it had reported.

        So it failed for want of pixels or encodings, which later attempts bring in any case.
        """
        is_first = self.number == 1 and bool(self._request.media)
        is_alone = self.failure_by_address.keys() == {self._route.first.node.address}
        return is_first and is_alone and failure.kind is FailureKind.KV_LOST

    async def run(self, node_calls: NodeCalls) -> AsyncGenerator[AnswerPart, None]:
        """Run the legs and yield the parts of the answer; the last is its Finish.

        Raises NodeFailed when a leg fails, and DeadlineExceeded. The others are then cancelled.
        """
        self._dispatched_s = self._since_received()
        self._answer.begin_attempt()
        events = Events()
        calls = self._build_calls(node_calls, events.put)
        self._under_way = set(calls)
        async with under_way(events, calls):
            while self._answer.finish is None:
                part = self._handle(await events.next(), events)
                if part is not None:
                    yield part
            await self._await_prefill_report(events)
            finish = self._build_finish(self._answer.finish)
            self._context.trace.note_completed(finish)
            yield finish

    async def _await_prefill_report(self, events: Events) -> None:
        """Wait for the last output of prefill: all of decode's can arrive before it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PREFILL_REPORT_WAIT_S):
                while LegKind.PREFILL in self._under_way and not self._has_prefill_output:
                    event = await events.next()
                    if isinstance(event, LegEnded):
                        self._under_way.discard(event.leg)
                    else:
                        self._take_output(event)

    def _build_calls(self, node_calls: NodeCalls, deliver: Deliver) -> dict[LegKind, LegCall]:
        timeout_s, trace = self._context.remaining_s(self._clock()), self._context.trace
        call = partial(node_calls.call, deliver=deliver, timeout_s=timeout_s, trace=trace)
        if not self._request.task.has_decode_leg:
            leg = replace(self._route.first, sends=False)
            return {leg.kind: partial(call, leg, self._request_of(leg))}
        return {leg.kind: partial(call, leg, self._request_of(leg)) for leg in self._route.legs}

    def _request_of(self, leg: Leg) -> EngineRequest:
        """Return what the node of a leg is asked to do."""
        request, sender = self._request, leg.receives_from
        if sender is not None:
            source = Peer(sender.card.node_id, sender.address)
            receive = ReceiveKv(self._handoff_id, source)
            return replace(request, receive_from=receive, pictures=())
        request = replace(request, prefix_source=_prefix_source(self._route))
        if not leg.sends:
            return request
        return replace(request, send_to=self._handoff_id, predicted_token_ids=())

    def _handle(self, event: LegEvent, events: Events) -> TokenChunk | None:
        if isinstance(event, LegOutput):
            return self._take_output(event)
        leg, failure = event
        if isinstance(failure, NodeFailed) and leg is LegKind.PREFILL and self.num_new_tokens > 1:
            failure = None  # decode computed a second token: it has all KV
        if failure is not None:
            self._blame(leg, failure)
            if self._is_without_kv(failure):
                self._blame(self._route.first.kind, failure)
            for other in events.ended_legs():  # a request can end both of its nodes
                if isinstance(other.error, NodeFailed) and other.error.kind in NODE_ENDED:
                    self._blame(other.leg, other.error)
            raise failure
        self._end_leg(leg)
        return None

    def _is_without_kv(self, failure: Exception) -> bool:
        """Return whether the KV of the prompt never arrived: the sender's links may be cut."""
        is_lost = isinstance(failure, NodeFailed) and failure.kind is FailureKind.KV_LOST
        return is_lost and self._first_decoded_token_s is None

    @property
    def num_new_tokens(self) -> int:
        return len(self._answer.token_ids) - len(self._request.prior_output_token_ids)

    def _end_leg(self, leg: LegKind) -> None:
        """Record the end of a leg. Raises NodeFailed if both ended without finishing the answer.

        Either leg can end last: messages of decode can arrive before the first token of prefill.
        """
        self._under_way.discard(leg)
        if not self._under_way:
            kind, node = self._route.last.kind, self._route.last.node
            role = role_of(node.card.legs)
            failure = NodeFailed(f"{role} node {node.address} ended without finishing the answer")
            self._blame(kind, failure)
            raise failure

    def _take_output(self, event: LegOutput) -> TokenChunk | None:
        if event.leg is self._route.first.kind:
            self._on_prefilled()  # a token means that the prompt is computed
        if event.report is not None:
            self._reports[event.leg] = event.report
        if event.leg is LegKind.PREFILL and event.outputs[-1].finish_reason is not None:
            self._has_prefill_output = True
        part = self._answer.take(*event.outputs)
        if part is not None and part.token_ids:
            self._context.trace.note_tokens(len(part.token_ids))
            self._note_time(event.leg)
        return part

    def _note_time(self, leg: LegKind) -> None:
        if self._first_token_s is None:
            self._first_token_s = self._since_received()
        if leg is LegKind.DECODE and self._first_decoded_token_s is None:
            self._first_decoded_token_s = self._since_received()
            self._on_decoded()

    def _blame(self, leg: LegKind, failure: Exception) -> None:
        if isinstance(failure, NodeFailed):
            [node] = [each.node for each in self._route.legs if each.kind is leg]
            self.failure_by_address[node.address] = failure

    def _build_finish(self, end: FinishStatus) -> Finish:
        served = self._build_served()
        num_cached: int | None = served.prompt_tokens_cached_on_decode
        if served.is_prefill_remote:
            num_cached = served.prompt_tokens_cached_on_prefill
        return Finish(
            reason=end.reason,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_completion_tokens=len(self._answer.token_ids),
            dispatched_s=self._dispatched_s,
            first_token_s=self._first_token_s or 0.0,
            first_decoded_token_s=self._first_decoded_token_s or 0.0,
            finished_s=self._since_received(),
            served=served,
            stop_token_id=end.stop_token_id,
            stop_string=end.stop_string,
            num_cached_prompt_tokens=num_cached,
        )

    def _build_served(self) -> Served:
        route, on_prefill = self._route, self._reports.get(LegKind.PREFILL)
        decoded = self._reports.get(LegKind.DECODE, CallReport())
        is_remote, reason = True, ""
        if not route.is_split:
            is_remote, reason = False, route.local_reason
        elif decoded.prompt_tokens_computed > 0 and not decoded.kv_blocks:
            is_remote, reason = False, "the KV did not arrive; decode computed the prompt"
        computed = (on_prefill or CallReport()) if is_remote else decoded
        return Served(
            prefill_node=route.first.node.card.node_id if route.is_split else "",
            decode_node=route.last.node.card.node_id if LegKind.DECODE in self._reports else "",
            is_prefill_remote=is_remote,
            prefill_reason=reason,
            kv_bytes=decoded.kv_bytes,
            kv_blocks=decoded.kv_blocks,
            kv_transport=decoded.kv_transport,
            prompt_tokens_computed_on_decode=decoded.prompt_tokens_computed,
            prompt_tokens_cached_on_decode=decoded.prompt_tokens_cached,
            attempts=self._handoff_id.attempt,
            trace_id=self._context.trace.trace_id,
            tokens_proposed=decoded.tokens_proposed,
            tokens_accepted=decoded.tokens_accepted,
            prompt_tokens_cached_on_prefill=None
            if on_prefill is None
            else on_prefill.prompt_tokens_cached,
            kv_conversion=decoded.kv_conversion,
            prompt_tokens_loaded=computed.prompt_tokens_loaded,
        )

    def _since_received(self) -> float:
        return self._clock() - self._context.received_s


def _prefix_source(route: Route) -> PrefixSource | None:
    if route.holder is None:
        return None
    node = route.holder.node
    return PrefixSource(Peer(node.card.node_id, node.address), route.holder.num_tokens)


class DispatchedRequest:
    """State of a request that is kept across its attempts."""

    def __init__(
        self, call: GenerateCall, context: RequestContext, answer: AnswerAssembler
    ) -> None:
        self.call = call
        self.context = context
        self.answer = answer
        seed = call.sampling.seed
        self.seed = secrets.randbits(SEED_BITS) if seed is None else seed
        self.failures = AttemptFailures()
        self.suspicion = Suspicion(context.quarantine_group)
        self.revision = self.pinned_revision
        self.computed: ComputedKv | None = None  # by a vLLM server that this router asked
        # Unique across routers: clients choose request ids, and hand-offs of different requests
        # must not share an id.
        self.own_id = f"{call.request_id}.{secrets.token_hex(NONCE_BYTES)}"

    @property
    def pinned_revision(self) -> Revision | None:
        """Model revision of other answers to the prompt. None: any may begin the answer."""
        placement = self.context.placement
        return None if placement is None else placement.decode.revision

    def to_engine_request(
        self, handoff_id: HandoffId, now: float, pictures: tuple[Picture, ...], *, is_paced: bool
    ) -> EngineRequest:
        """Return the request of an attempt, which continues the answer so far.

        `pictures` are those whose pixels the node that computes the prompt gets.
        """
        call = self.call
        return EngineRequest(
            request_id=node_request_id(handoff_id),
            prompt_token_ids=call.prompt_token_ids,
            sampling=call.sampling,
            seed=self.seed,
            task=call.task,
            age_s=max(0.0, now - self.context.received_s),
            priority=call.priority,
            adapter=call.model.adapter,
            media=call.token_prompt.media,
            pictures=pictures,
            cache_salt=self.cache_salt(handoff_id.attempt),
            tenant=call.tenant or call.cache_salt,
            client=call.client,
            kv_hints=call.kv_hints,
            foreign_kv=self._foreign_kv(now) if handoff_id.attempt == 1 else None,
            prior_output_token_ids=self.answer.token_ids,
            predicted_token_ids=call.predicted_token_ids,
            is_paced=is_paced,
        )

    def cache_salt(self, attempt: int) -> str:
        """Return the salt of an attempt. The first one reads what a vLLM server has computed."""
        salt = self.call.cache_salt
        return salt if self.computed is None or attempt > 1 else f"{VLLM_SALT}{salt}"

    @property
    def has_foreign_kv(self) -> bool:
        return self.call.foreign_kv is not None or self.computed is not None

    def _foreign_kv(self, now: float) -> ForeignKv | None:
        """Return KV for the first attempt. The server then releases it, and reuses the room."""
        return self.call.foreign_kv if self.computed is None else self.computed.aged(now)
