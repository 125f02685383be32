"""Exceptions of the KV transfer layer."""

from __future__ import annotations

from baton.core.errors import NamedError


class TransportMissing(NamedError):
    """The library of the selected transport is not installed."""


class InvalidMessage(NamedError):
    """A peer sent an invalid message. Nothing else on that link is trusted."""


class PeerUnreachable(NamedError):
    """The data path to a peer cannot be set up, or has failed. The pair must be linked again."""


class DuplicateNodeId(PeerUnreachable):
    """Two processes that are alive have the same node id. The later one is refused."""
