"""`baton trace`: its waterfalls, pages and exports."""

from __future__ import annotations

import io
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from baton.cli import main
from baton.telemetry import names
from baton.telemetry.options import MIB
from baton.telemetry.resource import Process
from baton.telemetry.tracing import otlp
from baton.telemetry.tracing.spans import Span
from baton.telemetry.tracing.store import TraceWriter
from baton.telemetry.tracing.traces import Trace, find_trace, note_of, traces_of
from baton.traces.lists import REQUEST_COLUMNS, table_of
from baton.traces.page import render_page
from baton.traces.terminal import WIDE, show_related, show_waterfall
from tests.support.baton_command import run_baton
from tests.support.collector import collecting
from tests.support.traces import STEP_TRACE_ID, TRACE_ID, an_exported_step, an_exported_trace


def a_trace(*, has_failed_try: bool = False) -> Trace:
    [trace] = traces_of(an_exported_trace(has_failed_try=has_failed_try))
    return trace


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Store one trace as three processes write it."""
    by_role: dict[str, list[Span]] = {}
    for one in (*an_exported_trace(), *an_exported_step()):
        by_role.setdefault(str(one.resource["baton.role"]), []).append(one.span)
    for role, spans in by_role.items():
        TraceWriter(tmp_path, MIB, Process(role, role, "i").attributes, role).write(spans)
    monkeypatch.setenv("BATON_TRACE_DIR", str(tmp_path))
    return tmp_path


def the(trace: Trace, name: str) -> Span:
    [found] = [row.span for row in trace.rows if row.span.name == name]
    return found


def related_lines(trace: Trace, kept: list[Trace]) -> list[str]:
    reported = io.StringIO()
    show_related(Console(file=reported, width=100), trace, kept)
    return reported.getvalue().splitlines()


def drawn(table: Table, width: int) -> str:
    reported = io.StringIO()
    Console(file=reported, width=width).print(table)
    return reported.getvalue()


def baton(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["baton", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(str(ended.value.code))


@pytest.mark.parametrize("width", [60, 90, 160])
@pytest.mark.parametrize("has_failed_try", [False, True])
def test_a_waterfall_has_a_line_for_each_span_and_fits(width: int, has_failed_try: bool) -> None:
    trace, drawn = a_trace(has_failed_try=has_failed_try), io.StringIO()

    show_waterfall(Console(file=drawn, width=width), trace)

    lines = [line for line in drawn.getvalue().splitlines() if "━" in line]
    assert len(lines) == len(trace.rows)
    assert max(map(len, lines)) <= width
    assert all(f" {row.node} " in line for row, line in zip(trace.rows, lines, strict=True))
    assert "\x1b" not in drawn.getvalue()  # plain where no terminal is


@pytest.mark.parametrize("width", [60, 90, 160])
def test_a_failed_attempt_names_the_node_and_the_reason(width: int) -> None:
    trace, drawn = a_trace(has_failed_try=True), io.StringIO()

    show_waterfall(Console(file=drawn, width=width), trace)

    assert "UNAVAILABLE: <gone> & away" in drawn.getvalue()
    if width < WIDE:
        assert "✗ decode on d0: UNAVAILABLE: <gone> & away" in drawn.getvalue()
    assert "UNAVAILABLE: <gone> & away" in note_of(the(trace, names.MIGRATE))


def test_a_failed_node_without_spans_has_a_lane_on_the_page() -> None:
    reported = an_exported_trace(has_failed_try=True)
    [trace] = traces_of(one for one in reported if one.resource["baton.role"] == "router")

    page = render_page(trace)

    head, lanes = page.split("<h2>")[0], page[: page.index("Every span")]
    assert "✗ decode on d0: UNAVAILABLE: &lt;gone&gt; &amp; away" in head
    assert "<div class=who>d0</div>" in lanes
    assert "UNAVAILABLE: &lt;gone&gt; &amp; away" in lanes


def test_a_long_note_does_not_shrink_the_bars() -> None:
    reported = an_exported_trace(has_failed_try=True)
    long = [replace(one, span=replace(one.span, status_message="why " * 50)) for one in reported]
    [trace] = traces_of(long)
    drawn = io.StringIO()

    show_waterfall(Console(file=drawn, width=160), trace)

    [root] = [line for line in drawn.getvalue().splitlines() if line.startswith("generate")]
    [leg] = [line for line in drawn.getvalue().splitlines() if "why why" in line]
    assert " router " in leg
    assert root.count("━") + root.count("◆") > 40


def test_bars_are_positioned_by_the_times_of_their_spans() -> None:
    trace, drawn = a_trace(), io.StringIO()

    show_waterfall(Console(file=drawn, width=100), trace)

    lines = drawn.getvalue().splitlines()
    [push] = [line for line in lines if "kv_push" in line]
    [compute] = [line for line in lines if "decode_compute" in line]
    assert push.index("━") < compute.index("━")
    assert "180.0" in push


def test_the_page_is_self_contained_and_shows_every_span() -> None:
    trace = a_trace(has_failed_try=True)

    page = render_page(trace)

    assert not re.search(r"https?://|<script|<link|src=|@import|url\(", page)
    assert page.count("<details") == len(trace.rows)
    assert "&lt;gone&gt; &amp; away" in page
    assert "<gone>" not in page


def test_the_page_fits_a_narrow_screen() -> None:
    """Labels stay within the page, and a row of the waterfall takes two lines."""
    page = render_page(a_trace())

    marks = re.findall(r'<div class="mark (flip)?" style="left:([\d.]+)%"', page)
    [narrow] = re.findall(r"@media \(max-width: 600px\) \{(.*?)</style>", page, re.DOTALL)
    assert marks
    assert all((side == "flip") == (float(left) > 50) for side, left in marks)
    assert '"track track track"' in narrow
    assert ".ticks span:not(:first-child, :last-child) { display: none }" in narrow


def test_a_trace_is_found_by_trace_id_and_by_request_id() -> None:
    trace = a_trace()

    assert find_trace([trace], f"{TRACE_ID:032x}"[:30]) is trace
    assert find_trace([trace], "r1") is trace
    assert find_trace([trace], "") is trace
    assert find_trace([trace], "ffff") is None


def test_list_and_show_read_the_span_files_of_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baton(monkeypatch, "trace", "list") == 0
    assert "r1" in capsys.readouterr().out
    assert baton(monkeypatch, "trace", "show", "--html", str(folder / "page.html")) == 0
    assert (folder / "page.html").read_text().startswith("<!doctype html>")
    assert baton(monkeypatch, "trace", "show", "beef") == 1
    assert "baton trace list" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--html",), ("r1", "--html"), ("--html", "--trace-dir")])
def test_an_html_page_without_a_file_is_opened_in_the_browser(
    folder: Path, arguments: tuple[str, ...]
) -> None:
    named = (*arguments, str(folder)) if arguments[-1] == "--trace-dir" else arguments
    variables = {"BROWSER": "echo opened %s", "TMPDIR": str(folder), "BATON_TRACE_DIR": str(folder)}

    done = run_baton("trace", "show", *named, **variables)

    [page] = folder.glob("baton-trace-*.html")
    assert page.read_text().startswith("<!doctype html>")
    assert {f"wrote {page}", f"opened {page.as_uri()}"} == {*done.stdout.splitlines()}


def test_steps_are_listed_apart_from_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = f"{STEP_TRACE_ID:032x}"[:12]

    assert baton(monkeypatch, "trace", "list") == 0
    assert step not in capsys.readouterr().out
    assert baton(monkeypatch, "trace", "list", "--steps") == 0
    [heading, line] = capsys.readouterr().out.splitlines()

    assert " ".join(heading.split()) == "trace began node step ms run ms rows in out traced"
    assert line.startswith(step)
    assert " ".join(line.split()[2:]) == "decode 12 6.0 5.0 3 40 2 2"


def test_the_newest_trace_is_a_request_even_if_a_step_is_newer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baton(monkeypatch, "trace", "show") == 0

    assert "request r1 · ok" in capsys.readouterr().out


def test_a_step_and_its_requests_refer_to_each_other() -> None:
    kept = traces_of([*an_exported_trace(), *an_exported_step()])
    request, step = sorted(kept, key=lambda trace: trace.is_step)

    of_step, of_request = (related_lines(trace, kept) for trace in (step, request))

    assert of_step == [
        "traced requests in it",
        f"  {TRACE_ID:032x}  request r1",
        f"  {0xDEAD:032x}  its trace is not stored here",
    ]
    assert of_request == ["its traced steps", f"  {STEP_TRACE_ID:032x}  step 12 of d0, 6.0 ms"]
    assert f"<th>{TRACE_ID:032x}<td>request r1" in render_page(step, kept)
    assert related_lines(request, [request]) == []


@pytest.mark.parametrize("width", [60, 160])
def test_a_step_is_drawn_with_its_parts(width: int) -> None:
    [step] = traces_of(an_exported_step())
    drawn = io.StringIO()

    show_waterfall(Console(file=drawn, width=width), step)

    assert "step 12 of d0 · 6.0 ms · 3 rows, 40 tokens of prompts, 2 of answers" in drawn.getvalue()
    lines = [line.rstrip() for line in drawn.getvalue().splitlines() if "━" in line]
    assert [line.split("━")[0].split()[-3:] for line in lines[1:]] == [
        [name, "d0", took]
        for name, took in zip(
            ("schedule", "orders", "run", "poll", "update"),
            ("0.1", "0.1", "5.0", "0.1", "0.7"),
            strict=True,
        )
    ]
    assert max(map(len, lines)) <= width


def test_a_list_is_truncated_only_on_a_terminal() -> None:
    [trace] = traces_of(an_exported_trace())

    narrow, wide = (drawn(table_of(REQUEST_COLUMNS, [trace], width), width) for width in (80, 160))

    assert "…" not in narrow + wide
    assert max(map(len, narrow.splitlines())) <= 80
    assert "r1" not in narrow.split()
    assert "r1" in wide.split()


def test_export_sends_stored_spans_to_a_collector(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        code = baton(monkeypatch, "trace", "export", "--otlp-endpoint", collector.address)

        spans = collector.trace(f"{TRACE_ID:032x}", lambda spans: len(spans) == 14)

    assert code == 0
    assert {span.service for span in spans} == {"baton-router", "baton-prefill", "baton-decode"}
    assert len([span for span in spans if not span.parent_id]) == 1


def test_the_list_shows_request_ids_as_clients_wrote_them() -> None:
    spans = [
        replace(
            one,
            span=replace(
                one.span,
                attributes={
                    name: "[/b]" if name == names.RESPONSE_ID else value
                    for name, value in one.span.attributes.items()
                },
            ),
        )
        for one in an_exported_trace()
    ]

    assert "[/b]" in drawn(table_of(REQUEST_COLUMNS, traces_of(spans), WIDE), WIDE).split()


@pytest.mark.parametrize("width", [80, 200])
def test_the_waterfall_shows_the_tier_load_of_a_wait(width: int) -> None:
    reported = io.StringIO()

    show_waterfall(Console(file=reported, width=width), a_trace())

    assert "loaded 1 block from host in 4.0 ms, 4 KiB" in reported.getvalue()


def test_export_names_the_reason_of_a_failure_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr(otlp, "TIMEOUT_S", 1)

    code = baton(monkeypatch, "trace", "export", "--otlp-endpoint", endpoint)

    [line] = capsys.readouterr().err.splitlines()
    assert code == 1
    assert line.startswith(f"baton: error: {endpoint}: the collector did not accept the spans: ")
    assert "refused" in line
