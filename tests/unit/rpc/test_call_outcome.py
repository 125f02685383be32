"""Outcome of calls: late or cancelled."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest

from baton.rpc.status import end_of, is_late
from baton.telemetry.tracing.spans import SpanOutcome


@dataclass
class Call:
    """Fake call with a given remaining time."""

    remaining_s: float | None

    def time_remaining(self) -> float | None:
        return self.remaining_s


@pytest.mark.parametrize(
    ("remaining_s", "took_s", "is_over"),
    [
        (None, 100.0, False),  # it had no deadline
        (-1.0, 5.0, True),
        (0.03, 4.0, True),  # the client's deadline expired first
        (0.5, 4.0, False),
        (30.0, 0.1, False),
    ],
)
def test_a_call_past_the_deadline_of_its_client_is_late(
    remaining_s: float | None, took_s: float, is_over: bool
) -> None:
    call = Call(remaining_s)

    assert is_late(call, time.monotonic() - took_s) is is_over


@pytest.mark.parametrize(
    ("is_over", "outcome"), [(True, SpanOutcome.DEADLINE_EXCEEDED), (False, SpanOutcome.CANCELLED)]
)
def test_an_interrupted_call_is_late_or_cancelled(is_over: bool, outcome: SpanOutcome) -> None:
    assert end_of(asyncio.CancelledError(), is_late=is_over).outcome is outcome
