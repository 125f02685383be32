"""Azure LLM inference traces: arrival, prompt and answer tokens, no hashes."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from benchmarks.replay.formats.source import InvalidTrace, TextFile
from benchmarks.replay.trace import ReplayTrace, TraceRequest, ordered_trace

# The recording has no blocks. Lengths are scaled as in Mooncake's traces.
BLOCK_TOKENS = 512
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(files: Sequence[TextFile]) -> ReplayTrace:
    """Read CSV files with the columns TIMESTAMP, ContextTokens and GeneratedTokens."""
    requests = [request for file in files for request in _requests(file)]
    return ordered_trace("azure", BLOCK_TOKENS, requests)


def _requests(file: TextFile) -> list[TraceRequest]:
    rows = csv.DictReader(file.text.splitlines())
    missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise InvalidTrace(f"{file.name}:1: the columns {', '.join(missing)} are missing")
    return [_request(f"{file.name}:{rows.line_num}", row) for row in rows]


def _request(where: str, row: Mapping[str, Any]) -> TraceRequest:
    try:
        at = datetime.fromisoformat(row["TIMESTAMP"])
        num_prompt_tokens, num_output_tokens = (int(row[name]) for name in COLUMNS[1:])
    except (ValueError, TypeError) as error:
        raise InvalidTrace(
            f"{where}: write it like 2023-11-16 18:17:03.979,4808,10 ({error})"
        ) from None
    if num_prompt_tokens < 0 or num_output_tokens < 0:
        raise InvalidTrace(f"{where}: the numbers of tokens must be at least 0")
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return TraceRequest(at.timestamp(), num_prompt_tokens, num_output_tokens)
