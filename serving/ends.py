"""How a call ended, read from what was raised in it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
from grpc import aio

from serving.errors import DeadlineExceeded
from serving.status import NAMED, RemoteFailure, code_and_reason, remote_error
from telemetry.spans import End, Outcome


def end_of(error: BaseException, *, is_late: bool = False, is_refused: bool = False) -> End:
    """Now, by this error. `is_late`: the call's deadline has passed."""
    now_s = time.monotonic()
    is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
    if isinstance(error, DeadlineExceeded) or (is_cancelled and is_late):
        late = str(error) or "the deadline passed"
        return _failed(now_s, Outcome.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", late)
    if is_cancelled:
        return End(now_s, Outcome.CANCELLED, rpc_status=grpc.StatusCode.CANCELLED.name)
    if isinstance(error, grpc.RpcError | RemoteFailure):
        remote = remote_error(error)
        code = remote.code.name
        return End(now_s, Outcome.FAILED, remote.reason or code, remote.message, code)
    if isinstance(error, NAMED):
        status, reason = code_and_reason(error)
        outcome = Outcome.REFUSED if is_refused else Outcome.FAILED
        return End(now_s, outcome, reason, str(error), status.name)
    return _failed(now_s, Outcome.FAILED, type(error).__name__, str(error), "UNKNOWN")


def is_late(context: aio.ServicerContext[Any, Any]) -> bool:
    """Whether a call is past its deadline."""
    remaining_s: float | None = context.time_remaining()  # its type says that it is never None
    return (1.0 if remaining_s is None else remaining_s) <= 0


def _failed(now_s: float, outcome: Outcome, kind: str, message: str, code: str = "") -> End:
    return End(now_s, outcome, kind, message, code or kind)
