"""Options of addresses, ports and timeouts."""

from __future__ import annotations

from typing import Annotated

import typer

NETWORK_PANEL = "Network"

Host = Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=NETWORK_PANEL)]
Port = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        help="Port to listen on; 0 takes a free port.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
HttpPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port of the OpenAI-compatible HTTP API; 0 takes a free port. Default: no HTTP.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
HttpHost = Annotated[
    str,
    typer.Option(
        help="Address to serve HTTP on. Default: that of --host.", rich_help_panel=NETWORK_PANEL
    ),
]
NodePatience = Annotated[
    float,
    typer.Option(
        help="Seconds that a request waits for a decode node if there is none; 0: fail at once.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
StuckAfter = Annotated[
    float,
    typer.Option(
        help="Seconds without a finished step or layer after which the node is not ready.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
DrainTimeout = Annotated[
    float,
    typer.Option(
        min=0,
        help="Seconds to finish running requests after SIGTERM; the process then ends at once.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
NodeName = Annotated[
    str,
    typer.Option(help="Name of the node. Default: a random name.", rich_help_panel=NETWORK_PANEL),
]
Nodes = Annotated[
    str,
    typer.Option(
        help="Comma-separated node addresses: host:port, dns:///name:port (each address behind "
        "the name is a node) or file:///path (a list of host:port lines).",
        rich_help_panel=NETWORK_PANEL,
    ),
]
FindEvery = Annotated[
    float,
    typer.Option(
        help="Seconds between two resolutions of names and reads of lists.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
ParentPid = Annotated[int, typer.Option(hidden=True, help="End when this process ends.")]
