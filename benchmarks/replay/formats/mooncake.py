"""Mooncake traces: one request per line, with an id for each block of 512 tokens."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.replay.formats.fields import block_names_of, number_of, parse_object, tokens_of
from benchmarks.replay.formats.source import TextFile
from benchmarks.replay.trace import ReplayTrace, TraceRequest, ordered_trace

BLOCK_TOKENS = 512


def read_mooncake(files: Sequence[TextFile]) -> ReplayTrace:
    """Read lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`."""
    requests = [_request(*line) for file in files for line in file.lines()]
    return ordered_trace("mooncake", BLOCK_TOKENS, requests)


def _request(where: str, line: str) -> TraceRequest:
    values = parse_object(where, line)
    num_tokens = tokens_of(where, values, "input_length")
    return TraceRequest(
        number_of(where, values, "timestamp") / 1e3,
        num_tokens,
        tokens_of(where, values, "output_length"),
        block_names_of(where, values, num_tokens, BLOCK_TOKENS),
    )
