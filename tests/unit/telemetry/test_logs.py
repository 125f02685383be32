"""Log lines: text on a terminal, JSON elsewhere."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from baton.core.errors import InvalidConfig
from baton.telemetry.logs import (
    FIELDS,
    TEXT,
    JsonFormatter,
    RepeatFilter,
    RepeatLimit,
    TextFormatter,
    configure_logging,
    log_event,
)


def a_record(message: str = "request ended", **fields: object) -> logging.LogRecord:
    record = logging.LogRecord("router", logging.INFO, __file__, 1, message, (), None)
    record.__dict__[FIELDS] = fields
    return record


def test_a_json_line_is_one_object_with_its_trace() -> None:
    line = JsonFormatter("router").format(a_record(request_id="a\nb", trace_id="ab" * 16))

    assert "\n" not in line
    reported = json.loads(line)
    assert reported["trace_id"] == "ab" * 16
    assert reported["request_id"] == "a\nb"
    assert (reported["level"], reported["role"], reported["logger"]) == ("info", "router", "router")
    assert reported["time"].endswith("Z")


def test_an_exception_keeps_its_traceback_in_one_line() -> None:
    try:
        raise RuntimeError("a bug")
    except RuntimeError:
        record = logging.LogRecord("engine", logging.ERROR, "", 1, "x", (), sys.exc_info())

    line = JsonFormatter("decode").format(record)

    assert "\n" not in line
    assert "RuntimeError: a bug" in json.loads(line)["exception"]


def test_a_text_line_ends_with_the_fields() -> None:
    line = TextFormatter(TEXT).format(a_record(outcome="failed", num_tries=2))

    assert line.endswith("INFO router: request ended outcome=failed num_tries=2")


def test_an_event_omits_unknown_fields(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("baton.router.told")

    with caplog.at_level(logging.INFO):
        log_event(log, logging.INFO, "ended", {"a": None, "b": "", "c": 0}, trace_id="1")
        log_event(log, logging.DEBUG, "not wanted", {})

    [record] = caplog.records
    assert record.__dict__[FIELDS] == {"c": 0, "trace_id": "1"}


@pytest.mark.parametrize(
    ("written_as", "level", "named"),
    [("xml", "info", "log-format"), ("json", "loud", "--log-level")],
)
def test_unknown_settings_are_refused_by_name(written_as: str, level: str, named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        configure_logging("router", written_as, level)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def a_failure(line: int = 1) -> logging.LogRecord:
    return logging.LogRecord("asyncio", logging.ERROR, __file__, line, "accept failed", (), None)


def test_repeated_lines_are_suppressed_and_counted_in_the_next_one() -> None:
    clock = Clock()
    repeats = RepeatFilter(warning=RepeatLimit(burst=3, per_s=1.0), clock=clock)

    passed = [repeats.filter(a_failure()) for _ in range(1000)]
    clock.now += 1.0
    next_one = a_failure()

    assert passed == [True] * 3 + [False] * 997
    assert repeats.filter(next_one)
    assert next_one.__dict__[FIELDS] == {"num_suppressed": 997}


def test_lines_of_other_kinds_are_not_suppressed_with_a_repeated_one() -> None:
    repeats = RepeatFilter(warning=RepeatLimit(burst=1, per_s=1.0), clock=Clock())

    passed = [repeats.filter(a_failure(line)) for line in (1, 1, 2)]

    assert passed == [True, False, True]


def test_a_process_suppresses_repeated_lines_of_every_logger() -> None:
    stream = io.StringIO()
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        configure_logging("router", "json", stream=stream)
        for _ in range(1000):
            logging.getLogger("asyncio").error("socket.accept() out of system resource")
    finally:
        root.handlers = before

    assert len(stream.getvalue().splitlines()) < 100
