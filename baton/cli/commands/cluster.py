"""`baton up` and `baton demo`: a whole cluster on this machine."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.command import FILE, SETTINGS
from baton.cli.options.model import Host, ModelOrDemo, Port, TraceDir
from baton.cli.signatures import forwarded_arguments, inherit_options, is_set, make
from baton.core.errors import InvalidConfig
from baton.core.options import MACHINE, MODEL, NETWORK, SECURITY, TELEMETRY, Option, options_of
from baton.demo_model import demo_model
from baton.engine.runner.config import RunnerConfig
from baton.fork_server import ForkServer
from baton.imports import quick_imports
from baton.node.options import NodeOptions
from baton.router.model_options import ByName, parse_models
from baton.router.options import RouterOptions
from baton.rpc.listening import MAX_PORT, check_port
from baton.rpc.security.tls import TlsConfig
from baton.telemetry.options import default_trace_dir, trace_folder

if TYPE_CHECKING:
    from baton.cluster import ClusterOptions

FOR_TLS = tuple(options_of(TlsConfig))
# Options that a command sets itself for each process of the cluster that it starts.
LISTS = ("prefill_nodes", "decode_nodes", "encode_nodes")
SET_PER_PROCESS = ("host", "port", "model", "node_id", *LISTS)
GIVEN = (*SET_PER_PROCESS, "http_port", "drain_timeout_s", *FOR_TLS)  # those of `baton up`
ONLY_OF_PROCESSES = ("node_id", *LISTS)
CLUSTER = "Cluster"
# Panels whose options apply to any model; the others of `baton up` are for --model.
OF_ANY_MODEL = (MACHINE, NETWORK, SECURITY, TELEMETRY)
POOLING = "pooling"
NO_TABLES: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """Nodes of a cluster that a command starts."""

    prefill: Annotated[int, Option("Number of prefill nodes.", CLUSTER, at_least=0)] = 1
    decode: Annotated[int, Option("Number of decode nodes.", CLUSTER, at_least=1)] = 1
    encode: Annotated[
        int,
        Option(
            "Number of encode nodes, which encode pictures for the nodes that compute prompts.",
            CLUSTER,
            at_least=0,
        ),
    ] = 0
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
    embedders: Annotated[
        tuple[ByName, ...],
        Option(
            "Further model, which embeds or scores texts on a node of its own; can be repeated, "
            "NAME=FOLDER names it. --pooling is then for these models, other options of models "
            "for --model.",
            MODEL,
            name="embed",
            kind=list[str],
            parse=partial(parse_models, flag="--embed"),
        ),
    ] = ()
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
        float,
        Option("Seconds that each process may take to load.", CLUSTER, at_least=1, is_setting=True),
    ] = 600.0
    drain_timeout_s: Annotated[
        float,
        Option(
            "Seconds that each process may take to finish running requests.", CLUSTER, at_least=0
        ),
    ] = 30.0
    host: Host = "127.0.0.1"
    port: Port = 50051
    http_port: Annotated[
        int,
        Option(
            "Port of the HTTP APIs (OpenAI, Anthropic); 0 serves no HTTP.",
            NETWORK,
            at_least=0,
            at_most=MAX_PORT,
        ),
    ] = 8000


@inherit_options(UpOptions, NodeOptions, RouterOptions, without=ONLY_OF_PROCESSES)
def up(context: typer.Context, **given: Any) -> None:
    """Start a local cluster; Ctrl-C drains it.

    Options of nodes and router are passed on to these processes. --embed adds models that embed
    or score texts.
    """
    if given.get("metrics_port"):
        raise InvalidConfig(
            f"--metrics-port {given['metrics_port']} cannot be shared by several processes; 0 "
            "gives each process a free port, which it logs"
        )
    options: UpOptions = make(UpOptions, given)
    size, host = options.size, options.host
    pooling = given[POOLING]
    if options.embedders:
        given[POOLING] = "auto"
    # Validate the options before three processes load a model.
    given["model"] = options.model or demo_model()
    nodes = make(NodeOptions, given)
    http_port = _http_port(context, options.http_port)
    of_router = {"decode_nodes": f"{host}:1", "http_port": http_port}
    router = make(RouterOptions, given | {"model": [given["model"]]} | of_router)
    if size.prefill + size.decode + size.encode > 1:
        for part in nodes.parts:
            part.check_shared()
    check_port(host, options.port)
    if http_port is not None:
        check_port(router.http_host or host, http_port, "--http-port", zero="none")
    with closing(ForkServer()) as forks:
        forks.open()  # it imports at the same time as this process
        with quick_imports():
            from baton.cli.commands.up import run_cluster

        cluster = cluster_options(context, given["model"], size, options.embedders, without=GIVEN)
        http = () if http_port is None else ("--http-port", str(http_port))
        cluster = replace(
            cluster,
            router_arguments=(*cluster.router_arguments, *http),
            model_name=nodes.model_name,
            host=host,
            port=options.port,
            tls=make(TlsConfig, given),
            start_timeout_s=options.start_timeout_s,
            drain_timeout_s=options.drain_timeout_s,
            show_logs=True,
        )
        run_cluster(
            cluster,
            nodes.runner,
            [RunnerConfig(one.value, pooling=pooling) for one in options.embedders],
            forks=forks,
            restarts=options.restart,
            token_file=given["token_file"],
        )


def _http_port(context: typer.Context, port: int) -> int | None:
    """Return the port of HTTP, or None without. The settings file may set it for routers alone."""
    router = context.meta.get(SETTINGS, {}).get("serve", {}).get("router", {})
    in_file: int | None = router.get("http_port")
    return (port or None) if in_file is None or is_set(context, "http_port") else in_file


def cluster_options(
    context: typer.Context,
    model: str,
    size: ClusterSize,
    embedders: Sequence[ByName] = (),
    *,
    without: Collection[str],
) -> ClusterOptions:
    """Return a cluster whose processes get the options that the command was given.

    Each process but those of embedders reads its own table of the settings file.
    """
    from baton.cluster import ClusterOptions, FurtherModel

    path = context.meta.get(FILE)
    num_generating = size.prefill + size.decode + size.encode
    num_ranks = context.params.get("tensor_parallel_size", 1)
    shares = partial(
        _shares,
        context,
        num_nodes=num_generating + len(embedders),
        num_processes=num_generating * num_ranks + len(embedders),
    )
    of_embedders = {
        name for name, one in options_of(NodeOptions).items() if one.option.panel in OF_ANY_MODEL
    }
    of_others = options_of(NodeOptions).keys() - of_embedders - {POOLING}
    own = {*without, POOLING} if embedders else without
    return ClusterOptions(
        model=model,
        num_prefill=size.prefill,
        num_decode=size.decode,
        num_encode=size.encode,
        is_colocated=size.colocated,
        program_arguments=() if path is None else (f"--config={path}",),
        node_arguments=(
            *shares(tables=context.meta.get(SETTINGS, {}).get("serve", {})),
            *forwarded_arguments(context, NodeOptions, without=own),
        ),
        embedders=tuple(FurtherModel(one.value, one.name) for one in embedders),
        embedder_arguments=(
            *shares(tables=NO_TABLES),
            *forwarded_arguments(context, NodeOptions, without={*without, *of_others}),
        ),
        router_arguments=forwarded_arguments(context, RouterOptions, without=without),
    )


def _shares(
    context: typer.Context, *, num_nodes: int, num_processes: int, tables: Mapping[str, Any]
) -> Iterator[str]:
    """Divide cores and memory among the nodes: by default, each would use all of them.

    `tables` of the settings file, by role, may set shares of their own.
    """
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
    for name, share in (("threads", num_threads), ("nodes_per_machine", num_nodes)):
        in_file = any(name in tables.get(role, {}) for role in ("prefill", "decode", "encode"))
        if not in_file and not is_set(context, name):
            yield f"{options_of(NodeOptions)[name].flag}={share}"


def demo(
    model: ModelOrDemo = "",
    trace_dir: TraceDir = "",
) -> None:
    """Start a cluster of three processes, send prompts and show the traces."""
    from baton.demo import run

    run(model, trace_folder(trace_dir) or default_trace_dir())
