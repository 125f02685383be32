"""Named errors of the services. `rpc/status.py` maps them to gRPC codes."""

from __future__ import annotations

from enum import Enum

from baton.core.errors import NamedError


class ServiceError(NamedError):
    """Base class of the errors of a service."""


class UnknownModel(ServiceError):
    """The request names a model that is not served here."""


class UnknownResponse(ServiceError):
    """No stored response of this client has the id."""


class EmptyPrompt(ServiceError):
    """The prompt has no tokens to continue."""


class UnsupportedInput(ServiceError):
    """The request uses a feature that this service does not support."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field  # name of the request's field, if a single field is the cause


class RequestIdInUse(ServiceError):
    """Another request with this id is in flight."""


class Unauthenticated(ServiceError):
    """The caller sent no token, or one that this server does not accept."""


class NotAnOperator(ServiceError):
    """The call is for operators, and the caller sent no operator's token."""


class Unreadable(ServiceError):
    """The request is not a valid message of this method."""


class MessageTooLarge(ServiceError):
    """A message exceeds the size limit. A retry would be equally large."""


class BodyTimeout(ServiceError):
    """The request's body did not arrive within its time limit."""


class DeadlineExceeded(ServiceError):
    """A deadline, mostly the client's, passed before the answer was complete."""


class QueueFull(ServiceError):
    """The admission queue is full. The client can retry after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(QueueFull):
    """The client has used up one of its limits. It can retry after `retry_after_s`."""


class TooLate(QueueFull):
    """The forecast time to the first token exceeds the client's deadline."""


class ClientGone(ServiceError):
    """The client disconnected before its whole request had been received."""


class ClientTooSlow(ServiceError):
    """The client left too much of its answer unread. The unread part is dropped."""


class NoNodes(ServiceError):
    """No node that can serve the request is known and reachable."""


class OtherVersion(ServiceError):
    """The caller or the node speaks another version of the API of nodes."""


class TooManyConnects(ServiceError):
    """A node already opens as many links ahead of their first hand-off as its limit allows."""


class IncompatibleNodes(ServiceError):
    """Prefill nodes exist, but none can transfer its KV to any decode node."""


class FailureKind(Enum):
    """Cause of a failed attempt, as needed to decide whether the request is at fault."""

    OTHER = "other"
    VANISHED = "vanished"  # a process of the node was killed or crashed, or the node is cut off
    ENGINE_FAILED = "engine failed"  # reported by the node, which will be restarted
    PASS_FAILED = "pass failed"  # of this request alone; the node keeps running
    KV_LOST = "kv lost"  # the KV of the prompt did not arrive at the node, or left it


class NodeFailed(ServiceError):
    """A node failed, and no further attempt is left."""

    def __init__(self, message: str = "", kind: FailureKind = FailureKind.OTHER) -> None:
        super().__init__(message)
        self.kind = kind


class NodeDraining(NodeFailed):
    """A node that drains or pauses refused or ended a request. No request is at fault."""


class AdapterNotLoaded(NodeFailed):
    """A node could not load the adapter of a request, and did not start any work."""


class KvLoadFailed(ServiceError):
    """The KV of a prompt did not arrive, and this node does not recompute it."""


class PoisonedRequest(ServiceError):
    """The request has ended engines or failed passes twice. It is not retried again."""


class AdapterUnreadable(ServiceError):
    """The files of an adapter have changed, or cannot be found or read."""


class AdaptersBusy(ServiceError):
    """All places for adapters in memory are in use. Another node can be tried."""


class TooManyAdapters(ServiceError):
    """As many adapters have names as nodes can list."""


class TooManyUpdates(ServiceError):
    """As many loads and unloads of adapters are in progress as the router takes."""


class Draining(ServiceError):
    """The process is draining and accepts no new requests."""


class GenerationFailed(ServiceError):
    """The engine ended the request with an error."""


class AddressInUse(ServiceError):
    """The port is in use, or the address is not this machine's. The process exits at start."""
