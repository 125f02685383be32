"""Trace formats: handmade samples of each, and files that are refused with the line."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.replay.formats import read_trace
from benchmarks.replay.formats.source import InvalidTrace
from benchmarks.replay.trace import TraceRequest

MOONCAKE = """\
{"timestamp": 3000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]}

{"timestamp": 1000, "input_length": 1024, "output_length": 5, "hash_ids": [0, 4]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.4799600,110,27
"""


def a_turn(t: float, num_prompt_tokens: int, ids: list[int], **others: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": num_prompt_tokens, "out": 9, "hash_ids": ids, **others}


def a_session(name: str, *requests: dict[str, Any], scope: str = "local") -> dict[str, Any]:
    return {"id": name, "block_size": 64, "hash_id_scope": scope, "requests": list(requests)}


def written(folder: Path, name: str, content: str) -> Path:
    (folder / name).write_text(content)
    return folder / name


def test_mooncake_requests_are_sorted_by_time_and_have_ids_of_full_blocks(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "trace.jsonl", MOONCAKE))

    assert (trace.format, trace.block_tokens) == ("mooncake", 512)
    assert trace.requests == (
        TraceRequest(0.0, 1024, 5, ("0", "4")),
        TraceRequest(2.0, 1030, 7, ("0", "1")),  # the third block has six tokens only
    )


def test_azure_rows_have_times_and_lengths(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "code.csv", AZURE))

    assert trace.format == "azure"
    assert trace.requests == (TraceRequest(0.0, 4808, 10), TraceRequest(1.5, 110, 27))


def test_local_ids_of_two_agent_sessions_are_different_blocks(tmp_path: Path) -> None:
    sessions = [a_session("a", a_turn(0, 70, [1])), a_session("b", a_turn(0, 64, [1]))]
    shared = [{**session, "hash_id_scope": "global"} for session in sessions]
    for name, entries in (("local", sessions), ("global", shared)):
        written(tmp_path, f"{name}.jsonl", "\n".join(json.dumps(one) for one in entries))

    local = read_trace(tmp_path / "local.jsonl")
    both = read_trace(tmp_path / "global.jsonl")

    assert [one.session for one in local.requests] == ["a", "b"]
    assert [one.block_names for one in local.requests] == [("a/1",), ("b/1",)]
    assert [one.block_names for one in both.requests] == [("1",), ("1",)]


def test_subagents_are_separate_sessions(tmp_path: Path) -> None:
    subagent = {"type": "subagent", "t": 2, "requests": [a_turn(3, 64, [1])]}
    session = a_session("a", a_turn(1, 64, [1]), subagent, a_turn(9, 128, [1, 2]))
    trace = read_trace(written(tmp_path, "a.json", json.dumps(session, indent=1)))

    assert [(one.at_s, one.session) for one in trace.requests] == [
        (0, "a"),
        (2, "a/2"),
        (8, "a"),
    ]
    assert trace.requests[1].block_names == ("a/2/1",)


def test_sessions_read_from_a_folder_equal_those_read_from_an_archive(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    with tarfile.open(tmp_path / "sessions.tar.gz", "w:gz") as archive:
        for name in ("a", "b"):
            content = json.dumps(a_session(name, a_turn(0, 64, [1]))).encode()
            (folder / f"{name}.json").write_bytes(content)
            entry = tarfile.TarInfo(f"sessions/{name}.json")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))

    trace = read_trace(folder)

    assert trace.format == "weka"
    assert [one.session for one in trace.requests] == ["a", "b"]
    assert read_trace(tmp_path / "sessions.tar.gz") == trace


def test_gzip_traces_are_read_without_unpacking(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress(MOONCAKE.encode()))

    assert len(read_trace(tmp_path / "trace.jsonl.gz").requests) == 2


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (MOONCAKE + "nonsense", "trace:4: not JSON"),
        (MOONCAKE + "[1]", "trace:4: expected a JSON object, got list"),
        (MOONCAKE.replace("1024", '"1024"'), "trace:3: input_length is '1024'"),
        (MOONCAKE.replace("3000", "-1"), "trace:1: timestamp is -1"),
        (MOONCAKE.replace("3000", "NaN"), "trace:1: timestamp is nan"),
        (MOONCAKE.replace("[0, 4]", "7"), "trace:3: hash_ids must be a list"),
        (MOONCAKE.replace("[0, 4]", "[0, 4, 5]"), "trace:3: 3 hash_ids for 1024 tokens"),
        (AZURE.replace("110", "many"), "trace:3: write it like"),
        (AZURE.replace("110", "-110"), "trace:3: the numbers of tokens"),
        (AZURE.replace(",GeneratedTokens", ""), "trace:1: the columns GeneratedTokens"),
        (json.dumps(a_session("a", a_turn(0, 64, [1, 2]))), "request 1: 2 hash_ids for 64 tokens"),
        ('{"block_size": 64, "requests": 3}', "a session needs a list of requests"),
        ('{"block_size": 0, "requests": []}', "all sessions need the same block_size"),
        ("", "has no requests"),
        ('{"block_size": 64, "requests": []}', "has no requests"),
        ("a,b\n1,2", "no known format; name it with --format mooncake"),
    ],
)
def test_a_file_that_cannot_be_replayed_is_refused_with_its_line(
    content: str, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidTrace) as refused:
        read_trace(written(tmp_path, "trace", content))

    assert complaint in str(refused.value)


def test_missing_files_damaged_files_and_unknown_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "torn.gz").write_bytes(gzip.compress(MOONCAKE.encode())[:-10])
    for path in (tmp_path / "missing", tmp_path / "torn.gz"):
        with pytest.raises(InvalidTrace, match="cannot be read"):
            read_trace(path)
    with pytest.raises(InvalidTrace, match="choose one of mooncake, weka, azure"):
        read_trace(written(tmp_path, "trace", MOONCAKE), "csv")
