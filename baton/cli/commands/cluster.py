"""`baton up` and `baton demo`: a whole cluster on this machine."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.command import FILE, SETTINGS
from baton.cli.options.model import Host, ModelOrDemo, Port, TraceDir
from baton.cli.signatures import forwarded_arguments, inherit_options, is_set, make
from baton.core.errors import InvalidConfig
from baton.core.options import Option, options_of
from baton.demo_model import demo_model
from baton.node.options import NodeOptions
from baton.router.options import RouterOptions
from baton.rpc.listening import check_port
from baton.rpc.security.tls import TlsConfig
from baton.telemetry.options import default_trace_dir, trace_folder

if TYPE_CHECKING:
    from baton.cluster import ClusterOptions

FOR_TLS = tuple(options_of(TlsConfig))
# Options that a command sets itself for each process of the cluster that it starts.
SET_PER_PROCESS = ("host", "port", "model", "node_id", "prefill_nodes", "decode_nodes")
GIVEN = (*SET_PER_PROCESS, "drain_timeout_s", *FOR_TLS)  # those of `baton up`
ONLY_OF_PROCESSES = ("node_id", "prefill_nodes", "decode_nodes")
CLUSTER = "Cluster"


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """Nodes of a cluster that a command starts."""

    prefill: Annotated[int, Option("Number of prefill nodes.", CLUSTER, at_least=0)] = 1
    decode: Annotated[int, Option("Number of decode nodes.", CLUSTER, at_least=1)] = 1
    colocated: Annotated[
        bool,
        Option(
            "Start no prefill nodes but as many decode nodes, which also compute the prompts.",
            CLUSTER,
            flags=("--colocated",),
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of `baton up` besides those that it passes on."""

    model: ModelOrDemo = ""
    size: ClusterSize = ClusterSize()
    restart: Annotated[
        bool,
        Option(
            "Restart nodes that die: after 1 s, then after longer delays, at most five times in a "
            "row.",
            CLUSTER,
            flags=("--restart",),
        ),
    ] = False
    start_timeout_s: Annotated[
        float, Option("Seconds that each process may take to load.", CLUSTER, at_least=1)
    ] = 600.0
    drain_timeout_s: Annotated[
        float,
        Option(
            "Seconds that each process may take to finish running requests.", CLUSTER, at_least=0
        ),
    ] = 30.0
    host: Host = "127.0.0.1"
    port: Port = 50051


@inherit_options(UpOptions, NodeOptions, RouterOptions, without=ONLY_OF_PROCESSES)
def up(context: typer.Context, **given: Any) -> None:
    """Start a local cluster; Ctrl-C drains it.

    Options of nodes and router are passed on to these processes.
    """
    from baton.cli.commands.up import run_cluster

    if given.get("metrics_port"):
        raise InvalidConfig(
            f"--metrics-port {given['metrics_port']} cannot be shared by several processes; 0 "
            "gives each process a free port, which it logs"
        )
    options: UpOptions = make(UpOptions, given)
    size, host = options.size, options.host
    # Validate the options before three processes load a model.
    given["model"] = options.model or demo_model()
    nodes = make(NodeOptions, given)
    router = make(RouterOptions, given | {"model": [given["model"]], "decode_nodes": f"{host}:1"})
    if size.prefill + size.decode > 1:
        nodes.kv_events.check_shared()
    check_port(host, options.port)
    if router.http_port is not None:
        check_port(router.http_host or host, router.http_port, "--http-port")
    cluster = replace(
        cluster_options(context, given["model"], size, without=GIVEN),
        host=host,
        port=options.port,
        tls=make(TlsConfig, given),
        start_timeout_s=options.start_timeout_s,
        drain_timeout_s=options.drain_timeout_s,
        show_logs=True,
    )
    run_cluster(cluster, nodes.runner, restarts=options.restart)


def cluster_options(
    context: typer.Context, model: str, size: ClusterSize, *, without: Collection[str]
) -> ClusterOptions:
    """Return a cluster whose processes get the options that the command was given.

    Each process reads its own table of the settings file.
    """
    from baton.cluster import ClusterOptions

    path = context.meta.get(FILE)
    return ClusterOptions(
        model=model,
        num_prefill=size.prefill,
        num_decode=size.decode,
        is_colocated=size.colocated,
        program_arguments=() if path is None else (f"--config={path}",),
        node_arguments=(
            *_shares(context, size.prefill + size.decode),
            *forwarded_arguments(context, NodeOptions, without=without),
        ),
        router_arguments=forwarded_arguments(context, RouterOptions, without=without),
    )


def _shares(context: typer.Context, num_nodes: int) -> Iterator[str]:
    """Divide cores and memory among the nodes: by default, each would use all of them."""
    tables = context.meta.get(SETTINGS, {}).get("serve", {})
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_nodes)
    for name, share in (("threads", num_threads), ("nodes_per_machine", num_nodes)):
        in_file = any(name in tables.get(role, {}) for role in ("prefill", "decode"))
        if not in_file and not is_set(context, name):
            yield f"{options_of(NodeOptions)[name].flag}={share}"


def demo(
    model: ModelOrDemo = "",
    trace_dir: TraceDir = "",
) -> None:
    """Start a cluster of three processes, send prompts and show the traces."""
    from baton.demo import run

    run(model, trace_folder(trace_dir) or default_trace_dir())
