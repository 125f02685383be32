"""Options of routing and admission."""

from __future__ import annotations

from typing import Annotated

import typer

ROUTING_PANEL = "Routing"

Policy = Annotated[
    str,
    typer.Option(
        help="Routing policy: prefix_aware, least_loaded, power_of_two or round_robin.",
        rich_help_panel=ROUTING_PANEL,
    ),
]
LocalPrefill = Annotated[
    int,
    typer.Option(
        help="Compute the uncached part of a prompt on the decode node, in small chunks between "
        "decode steps, if it has fewer tokens than this and the prefill node would have to "
        "compute at least twice as many; 0: never.",
        rich_help_panel=ROUTING_PANEL,
    ),
]
KvPulls = Annotated[
    bool,
    typer.Option(
        help="Name a node that has more of a prompt's KV than the node that computes it, which "
        "then pulls the KV from there.",
        rich_help_panel=ROUTING_PANEL,
    ),
]
MaxInFlight = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of requests in flight on the nodes. Default: as many as the decode "
        "nodes' batches hold.",
        rich_help_panel=ROUTING_PANEL,
    ),
]
MaxQueue = Annotated[
    int,
    typer.Option(
        help="Maximum number of queued requests; more are refused (QUEUE_FULL).",
        rich_help_panel=ROUTING_PANEL,
    ),
]
