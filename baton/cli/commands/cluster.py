"""`baton up` and `baton demo`: a whole cluster on this machine."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from baton.cli.command import FILE, SETTINGS
from baton.cli.options.model import ModelOrDemo
from baton.cli.options.network import Host, Port, TraceDir
from baton.cli.signatures import forwarded_arguments, inherit_options, is_set, parameters_of, split
from baton.core.errors import InvalidConfig
from baton.core.options import build_config
from baton.demo_model import demo_model
from baton.node.options import NodeOptions
from baton.router.options import RouterOptions
from baton.rpc.listening import check_port
from baton.rpc.security.tls import TlsConfig
from baton.telemetry.options import default_trace_dir, trace_folder

FOR_TLS = tuple(one.name for one in parameters_of(TlsConfig))
# Options that a command sets itself for each process of the cluster that it starts.
SET_PER_PROCESS = (
    "host",
    "port",
    "model",
    "node_id",
    "prefill_nodes",
    "decode_nodes",
    "parent_pid",
)
GIVEN = (*SET_PER_PROCESS, "drain_timeout_s", *FOR_TLS)  # those of `baton up`
CLUSTER_PANEL = "Cluster"


@inherit_options(NodeOptions, RouterOptions, without=set(GIVEN) - set(FOR_TLS))
def up(
    context: typer.Context,
    model: ModelOrDemo = "",
    prefill: Annotated[
        int, typer.Option(min=0, help="Number of prefill nodes.", rich_help_panel=CLUSTER_PANEL)
    ] = 1,
    decode: Annotated[
        int, typer.Option(min=1, help="Number of decode nodes.", rich_help_panel=CLUSTER_PANEL)
    ] = 1,
    colocated: Annotated[
        bool,
        typer.Option(
            "--colocated",
            help="Start no prefill nodes but as many decode nodes, which also compute the prompts.",
            rich_help_panel=CLUSTER_PANEL,
        ),
    ] = False,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Restart nodes that die: after 1 s, then after longer delays, at most five times "
            "in a row.",
            rich_help_panel=CLUSTER_PANEL,
        ),
    ] = False,
    start_timeout_s: Annotated[
        float,
        typer.Option(
            min=1, help="Seconds that each process may take to load.", rich_help_panel=CLUSTER_PANEL
        ),
    ] = 600.0,
    drain_timeout_s: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds that each process may take to finish running requests.",
            rich_help_panel=CLUSTER_PANEL,
        ),
    ] = 30.0,
    host: Host = "127.0.0.1",
    port: Port = 50051,
    **given: Any,
) -> None:
    """Start a local cluster; Ctrl-C drains it.

    Options of nodes and router are passed on to these processes.
    """
    from baton.cli.commands.up import run_cluster
    from baton.cluster import ClusterOptions

    if given.get("metrics_port"):
        raise InvalidConfig(
            f"--metrics-port {given['metrics_port']} cannot be shared by several processes; 0 "
            "gives each process a free port, which it logs"
        )
    num_nodes = prefill + decode
    model = model or demo_model()
    for_tls, for_nodes, for_router = split(given, TlsConfig, NodeOptions, RouterOptions)
    # Validate the options before three processes load a model.
    nodes = build_config(NodeOptions, {**for_nodes, "model": model})
    if num_nodes > 1:
        nodes.kv_events.check_shared()
    router = build_config(
        RouterOptions, {**for_router, "model": model, "decode_nodes": f"{host}:1"}
    )
    check_port(host, port)
    if router.http_port is not None:
        check_port(router.http_host or host, router.http_port, "--http-port")
    options = ClusterOptions(
        model=model,
        num_prefill=prefill,
        num_decode=decode,
        is_colocated=colocated,
        host=host,
        port=port,
        program_arguments=_same_file(context),
        node_arguments=(
            *_shared_cores(context, num_nodes),
            *shared_memory(context, num_nodes),
            *forwarded_arguments(context, NodeOptions, without=GIVEN),
        ),
        router_arguments=forwarded_arguments(context, RouterOptions, without=GIVEN),
        tls=build_config(TlsConfig, for_tls),
        start_timeout_s=start_timeout_s,
        drain_timeout_s=drain_timeout_s,
        show_logs=True,
    )
    run_cluster(options, num_nodes + 1, nodes.runner, restarts=restart)


def _same_file(context: typer.Context) -> tuple[str, ...]:
    """Pass the settings file on: each process reads its own table."""
    path = context.meta.get(FILE)
    return () if path is None else (f"--config={path}",)


def _shared_cores(context: typer.Context, num_nodes: int) -> tuple[str, ...]:
    """Divide the cores among the nodes, since each would use all of them by default."""
    nodes = context.meta.get(SETTINGS, {}).get("serve", {})
    in_file = any("threads" in nodes.get(role, {}) for role in ("prefill", "decode"))
    if in_file or is_set(context, "threads"):
        return ()
    num_cores = len(os.sched_getaffinity(0))
    return (f"--threads={max(1, num_cores // num_nodes)}",)


def shared_memory(context: typer.Context, num_nodes: int) -> tuple[str, ...]:
    """Divide the free memory among the nodes of this cluster."""
    nodes = context.meta.get(SETTINGS, {}).get("serve", {})
    in_file = any("nodes_per_machine" in nodes.get(role, {}) for role in ("prefill", "decode"))
    if in_file or is_set(context, "nodes_per_machine"):
        return ()
    return (f"--nodes-per-machine={num_nodes}",)


def demo(
    model: ModelOrDemo = "",
    trace_dir: TraceDir = "",
) -> None:
    """Start a cluster of three processes, send prompts and show the traces."""
    from baton.demo import run

    run(model, trace_folder(trace_dir) or default_trace_dir())
