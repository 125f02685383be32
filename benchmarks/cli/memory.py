"""`python -m benchmarks memory`."""

from __future__ import annotations

import signal
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options.output import JsonFile
from baton.cli.show import console, show_table, write_json

if TYPE_CHECKING:
    from benchmarks.cluster.memory import MemoryBench, MemoryRun, MemorySample


def memory(
    model: Annotated[str, typer.Option(help="Model folder.")] = "models/demo",
    requests: Annotated[int, typer.Option(min=1, help="Total number of requests.")] = 100_000,
    clients: Annotated[
        int, typer.Option(min=1, help="Clients, each sending one request after the other.")
    ] = 32,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 2,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill nodes.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode nodes.")] = 1,
    colocated: Annotated[
        bool,
        typer.Option(
            "--colocated",
            help="Start no prefill nodes but as many decode nodes, which also compute the prompts.",
        ),
    ] = False,
    kv_cache_memory: Annotated[
        str, typer.Option(help="KV cache of each node; small, so that it fills early.")
    ] = "6MiB",
    transport: Annotated[str, typer.Option(help="KV transport: nixl or ucxx.")] = "nixl",
    json_file: JsonFile = None,
) -> None:
    """Send very many short requests and measure how the memory of each process grows.

    A line is fitted to the memory of the second half, when all caches are full.
    """
    from baton.cluster import ClusterOptions
    from benchmarks.cluster.memory import MemoryBench

    quiet = ("--trace-dir", "off")
    cluster = ClusterOptions(
        model,
        prefill,
        decode,
        is_colocated=colocated,
        node_arguments=(
            f"--kv-cache-memory={kv_cache_memory}",
            "--threads=1",
            f"--kv-transport={transport}",
            *quiet,
        ),
        router_arguments=quiet,
    )
    bench = MemoryBench(cluster, requests, clients, answer_tokens=answer)
    held = _run(bench)
    rate = held.num_ended / held.elapsed_s
    console().print(
        f"{held.num_ended} requests in {held.elapsed_s:.0f} s ({rate:.0f}/s), "
        f"{held.num_failed} failed"
    )
    growths = [asdict(one) for one in held.growths]
    show_table("memory, MiB; growth fitted to the second half", growths)
    values = {"what": asdict(bench), "growths": growths, "run": asdict(held)}
    write_json(json_file, values)


def _run(bench: MemoryBench) -> MemoryRun:
    import asyncio

    from benchmarks.cluster.memory import run

    async def until_interrupted() -> MemoryRun:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, stop.set)
        try:
            with console(stderr=True).status("starting the cluster") as status:

                def on_look(look: MemorySample) -> None:
                    status.update(f"{look.num_ended}/{bench.num_requests} requests")

                return await run(bench, stop, on_look)
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    return asyncio.run(until_interrupted())
