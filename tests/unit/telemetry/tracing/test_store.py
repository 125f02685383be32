"""Trace store on disk, limited in size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.telemetry.options import MIB
from baton.telemetry.tracing.otlp_json import ExportedSpan, MalformedSpans, line_of, spans_of
from baton.telemetry.tracing.spans import AttributeValue, Span, SpanEvent, SpanLink
from baton.telemetry.tracing.store import TraceWriter, read_spans
from tests.support.spans import RESOURCE, a_span


def test_a_span_round_trips_through_the_store(tmp_path: Path) -> None:
    root, child = a_span(), a_span(2, parent_id=1)

    TraceWriter(tmp_path, MIB, RESOURCE, "router").write([root, child])

    assert list(read_spans(tmp_path)) == [
        ExportedSpan(root, RESOURCE),
        ExportedSpan(child, RESOURCE),
    ]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = (
    TEXTS
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.lists(TEXTS).map(tuple)
)


@given(st.dictionaries(TEXTS, VALUES), TEXTS)
def test_any_attribute_value_round_trips_through_the_store(
    attributes: dict[str, AttributeValue], message: str
) -> None:
    event, link = SpanEvent("e", 7, attributes), SpanLink(1, 2)
    span = Span(
        *("s", 1, 2, 3, 4, 5),
        attributes=attributes,
        events=(event,),
        links=(link, link),
        status_message=message,
    )

    line = line_of([span, span], attributes)

    assert spans_of(line) == [ExportedSpan(span, attributes)] * 2
    assert json.loads(line)  # for others, too
    assert line.count("\n") == 1


def test_the_folder_stays_within_its_limit_and_keeps_the_newest_spans(tmp_path: Path) -> None:
    writers = [TraceWriter(tmp_path, MIB, RESOURCE, name) for name in ("router", "decode")]
    big = "x" * 10_000

    for number in range(1, 301):
        reported = replace(a_span(number), status_message=big)
        writers[number % 2].write([reported])

    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    kept = [reported.span.span_id for reported in read_spans(tmp_path)]
    assert size <= MIB
    assert len(kept) > 50
    assert max(kept) == 300
    assert min(kept) > 100


def test_a_file_deleted_by_another_process_is_created_again(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, MIB, RESOURCE, "router")
    writer.write([a_span(1)])
    for path in tmp_path.iterdir():
        path.unlink()

    writer.write([a_span(2)])

    assert [reported.span.span_id for reported in read_spans(tmp_path)] == [2]


def test_truncated_lines_do_not_hide_the_others(tmp_path: Path) -> None:
    whole = line_of([a_span(1)], RESOURCE)
    text = whole[: len(whole) // 2] + "\n" + whole + "{}\n" + whole.strip()
    (tmp_path / "router-1.otlp.jsonl").write_text(text)

    assert [reported.span.span_id for reported in read_spans(tmp_path)] == [1, 1]


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"resourceSpans": [{}]}', "null"])
def test_a_file_without_spans_is_named(line: str) -> None:
    with pytest.raises(MalformedSpans):
        spans_of(line)
