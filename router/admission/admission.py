"""Admission of requests: deadlines against forecasts, a turn in the queue, measured answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager

from baton.core.ids import ANY_MODEL, ModelVariant
from baton.core.output import Finish
from baton.router.admission.admission_queue import (
    INITIAL_CAPACITY,
    AdmissionQueue,
    AdmissionQueueConfig,
    AnswerForecast,
    FirstTokenForecast,
)
from baton.router.dispatch.retries import RetryBudget
from baton.router.request_scope import RequestContext
from baton.router.values import AnswerPart, GenerateCall
from baton.rpc.errors import TooLate

MARGIN = 1.25  # forecasts are inexact, and requests of a higher priority overtake


class AnswerMeter:
    """Measures one answer for the forecasts, from its request's arrival in the queue."""

    def __init__(
        self, first_tokens: FirstTokenForecast, priority: int, clock: Callable[[], float]
    ) -> None:
        self._first_tokens = first_tokens
        self._priority = priority
        self._clock = clock
        self._admitted_s: float | None = None
        self._has_begun = False
        self._is_complete = False
        self._num_tokens = 0
        self._last_s = 0.0  # time of the last token, or of the admission before the first one
        first_tokens.note_arrival(priority, clock())

    def admit(self) -> None:
        self._admitted_s = self._last_s = self._clock()

    def note_part(self, part: AnswerPart) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._first_tokens.note_first_token(self._priority, self._clock())
        if isinstance(part, Finish):
            self._is_complete = True
        elif part.token_ids:
            self._last_s = self._clock()
            self._num_tokens += len(part.token_ids)

    def close(self, answers: AnswerForecast, num_in_flight: int) -> None:
        """Record the answer's pace, if the request was admitted."""
        if not self._has_begun:
            self._first_tokens.note_left(self._priority)
        if self._admitted_s is not None:
            duration_s = self._last_s - self._admitted_s
            answers.note_answer(
                self._num_tokens, duration_s, num_in_flight, is_whole=self._is_complete
            )


class AdmissionControl:
    def __init__(self, config: AdmissionQueueConfig, clock: Callable[[], float]) -> None:
        self.queue: AdmissionQueue[asyncio.Event] = AdmissionQueue(config)
        self._clock = clock
        self._first_token_forecast = FirstTokenForecast()
        self._answer_forecast = AnswerForecast()

    def resize(self, num_batch_slots: int) -> None:
        """Set how many requests the nodes run at once, and admit more if there is room."""
        for turn in self.queue.resize(num_batch_slots):
            turn.set()

    @asynccontextmanager
    async def turn(
        self, call: GenerateCall, context: RequestContext
    ) -> AsyncIterator[Callable[[AnswerPart], None]]:
        """Wait for admission, and hold the place until the end of the block.

        A request that is cancelled while it waits, such as by a disconnected client or a deadline,
        leaves the queue at once. Yields a callback for each part of the answer. Raises TooLate and
        QueueFull.
        """
        context.trace.note_queued(self.queue.num_waiting)
        wait_s = self._first_token_forecast.wait_s(call.priority)
        self._refuse_if_too_late(call, context, wait_s, self.queue.num_in_flight)
        turn = asyncio.Event()
        is_admitted = self.queue.join(turn, call.priority, call.client)
        meter = AnswerMeter(self._first_token_forecast, call.priority, self._clock)
        try:
            if not is_admitted:
                await turn.wait()
            # The wait may have exceeded the forecast: do not start work that is too late.
            self._refuse_if_too_late(call, context, 0.0, self.queue.num_in_flight - 1)
            context.trace.note_admitted()
            meter.admit()
            yield meter.note_part
        finally:
            meter.close(self._answer_forecast, self.queue.num_in_flight)
            admitted = self.queue.leave(turn, self._clock())
            if admitted is not None:
                admitted.set()

    def _refuse_if_too_late(
        self, call: GenerateCall, context: RequestContext, wait_s: float, num_others: int
    ) -> None:
        """Raise TooLate if a request that waits `wait_s` cannot meet its deadline.

        Refused early, its client can still send it to another router.
        """
        remaining_s = context.remaining_s(self._clock())
        if remaining_s is None:
            return
        answer_s = self._answer_forecast.duration_s(call.sampling.max_tokens, num_others)
        if MARGIN * (wait_s + answer_s) > remaining_s:
            raise TooLate(
                f"its turn would come in about {wait_s:.1f} s and the answer take "
                f"{answer_s:.1f} s, with {MARGIN - 1:.0%} in reserve, but the client waits for "
                f"{remaining_s:.1f} s",
                MARGIN * (wait_s + answer_s) - remaining_s,
            )


class ModelTraffic:
    """Admission and retry budget of the requests to one model."""

    def __init__(self, config: AdmissionQueueConfig, clock: Callable[[], float]) -> None:
        self.admission = AdmissionControl(config, clock)
        self.retry_budget = RetryBudget(config.max_in_flight or INITIAL_CAPACITY)


class TrafficByModel:
    """Traffic of all models that nodes serve, or have served.

    Clients cannot add any: requests to names that are not served share the first model's.
    """

    def __init__(self, config: AdmissionQueueConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        # Of requests that arrive before a node does. The first model takes it over.
        self._first = ModelTraffic(config, clock)
        self._by_name: dict[str, ModelTraffic] = {}

    def of(self, model: ModelVariant = ANY_MODEL) -> ModelTraffic:
        """Return the traffic of a base model and its adapters."""
        return self._by_name.get(model.base, self._first)

    def resize(self, batch_slots: Mapping[str, int]) -> None:
        """Set how many requests the nodes of each model run at once, and admit more of them.

        A model that is not served any more keeps its measurements, and its capacity.
        """
        for name, num_batch_slots in batch_slots.items():
            if name not in self._by_name:
                is_first = not self._by_name
                traffic = self._first if is_first else ModelTraffic(self._config, self._clock)
                self._by_name[name] = traffic
            self._by_name[name].admission.resize(num_batch_slots)

    @property
    def num_waiting(self) -> int:
        return sum(traffic.admission.queue.num_waiting for traffic in self._all())

    @property
    def num_in_flight(self) -> int:
        return sum(traffic.admission.queue.num_in_flight for traffic in self._all())

    def _all(self) -> Iterator[ModelTraffic]:
        return iter(self._by_name.values() if self._by_name else (self._first,))
