"""`baton doctor`: check whether this machine can run Baton."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from baton.cli.errors import FAILED
from baton.cli.options.model import KvDtype, KvFolder, KvObjectStore
from baton.cli.options.network import Host, TraceDir
from baton.cli.options.output import OUTPUT_PANEL
from baton.cli.show import console
from baton.core.errors import InvalidConfig
from baton.core.options import KV_CACHE, MODEL, NETWORK
from baton.core.units import AUTO, parse_kv_memory
from baton.telemetry.options import trace_folder

if TYPE_CHECKING:
    from baton.doctor.findings import Finding

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
TRANSPORTS = ("nixl", "ucxx")


def doctor(
    model: Annotated[
        str,
        typer.Option(
            help="Also check this model folder; nothing is downloaded.",
            rich_help_panel=MODEL,
        ),
    ] = "",
    kv_cache_memory: Annotated[
        str,
        typer.Option(
            help="KV cache of a node, such as 2GiB; auto: the size `baton up` picks for two nodes.",
            rich_help_panel=KV_CACHE,
        ),
    ] = AUTO,
    kv_cache_dtype: KvDtype = "auto",
    transports: Annotated[
        str,
        typer.Option(
            help="Comma-separated KV transports to test with a transfer; empty: none.",
            rich_help_panel=KV_CACHE,
        ),
    ] = "nixl,ucxx",
    patience_s: Annotated[
        float,
        typer.Option(
            min=0.1, help="Timeout in seconds for each transport.", rich_help_panel=KV_CACHE
        ),
    ] = 10.0,
    kv_folder: KvFolder = "",
    kv_object_store: KvObjectStore = "",
    host: Host = "127.0.0.1",
    ports: Annotated[
        str,
        typer.Option(help="Comma-separated ports that should be free.", rich_help_panel=NETWORK),
    ] = "50051",
    trace_dir: TraceDir = "",
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel=OUTPUT_PANEL),
    ] = False,
) -> None:
    """Check machine, software, KV transports, tiers and model; exit code 1 if a check fails."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # keep standard output for the findings
    checks = _checks(
        model,
        parse_kv_memory(kv_cache_memory),
        kv_cache_dtype,
        _transports(transports),
        patience_s,
        host,
        _ports(ports),
        trace_folder(trace_dir),
        (kv_folder, kv_object_store),
    )
    findings: list[Finding] = []
    with console(stderr=True).status("checking the machine") as status:
        for finding in checks:
            status.update(Text(f"{finding.check}: {finding.found}"))
            findings.append(finding)
    if as_json:
        rows = [{**asdict(one), "status": one.status.value} for one in findings]
        print(json.dumps({"findings": rows}, indent=2))
    else:
        console().print(_table(findings))
    if any(one.status.value == "fail" for one in findings):
        raise typer.Exit(FAILED)


def _checks(
    model: str,
    kv_bytes: int | None,
    kv_cache_dtype: str,
    transports: list[str],
    patience_s: float,
    host: str,
    ports: list[int],
    trace_dir: Path | None,
    tiers: tuple[str, str],
) -> Iterator[Finding]:
    from baton.doctor.folders import check_folders
    from baton.doctor.machine import check_machine
    from baton.doctor.software import check_software, port_findings
    from baton.doctor.tiers import TYPICAL, check_tiers
    from baton.doctor.wire import check_transfer_rate

    yield from check_machine()
    yield from check_software()
    yield from check_folders(trace_dir)
    yield from port_findings(host, ports)
    yield from check_transfer_rate(transports, patience_s)
    if model:
        from baton.doctor.model import check_model_folder, kv_shape_of

        yield from check_model_folder(model, kv_bytes, kv_cache_dtype)
        yield from check_tiers(*tiers, kv_shape_of(model, kv_cache_dtype) or TYPICAL)
    else:
        yield from check_tiers(*tiers)


def _table(findings: list[Finding]) -> Table:
    table = Table()
    for name in ("", "what", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for one in findings:
        status = one.status.value
        table.add_row(Text(status, style=STYLES[status]), one.check, Text(one.found), one.advice)
    return table


def _transports(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TRANSPORTS:
            raise InvalidConfig(f"--transports {name!r}: choose among {', '.join(TRANSPORTS)}")
    return names


def _ports(text: str) -> list[int]:
    try:
        ports = [int(one) for one in text.split(",") if one.strip()]
    except ValueError:
        ports = [-1]
    if not all(0 <= port < 1 << 16 for port in ports):
        raise InvalidConfig(f"--ports {text!r}: write it like 50051,50061, each at most 65535")
    return ports
