"""Logging, one line per event: text on a terminal, JSON elsewhere. No prompts, no answers."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TextIO

from baton.core.errors import InvalidConfig
from baton.telemetry.tracing.spans import AttributeValue

FORMATS = ("auto", "text", "json")
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# The debug level applies to this package, not to libraries.
PACKAGE = "baton"
FIELDS = "fields"
NUM_SUPPRESSED = "num_suppressed"
MAX_KINDS = 512

Fields = Mapping[str, AttributeValue | None]


def log_event(
    log: logging.Logger, level: int, event: str, fields: Fields, trace_id: str = ""
) -> None:
    """Log an event with its fields; those that are None or empty are omitted."""
    if log.isEnabledFor(level):
        known = {name: value for name, value in fields.items() if value not in (None, "")}
        if trace_id:
            known["trace_id"] = trace_id
        log.log(level, "%s", event, extra={FIELDS: known})


def configure_logging(
    role: str, written_as: str = "auto", level: str = "info", stream: TextIO | None = None
) -> None:
    """Set up logging, once per process. Raises InvalidConfig."""
    if written_as not in FORMATS:
        raise InvalidConfig(f"log-format {written_as!r}: choose one of {', '.join(FORMATS)}")
    if level not in LEVELS:
        raise InvalidConfig(f"--log-level {level!r}: choose one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    is_text = handler.stream.isatty() if written_as == "auto" else written_as == "text"
    handler.setFormatter(TextFormatter(TEXT) if is_text else JsonFormatter(role))
    handler.addFilter(RepeatFilter())
    logging.basicConfig(level=max(logging.INFO, LEVELS[level]), handlers=[handler])
    logging.getLogger(PACKAGE).setLevel(LEVELS[level])


@dataclass(frozen=True, slots=True)
class RepeatLimit:
    """Token bucket parameters: burst of lines of one kind, and lines per second after it."""

    burst: int
    per_s: float


# The limit for info allows a line per request; repeated warnings add little.
INFO_LIMIT, WARNING_LIMIT = RepeatLimit(1000, 100.0), RepeatLimit(20, 1.0)


@dataclass(slots=True)
class _TokenBucket:
    num_left: float
    filled_s: float
    num_suppressed: int = 0

    def take(self, limit: RepeatLimit, now: float) -> bool:
        self.num_left = min(limit.burst, self.num_left + (now - self.filled_s) * limit.per_s)
        self.filled_s = now
        if self.num_left < 1:
            self.num_suppressed += 1
            return False
        self.num_left -= 1
        return True


class RepeatFilter(logging.Filter):
    """Rate limit for lines of one kind, that is, of one logger, level and source line.

    The next line of the kind has the number of suppressed lines. Thread-safe.
    """

    def __init__(
        self,
        info: RepeatLimit = INFO_LIMIT,
        warning: RepeatLimit = WARNING_LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._info = info
        self._warning = warning
        self._clock = clock
        self._bucket_by_kind: OrderedDict[Hashable, _TokenBucket] = OrderedDict()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        limit = self._warning if record.levelno >= logging.WARNING else self._info
        kind = (record.name, record.levelno, record.pathname, record.lineno)
        with self._lock:
            bucket = self._bucket_of(kind, limit)
            if not bucket.take(limit, self._clock()):
                return False
            num_suppressed, bucket.num_suppressed = bucket.num_suppressed, 0
        if num_suppressed:
            fields: Fields = getattr(record, FIELDS, {})
            setattr(record, FIELDS, {**fields, NUM_SUPPRESSED: num_suppressed})
        return True

    def _bucket_of(self, kind: Hashable, limit: RepeatLimit) -> _TokenBucket:
        bucket = self._bucket_by_kind.get(kind)
        if bucket is None:
            bucket = self._bucket_by_kind[kind] = _TokenBucket(limit.burst, self._clock())
            if len(self._bucket_by_kind) > MAX_KINDS:
                self._bucket_by_kind.popitem(last=False)
        self._bucket_by_kind.move_to_end(kind)
        return bucket


class TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        fields: Fields = getattr(record, FIELDS, {})
        text = "".join(f" {name}={value}" for name, value in fields.items())
        return super().formatMessage(record) + text


class JsonFormatter(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        whole_s = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{whole_s}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "role": self._role,
            "pid": os.getpid(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


@cache
def exporter_log() -> ExporterLog:
    """Return what keeps the exporters' log lines. From then on, they are not logged."""
    return ExporterLog()


class ExporterLog(logging.Handler):
    """Keeps the last log line of the SDK's exporters, which return no reason of a failure."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        logger = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self._text = record.getMessage()

    @property
    def reason(self) -> str:
        return self._text.partition("error details: ")[2] or self._text
