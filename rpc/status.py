"""Map named errors to gRPC statuses, and failed calls back to `RemoteError`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode, aio
from grpc_status import rpc_status

from baton.core.errors import ContextLengthExceeded, InvalidRequest, NamedError
from baton.engine.errors import EngineGone, EngineKilled, EngineStopped, PassFailed
from baton.kv_transfer.errors import InvalidMessage, PeerUnreachable
from baton.rpc.errors import (
    AdapterNotLoaded,
    AdaptersBusy,
    AdapterUnreadable,
    BodyTimeout,
    ClientGone,
    ClientTooSlow,
    DeadlineExceeded,
    Draining,
    EmptyPrompt,
    GenerationFailed,
    IncompatibleNodes,
    KvLoadFailed,
    MessageTooLarge,
    NodeDraining,
    NodeFailed,
    NoNodes,
    NotAnOperator,
    OtherVersion,
    PoisonedRequest,
    QueueFull,
    RateLimited,
    RequestIdInUse,
    TooLate,
    TooManyAdapters,
    TooManyConnects,
    TooManyUpdates,
    Unauthenticated,
    UnknownModel,
    UnknownResponse,
    Unreadable,
    UnsupportedInput,
)
from baton.telemetry.tracing.spans import End, SpanOutcome

DOMAIN = "baton"
# gRPC's error text for a message over the limit. The limit is the same on all sides.
TOO_LARGE = "message larger than max"
TOO_LARGE_ADVICE = "ask for less at once: a shorter prompt, or fewer logprobs"
DETAILS_KEY = "grpc-status-details-bin"
CODE_BY_NUMBER: dict[int, StatusCode] = {code.value[0]: code for code in StatusCode}

# Reasons are for programs and never change. Messages are for people and can change.
CODE_AND_REASON: dict[type[Exception], tuple[StatusCode, str]] = {
    InvalidRequest: (StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    EmptyPrompt: (StatusCode.INVALID_ARGUMENT, "EMPTY_PROMPT"),
    UnsupportedInput: (StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_INPUT"),
    Unreadable: (StatusCode.INVALID_ARGUMENT, "UNREADABLE"),
    InvalidMessage: (StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE"),
    UnknownModel: (StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
    UnknownResponse: (StatusCode.NOT_FOUND, "UNKNOWN_RESPONSE"),
    AdapterUnreadable: (StatusCode.FAILED_PRECONDITION, "ADAPTER_UNREADABLE"),
    AdaptersBusy: (StatusCode.UNAVAILABLE, "ADAPTERS_BUSY"),
    TooManyAdapters: (StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_ADAPTERS"),
    TooManyUpdates: (StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_UPDATES"),
    RequestIdInUse: (StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE"),
    Unauthenticated: (StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    NotAnOperator: (StatusCode.PERMISSION_DENIED, "NOT_AN_OPERATOR"),
    MessageTooLarge: (StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"),
    BodyTimeout: (StatusCode.DEADLINE_EXCEEDED, "BODY_TIMEOUT"),
    DeadlineExceeded: (StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    QueueFull: (StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    RateLimited: (StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED"),
    TooLate: (StatusCode.RESOURCE_EXHAUSTED, "TOO_LATE"),
    ClientGone: (StatusCode.CANCELLED, "CLIENT_GONE"),
    ClientTooSlow: (StatusCode.RESOURCE_EXHAUSTED, "CLIENT_TOO_SLOW"),
    TooManyConnects: (StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CONNECTS"),
    PeerUnreachable: (StatusCode.FAILED_PRECONDITION, "PEER_UNREACHABLE"),
    NoNodes: (StatusCode.UNAVAILABLE, "NO_NODES"),
    OtherVersion: (StatusCode.FAILED_PRECONDITION, "OTHER_VERSION"),
    IncompatibleNodes: (StatusCode.FAILED_PRECONDITION, "INCOMPATIBLE_NODES"),
    NodeFailed: (StatusCode.UNAVAILABLE, "NODE_FAILED"),
    NodeDraining: (StatusCode.UNAVAILABLE, "NODE_DRAINING"),
    AdapterNotLoaded: (StatusCode.UNAVAILABLE, "ADAPTER_NOT_LOADED"),
    KvLoadFailed: (StatusCode.UNAVAILABLE, "KV_LOAD_FAILED"),
    PoisonedRequest: (StatusCode.INTERNAL, "POISONED_REQUEST"),
    Draining: (StatusCode.UNAVAILABLE, "DRAINING"),
    EngineStopped: (StatusCode.UNAVAILABLE, "ENGINE_STOPPED"),
    EngineKilled: (StatusCode.UNAVAILABLE, "ENGINE_KILLED"),
    EngineGone: (StatusCode.UNAVAILABLE, "ENGINE_GONE"),
    PassFailed: (StatusCode.INTERNAL, "PASS_FAILED"),
    GenerationFailed: (StatusCode.INTERNAL, "GENERATION_FAILED"),
}
# OpenAI's error codes that are narrower than a reason, as metadata next to it.
CODE_KEY, FIELD_KEY = "code", "field"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
# A status is sent in a header, which is limited in size. Texts that quote a client can be long.
MAX_ERROR_CHARACTERS, MAX_ERROR_FIELD_CHARACTERS = 1000, 200
MAX_DEADLINE_ROUNDING = 0.01  # maximum rounding error, as a share of the deadline
CALL_LATENCY_S = 0.02  # network latency of a call from a nearby machine


@dataclass(frozen=True, slots=True)
class RemoteError:
    """Status of a failed call to another process."""

    code: StatusCode
    message: str
    reason: str | None = None  # None: not one of Baton's errors, such as a broken connection
    metadata: dict[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None  # None: the server did not send a RetryInfo


class RemoteFailure(Exception):
    """Failure of one call on a shared stream, alone or together with the stream."""

    def __init__(self, remote: RemoteError) -> None:
        super().__init__(remote.message)
        self.remote = remote


@asynccontextmanager
async def named_errors(
    context: aio.ServicerContext[Any, Any], **metadata: str
) -> AsyncIterator[None]:
    """Abort the call with the status of a named error. Other exceptions propagate unchanged."""
    try:
        yield
    except NamedError as error:
        await context.abort_with_status(rpc_status.to_status(status_of(error, metadata)))


def status_of(error: Exception, metadata: dict[str, str] | None = None) -> status_pb2.Status:
    code, reason = code_and_reason(error)
    texts = {**(metadata or {}), **_details_of(error)}
    fields = {name: _truncate(text, MAX_ERROR_FIELD_CHARACTERS) for name, text in texts.items()}
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=fields)
    details = [_pack(info)]
    if isinstance(error, QueueFull):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(_pack(retry))
    number: int = code.value[0]
    message = message_of(error)
    return status_pb2.Status(code=number, message=message, details=details)


def _details_of(error: Exception) -> dict[str, str]:
    details = {}
    if isinstance(error, InvalidRequest) and error.field:
        details[FIELD_KEY] = error.field
    if isinstance(error, ContextLengthExceeded):
        details[CODE_KEY] = CONTEXT_LENGTH_EXCEEDED
    return details


def message_of(error: Exception) -> str:
    """Return the error's text, cut to a length that fits into a header."""
    return _truncate(str(error), MAX_ERROR_CHARACTERS)


def _truncate(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else f"{text[: max_characters - 1]}…"


def _pack(message: Message) -> any_pb2.Any:
    detail = any_pb2.Any()
    detail.Pack(message)
    return detail


def code_and_reason(error: Exception) -> tuple[StatusCode, str]:
    for kind in type(error).__mro__:
        if kind in CODE_AND_REASON:
            return CODE_AND_REASON[kind]
    return StatusCode.INTERNAL, "INTERNAL"


def reason_of(kind: type[Exception]) -> str:
    """Return the reason string that other processes receive for this error type."""
    return CODE_AND_REASON[kind][1]


def invalid_request_in(remote: RemoteError) -> InvalidRequest:
    """Return the refusal that another process sent, with its field."""
    is_too_long = remote.metadata.get(CODE_KEY) == CONTEXT_LENGTH_EXCEEDED
    kind = ContextLengthExceeded if is_too_long else InvalidRequest
    return kind(remote.message, remote.metadata.get(FIELD_KEY))


def remote_error(error: grpc.RpcError | RemoteFailure) -> RemoteError:
    """Return the status of a failed call, from asyncio, blocking and shared-stream calls."""
    if isinstance(error, RemoteFailure):
        return error.remote
    if not isinstance(error, (aio.AioRpcError, grpc.Call)):
        return RemoteError(StatusCode.UNKNOWN, str(error))
    message = error.details() or ""
    for key, blob in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(blob, bytes):
            return remote_error_in(status_pb2.Status.FromString(blob))
    if error.code() is StatusCode.RESOURCE_EXHAUSTED and TOO_LARGE in message:
        advised = f"{message}; {TOO_LARGE_ADVICE}"
        return RemoteError(error.code(), advised, reason_of(MessageTooLarge))
    return RemoteError(error.code(), message)


def remote_error_in(status: status_pb2.Status) -> RemoteError:
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_after_s = None
    for detail in status.details:
        detail.Unpack(info)
        if detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    code = CODE_BY_NUMBER[status.code]
    return RemoteError(
        code, status.message, info.reason or None, dict(info.metadata), retry_after_s
    )


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
