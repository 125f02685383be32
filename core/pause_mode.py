"""Modes in which a node's scheduler is paused."""

from __future__ import annotations

from enum import StrEnum


class PauseMode(StrEnum):
    """Treatment of the requests in progress. Requests that wait for blocks stay queued."""

    ABORT = "abort"  # they end at once, the queued ones included
    WAIT = "wait"  # those that hold blocks go on to their end
    KEEP = "keep"  # they stop, keep their blocks, and go on when the scheduler is resumed
