"""One line per event: for people on a terminal, JSON elsewhere. Prompts and answers are in none."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from engine.errors import InvalidConfig
from telemetry.spans import AttributeValue

FORMATS = ("auto", "text", "json")
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Libraries say more than anybody wants to know; debug is of our own rooms.
ROOMS = (
    *("baton", "router", "prefill_node", "decode_node"),
    *("serving", "telemetry", "engine", "kv_transfer"),
)
FIELDS = "fields"

Fields = Mapping[str, AttributeValue | None]


def log_event(
    log: logging.Logger, level: int, event: str, fields: Fields, trace_id: str = ""
) -> None:
    """What is not known is left out."""
    if log.isEnabledFor(level):
        told = {name: value for name, value in fields.items() if value not in (None, "")}
        if trace_id:
            told["trace_id"] = trace_id
        log.log(level, "%s", event, extra={FIELDS: told})


def start_logging(
    role: str, written_as: str = "auto", level: str = "info", stream: TextIO | None = None
) -> None:
    """Once per process. Raises InvalidConfig."""
    if written_as not in FORMATS:
        raise InvalidConfig(f"--log-format {written_as!r}: choose one of {', '.join(FORMATS)}")
    if level not in LEVELS:
        raise InvalidConfig(f"--log-level {level!r}: choose one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    is_text = handler.stream.isatty() if written_as == "auto" else written_as == "text"
    handler.setFormatter(TextFormatter(TEXT) if is_text else JsonFormatter(role))
    logging.basicConfig(level=max(logging.INFO, LEVELS[level]), handlers=[handler])
    for room in ROOMS:
        logging.getLogger(room).setLevel(LEVELS[level])


class TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        fields: Fields = getattr(record, FIELDS, {})
        told = "".join(f" {name}={value}" for name, value in fields.items())
        return super().formatMessage(record) + told


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
