"""`baton up` and `baton demo`: a whole cluster on this machine."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Annotated

import typer

Model = Annotated[str, typer.Option(help="Model folder, or a name on the Hugging Face hub.")]


def up(
    model: Model,
    prefill: Annotated[int, typer.Option(min=0, help="How many prefill nodes.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="How many decode nodes.")] = 1,
    port: Annotated[int, typer.Option(help="The router's port; 0 takes any.")] = 50051,
    kv_cache_memory: Annotated[str, typer.Option(help="Of each node.")] = "256MiB",
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch in each node.")] = 1,
) -> None:
    """Start a local cluster; Ctrl-C drains it."""
    from baton.cluster import ClusterOptions, LocalCluster

    options = ClusterOptions(
        model=model,
        num_prefill=prefill,
        num_decode=decode,
        port=port,
        node_arguments=("--kv-cache-memory", kv_cache_memory, "--threads", str(threads)),
        show_logs=True,
    )
    with LocalCluster(options) as cluster:
        print(f"serving on {cluster.address}; Ctrl-C ends", flush=True)
        told = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: told.set())
        told.wait()
        print("draining", file=sys.stderr)


def demo(
    model: Annotated[str, typer.Option(help="Model folder; the one in the box if left out.")] = "",
) -> None:
    """Start a cluster of three processes, send it prompts, show what happened."""
    from baton.demo import run

    run(model)
