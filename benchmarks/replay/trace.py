"""Requests of a recorded trace. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request. Lengths are those of the recording."""

    at_s: float  # since the first request of the trace
    num_prompt_tokens: int
    num_output_tokens: int
    # One for each leading block of the prompt; equal names of equal prefixes mean equal tokens.
    # Tokens after them were not seen in any other request.
    block_names: tuple[str, ...] = ()
    session: str = ""  # empty: independent of all other requests


@dataclass(frozen=True, slots=True)
class ReplayTrace:
    """A recorded trace, ordered by time."""

    format: str
    block_tokens: int  # tokens of a block in the recording
    requests: tuple[TraceRequest, ...]


def ordered_trace(
    format_name: str, block_tokens: int, requests: Sequence[TraceRequest]
) -> ReplayTrace:
    """Return a trace whose requests are in the order of time and start at 0."""
    ordered = sorted(requests, key=lambda request: request.at_s)
    start_s = ordered[0].at_s if ordered else 0.0
    moved = tuple(replace(request, at_s=request.at_s - start_s) for request in ordered)
    return ReplayTrace(format_name, block_tokens, moved)
