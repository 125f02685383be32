"""`baton bench serve`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.bench.serve.load import LOAD, ServeLoad, read_prompts
from baton.cli.commands.bench.progress import requests_bar
from baton.cli.commands.bench.serve_tables import name_of_run, show_runs
from baton.cli.commands.cluster import SET_PER_PROCESS, shared_memory
from baton.cli.options.output import OUTPUT_PANEL, JsonFile, check_creatable_folder
from baton.cli.options.security import ClientTokenFile, client_tls
from baton.cli.show import console, show_table, write_json
from baton.cli.signatures import forwarded_arguments, inherit_options, parameters_of, split
from baton.core.errors import InvalidConfig
from baton.core.options import build_config
from baton.node.options import NodeOptions
from baton.router.options import RouterOptions

if TYPE_CHECKING:
    from baton.bench.serve.benchmark import (
        Connect,
        MeasuredRun,
        ServeBench,
        ServeProgress,
    )
    from baton.cluster import ClusterOptions

TARGET_PANEL = "Target"
DISAGGREGATED, COLOCATED = "disaggregated", "colocated"
UNFIT = {*SET_PER_PROCESS, "served_model_name", "tls_client_ca"}


def _load(help: str, **given: Any) -> Any:  # noqa: A002
    return typer.Option(help=help, rich_help_panel=LOAD, **given)


def _target(help: str, *names: str, **given: Any) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, rich_help_panel=TARGET_PANEL, **given)


@inherit_options(
    ServeLoad,
    client_tls,
    NodeOptions,
    RouterOptions,
    without=UNFIT,
)
def serve(
    context: typer.Context,
    address: Annotated[
        str, _target("host:port of a running router (gRPC).", "--address", "--router")
    ] = "",
    model: Annotated[str, _target("Without --address: start a cluster with this model.")] = "",
    prefill: Annotated[int, _target("Prefill nodes of the cluster.", min=0)] = 1,
    decode: Annotated[int, _target("Decode nodes of the cluster.", min=1)] = 1,
    colocated: Annotated[
        bool, _target("Start as many nodes that prefill and decode.", "--colocated")
    ] = False,
    compare: Annotated[
        str, _target("colocated: compare with a cluster of such nodes, alternately.")
    ] = "",
    rounds: Annotated[int, _target("Rounds of a comparison.", min=1)] = 3,
    token_file: ClientTokenFile = None,
    rates: Annotated[str, _load("Run once at each of these rates, such as 1,2,4.")] = "",
    concurrency: Annotated[
        int | None,
        _load("Maximum requests in flight; waiting for a slot counts as latency.", min=1),
    ] = None,
    prompts: Annotated[
        Path | None, _load('JSONL: {"prompt": text or ids, "max_tokens": …, "at_s": …}.')
    ] = None,
    slo: Annotated[
        str, _load("Objectives of a good answer: ttft, itl (p99 of the answer), tpot, e2e.")
    ] = "ttft=500ms,itl=50ms",
    json_file: JsonFile = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="Draw plots to this folder.",
            callback=check_creatable_folder,
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    **given: Any,
) -> None:
    """Send an open-loop load at given rates and report latency, throughput and goodput.

    The target is a running router, or a cluster that is started with the given options of nodes
    and router. Ctrl-C ends the run and reports the requests completed so far.
    """
    from baton.bench.plotting import need_matplotlib
    from baton.bench.serve.benchmark import ServeBench
    from baton.bench.serve.figures import parse_slo

    for_load, for_tls, for_nodes = split(given, ServeLoad, client_tls, NodeOptions)
    _check_target(address, model, compare)
    if plots is not None:
        need_matplotlib()
    what = ServeBench(
        load=build_config(ServeLoad, for_load),
        rates=_rates(rates),
        slo=parse_slo(slo),
        concurrency=concurrency,
        num_rounds=rounds if compare else 1,
        lines=read_prompts(prompts) if prompts is not None else (),
    )
    clusters = {}
    if not address:
        selected = [COLOCATED] if colocated else [DISAGGREGATED]
        # Validate the options before the start.
        build_config(NodeOptions, {**for_nodes, "model": model})
        clusters = _clusters(context, model, prefill, decode)
        clusters = {name: clusters[name] for name in (clusters if compare else selected)}
    measured = _run(what, address, clusters, _connect(for_tls, token_file))
    _report(measured, what, is_comparison=bool(compare), json_file=json_file, plots=plots)


def _check_target(address: str, model: str, compare: str) -> None:
    if bool(address) == bool(model):
        raise InvalidConfig(
            "pass --address host:port of a running router, or --model to start a cluster"
        )
    if compare not in ("", COLOCATED):
        raise InvalidConfig(f"--compare {compare}: only {COLOCATED} is supported")
    if compare and address:
        raise InvalidConfig("--compare starts both clusters itself: pass --model, not --address")


def _rates(written: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(one) for one in filter(None, written.split(",")))
    except ValueError:
        raise InvalidConfig(f"--rates {written}: write it like 1,2,4") from None
    if any(not rate > 0 for rate in rates):
        raise InvalidConfig(f"--rates {written}: every rate must be above 0")
    return rates


def _clusters(
    context: typer.Context, model: str, prefill: int, decode: int
) -> dict[str, ClusterOptions]:
    """Return both kinds of cluster, with equal numbers of processes and threads."""
    from baton.cluster import ClusterOptions

    without = {*SET_PER_PROCESS, *(one.name for one in parameters_of(client_tls))}
    chosen = forwarded_arguments(context, NodeOptions, without=without)
    threads = max(1, len(os.sched_getaffinity(0)) // (prefill + decode))
    has_threads = any(one.startswith("--threads") for one in chosen)
    return {
        name: ClusterOptions(
            model=model,
            num_prefill=prefill,
            num_decode=decode,
            is_colocated=is_both,
            node_arguments=(
                *([] if has_threads else [f"--threads={threads}"]),
                *shared_memory(context, prefill + decode),
                *chosen,
            ),
            router_arguments=forwarded_arguments(context, RouterOptions, without=without),
        )
        for name, is_both in ((DISAGGREGATED, False), (COLOCATED, True))
    }


def _connect(for_tls: dict[str, Any], token_file: Path | None) -> Connect:
    """Return a factory of clients that do not retry: failures are part of the measurement."""
    from baton.client import AsyncClient, Retries
    from baton.rpc.security.token import read_tokens

    tls = client_tls(**for_tls)
    token = None if token_file is None else read_tokens(token_file)[0]
    return lambda address: AsyncClient(
        address, tls=tls, token=token, retries=Retries(max_attempts=1)
    )


def _run(
    what: ServeBench, address: str, clusters: dict[str, ClusterOptions], connect: Connect
) -> list[MeasuredRun]:
    from baton.bench.serve.benchmark import bench_clusters, bench_router

    with requests_bar() as update:

        def on_progress(now: ServeProgress) -> None:
            update(f"{now.name}, {now.rate:g}/s", now.num_ended, now.num_planned)

        if address:
            return bench_router(what, address, connect, on_progress)
        return bench_clusters(what, clusters, connect, on_progress)


def _report(
    measured: Sequence[MeasuredRun],
    what: ServeBench,
    *,
    is_comparison: bool,
    json_file: Path | None,
    plots: Path | None,
) -> None:
    from baton.bench.serve.benchmark import compare
    from baton.bench.serve.plots import draw

    if any(one.figures.is_cut_short for one in measured) or not measured:
        console(stderr=True).print("interrupted: these are the requests completed so far")
    show_runs(measured)
    ratios = compare(measured, DISAGGREGATED, COLOCATED) if is_comparison else []
    if ratios:
        title = (
            f"{DISAGGREGATED} (first) over {COLOCATED} (second): medians and ratios over the rounds"
        )
        show_table(title, [asdict(one) for one in ratios])
    values = {
        "what": asdict(what),
        "runs": [name_of_run(one) | asdict(one.figures) for one in measured],
        "ratios": [asdict(one) for one in ratios],
    }
    write_json(json_file, values)
    for path in draw(measured, plots) if plots is not None else ():
        print(path)
