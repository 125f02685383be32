"""One try to serve a request: both legs at the same time, under one hand-off id."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from kv_transfer.types import HandoffId
from router.answer import Answer
from router.context import RequestContext
from router.legs import (
    Deliver,
    Events,
    Leg,
    LegCall,
    LegEnded,
    LegEvent,
    LegFailed,
    LegOutput,
    LegSummary,
    NodeCalls,
    under_way,
)
from router.policy import Route
from router.values import (
    DecodeSummary,
    Ending,
    Finish,
    Piece,
    PrefillPlace,
    PrefillSummary,
    Served,
    Timings,
)
from serving.errors import NodeFailed
from serving.translate_sequence import Sequence


def _nobody_listens() -> None:
    """For those to whom it means nothing."""


class Attempt:
    def __init__(
        self,
        *,
        route: Route,
        handoff_id: HandoffId,
        sequence: Sequence,
        answer: Answer,
        context: RequestContext,
        clock: Callable[[], float],
        on_prefilled: Callable[[], None] = _nobody_listens,
        on_decoded: Callable[[], None] = _nobody_listens,
    ) -> None:
        self._route = route
        self._handoff_id = handoff_id
        self._sequence = sequence
        self._answer = answer
        self._context = context
        self._clock = clock
        self._on_prefilled = on_prefilled
        self._on_decoded = on_decoded  # a first token from the decode node: all KV is there
        self._under_way = {Leg.DECODE} if route.prefill is None else {Leg.PREFILL, Leg.DECODE}
        self._summary: DecodeSummary | None = None
        self._prefill_summary: PrefillSummary | None = None
        self._dispatched_s = 0.0
        self._first_token_s: float | None = None
        self._first_decoded_token_s: float | None = None
        self.failed_addresses: frozenset[str] = frozenset()

    async def run(self, node_calls: NodeCalls) -> AsyncGenerator[Piece | Ending, None]:
        """Raises NodeFailed when a leg breaks off, and DeadlineExceeded when time is over.

        The other leg is cancelled with it.
        """
        self._dispatched_s = self._since_received()
        self._answer.begin_try()
        events = Events()
        async with under_way(events, self._calls(node_calls, events.put)):
            while self._answer.finish is None:
                piece = self._take(await events.next())
                if piece is not None:
                    yield piece
            ending = self._ending(self._answer.finish)
            self._context.trace.served(ending)
            yield ending

    def _calls(self, node_calls: NodeCalls, deliver: Deliver) -> dict[Leg, LegCall]:
        route, handoff_id = self._route, self._handoff_id
        sequence, trace = self._sequence, self._context.trace
        timeout_s = self._context.remaining_s(self._clock())
        around: dict[str, Any] = {"timeout_s": timeout_s, "trace": trace}
        ask_decode, ask_prefill, peer = node_calls.decode, node_calls.prefill, route.prefill
        decode = partial(ask_decode, route.decode, handoff_id, sequence, peer, deliver, **around)
        if peer is None:
            return {Leg.DECODE: decode}
        prefill = partial(ask_prefill, peer, handoff_id, sequence, deliver, **around)
        return {Leg.PREFILL: prefill, Leg.DECODE: decode}

    def _take(self, event: LegEvent) -> Piece | None:
        if isinstance(event, LegOutput):
            return self._take_output(event)
        match event:
            case LegSummary(DecodeSummary() as summary):
                self._summary = summary
            case LegSummary(PrefillSummary() as prefill_summary):
                self._prefill_summary = prefill_summary
            case LegFailed(Leg.PREFILL, NodeFailed()) if self._decode_goes_on:
                self._end(Leg.PREFILL)
            case LegFailed(leg, error):
                self._blame(leg)
                raise error
            case LegEnded(leg):
                self._end(leg)
        return None

    @property
    def _decode_goes_on(self) -> bool:
        """It computed a token after the first: all KV is there, prefill is not needed any more."""
        num_new = len(self._answer.token_ids) - len(self._sequence.prior_output_token_ids)
        return num_new > 1

    def _end(self, leg: Leg) -> None:
        """Either leg may be the last: decode's words can overtake the first token."""
        self._under_way.discard(leg)
        if not self._under_way:
            self._blame(Leg.DECODE)
            raise NodeFailed(f"decode node {self._route.decode.address} ended without a word")

    def _take_output(self, event: LegOutput) -> Piece | None:
        if event.leg is Leg.PREFILL or self._route.prefill is None:
            self._on_prefilled()  # it has its first token
        piece = self._answer.take(*event.outputs)
        if piece is not None and piece.token_ids:
            self._context.trace.gave(len(piece.token_ids))
            self._note_time(event.leg)
        return piece

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

    def _ending(self, finish: Finish) -> Ending:
        return Ending(
            finish=finish,
            num_prompt_tokens=len(self._sequence.prompt_token_ids),
            num_completion_tokens=len(self._answer.token_ids),
            timings=Timings(
                self._dispatched_s,
                self._first_token_s,
                self._first_decoded_token_s,
                self._since_received(),
            ),
            served=self._served(),
        )

    def _served(self) -> Served:
        route, summary = self._route, self._summary or DecodeSummary()
        place, reason = PrefillPlace.REMOTE, ""
        if route.prefill is None:
            place, reason = PrefillPlace.LOCAL, route.local_reason
        elif summary.prompt_tokens_computed > 0 and not summary.kv_blocks:
            place, reason = PrefillPlace.LOCAL, "the KV did not arrive; decode computed the prompt"
        return Served(
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
