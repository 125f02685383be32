"""`baton doctor`: check whether this machine can run Baton."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.errors import FAILED
from baton.cli.options.model import Host, KernelChoice, KvDtype, KvFolder, KvObjectStore
from baton.cli.show import console
from baton.cli.signatures import inherit_options, option_of
from baton.core.errors import InvalidConfig
from baton.core.options import KV_CACHE, MODEL, NETWORK, OUTPUT, Option, build_config
from baton.core.units import AUTO, parse_kv_memory
from baton.doctor.collectives import check_collectives
from baton.doctor.findings import Finding, check_folders
from baton.doctor.machine import check_machine
from baton.kv_transfer.external_kv import FILE, OBJECT
from baton.node.adapters.config import AdapterConfig
from baton.telemetry.options import TelemetryOptions

if TYPE_CHECKING:
    from rich.table import Table

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
TRANSPORTS = ("nixl", "ucxx")


def _names(written: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, written.split(","))))


def _transports(written: str) -> tuple[str, ...]:
    names = _names(written)
    for name in names:
        if name not in TRANSPORTS:
            raise InvalidConfig(f"--transports {name!r}: choose among {', '.join(TRANSPORTS)}")
    return names


def _ports(written: str) -> tuple[int, ...]:
    try:
        ports = tuple(int(one) for one in _names(written))
    except ValueError:
        ports = (-1,)
    if not all(0 <= port < 1 << 16 for port in ports):
        raise InvalidConfig(f"--ports {written!r}: write it like 50051,50061, each at most 65535")
    return ports


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Optional checks, besides those of the machine and its software."""

    model: Annotated[str, Option("Also check this model folder; nothing is downloaded.", MODEL)] = (
        ""
    )
    kv_bytes: Annotated[
        int | None,
        Option(
            "KV cache of a node, such as 2GiB; auto: the size `baton up` picks for two nodes.",
            KV_CACHE,
            name="kv_cache_memory",
            default=AUTO,
            parse=parse_kv_memory,
        ),
    ] = None
    kv_cache_dtype: KvDtype = "auto"
    kernels: KernelChoice = "auto"
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    transports: Annotated[
        tuple[str, ...],
        Option(
            "Comma-separated KV transports to test with a transfer; empty: none.",
            KV_CACHE,
            default="nixl,ucxx",
            parse=_transports,
        ),
    ] = TRANSPORTS
    patience_s: Annotated[
        float, Option("Timeout in seconds for each transport.", KV_CACHE, at_least=0.1)
    ] = 10.0
    kv_folder: KvFolder = ""
    kv_object_store: KvObjectStore = ""
    host: Host = "127.0.0.1"
    ports: Annotated[
        tuple[int, ...],
        Option(
            "Comma-separated ports that should be free.",
            NETWORK,
            default="50051,8000",
            parse=_ports,
        ),
    ] = (50051, 8000)
    trace_dir: Annotated[Path | None, option_of(TelemetryOptions, "trace_dir")] = None


@inherit_options(DoctorOptions)
def doctor(
    as_json: Annotated[
        bool, Option("Print JSON instead of a table.", OUTPUT, flags=("--json",))
    ] = False,
    **given: Any,
) -> None:
    """Check machine, software, KV transports, tiers and model; exit code 1 if a check fails."""
    from rich.text import Text

    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # keep standard output for the findings
    options = build_config(DoctorOptions, given)
    findings: list[Finding] = []
    with console(stderr=True).status("checking the machine") as status:
        for finding in _checks(options):
            status.update(Text(f"{finding.check}: {finding.found}"))
            findings.append(finding)
    if as_json:
        rows = [{**asdict(one), "status": one.status.value} for one in findings]
        print(json.dumps({"findings": rows}, indent=2))
    else:
        console().print(_table(findings))
    if any(one.status.value == "fail" for one in findings):
        raise typer.Exit(FAILED)


def _checks(options: DoctorOptions) -> Iterator[Finding]:
    from baton.doctor.model import NO_ADAPTERS, AdapterRoom, check_model_folder, kv_shape_of
    from baton.doctor.software import check_software, port_findings
    from baton.doctor.tiers import TYPICAL, check_tiers
    from baton.doctor.wire import check_transfer_rate

    yield from check_machine()
    yield from check_software()
    yield from check_collectives()
    yield from check_folders(options.trace_dir)
    yield from port_findings(options.host, options.ports)
    yield from check_transfer_rate(options.transports, options.patience_s)
    kv = TYPICAL
    if options.model:
        config, room = options.adapters, NO_ADAPTERS
        if config.are_served:
            room = AdapterRoom(config.num_places, config.max_lora_rank, options.kernels)
        yield from check_model_folder(options.model, options.kv_bytes, options.kv_cache_dtype, room)
        kv = kv_shape_of(options.model, options.kv_cache_dtype) or kv
    yield from check_tiers({FILE: options.kv_folder, OBJECT: options.kv_object_store}, kv)


def _table(findings: list[Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in ("", "what", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for one in findings:
        status = one.status.value
        table.add_row(Text(status, style=STYLES[status]), one.check, Text(one.found), one.advice)
    return table
