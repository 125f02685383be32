"""Agent sessions of Weka's kv-cache-tester: a JSON object per session, with its requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.replay.formats.fields import block_names_of, number_of, parse_object, tokens_of
from benchmarks.replay.formats.source import InvalidTrace, TextFile
from benchmarks.replay.trace import ReplayTrace, TraceRequest, ordered_trace

SUBAGENT = "subagent"


def read_weka(files: Sequence[TextFile]) -> ReplayTrace:
    """Read sessions: one per file, or one per line. All start at the same time."""
    sessions = [session for file in files for session in _sessions(file)]
    sizes = {where: tokens_of(where, values, "block_size") for where, values in sessions}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise InvalidTrace(f"all sessions need the same block_size, above 0; found {sizes}")
    [block_tokens] = set(sizes.values())
    requests = [
        request
        for where, values in sessions
        for request in _requests(where, values, block_tokens, str(values.get("id", where)))
    ]
    return ordered_trace("weka", block_tokens, requests)


def _sessions(file: TextFile) -> list[tuple[str, dict[str, Any]]]:
    lines = list(file.lines())
    if len(lines) > 1 and not lines[0][1].rstrip().endswith("}"):
        lines = [(file.name, file.text)]  # one object over several lines
    return [(where, parse_object(where, line)) for where, line in lines]


def _requests(
    where: str, values: Mapping[str, Any], block_tokens: int, session: str
) -> Iterator[TraceRequest]:
    """Yield the requests of a session. Each subagent is a session of its own."""
    scope = "" if values.get("hash_id_scope") == "global" else f"{session}/"
    for number, entry in enumerate(_entries(where, values), 1):
        place = f"{where}: request {number}"
        if entry.get("type") == SUBAGENT:
            nested = {**entry, "hash_id_scope": values.get("hash_id_scope")}
            yield from _requests(place, nested, block_tokens, f"{session}/{number}")
            continue
        num_tokens = tokens_of(place, entry, "in")
        yield TraceRequest(
            number_of(place, entry, "t"),
            num_tokens,
            tokens_of(place, entry, "out"),
            block_names_of(place, entry, num_tokens, block_tokens, scope),
            session,
        )


def _entries(where: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries = values.get("requests")
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise InvalidTrace(f"{where}: a session needs a list of requests")
    return entries
