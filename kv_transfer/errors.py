"""The named errors of this room."""

from __future__ import annotations


class KvTransferError(Exception):
    """The root of every error raised here on purpose."""


class InvalidKvSetting(KvTransferError):
    """A setting of the hand-off or of its transport cannot work; the process stops at start."""


class TransportMissing(KvTransferError):
    """The library of the chosen transport is not installed."""


class InvalidMessage(KvTransferError):
    """A peer says what cannot be; nothing it says on that link is believed any more."""


class PeerUnreachable(KvTransferError):
    """The data path to a peer cannot be set up, or has failed; the pair must start anew."""
