"""`baton bench`: a load on a running cluster, as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.bench.benchmark import MeasuredRun, bench_clusters, bench_router
from baton.bench.benchmark import compare as compared
from baton.bench.load import TARGET, ServeBench
from baton.bench.plots import draw, need_matplotlib
from baton.cli.command import CommandGroup, unwrap
from baton.cli.commands.cluster import SET_PER_PROCESS, ClusterSize, cluster_options
from baton.cli.options.connection import client_tls, connect_to_measure
from baton.cli.options.output import JsonFile, check_creatable_folder
from baton.cli.show import console, requests_bar, show_table, write_json
from baton.cli.signatures import inherit_options, make, parameters_of
from baton.core.errors import InvalidConfig
from baton.core.options import OUTPUT, Option
from baton.core.units import format_bytes
from baton.node.options import NodeOptions
from baton.router.options import RouterOptions
from baton.rpc.process_end import exit_on_sigterm

if TYPE_CHECKING:
    from baton.bench.figures import ServeFigures
    from baton.cluster import ClusterOptions

DISAGGREGATED, COLOCATED = "disaggregated", "colocated"
UNFIT = {*SET_PER_PROCESS, "served_model_name", "tls_client_ca"}


class BenchGroup(CommandGroup):
    """Group whose refusal of an unknown command names the benchmarks of the repository."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except typer.TyperException as error:
            error.message += " Research benchmarks run from a checkout: python -m benchmarks NAME."
            raise


bench = typer.Typer(cls=BenchGroup, no_args_is_help=True)


@bench.callback(
    help=unwrap("""
    Measure a cluster.

    Benchmarks of the engine, of the KV transfer and of recorded traces, also against other
    engines, run from a checkout of the repository as `python -m benchmarks NAME`.
    """)
)
def _bench() -> None:
    exit_on_sigterm()  # unwinds the stack, so that started processes end with the measurement


@bench.command()
@inherit_options(
    ClusterSize, ServeBench, connect_to_measure, NodeOptions, RouterOptions, without=UNFIT
)
def serve(
    context: typer.Context,
    address: Annotated[
        str,
        Option("host:port of a running router (gRPC).", TARGET, flags=("--address", "--router")),
    ] = "",
    model: Annotated[
        str, Option("Without --address: start a cluster with this model.", TARGET)
    ] = "",
    compare: Annotated[
        str, Option("colocated: compare with a cluster of such nodes, alternately.", TARGET)
    ] = "",
    json_file: JsonFile = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="Draw plots to this folder.",
            callback=check_creatable_folder,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    **given: Any,
) -> None:
    """Send an open-loop load at given rates and report latency, throughput and goodput.

    The target is a running router, or a cluster that is started with the given options of nodes
    and router. Ctrl-C ends the run and reports the requests completed so far.
    """
    _check_target(address, model, compare)
    if plots is not None:
        need_matplotlib()
    what = make(ServeBench, given)
    if not compare:
        what = replace(what, num_rounds=1)
    clients = make(connect_to_measure, given)
    clusters = {} if address else _clusters(context, model, given, is_comparison=bool(compare))
    with requests_bar() as update:
        if address:
            measured = bench_router(what, address, clients, update)
        else:
            measured = bench_clusters(what, clusters, clients, update)
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


def _clusters(
    context: typer.Context, model: str, given: dict[str, Any], *, is_comparison: bool
) -> dict[str, ClusterOptions]:
    """Return the cluster, or both kinds, with equal numbers of processes and threads."""
    size = make(ClusterSize, given)
    make(NodeOptions, given | {"model": model})  # validates the options before the start
    without = {*SET_PER_PROCESS, *(one.name for one in parameters_of(client_tls))}
    cluster = cluster_options(context, model, size, without=without)
    return {
        name: replace(cluster, is_colocated=is_colocated)
        for name, is_colocated in ((DISAGGREGATED, False), (COLOCATED, True))
        if is_comparison or is_colocated is size.colocated
    }


def _report(
    measured: Sequence[MeasuredRun],
    what: ServeBench,
    *,
    is_comparison: bool,
    json_file: Path | None,
    plots: Path | None,
) -> None:
    if any(one.figures.is_cut_short for one in measured) or not measured:
        console(stderr=True).print("interrupted: these are the requests completed so far")
    show_runs(measured)
    ratios = compared(measured, DISAGGREGATED, COLOCATED) if is_comparison else []
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


def show_runs(measured: Sequence[MeasuredRun]) -> None:
    if len(measured) == 1:
        _show_one(measured[0])
    elif measured:
        show_table("rates", [name_of_run(one) | _rates_of(one.figures) for one in measured])
        rows = [name_of_run(one) | row for one in measured for row in _latencies(one.figures)]
        show_table("latencies, ms", rows)
        show_table("service", [name_of_run(one) | _service(one.figures) for one in measured])
    _show_errors(measured)


def _show_one(one: MeasuredRun) -> None:
    """Show one run in tables narrow enough for any terminal."""
    figures = _rates_of(one.figures) | _service(one.figures)
    rows = [{"what": name, "figure": cell} for name, cell in figures.items()]
    show_table(f"{one.name}, {one.rate:g} requests/s", rows)
    show_table("latencies, ms", list(_latencies(one.figures)))


def name_of_run(one: MeasuredRun) -> dict[str, object]:
    return {"cluster": one.name, "rate": one.rate}


def _rates_of(figures: ServeFigures) -> dict[str, object]:
    return {
        "answered": f"{figures.num_answered}/{figures.num_planned}",
        "failed": figures.num_failed,
        "requests/s": figures.requests_per_s,
        "tokens in/s": figures.input_tokens_per_s,
        "tokens out/s": figures.output_tokens_per_s,
        "good/s": figures.goodput_per_s,
        "good %": figures.good_share * 100,
    }


def _latencies(figures: ServeFigures) -> Iterator[dict[str, object]]:
    for name, quantiles in (
        ("first token", figures.ttft_ms),
        ("gap", figures.itl_ms),
        ("per token", figures.tpot_ms),
        ("whole answer", figures.e2e_ms),
    ):
        if quantiles is not None:
            yield {"time": name} | asdict(quantiles)


def _service(figures: ServeFigures) -> dict[str, object]:
    return {
        "remote": figures.num_remote,
        "local": figures.num_local,
        "retried": figures.num_retried,
        "KV moved": format_bytes(figures.kv_bytes),
        "prefix tokens hit": figures.prefix_hit_tokens,
        "late sends": figures.num_late,
        "client lag p99 ms": figures.client_lag_p99_ms,
        "client CPU %": figures.client_cpu_share * 100,
    }


def _show_errors(measured: Sequence[MeasuredRun]) -> None:
    rows = [
        name_of_run(one) | {"reason": reason, "requests": count}
        for one in measured
        for reason, count in one.figures.errors.items()
    ]
    if rows:
        show_table("failures", rows)
