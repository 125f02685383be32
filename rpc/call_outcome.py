"""Conversion of the exception that ended a call to the end of its span."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import grpc

from baton.core.errors import NamedError
from baton.rpc.errors import ClientGone, DeadlineExceeded
from baton.rpc.status import RemoteFailure, code_and_reason, remote_error
from baton.telemetry.tracing.spans import End, SpanOutcome

MAX_DEADLINE_ROUNDING = 0.01  # maximum rounding error, as a share of the deadline
CALL_LATENCY_S = 0.02  # network latency of a call from a nearby machine


class HasDeadline(Protocol):
    def time_remaining(self) -> float | None: ...


def end_of(error: BaseException, *, is_late: bool = False, is_refused: bool = False) -> End:
    """Return the end for this error, at the current time. `is_late`: the deadline has passed."""
    now_s = time.monotonic()
    is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit | ClientGone)
    if isinstance(error, DeadlineExceeded) or (is_cancelled and is_late):
        late = str(error) or "the deadline passed"
        return _failed(now_s, SpanOutcome.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", late)
    if is_cancelled:
        return End(now_s, SpanOutcome.CANCELLED, rpc_status=grpc.StatusCode.CANCELLED.name)
    if isinstance(error, grpc.RpcError | RemoteFailure):
        remote = remote_error(error)
        code = remote.code.name
        return End(now_s, SpanOutcome.FAILED, remote.reason or code, remote.message, code)
    if isinstance(error, NamedError):
        status, reason = code_and_reason(error)
        outcome = SpanOutcome.REFUSED if is_refused else SpanOutcome.FAILED
        return End(now_s, outcome, reason, str(error), status.name)
    return _failed(now_s, SpanOutcome.FAILED, type(error).__name__, str(error), "UNKNOWN")


def is_late(call: HasDeadline, began_s: float) -> bool:
    """Return whether a call that began at `began_s` is past its deadline, within a tolerance.

    The client's deadline expires first, since its call began earlier and gRPC rounds the timeout
    up. So a cancellation shortly before the deadline counts as its expiry.
    """
    remaining_s = call.time_remaining()
    if remaining_s is None:
        return False
    whole_s = remaining_s + time.monotonic() - began_s
    return remaining_s <= MAX_DEADLINE_ROUNDING * whole_s + CALL_LATENCY_S


def _failed(now_s: float, outcome: SpanOutcome, kind: str, message: str, code: str = "") -> End:
    return End(now_s, outcome, kind, message, code or kind)
