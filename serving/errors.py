"""What a service refuses or fails with, by name. Their gRPC codes are in `serving/status.py`."""

from __future__ import annotations

from enum import Enum


class ServiceError(Exception):
    """The root of every error that a service raises on purpose, beside the engine's own."""


class UnknownModel(ServiceError):
    """The request names a model that is not served here."""


class EmptyPrompt(ServiceError):
    """There is nothing to continue."""


class UnsupportedInput(ServiceError):
    """The request asks for something that this service does not do."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field  # by which it asks, where it is one


class RequestIdInUse(ServiceError):
    """Another request of that id is under way."""


class Unauthenticated(ServiceError):
    """The caller has shown no token, or none that is taken here."""


class Unreadable(ServiceError):
    """What came is no message of this method."""


class MessageTooLarge(ServiceError):
    """A message is larger than one may be; another try would be as large."""


class BodyTimeout(ServiceError):
    """The request's body did not come within the time that it may take."""


class DeadlineExceeded(ServiceError):
    """The time that the client gave was over before the answer was whole."""


class QueueFull(ServiceError):
    """More requests wait already than may; there is no room for this one now."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLate(QueueFull):
    """The client's deadline would pass before its first token, as fast as these come now."""


class ClientGone(ServiceError):
    """The client disconnected before its whole request had been received."""


class ClientTooSlow(ServiceError):
    """The client has left too much of its answer unread; what it did not read is given up."""


class NoNodes(ServiceError):
    """No node that could serve the request is known and reachable."""


class TooManyConnects(ServiceError):
    """A node is making as many links ahead of their first hand-off as it may at a time."""


class IncompatibleNodes(ServiceError):
    """Prefill nodes are there, and none of them could hand its KV to any decode node."""


class FailureKind(Enum):
    """What a try failed with on its node, as far as that tells whether the request is at fault."""

    OTHER = "other"
    VANISHED = "vanished"  # the connection broke: killed, crashed or cut off
    ENGINE_FAILED = "engine failed"  # the node reported it, and will be restarted
    PASS_FAILED = "pass failed"  # of this request alone: the node goes on


class NodeFailed(ServiceError):
    """A node broke off, and no other try is left."""

    def __init__(self, message: str = "", kind: FailureKind = FailureKind.OTHER) -> None:
        super().__init__(message)
        self.kind = kind


class NodeDraining(NodeFailed):
    """A node refused a request before it began anything: it is on its way out."""


class KvLoadFailed(ServiceError):
    """The KV of a prompt did not arrive, and this node does not compute prompts in its place."""


class PoisonedRequest(ServiceError):
    """Engines end, or passes fail, when they run this request; it is not tried a third time."""


class Draining(ServiceError):
    """The process takes no new requests: it is on its way out."""


class GenerationFailed(ServiceError):
    """The engine ended the request with an error."""


class AddressInUse(ServiceError):
    """The port is taken, or the address is not this machine's; the process stops at start."""
