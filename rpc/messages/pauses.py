"""Mapping of pause modes. Pure."""

from __future__ import annotations

from baton.core.pause_mode import PauseMode
from baton.rpc.errors import UnsupportedInput
from baton.rpc.messages.mapper import enum_converter
from baton.v1 import node_pb2

MODE = enum_converter(PauseMode, node_pb2.PauseMode.DESCRIPTOR, has_none=True)  # None: resume


def pause_mode_of(number: int) -> PauseMode | None:
    """Return the mode of a request. Raises UnsupportedInput."""
    try:
        mode: PauseMode | None = MODE.from_message(number)
    except KeyError:
        raise UnsupportedInput(f"pause mode {number} is unknown here", "mode") from None
    return mode
