"""Admission of requests: deadlines against forecasts, a turn in the queue, measured answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from router.admission.admission_queue import AdmissionQueue, AdmissionQueueConfig
from router.admission.answer_forecast import AnswerForecast
from router.admission.wait_forecast import FirstTokenForecast
from router.context import RequestContext
from router.values import AnswerPart, CompletionSummary, GenerateCall
from rpc.errors import TooLate

MARGIN = 1.25  # forecasts are inexact, and requests of a higher priority overtake


class AnswerMeter:
    """Measures one answer for the forecasts."""

    def __init__(
        self, first_tokens: FirstTokenForecast, priority: int, clock: Callable[[], float]
    ) -> None:
        self._first_tokens = first_tokens
        self._priority = priority
        self._clock = clock
        self.has_begun = False
        self.is_complete = False
        self.num_tokens = 0
        self.last_s = 0.0  # time of the last token, or of the admission before the first one

    def note_part(self, part: AnswerPart) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._first_tokens.note_began(self._priority, self._clock())
        if isinstance(part, CompletionSummary):
            self.is_complete = True
        elif part.token_ids:
            self.last_s = self._clock()
            self.num_tokens += len(part.token_ids)


class Admission:
    def __init__(self, config: AdmissionQueueConfig, clock: Callable[[], float]) -> None:
        self._queue: AdmissionQueue[asyncio.Event] = AdmissionQueue(config)
        self._clock = clock
        self._first_token_forecast = FirstTokenForecast()
        self._answer_forecast = AnswerForecast()

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    @property
    def num_in_flight(self) -> int:
        return self._queue.num_in_flight

    def resize(self, num_batch_slots: int) -> None:
        """Set how many requests the nodes run at once, and admit more if there is room."""
        for turn in self._queue.resize(num_batch_slots):
            turn.set()

    @asynccontextmanager
    async def turn(
        self, call: GenerateCall, context: RequestContext
    ) -> AsyncIterator[Callable[[AnswerPart], None]]:
        """Wait for admission, and hold the place until the end of the block.

        Yields a callback for each part of the answer. Raises TooLate and QueueFull.
        """
        context.trace.note_queued(self.num_waiting)
        wait_s = self._first_token_forecast.wait_s(call.priority)
        self._refuse_if_too_late(call, context, wait_s, self.num_in_flight)
        with self._awaiting_first_part(call.priority) as meter:
            async with self._place(call.priority):
                # The wait may have exceeded the forecast: do not start work that is too late.
                self._refuse_if_too_late(call, context, 0.0, self.num_in_flight - 1)
                context.trace.note_admitted()
                with self._measuring_pace(meter):
                    yield meter.note_part

    def _refuse_if_too_late(
        self, call: GenerateCall, context: RequestContext, wait_s: float, num_others: int
    ) -> None:
        """Raise TooLate if a request that waits `wait_s` cannot meet its deadline.

        Refused early, its client can still send it to another router.
        """
        remaining_s = context.remaining_s(self._clock())
        if remaining_s is None:
            return
        answer_s = self._answer_forecast.lasts_s(call.sampling.max_tokens, num_others)
        if MARGIN * (wait_s + answer_s) > remaining_s:
            raise TooLate(
                f"its turn would come in about {wait_s:.1f} s and the answer take "
                f"{answer_s:.1f} s, with {MARGIN - 1:.0%} in reserve, but the client waits for "
                f"{remaining_s:.1f} s",
                MARGIN * (wait_s + answer_s) - remaining_s,
            )

    @contextmanager
    def _awaiting_first_part(self, priority: int) -> Iterator[AnswerMeter]:
        """Count the request among those that wait for a first token until its answer begins."""
        self._first_token_forecast.note_arrival(priority, self._clock())
        meter = AnswerMeter(self._first_token_forecast, priority, self._clock)
        try:
            yield meter
        finally:
            if not meter.has_begun:
                self._first_token_forecast.note_left(priority)

    @asynccontextmanager
    async def _place(self, priority: int) -> AsyncIterator[None]:
        """Wait for the turn in the queue, and hold the place. Raises QueueFull.

        A request that is cancelled while it waits, such as by a disconnected client or a deadline,
        leaves the queue at once.
        """
        turn = asyncio.Event()
        is_admitted = self._queue.join(turn, priority)
        try:
            if not is_admitted:
                await turn.wait()
            yield
        finally:
            admitted = self._queue.leave(turn, self._clock())
            if admitted is not None:
                admitted.set()

    @contextmanager
    def _measuring_pace(self, meter: AnswerMeter) -> Iterator[None]:
        """Record the answer's pace at the end of the block."""
        began_s = meter.last_s = self._clock()
        try:
            yield
        finally:
            self._answer_forecast.note_answer(
                meter.num_tokens,
                meter.last_s - began_s,
                self.num_in_flight,
                is_whole=meter.is_complete,
            )
