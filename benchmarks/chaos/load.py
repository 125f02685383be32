"""Closed-loop clients of a chaos run, and the outcome of each request."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from baton.client import BatonError
from benchmarks.chaos.faults import Phase
from benchmarks.chaos.sending import (
    DEADLINE_EXCEEDED,
    HttpRequestFailed,
    Router,
    Sending,
    WrongAnswer,
)
from benchmarks.chaos.workload import KnownAnswer

# Requests take seconds; one without an end after this time counts as hung.
PATIENCE_S = 90.0
CANCEL_SHARE = 0.08
MAX_CANCEL_AFTER_S = 1.5
SHORT_DEADLINE_SHARE = 0.08
MIN_DEADLINE_S, MAX_DEADLINE_S = 0.05, 2.0  # deadlines that some answers miss
SHARING_SHARE = 0.3  # share of requests that may hit cached prefixes
PAUSE_AFTER_REFUSAL_S = 0.2
FIRST_DECODED = 2  # tokens after which the decode node is generating


class RequestOutcome(Enum):
    RIGHT = "right"
    WRONG = "wrong"
    HUNG = "hung"
    REFUSED = "refused"  # with a named error before the first token
    BROKEN = "broken"  # with a named error after the first token
    LATE = "late"  # ended by a short deadline
    CANCELLED = "cancelled"


@dataclass(slots=True)
class AnswerOutcome:
    """One request as seen by its client. Times are monotonic."""

    tag: int
    kind: str
    began_s: float
    patience_s: float = PATIENCE_S
    ended_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    outcome: RequestOutcome = RequestOutcome.RIGHT
    reason: str = ""
    attempts: int = 1
    is_local: bool = False  # its decode node computed the prompt
    num_drafted: int = 0  # tokens that a node proposed
    num_accepted: int = 0  # of these

    @property
    def has_short_deadline(self) -> bool:
        """Return whether the deadline is shorter than an answer may take."""
        return self.patience_s < PATIENCE_S


class ChaosLoad:
    """Closed-loop clients: each sends its next request a pause after the last one has ended."""

    def __init__(self, router: Router, known: Sequence[KnownAnswer], seed: int) -> None:
        self._router = router
        self._known = known
        self._draw = random.Random(seed)
        self._numbers = 0
        self._changed = asyncio.Event()
        self._last_reached: Phase | None = None
        self.pause_s = 0.0  # of a client after each answer
        self.outcomes: list[AnswerOutcome] = []
        self.num_in_flight = 0

    async def run(self, num_clients: int, stop: asyncio.Event) -> None:
        """Run clients until `stop` is set and their requests have ended."""

        async def send_requests() -> None:
            while not stop.is_set():
                record = await self._send()
                failed = record.outcome in (RequestOutcome.REFUSED, RequestOutcome.BROKEN)
                with suppress(TimeoutError):
                    async with asyncio.timeout(PAUSE_AFTER_REFUSAL_S if failed else self.pause_s):
                        await stop.wait()

        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(send_requests())

    async def reached(self, phase: Phase, timeout_s: float) -> None:
        """Wait until a request reaches this phase, at most for `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await self._changed.wait()
                    if self._last_reached is phase:
                        return
        except TimeoutError:
            return

    def _note(self, phase: Phase) -> None:
        self._last_reached = phase
        self._changed.set()
        self._changed = asyncio.Event()

    async def _send(self) -> AnswerOutcome:
        one = self._draw.choice(self._known)
        self._numbers += 1
        shares = self._draw.random() < SHARING_SHARE
        salt = "" if shares else str(self._numbers)
        cancels = self._draw.random() < CANCEL_SHARE
        cancel_after_s = self._draw.random() * MAX_CANCEL_AFTER_S if cancels else None
        record = AnswerOutcome(
            one.request.tag, one.request.kind, time.monotonic(), self._patience_s()
        )
        self.num_in_flight += 1
        try:
            async with asyncio.timeout(cancel_after_s):
                await self._receive(one, salt, record)
        except TimeoutError:
            _set_outcome(record, RequestOutcome.CANCELLED)
        finally:
            self.num_in_flight -= 1
        record.ended_s = time.monotonic()
        self.outcomes.append(record)
        return record

    def _patience_s(self) -> float:
        if self._draw.random() >= SHORT_DEADLINE_SHARE:
            return PATIENCE_S
        return self._draw.uniform(MIN_DEADLINE_S, MAX_DEADLINE_S)

    async def _receive(self, one: KnownAnswer, salt: str, record: AnswerOutcome) -> None:
        self._note(Phase.SENT)
        on_tokens = partial(self._note_tokens, record)
        try:
            answer = await one.request.send(
                Sending(self._router, record.patience_s, salt, on_tokens)
            )
        except WrongAnswer as error:
            _set_outcome(record, RequestOutcome.WRONG, str(error))
        except BatonError as error:
            _judge_error(record, error.reason or error.code.name)
        except HttpRequestFailed as error:
            _judge_error(record, error.reason)
        else:
            _judge_answer(one, answer, record)

    def _note_tokens(self, record: AnswerOutcome) -> None:
        if not record.arrivals_s:
            self._note(Phase.FIRST_TOKEN)
        elif len(record.arrivals_s) == FIRST_DECODED:
            self._note(Phase.DECODING)
        record.arrivals_s.append(time.monotonic())


def _judge_answer(one: KnownAnswer, answer: Any, record: AnswerOutcome) -> None:
    difference = one.request.difference(answer, one.answer)
    if difference is not None:
        _set_outcome(record, RequestOutcome.WRONG, difference)
    served = one.request.served(answer)
    if served is not None:
        record.attempts = served.attempts
        record.is_local = not served.is_prefill_remote
        record.num_drafted, record.num_accepted = served.tokens_proposed, served.tokens_accepted


def _judge_error(record: AnswerOutcome, reason: str) -> None:
    if reason == DEADLINE_EXCEEDED and record.has_short_deadline:
        _set_outcome(record, RequestOutcome.LATE)
    elif reason == DEADLINE_EXCEEDED:
        _set_outcome(record, RequestOutcome.HUNG, f"no end within {record.patience_s:.0f} s")
    else:
        is_begun = bool(record.arrivals_s)
        outcome = RequestOutcome.BROKEN if is_begun else RequestOutcome.REFUSED
        _set_outcome(record, outcome, reason)


def _set_outcome(record: AnswerOutcome, outcome: RequestOutcome, reason: str = "") -> None:
    record.outcome, record.reason = outcome, reason
