"""`python -m benchmarks reuse`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.options.output import JsonFile
from baton.cli.show import show_table, write_json


def reuse(
    trace: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Trace that `replay` reads, with a block of 16 tokens for each recorded block. "
            " Default: chats, whose prompts contain the earlier answers.",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=10, help="Number of requests.")] = 1500,
    cache_share: Annotated[
        float,
        typer.Option(help="Share of all blocks that the KV caches of the nodes of a role hold."),
    ] = 0.25,
    host_factor: Annotated[
        float, typer.Option(help="Blocks of host memory for each block of a KV cache.")
    ] = 3.0,
    load: Annotated[
        float,
        typer.Option(help="Load, relative to the capacity of the prefill nodes without reuse."),
    ] = 0.5,
    local_prefill_below: Annotated[
        int, typer.Option(help="The option of routers of that name; 0: never.")
    ] = 256,
    seed: Annotated[int, typer.Option(help="Of the chats. Same seed, same figures.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Simulate the reuse of KV with host memory, files, pulls and two routers."""
    from baton.engine.kv_cache.block_hashes import PrefixNaming
    from benchmarks.replay.formats import read_trace
    from benchmarks.router.reuse import ReuseBench, chats, ideal_reuse, run
    from benchmarks.router.simulation import SimCluster
    from benchmarks.router.workloads import recorded

    cluster = SimCluster()
    bench = ReuseBench(cluster, cache_share, host_factor, local_prefill_below)
    tokens_per_s = load * cluster.num_prefill * cluster.prefill_tokens_per_s
    if trace is None:
        served = chats(requests, tokens_per_s, seed)
    else:
        read = read_trace(trace)
        first = replace(read, requests=read.requests[:requests])
        served = recorded(first, tokens_per_s, cluster.block_size)
    ideal = ideal_reuse(served, PrefixNaming(cluster.block_size))
    with Console(stderr=True).status("simulating") as status:
        figures = run(bench, served, lambda done: status.update(f"simulated {done}"))
    rows = [asdict(figure) for figure in figures]
    show_table(f"2 nodes of each role, {len(served)} requests, ideal reuse {ideal:.3f}", rows)
    write_json(json_file, {"cluster": asdict(bench), "ideal_reuse": ideal, "variants": rows})
