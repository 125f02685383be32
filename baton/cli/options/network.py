"""Options of addresses, and of what processes that listen have in common."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.signatures import option_of
from baton.node.options import NodeOptions
from baton.telemetry.options import TelemetryOptions

Host = Annotated[str, option_of(NodeOptions, "host")]
Port = Annotated[int, option_of(NodeOptions, "port")]
TraceDir = Annotated[str, option_of(TelemetryOptions, "trace_dir")]
ParentPid = Annotated[int, typer.Option(hidden=True, help="End when this process ends.")]
