"""`python -m benchmarks policies`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.options.output import JsonFile, check_writable_file
from baton.cli.show import show_table, write_json


def policies(
    nodes: Annotated[
        int, typer.Option(min=2, help="Number of nodes; half of them are prefill nodes.")
    ] = 1000,
    requests: Annotated[
        int, typer.Option(min=100, help="Number of requests; the first third is warm-up.")
    ] = 6000,
    load: Annotated[
        float,
        typer.Option(
            help="Load, relative to the capacity of the prefill nodes without prefix hits."
        ),
    ] = 0.7,
    skew: Annotated[
        float, typer.Option(help="Zipf exponent of the popularity of system prompts.")
    ] = 1.1,
    seed: Annotated[int, typer.Option(help="Same seed, same figures.")] = 0,
    json_file: JsonFile = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw the figures to this PNG.", callback=check_writable_file),
    ] = None,
) -> None:
    """Compare the routing policies on a simulated cluster by hit rate and waiting time."""
    from baton.bench.plots import need_matplotlib
    from benchmarks.plots.policies import draw
    from benchmarks.router.policies import PolicyBench, run
    from benchmarks.router.simulation import SimCluster
    from benchmarks.router.workloads import Sessions

    if plot_file is not None:
        need_matplotlib()
    cluster = SimCluster(num_prefill=nodes // 2, num_decode=nodes - nodes // 2, block_size=64)
    bench = PolicyBench(cluster, Sessions(skew=skew), requests, load, seed)
    with Console(stderr=True).status("simulating") as status:
        figures = run(bench, lambda done: status.update(f"simulated {done.policy}"))
    rows = [asdict(figure) for figure in figures]
    show_table(f"{nodes} simulated nodes, {requests} requests, seed {seed}", rows)
    write_json(json_file, {"cluster": asdict(bench), "policies": rows})
    if plot_file is not None:
        draw(figures, plot_file)
