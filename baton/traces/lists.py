"""Tables of traces for the terminal, one line per trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.table import Table
from rich.text import Text

from baton.telemetry import names
from baton.telemetry.tracing.traces import Trace

WIDE = 110  # minimum width for all columns
NUM_ID_DIGITS = 12  # of a trace id; `show` accepts any prefix


@dataclass(frozen=True, slots=True)
class Column:
    heading: str
    cell: Callable[[Trace], str]
    is_number: bool = True
    is_for_wide: bool = False


def table_of(columns: Sequence[Column], traces: Sequence[Trace], width: int) -> Table:
    shown = [column for column in columns if width >= WIDE or not column.is_for_wide]
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False)
    for column in shown:
        table.add_column(
            column.heading, justify="right" if column.is_number else "left", no_wrap=True
        )
    for trace in traces:
        table.add_row(*(Text(column.cell(trace)) for column in shown))
    return table


def _attribute(name: str) -> Callable[[Trace], str]:
    return lambda trace: _format_value(trace.attribute(name))


def _ms(name: str) -> Callable[[Trace], str]:
    def cell(trace: Trace) -> str:
        value = trace.attribute(name)
        return f"{value * 1000:.1f}" if isinstance(value, float) else ""

    return cell


def _began(trace: Trace) -> str:
    return f"{datetime.fromtimestamp(trace.began_ns / 1e9):%H:%M:%S}"


def _format_value(value: object) -> str:
    return "" if value is None else str(value)


COMMON_COLUMNS = (
    Column("trace", lambda trace: f"{trace.trace_id:032x}"[:NUM_ID_DIGITS], is_number=False),
    Column("began", _began, is_number=False),
)
DURATION = Column("ms", lambda trace: f"{trace.duration_s * 1000:.1f}")
REQUEST_COLUMNS = (
    *COMMON_COLUMNS,
    Column("request", _attribute(names.RESPONSE_ID), is_number=False, is_for_wide=True),
    Column("outcome", lambda trace: trace.outcome, is_number=False),
    Column("prefill", _attribute(names.SERVED), is_number=False),
    DURATION,
    Column("first ms", _ms(names.TIME_TO_FIRST_TOKEN)),
    Column("in", _attribute(names.INPUT_TOKENS)),
    Column("out", _attribute(names.OUTPUT_TOKENS)),
    Column("tries", _attribute(names.ATTEMPTS)),
)
STEP_COLUMNS = (
    *COMMON_COLUMNS,
    Column("node", lambda trace: trace.rows[0].node, is_number=False),
    Column("step", _attribute(names.STEP_NUMBER)),
    DURATION,
    Column("run ms", _ms(names.STEP_RUN)),
    Column("rows", _attribute(names.STEP_ROWS)),
    Column("in", _attribute(names.STEP_PREFILL_TOKENS)),
    Column("out", _attribute(names.STEP_DECODE_TOKENS)),
    Column("traced", lambda trace: str(len(trace.root.links) if trace.root else 0)),
)
