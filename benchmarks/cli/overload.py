"""`python -m benchmarks overload`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from baton.cli.options.output import JsonFile
from baton.cli.show import console, show_table, write_json


def overload(
    model: Annotated[str, typer.Option(help="Model folder.")] = "models/demo",
    factor: Annotated[
        float, typer.Option(min=1, help="Offered load as a multiple of the peak rate.")
    ] = 3.0,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each phase.")] = 20.0,
    clients: Annotated[
        int, typer.Option(min=1, help="Closed-loop clients that measure the peak.")
    ] = 128,
    patience: Annotated[float, typer.Option(help="Deadline of each request in seconds.")] = 8.0,
    urgent: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests with urgent priority.")
    ] = 0.1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 32,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill nodes.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode nodes.")] = 1,
    kv_cache_memory: Annotated[str, typer.Option(help="KV cache of each node.")] = "64MiB",
    node_cpus: Annotated[
        str,
        typer.Option(
            help="Cores reserved for the nodes, such as 0-3,6; empty: all processes share all."
        ),
    ] = "",
    json_file: JsonFile = None,
) -> None:
    """Measure the peak rate, send a multiple of it, and count served, refused and unserved."""
    import asyncio

    from baton.cluster import ClusterOptions
    from baton.node.cpus import parse_cpus
    from benchmarks.cluster.overload import OverloadBench, run

    quiet = ("--trace-dir", "off")
    apart = ("--cpus", node_cpus) if node_cpus else ()
    cluster = ClusterOptions(
        model,
        prefill,
        decode,
        node_arguments=("--kv-cache-memory", kv_cache_memory, "--threads", "1", *apart, *quiet),
        router_arguments=quiet,
    )
    bench = OverloadBench(
        cluster,
        factor=factor,
        seconds=seconds,
        num_clients=clients,
        patience_s=patience,
        urgent_share=urgent,
        prompt_tokens=prompt,
        answer_tokens=answer,
        node_cpus=parse_cpus(node_cpus) if node_cpus else (),
    )
    with console(stderr=True).status("measuring the peak, then overload"):
        found = asyncio.run(run(bench))
    console().print(
        f"peak {found.peak_per_s:.1f} requests/s; of {found.sent_per_s:.1f} sent, "
        f"{found.served_per_s:.1f} were served: {found.share_of_peak:.0%} of the peak"
    )
    show_table("", [asdict(one) for one in found.kinds])
    if found.reasons:
        show_table("not served", [{"why": n, "times": c} for n, c in found.reasons.items()])
    show_table("cores used", [asdict(one) for one in found.cores])
    values = {"what": asdict(bench), "share_of_peak": found.share_of_peak, **asdict(found)}
    write_json(json_file, values)
