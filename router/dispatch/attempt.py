"""One attempt to serve a request: concurrent prefill and decode calls with one hand-off id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from baton.core.ids import HandoffId, Peer
from baton.core.request import EngineRequest, PrefixSource, ReceiveKv
from baton.router.answer import AnswerAssembler
from baton.router.context import RequestContext
from baton.router.dispatch.node_rpcs import (
    Deliver,
    Events,
    Leg,
    LegCall,
    LegEnded,
    LegEvent,
    LegOutput,
    NodeCalls,
    under_way,
)
from baton.router.routing.policy import Route
from baton.router.values import (
    AnswerPart,
    CompletionSummary,
    DecodeSummary,
    FinishStatus,
    PrefillPlace,
    PrefillSummary,
    ServedBy,
    Timings,
    TokenChunk,
)
from baton.rpc.errors import NodeFailed

# Maximum delay of an answer's statistics after its last token. Prefill sent its own long before,
# unless its process is frozen.
PREFILL_SUMMARY_WAIT_S = 0.1


def _ignore() -> None:
    """Default callback: do nothing."""


def _legs_of(route: Route, request: EngineRequest) -> set[Leg]:
    """Return the calls of an attempt. A prefetch is for the node that would compute the prompt."""
    if route.prefill is None:
        return {Leg.DECODE}
    return {Leg.PREFILL} if request.kv_hints.prefetch else {Leg.PREFILL, Leg.DECODE}


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
        on_prefilled: Callable[[], None] = _ignore,
        on_decoded: Callable[[], None] = _ignore,
    ) -> None:
        self._route = route
        self._handoff_id = handoff_id
        self._request = request
        self._answer = answer
        self._context = context
        self._clock = clock
        self._on_prefilled = on_prefilled
        self._on_decoded = on_decoded  # first token of the decode node: it has all KV
        self._under_way = _legs_of(route, request)
        self._has_prefill_output = False
        self._summary: DecodeSummary | None = None
        self._prefill_summary: PrefillSummary | None = None
        self._dispatched_s = 0.0
        self._first_token_s: float | None = None
        self._first_decoded_token_s: float | None = None
        self.failed_addresses: frozenset[str] = frozenset()

    async def run(self, node_calls: NodeCalls) -> AsyncGenerator[AnswerPart, None]:
        """Run both legs and yield the parts of the answer; the last is its CompletionSummary.

        Raises NodeFailed when a leg fails, and DeadlineExceeded. The other leg is then cancelled.
        """
        self._dispatched_s = self._since_received()
        self._answer.begin_attempt()
        events = Events()
        async with under_way(events, self._build_calls(node_calls, events.put)):
            while self._answer.finish is None:
                part = self._handle(await events.next())
                if part is not None:
                    yield part
            await self._await_prefill_summary(events)
            ending = self._build_ending(self._answer.finish)
            self._context.trace.note_completed(ending)
            yield ending

    async def _await_prefill_summary(self, events: Events) -> None:
        """Wait for the last output of prefill: all of decode's can arrive before it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PREFILL_SUMMARY_WAIT_S):
                while Leg.PREFILL in self._under_way and not self._has_prefill_output:
                    event = await events.next()
                    if isinstance(event, LegEnded):
                        self._under_way.discard(event.leg)
                    else:
                        self._take_output(event)

    def _build_calls(self, node_calls: NodeCalls, deliver: Deliver) -> dict[Leg, LegCall]:
        prefill, decode = self._route.prefill, self._route.decode
        request, prefix_source = self._request, _prefix_source(self._route)
        timeout_s = self._context.remaining_s(self._clock())
        options: dict[str, Any] = {"timeout_s": timeout_s, "trace": self._context.trace}
        if prefill is None:
            alone = replace(request, prefix_source=prefix_source)
            return {Leg.DECODE: partial(node_calls.decode, decode, alone, deliver, **options)}
        if request.kv_hints.prefetch:
            loader = replace(request, prefix_source=prefix_source)
            return {Leg.PREFILL: partial(node_calls.prefill, prefill, loader, deliver, **options)}
        source = Peer(prefill.card.node_id, prefill.address)
        sender = replace(request, send_to=self._handoff_id, prefix_source=prefix_source)
        receiver = replace(request, receive_from=ReceiveKv(self._handoff_id, source))
        return {
            Leg.PREFILL: partial(node_calls.prefill, prefill, sender, deliver, **options),
            Leg.DECODE: partial(node_calls.decode, decode, receiver, deliver, **options),
        }

    def _handle(self, event: LegEvent) -> TokenChunk | None:
        if isinstance(event, LegOutput):
            return self._take_output(event)
        leg, failure = event
        if isinstance(failure, NodeFailed) and leg is Leg.PREFILL and self.num_new_tokens > 1:
            failure = None  # decode computed a second token: it has all KV
        if failure is not None:
            self._blame(leg)
            raise failure
        self._end_leg(leg)
        return None

    @property
    def num_new_tokens(self) -> int:
        return len(self._answer.token_ids) - len(self._request.prior_output_token_ids)

    def _end_leg(self, leg: Leg) -> None:
        """Record the end of a leg. Raises NodeFailed if both ended without finishing the answer.

        Either leg can end last: messages of decode can arrive before the first token of prefill.
        """
        self._under_way.discard(leg)
        if not self._under_way:
            self._blame(Leg.DECODE)
            address = self._route.decode.address
            raise NodeFailed(f"decode node {address} ended without finishing the answer")

    def _take_output(self, event: LegOutput) -> TokenChunk | None:
        if event.leg is Leg.PREFILL or self._route.prefill is None:
            self._on_prefilled()  # a token means that the prompt is computed
        if event.summary is not None:
            self._note_summary(event.summary)
        if event.leg is Leg.PREFILL and event.outputs[-1].finish_reason is not None:
            self._has_prefill_output = True
        part = self._answer.take(*event.outputs)
        if part is not None and part.token_ids:
            self._context.trace.note_tokens(len(part.token_ids))
            self._note_time(event.leg)
        return part

    def _note_summary(self, summary: DecodeSummary | PrefillSummary) -> None:
        if isinstance(summary, DecodeSummary):
            self._summary = summary
        else:
            self._prefill_summary = summary

    def _note_time(self, leg: Leg) -> None:
        if self._first_token_s is None:
            self._first_token_s = self._since_received()
        if leg is Leg.DECODE and self._first_decoded_token_s is None:
            self._first_decoded_token_s = self._since_received()
            self._on_decoded()

    def _blame(self, leg: Leg) -> None:
        node = self._route.prefill if leg is Leg.PREFILL else self._route.decode
        if node is not None:
            self.failed_addresses = frozenset({node.address})

    def _build_ending(self, finish: FinishStatus) -> CompletionSummary:
        return CompletionSummary(
            finish=finish,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_completion_tokens=len(self._answer.token_ids),
            timings=Timings(
                self._dispatched_s,
                self._first_token_s,
                self._first_decoded_token_s,
                self._since_received(),
            ),
            served=self._build_served(),
        )

    def _build_served(self) -> ServedBy:
        route, summary = self._route, self._summary or DecodeSummary()
        place, reason = PrefillPlace.REMOTE, ""
        if route.prefill is None:
            place, reason = PrefillPlace.LOCAL, route.local_reason
        elif summary.prompt_tokens_computed > 0 and not summary.kv_blocks:
            place, reason = PrefillPlace.LOCAL, "the KV did not arrive; decode computed the prompt"
        return ServedBy(
            prefill_node="" if route.prefill is None else route.prefill.card.node_id,
            decode_node="" if self._summary is None else route.decode.card.node_id,
            prefill=place,
            prefill_reason=reason,
            summary=summary,
            attempts=self._handoff_id.attempt,
            trace_id=self._context.trace.trace_id,
            prefill_summary=self._prefill_summary,
        )

    def _since_received(self) -> float:
        return self._clock() - self._context.received_s


def _prefix_source(route: Route) -> PrefixSource | None:
    if route.holder is None:
        return None
    node = route.holder.node
    return PrefixSource(Peer(node.card.node_id, node.address), route.holder.num_tokens)
